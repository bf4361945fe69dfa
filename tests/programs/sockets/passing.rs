//! Connections under `ginnel run` that have changed over and then go to another process: by `exec`, by `posix_spawn`,
//! or in a message.

use ginnel_report::Record;
use programs::stage::{MODES, PYTHON, Stage, changed, free_port};

/// The part that both programs have in common.
pub const COMMON: &str = r#"
import os, random, signal, socket, subprocess, sys, time
content = random.Random(5).randbytes(400000)
def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data
def record():
    last = ''
    for line in open(os.environ['GINNEL_SOCKETS_REPORT']):
        if line.endswith('\n') and '"pid":%d,' % os.getpid() in line and '"connection"' in line:
            last = line
    return last
def has_changed():
    return all(word in record() for word in ('"sent_after_us"', '"received_after_us"'))
# Until both ends know that both directions have changed over.
def ask_until_changed(c, asks):
    changed = []
    while changed != [b'!', b'!']:
        own = b'!' if has_changed() else b'?'
        if asks:
            c.sendall(own * 100)
        other = receive(c, 100)[:1]
        if not asks:
            c.sendall(own * 100)
        changed = [own, other]
"#;

/// The server: answers until its connection has changed over, and then hands it to another process.
const SERVER: &str = r#"
GO_ON = r'''
import os, socket, sys
content = __import__('random').Random(5).randbytes(400000)
def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data
fd, unread = int(sys.argv[1]), int(sys.argv[2])
c = socket.socket(fileno=fd)
assert receive(c, unread) == content[:unread], 'the rest of the request'
c.sendall(b'the other one')
assert receive(c, len(content)) == content
c.sendall(content[::-1])
assert c.recv(1) == b''
c.close()
'''
how, port = sys.argv[1], int(sys.argv[2])
s = socket.create_server(('127.0.0.1', port))
c, _ = s.accept()
ask_until_changed(c, False)
# Data that arrives with the request is for the other process.
unread = int(receive(c, 6))
if how == 'half':
    c.sendall(b'take your time')
other = [sys.executable, '-c', GO_ON]
os.environ['PYTHONUNBUFFERED'] = '1'
if how == 'exec':
    os.set_inheritable(c.fileno(), True)
    os.execv(other[0], other + [str(c.fileno()), str(unread)])
elif how == 'exec of nothing':
    os.set_inheritable(c.fileno(), True)
    try:
        os.execv('/nowhere', ['nowhere'])
    except FileNotFoundError:
        pass
    assert os.get_inheritable(c.fileno())
    exec(GO_ON.replace('sys.argv[1]', 'c.detach()').replace('sys.argv[2]', 'unread'))
elif how in ('spawn', 'fork and exec'):
    wait = (lambda: None) if how == 'fork and exec' else None
    # With a preexec function, subprocess uses fork; otherwise vfork.
    child = subprocess.Popen(other + ['0', str(unread)], stdin=c, preexec_fn=wait)
    c.close()
    assert child.wait() == 0
elif how == 'posix_spawn':
    actions = [(os.POSIX_SPAWN_DUP2, c.fileno(), 0)]
    child = os.posix_spawn(other[0], other + ['0', str(unread)], os.environ, file_actions=actions)
    c.close()
    assert os.waitpid(child, 0)[1] == 0
else:
    ours, theirs = socket.socketpair()
    receiver = 'import os, socket, sys\n' \
        's = socket.socket(fileno=0)\n' \
        'fd = socket.recv_fds(s, 1, 1)[1][0]\n' \
        'os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], str(os.dup2(fd, 9)), sys.argv[2]])\n'
    environment = dict(os.environ)
    if how == 'message to a stranger':
        environment.pop('LD_PRELOAD')
    child = subprocess.Popen([sys.executable, '-c', receiver, GO_ON, str(unread)], stdin=theirs, env=environment)
    theirs.close()
    socket.send_fds(ours, [b'.'], [c.fileno()])
    c.close()
    assert child.wait() == 0
"#;

/// The client, which knows nothing of the handover.
const CLIENT: &str = r#"
how, port, unread = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
c = socket.create_connection(('127.0.0.1', port))
ask_until_changed(c, True)
c.sendall(b'%6d' % unread + content[:unread])
assert receive(c, 13) == b'the other one'
c.sendall(content)
assert receive(c, len(content)) == content[::-1]
c.close()
"#;

const WAYS: [&str; 7] =
    ["exec", "exec of nothing", "spawn", "fork and exec", "posix_spawn", "message", "message to a stranger"];

#[test]
fn a_connection_that_has_changed_over_can_go_to_another_process() {
    kit::require_programs!(&[PYTHON]);
    for (mode, few) in MODES.into_iter().zip(["0", "3000"]) {
        for how in WAYS {
            for unread in [few, "100000"] {
                let mut stage = Stage::new(mode);
                let port = free_port();
                let at = port.to_string();
                stage.serve(port, &[PYTHON, "-c", &format!("{COMMON}{SERVER}"), how, &at]);
                stage.client(&[PYTHON, "-c", &format!("{COMMON}{CLIENT}"), how, &at, unread]);
                let log = stage.log();
                let connections = stage.end();
                assert!(!log.contains("Traceback"), "{mode} {how} {unread}: {log}");
                let changed = changed(&connections, "python3");
                // Both ends, and the end of a child.
                let ends = if how == "fork and exec" { 3 } else { 2 };
                assert_eq!(changed.len(), ends, "{mode} {how} {unread}: {connections:#?}");
                assert!(changed.iter().all(|end| end.returned == 2), "{mode} {how} {unread}: {changed:#?}");
            }
        }
    }
}

/// Runs a program that has both ends of its connections, until all of them have changed over. Returns what the report
/// says about them.
fn run(program: &str) -> Vec<Record<'static>> {
    let stage = Stage::new("eager").settling();
    stage.client(&[PYTHON, "-c", &format!("{COMMON}{PAIR}{program}")]);
    stage.end()
}

/// Returns two ends of a connection that has changed over.
const PAIR: &str = r#"
import threading
server = socket.create_server(('127.0.0.1', 0))
def pair():
    a = socket.create_connection(server.getsockname())
    b, _ = server.accept()
    for one, other in ((a, b), (b, a)):
        one.sendall(b'.')
        assert receive(other, 1) == b'.'
    return a, b
"#;

#[test]
fn a_message_with_a_connection_waits_for_the_peer_for_a_limited_time() {
    kit::require_programs!(&[PYTHON]);
    let mut stage = Stage::new("eager");
    let port = free_port();
    let at = port.to_string();
    stage.serve(port, &[PYTHON, "-c", &format!("{COMMON}{REFUSED}"), "serve", &at]);
    stage.client(&[PYTHON, "-c", &format!("{COMMON}{REFUSED}"), "talk", &at]);
    let log = stage.log();
    let connections = stage.end();
    assert!(!log.contains("Traceback"), "{log}");
    assert_eq!(changed(&connections, "python3").len(), 2, "{connections:#?}");
}

/// A server that tries to pass its connection on while its client is busy with something else.
const REFUSED: &str = r#"
port = int(sys.argv[2])
if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    b, _ = s.accept()
    ask_until_changed(b, False)
    ours, theirs = socket.socketpair()
    # The client makes no call on the connection before it is told to.
    assert receive(b, 500) == content[:500]
    client = int(receive(b, 10))
    while 'sigtimedwait' not in open('/proc/%d/wchan' % client).read():
        time.sleep(0.001)
    begun = time.monotonic()
    try:
        socket.send_fds(ours, [b'.'], [b.fileno()])
        assert False, 'the message was sent'
    except BlockingIOError:
        pass
    assert 0.9 < time.monotonic() - begun < 30
    # Data that has arrived can still be received, and the refused call can be repeated.
    assert receive(b, 500) == content[500:1000]
    os.kill(client, signal.SIGUSR1)
    socket.send_fds(ours, [b'.'], [b.fileno()])
    c = socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0])
    assert receive(c, 3000) == content[1000:4000]
    c.sendall(b'the answer')
    assert c.recv(1) == b''
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    a = socket.create_connection(('127.0.0.1', port))
    ask_until_changed(a, True)
    a.sendall(content[:500] + b'%10d' % os.getpid() + content[500:2000])
    assert signal.sigtimedwait([signal.SIGUSR1], 50)
    a.sendall(content[2000:4000])
    assert receive(a, 10) == b'the answer'
"#;

#[test]
fn the_end_of_a_stream_goes_to_the_other_process_too() {
    kit::require_programs!(&[PYTHON]);
    let connections = run(r#"
for unread in (0, 1000):
    a, b = pair()
    a.sendall(content[:unread])
    a.shutdown(socket.SHUT_WR)
    ours, theirs = socket.socketpair()
    # Its peer waits for an answer.
    answer = []
    reader = threading.Thread(target=lambda: answer.append(receive(a, 10)))
    reader.start()
    socket.send_fds(ours, [b'.'], [b.fileno()])
    c = socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0])
    b.close()
    assert receive(c, unread) == content[:unread] and c.recv(1) == b''
    c.sendall(b'the answer')
    reader.join()
    assert answer == [b'the answer']
    c.shutdown(socket.SHUT_WR)
    assert a.recv(1) == b''
"#);
    assert_eq!(changed(&connections, "python3").len(), 4, "{connections:#?}");
}

#[test]
fn executing_another_program_does_not_affect_the_servers_connections() {
    kit::require_programs!(&[PYTHON]);
    let connections = run(r#"
a, b = pair()
# Descriptors that are inheritable, as C programs often leave them.
for end in (a, b):
    os.set_inheritable(end.fileno(), True)
    assert os.get_inheritable(end.fileno())
stop = threading.Event()
def serve():
    while not stop.is_set():
        for one, other in ((a, b), (b, a)):
            one.sendall(b'.')
            assert receive(other, 1) == b'.'
server_thread = threading.Thread(target=serve)
server_thread.start()
for turn in range(3):
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os.execv('/bin/true', ['true'])
    assert os.waitpid(child, 0)[1] == 0
    assert subprocess.run(['true'], close_fds=False).returncode == 0
stop.set()
server_thread.join()
for end in (a, b):
    os.set_inheritable(end.fileno(), False)
    assert not os.get_inheritable(end.fileno())
"#);
    // The ends of the children as well, which have done nothing.
    let changed = changed(&connections, "python3");
    assert!(changed.len() >= 2, "{connections:#?}");
    assert!(changed.iter().all(|end| end.returns == 0 && end.reason.is_empty()), "{changed:#?}");
}

#[test]
fn a_connection_whose_peer_only_sends_or_sleeps_in_epoll_is_passed_on() {
    kit::require_programs!(&[PYTHON]);
    let connections = run(r#"
import selectors
for how in ('sends', 'epoll', 'poll'):
    a, b = pair()
    ours, theirs = socket.socketpair()
    stop, sent = threading.Event(), [0]
    def send():
        while not stop.is_set():
            a.sendall(content[sent[0]:sent[0] + 10])
            sent[0] += 10
            time.sleep(0.001)
    def wait():
        a.setblocking(False)
        with (selectors.EpollSelector if how == 'epoll' else selectors.PollSelector)() as selector:
            selector.register(a, selectors.EVENT_READ)
            while not selector.select():
                pass
    peer = threading.Thread(target=send if how == 'sends' else wait)
    peer.start()
    if how == 'sends':
        # A part of the data has arrived.
        assert receive(b, 25) == content[:25]
    begun = time.monotonic()
    socket.send_fds(ours, [b'.'], [b.fileno()])
    c = socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0])
    b.close()
    stop.set()
    c.sendall(b'the answer')
    peer.join()
    a.setblocking(True)
    assert receive(a, 10) == b'the answer'
    if how == 'sends':
        assert receive(c, sent[0] - 25) == content[25:sent[0]]
"#);
    assert_eq!(changed(&connections, "python3").len(), 6, "{connections:#?}");
}
