//! Processes that have a connection in common, after a fork.

use crate::stage::{MODES, PYTHON, Stage, changed, free_port, have};

/// A server whose child goes on with a connection that has changed over, after programs were executed beside it.
const FORK: &str = r#"
import os, socket, subprocess, sys
port = int(sys.argv[2])
def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data
def echo(c):
    for _ in range(300):
        c.sendall(receive(c, 100))
def has_changed():
    own = '"pid":%d,' % os.getpid()
    words = [own, '"sent_after_us"', '"received_after_us"']
    return any(all(word in line for word in words) for line in open(os.environ['GINNEL_SOCKETS_REPORT']))
if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    c, _ = s.accept()
    # Until the connection has changed over.
    while True:
        changed = has_changed()
        receive(c, 100)
        c.sendall((b'!' if changed else b'?') * 100)
        if changed:
            break
    subprocess.run(['true'], check=True)
    assert os.system('true') == 0
    echo(c)
    if os.fork() == 0:
        s.close()
        echo(c)
        c.close()
        os._exit(0)
    c.close()
    assert os.wait()[1] == 0
else:
    c = socket.create_connection(('127.0.0.1', port))
    while True:
        c.sendall(b'.' * 100)
        if receive(c, 100) == b'!' * 100:
            break
    for turn in range(600):
        data = os.urandom(100)
        c.sendall(data)
        assert receive(c, 100) == data, turn
    assert c.recv(1) == b''
"#;

#[test]
fn trap_1_a_child_goes_on_with_a_connection_of_its_parent() {
    if !have(&[PYTHON]) {
        return;
    }
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &[PYTHON, "-c", FORK, "serve", &at]);
        stage.client(&[PYTHON, "-c", FORK, "talk", &at]);
        let log = stage.log();
        let connections = stage.end();
        // Both ends, and the child's.
        assert_eq!(changed(&connections, "python3").len(), 3, "{mode}: {connections:#?} {log}");
    }
}

/// One process sends and another one receives, each more than fits into a ring.
const SPLIT: &str = r#"
import os, random, socket, sys, time
port = int(sys.argv[2])
def has_changed():
    words = ['"pid":%d,' % os.getpid(), '"sent_after_us"', '"received_after_us"']
    return any(all(word in line for word in words) for line in open(os.environ['GINNEL_SOCKETS_REPORT']))
def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data
if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    c, _ = s.accept()
    while data := c.recv(65536):
        c.sendall(data)
else:
    c = socket.create_connection(('127.0.0.1', port))
    while not has_changed():
        c.sendall(b'.' * 100)
        receive(c, 100)
    pieces = [random.Random(seed).randbytes(seed * 40000) for seed in range(30)]
    child = os.fork()
    if child == 0:
        for piece in pieces:
            assert receive(c, len(piece)) == piece
        os._exit(0)
    for piece in pieces:
        c.sendall(piece)
    assert os.waitpid(child, 0)[1] == 0
"#;

#[test]
fn trap_1_one_process_sends_and_another_one_receives() {
    if !have(&[PYTHON]) {
        return;
    }
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &[PYTHON, "-c", SPLIT, "serve", &at]);
        stage.client(&[PYTHON, "-c", SPLIT, "talk", &at]);
        stage.end();
    }
}
