//! Processes that share a connection after a fork.

use programs::stage::{MODES, PYTHON, Stage, changed, free_port};

/// A server whose child continues a connection that has changed over, after other programs were executed.
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
fn trap_1_a_child_continues_a_connection_of_its_parent() {
    kit::require_programs!(&[PYTHON]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &[PYTHON, "-c", FORK, "serve", &at]);
        stage.client(&[PYTHON, "-c", FORK, "talk", &at]);
        let log = stage.log();
        let connections = stage.end();
        // Both ends, and the end of the child.
        assert_eq!(changed(&connections, "python3").len(), 3, "{mode}: {connections:#?} {log}");
    }
}

/// One process sends and another one receives, each more than a ring holds.
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
    kit::require_programs!(&[PYTHON]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &[PYTHON, "-c", SPLIT, "serve", &at]);
        stage.client(&[PYTHON, "-c", SPLIT, "talk", &at]);
        stage.end();
    }
}

/// Processes of a server that share a connection send and receive in turn.
const TURNS: &str = r#"
import os, random, signal, socket, sys
port, when = int(sys.argv[2]), sys.argv[3]
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
def echo(c):
    n = int(receive(c, 8))
    c.sendall(receive(c, n))
def echo_until_changed(c):
    while True:
        has = changed()
        receive(c, 100)
        c.sendall((b'!' if has else b'?') * 100)
        if has:
            break
if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    c, _ = s.accept()
    if when == 'after':
        echo_until_changed(c)
    # Each process waits until the one before it is done.
    pipes = [os.pipe() for _ in range(3)]
    children = []
    for i in range(1, 3):
        child = os.fork()
        if child == 0:
            for turn in range(20):
                os.read(pipes[i][0], 1)
                echo(c)
                os.write(pipes[(i + 1) % 3][1], b'.')
            os._exit(0)
        children.append(child)
    for turn in range(20):
        echo(c)
        os.write(pipes[1][1], b'.')
        os.read(pipes[0][0], 1)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    # Now the process is the only one with the connection, because an executed program does not get it.
    sleeper = os.fork()
    if sleeper == 0:
        os.execvp('sleep', ['sleep', '100'])
    if when == 'before':
        assert not changed()
        echo_until_changed(c)
    for turn in range(20):
        echo(c)
    # A process that is killed while it waits does no harm.
    child = os.fork()
    if child == 0:
        c.recv(1)
        os._exit(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    c.sendall(b'+')
    echo(c)
    os.kill(sleeper, signal.SIGKILL)
else:
    c = socket.create_connection(('127.0.0.1', port))
    def ask_until_changed():
        while True:
            c.sendall(b'.' * 100)
            if receive(c, 100) == b'!' * 100:
                break
    def ask(turns):
        for turn in range(turns):
            data = random.randbytes(random.choice([1, 100, 3000, 5000]))
            c.sendall(b'%8d' % len(data) + data)
            assert receive(c, len(data)) == data, turn
    if when == 'after':
        ask_until_changed()
    ask(60)
    if when == 'before':
        ask_until_changed()
    ask(20)
    assert receive(c, 1) == b'+'
    ask(1)
    assert c.recv(1) == b''
"#;

#[test]
fn trap_1_processes_use_a_connection_in_turn() {
    kit::require_programs!(&[PYTHON]);
    for mode in MODES {
        for when in ["before", "after"] {
            let mut stage = Stage::new(mode);
            let port = free_port();
            let at = port.to_string();
            stage.serve(port, &[PYTHON, "-c", TURNS, "serve", &at, when]);
            stage.client(&[PYTHON, "-c", TURNS, "talk", &at, when]);
            let log = stage.log();
            let connections = stage.end();
            assert!(changed(&connections, "python3").len() >= 2, "{mode} {when}: {connections:#?} {log}");
        }
    }
}
