//! How programs under `ginnel run` that sleep are woken: by their doorbell, or by a byte on the connection.

use crate::epoll::PAIRS;
use programs::stage::{MODES, PYTHON, Stage, changed, free_port};

/// The number of doorbells rung, and of bytes sent to wake a peer.
struct Wakes {
    rings: u64,
    bytes: u64,
}

fn run(program: &str, ends: usize) -> Wakes {
    let stage = Stage::new("eager");
    stage.client(&[PYTHON, "-c", &format!("{PAIRS}{SLEEPERS}{program}")]);
    let connections = stage.end();
    let connections = changed(&connections, "python3");
    assert_eq!(connections.len(), ends, "{connections:#?}");
    Wakes {
        rings: connections.iter().map(|connection| connection.rings_sent).sum(),
        bytes: connections.iter().map(|connection| connection.wakes_sent).sum(),
    }
}

/// Ways of waiting for a byte, and threads that answer each byte with the next one.
const SLEEPERS: &str = r#"
def by_recv(c):
    return c.recv(1)
def by_poll(c):
    poll = select.poll()
    poll.register(c, select.POLLIN)
    assert poll.poll(60000)
    return c.recv(1, socket.MSG_DONTWAIT)
def by_select(c):
    assert select.select([c], [], [], 60)[0]
    return c.recv(1, socket.MSG_DONTWAIT)
epolls = {}
def by_epoll(c):
    if c not in epolls:
        epolls[c] = select.epoll()
        epolls[c].register(c, select.EPOLLIN)
    while not epolls[c].poll(60):
        pass
    return c.recv(1, socket.MSG_DONTWAIT)
def is_asleep(thread):
    return open(f'/proc/self/task/{thread.native_id}/stat').read().rpartition(')')[2].split()[0] == 'S'
def answer(c, wait):
    while byte := wait(c):
        c.sendall(bytes([(byte[0] + 1) % 256]))
def answering(wait):
    a, b = pair()
    thread = threading.Thread(target=answer, args=(b, wait))
    thread.start()
    return a, b, thread
def ask(a, thread, byte, wait):
    # Until the thread sleeps in its call. (It may also be found asleep on the way there; then it looks a little later.)
    while not is_asleep(thread):
        time.sleep(0.0005)
    a.sendall(bytes([byte]))
    assert wait(a) == bytes([(byte + 1) % 256])
def end(a, b, thread):
    a.shutdown(socket.SHUT_WR)
    thread.join()
    a.close()
    b.close()
"#;

#[test]
fn a_sleeper_is_woken_by_its_doorbell_however_it_waits() {
    kit::require_programs!(&[PYTHON]);
    for wait in ["recv", "poll", "select", "epoll"] {
        let program = format!(
            r#"
a, b, thread = answering(by_{wait})
for turn in range(200):
    time.sleep(0.001)
    ask(a, thread, turn, by_{wait})
end(a, b, thread)
"#
        );
        let Wakes { rings, bytes } = run(&program, 2);
        println!("{wait}: {rings} rings, {bytes} bytes");
        assert!(rings >= 100, "{wait}: {rings} rings, {bytes} bytes");
        assert!(bytes <= 50, "{wait}: {rings} rings, {bytes} bytes");
    }
}

/// The doorbell has room for only a few sleepers of a process.
#[test]
fn sleepers_without_room_at_the_doorbell_are_woken_by_bytes() {
    kit::require_programs!(&[PYTHON]);
    for wait in ["recv", "poll", "epoll"] {
        let program = format!(
            r#"
crowd = [answering(by_{wait}) for _ in range(12)]
for turn in range(20):
    time.sleep(0.001)
    for a, b, thread in crowd:
        ask(a, thread, turn, by_recv)
for a, b, thread in crowd:
    end(a, b, thread)
"#
        );
        let Wakes { rings, bytes } = run(&program, 24);
        println!("{wait}: {rings} rings, {bytes} bytes");
        assert!(rings >= 20, "{wait}: {rings} rings, {bytes} bytes");
        assert!(bytes >= 20, "{wait}: {rings} rings, {bytes} bytes");
    }
}

/// A thread that waits for room, in a call that sends and in `poll`.
#[test]
fn a_sender_that_sleeps_is_woken_when_there_is_room() {
    kit::require_programs!(&[PYTHON]);
    let program = r#"
import hashlib
a, b = pair()
data = os.urandom(1 << 20) * 4
def send(wait):
    if wait == 'call':
        a.sendall(data)
        return
    poll = select.poll()
    poll.register(a, select.POLLOUT)
    sent = 0
    while sent < len(data):
        assert poll.poll(60000)
        try:
            sent += a.send(data[sent:sent + 65536], socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
for wait in ('call', 'poll') * 3:
    thread = threading.Thread(target=send, args=(wait,))
    thread.start()
    got = hashlib.sha256()
    left = len(data)
    while left:
        # A slow receiver, for which the sender waits.
        part = b.recv(20000)
        assert part
        got.update(part)
        left -= len(part)
        if left % 7 == 0:
            time.sleep(0.0005)
    thread.join()
    assert got.digest() == hashlib.sha256(data).digest()
"#;
    run(program, 2);
}

/// Each process has slots of its own, even in epoll instances that it has inherited from its parent.
#[test]
fn a_child_sleeps_on_its_own_doorbell() {
    kit::require_programs!(&[PYTHON]);
    let program = r#"
a, b, thread = answering(by_epoll)
for turn in range(20):
    ask(a, thread, turn, by_recv)
end(a, b, thread)
def own():
    for wait in (by_recv, by_poll, by_epoll):
        a, b, thread = answering(wait)
        for turn in range(50):
            time.sleep(0.001)
            ask(a, thread, turn, wait)
        end(a, b, thread)
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        listener.close()
        listener = socket.create_server(('127.0.0.1', 0))
        # The report contains the parent's connections too.
        def changed(before=changed()):
            lines = [line for line in open(os.environ['GINNEL_SOCKETS_REPORT'])
                     if '"sent_after_us"' in line and '"received_after_us"' in line and f'"pid":{os.getpid()},' in line]
            return len({line.split('"connection":')[1].split(',')[0] for line in lines})
        pairs = 0
        own()
        os._exit(0)
    children.append(child)
own()
for child in children:
    assert os.waitpid(child, 0)[1] == 0
"#;
    let Wakes { rings, .. } = run(program, 2 + 4 * 6);
    assert!(rings >= 4 * 3 * 25, "{rings}");
}

/// A client that waits in `recv`, and has slept there.
#[test]
fn the_library_uses_few_descriptors_for_one_connection() {
    kit::require_programs!(&[PYTHON]);
    let server = r#"
import socket, sys, time
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
def sleeps(process):
    return open(f'/proc/{process}/stat').read().rpartition(')')[2].split()[0] == 'S'
while True:
    c, _ = listener.accept()
    while data := c.recv(16):
        while not sleeps(int(data)):
            time.sleep(0.0005)
        c.sendall(data)
"#;
    let client = r#"
import os, socket, sys
def opened():
    # Except for the descriptor with which they are listed.
    return {int(fd) for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')}
def has_changed():
    return any('"sent_after_us"' in line and '"received_after_us"' in line and f'"pid":{os.getpid()},' in line
               for line in open(os.environ['GINNEL_SOCKETS_REPORT']))
def ask():
    data = b'%16d' % os.getpid()
    c.sendall(data)
    got = b''
    while len(got) < len(data):
        more = c.recv(len(data) - len(got))
        assert more
        got += more
    assert got == data
before = opened()
c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
while not has_changed():
    ask()
for _ in range(100):
    ask()
hidden = {fd: os.readlink(f'/proc/self/fd/{fd}') for fd in opened() - before - {c.fileno()}}
assert len(hidden) <= 8, hidden
# The thread has slept on its doorbell.
assert 'anon_inode:[eventpoll]' in hidden.values(), hidden
print(len(hidden), hidden)
"#;
    for mode in MODES {
        let port = free_port();
        let mut stage = Stage::new(mode);
        stage.serve(port, &[PYTHON, "-c", server, &port.to_string()]);
        print!("{mode}: {}", stage.client(&[PYTHON, "-c", client, &port.to_string()]));
        let connections = stage.end();
        // The server may end before it has reported everything.
        assert!(!changed(&connections, "python3").is_empty(), "{connections:#?}");
    }
}

/// The kernel refuses more entries than the number of descriptors that the program may have.
#[test]
fn a_program_may_poll_as_many_descriptors_as_it_may_open() {
    kit::require_programs!(&[PYTHON]);
    let program = r#"
import resource
a, b = pair()
limit = 300
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
import ctypes
class Entry(ctypes.Structure):
    _fields_ = [('fd', ctypes.c_int), ('events', ctypes.c_short), ('revents', ctypes.c_short)]
libc = ctypes.CDLL(None, use_errno=True)
entries = (Entry * limit)(*[Entry(b.fileno() if n == 0 else -1, select.POLLIN, 0) for n in range(limit)])
for turn in range(20):
    threading.Timer(0.005, lambda: a.sendall(b'x')).start()
    assert libc.poll(entries, limit, 60000) == 1, ctypes.get_errno()
    assert entries[0].revents == select.POLLIN
    assert receive(b, 1) == b'x'
"#;
    run(program, 2);
}
