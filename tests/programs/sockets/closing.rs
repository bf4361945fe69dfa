//! Connections end for their peers as they do without the library.

use kit::wait::wait_until;
use programs::stage::{PYTHON, Stage, changed, free_port};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::fs;

/// Connections that are reported and closed in this order, in both ways of closing. The first one is for the daemon's greeting.
const CLOSE: &str = r#"
import os, socket, struct, sys, time
listener = socket.create_server(('127.0.0.1', 0))
def pair():
    a = socket.create_connection(listener.getsockname())
    return a, listener.accept()[0]
a, b = pair()
# The daemon is there, and has read its messages.
while '"sent_after_us"' not in open(os.environ['GINNEL_SOCKETS_REPORT']).read():
    a.sendall(b'.')
    assert b.recv(1) == b'.'
open('ready', 'x')
while not os.path.exists('stopped'):
    time.sleep(0.001)
for turn in range(40):
    for abort in (False, True):
        a, b = pair()
        if abort:
            a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        # Reported with this call.
        a.sendall(b'request')
        a.close()
        if abort:
            try:
                while b.recv(100):
                    pass
                assert False, 'an end in order'
            except ConnectionResetError:
                pass
        else:
            assert b.recv(100) == b'request'
            assert b.recv(100) == b''
        b.close()
a, b = pair()
# A child that shares the socket is not affected when the parent closes it; the connection ends with the last close.
a.sendall(b'1')
go, went = os.pipe()
child = os.fork()
if child == 0:
    os.read(go, 1)
    a.sendall(b'2')
    a.close()
    os._exit(0)
a.close()
assert b.recv(1) == b'1'
os.write(went, b'.')
assert b.recv(1) == b'2'
assert b.recv(1) == b''
os.waitpid(child, 0)
# A program exits while a connection is open. Its peer is another process.
a, b = pair()
if os.fork() == 0:
    a.close()
    assert b.recv(1) == b'3'
    assert b.recv(1) == b''
    open('ended', 'x')
    os._exit(0)
b.close()
a.sendall(b'3')
sys.exit(0)
"#;

#[test]
fn the_peer_sees_the_end_whatever_the_daemon_does() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    let daemon = Pid::from_child(stage.world.daemon());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("that the program is ready", || stage.world.files().join("ready").exists());
            kill_process(daemon, Signal::STOP).unwrap();
            let stopped = WaitIdOptions::STOPPED;
            assert!(waitid(WaitId::Pid(daemon), stopped).unwrap().is_some());
            fs::write(stage.world.files().join("stopped"), "").unwrap();
        });
        stage.client(&[PYTHON, "-c", CLOSE]);
        wait_until("the end of the last connection", || stage.world.files().join("ended").exists());
    });
    kill_process(daemon, Signal::CONT).unwrap();
    stage.world.good("status");
}

/// Prints what the two ends of a closed connection are told. Each pair has changed over when `pair` returns.
const ENDS: &str = r#"
import errno, os, socket, struct
listener = socket.create_server(('127.0.0.1', 0))
def pair():
    a = socket.create_connection(listener.getsockname())
    return a, listener.accept()[0]
def fails(number, call, *arguments):
    try:
        got = call(*arguments)
    except OSError as error:
        assert error.errno == number, error
    else:
        assert False, got
def abort(a):
    a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    a.close()
# Data sent before a reset is received first, and the reset is reported once.
a, b = pair()
a.sendall(b'data')
abort(a)
assert b.recv(2) == b'da'
assert b.recv(100) == b'ta'
fails(errno.ECONNRESET, b.recv, 100)
assert b.recv(100) == b''
# The same if the reset comes because data was not read.
a, b = pair()
a.sendall(b'data')
b.sendall(b'unread')
assert a.recv(1) == b'u'
a.close()
assert b.recv(100) == b'data'
fails(errno.ECONNRESET, b.recv, 100)
assert b.recv(100) == b''
fails(errno.EPIPE, b.send, b'more')
# The same if two processes share the connection, and the last to close it is not the one that opened it.
a, b = pair()
b.sendall(b'unread')
go, went = os.pipe()
child = os.fork()
if child == 0:
    b.close()
    os.read(go, 1)
    assert a.recv(1) == b'u'
    a.close()
    os._exit(0)
a.close()
os.write(went, b'.')
fails(errno.ECONNRESET, b.recv, 100)
assert os.waitpid(child, 0)[1] == 0
# The first data sent to a peer that has closed its end is lost.
a, b = pair()
a.close()
assert b.recv(100) == b''
assert b.sendmsg([b'lost', b'too']) == 7
fails(errno.EPIPE, b.send, b'more')
fails(errno.EPIPE, b.send, b'more')
assert b.recv(100) == b''
# After this side has shut down sending, nothing is sent.
a, b = pair()
b.shutdown(socket.SHUT_WR)
a.close()
fails(errno.EPIPE, b.send, b'more')
"#;

#[test]
fn both_ends_are_told_the_same_as_over_tcp() {
    kit::require_programs!(&[PYTHON]);
    for (mode, ends) in [("off", 0), ("eager", 12)] {
        let stage = Stage::new(mode).settling();
        stage.client(&[PYTHON, "-c", ENDS]);
        let connections = stage.end();
        let over = connections.iter().filter(|one| one.sent_after_us.is_some()).count();
        assert_eq!(over, ends, "{mode}: {connections:#?}");
    }
}

/// A server whose child is the only owner of the connection, and ends it while the byte that woke it is still in the
/// kernel's socket: the byte stays there while an epoll instance watches the connection. (A child has no doorbell that
/// could wake it.) The child has received everything, so the connection ends in order, whether the child closes it or
/// is killed.
const UNREAD: &str = r#"
import os, select, signal, socket, sys
port, how = int(sys.argv[2]), sys.argv[3]
def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data
def changed():
    words = ['"pid":%d,' % os.getpid(), '"sent_after_us"', '"received_after_us"']
    return any(all(word in line for word in words) for line in open(os.environ['GINNEL_SOCKETS_REPORT']))
def is_asleep(pid):
    return open('/proc/%d/stat' % pid).read().rsplit(')', 1)[1].split()[0] == 'S'
def unread(c):
    ends = [':%04X' % end[1] for end in (c.getsockname(), c.getpeername())]
    for line in open('/proc/net/tcp'):
        words = line.split()
        if [word[-5:] for word in words[1:3]] == ends:
            return int(words[4].split(':')[1], 16)
def wake(c):
    epoll = select.epoll()
    epoll.register(c, select.EPOLLIN)
    # When the client looked, it may have been asleep for another reason.
    while unread(c) == 0:
        c.sendall(b'%8d' % os.getpid())
        select.select([c], [], [])
        receive(c, 100)
if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    c, _ = s.accept()
    while True:
        has = changed()
        receive(c, 100)
        c.sendall(b'!' if has else b'?')
        if has:
            break
    closed, close = os.pipe()
    if os.fork() == 0:
        s.close()
        os.read(closed, 1)
        wake(c)
        if how == 'killed':
            os.kill(os.getpid(), signal.SIGKILL)
        c.close()
        os._exit(0)
    c.close()
    os.write(close, b'.')
    assert os.wait()[1] == (signal.SIGKILL if how == 'killed' else 0)
    sys.exit()
def ask():
    c.sendall(b'.' * 100)
    return receive(c, 1)
c = socket.create_connection(('127.0.0.1', port))
while ask() != b'!':
    pass
while first := c.recv(1):
    server = int(first + receive(c, 7))
    while not is_asleep(server):
        pass
    c.sendall(b'.' * 100)
"#;

#[test]
fn a_program_that_has_received_everything_ends_the_connection_in_order() {
    kit::require_programs!(&[PYTHON]);
    for how in ["killed", "closed"] {
        let mut stage = Stage::new("eager");
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &[PYTHON, "-c", UNREAD, "serve", &at, how]);
        stage.client(&[PYTHON, "-c", UNREAD, "talk", &at, how]);
        let log = stage.log();
        let connections = stage.end();
        // Both ends, and the child's end if the child had time to report it.
        assert!(changed(&connections, "python3").len() >= 2, "{how}: {connections:#?} {log}");
    }
}
