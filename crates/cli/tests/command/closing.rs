//! Connections end for their peers as they do without the library.

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::fs;

use crate::stage::{PYTHON, Stage, have};
use crate::world::wait_for;

/// Connections that are reported and closed in this order, both ways to close one. The first one is for the daemon's greeting.
const CLOSE: &str = r#"
import os, socket, struct, sys, time
listener = socket.create_server(('127.0.0.1', 0))
def pair():
    a = socket.create_connection(listener.getsockname())
    return a, listener.accept()[0]
a, b = pair()
# The daemon is there, and what it was sent has been looked at.
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
# A child that has the socket too is not harmed when the parent closes it, and the end comes when the last one has closed it.
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
# A program that ends with a connection that is open. Its peer is another process.
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
    if !have(&[PYTHON]) {
        return;
    }
    let stage = Stage::new("eager");
    let daemon = Pid::from_child(stage.world.daemon());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_for("that the program is ready", || stage.world.files().join("ready").exists());
            kill_process(daemon, Signal::STOP).unwrap();
            let stopped = WaitIdOptions::STOPPED;
            assert!(waitid(WaitId::Pid(daemon), stopped).unwrap().is_some());
            fs::write(stage.world.files().join("stopped"), "").unwrap();
        });
        stage.client(&[PYTHON, "-c", CLOSE]);
        wait_for("the end of the last connection", || stage.world.files().join("ended").exists());
    });
    kill_process(daemon, Signal::CONT).unwrap();
    stage.world.good("status");
}

/// What the two ends of a connection that is closed are told. Each pair has changed over when `pair` returns.
const ENDS: &str = r#"
import errno, socket, struct
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
# What was sent before a reset is received before it, and the reset is said once.
a, b = pair()
a.sendall(b'data')
abort(a)
assert b.recv(2) == b'da'
assert b.recv(100) == b'ta'
fails(errno.ECONNRESET, b.recv, 100)
assert b.recv(100) == b''
# Likewise if the reset comes because something was not read.
a, b = pair()
a.sendall(b'data')
b.sendall(b'unread')
assert a.recv(1) == b'u'
a.close()
assert b.recv(100) == b'data'
fails(errno.ECONNRESET, b.recv, 100)
assert b.recv(100) == b''
fails(errno.EPIPE, b.send, b'more')
# What is sent first to a peer that has closed its end is lost.
a, b = pair()
a.close()
assert b.recv(100) == b''
assert b.sendmsg([b'lost', b'too']) == 7
fails(errno.EPIPE, b.send, b'more')
fails(errno.EPIPE, b.send, b'more')
assert b.recv(100) == b''
# After its own end, nothing is sent at all.
a, b = pair()
b.shutdown(socket.SHUT_WR)
a.close()
fails(errno.EPIPE, b.send, b'more')
"#;

#[test]
fn both_ends_are_told_what_tcp_tells_them() {
    if !have(&[PYTHON]) {
        return;
    }
    for (mode, ends) in [("off", 0), ("eager", 8)] {
        let stage = Stage::new(mode).settling();
        stage.client(&[PYTHON, "-c", ENDS]);
        let connections = stage.end();
        let over = connections.iter().filter(|one| one.sent_after_us.is_some()).count();
        assert_eq!(over, ends, "{mode}: {connections:#?}");
    }
}
