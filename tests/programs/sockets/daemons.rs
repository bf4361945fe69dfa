//! The daemon is killed while connections change over: no byte is lost, and changes that were not finished begin again.

use kit::wait::wait_until;
use programs::stage::{PYTHON, Stage, changed, free_port};
use std::fs;
use std::process::{Child, Stdio};

/// A program that is killed if the test fails.
struct Program(Child);

impl Program {
    fn start(stage: &Stage, program: &str, arguments: &[&str]) -> Self {
        let errors = fs::File::create(stage.world.files().join("errors")).unwrap();
        let mut command = stage.command(&[&[PYTHON, "-c", program], arguments].concat());
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).spawn().unwrap())
    }

    /// Waits for its end, which must be successful.
    fn ends_well(mut self, stage: &Stage) {
        wait_until("the program's end", || self.0.try_wait().unwrap().is_some());
        let errors = fs::read_to_string(stage.world.files().join("errors")).unwrap();
        assert!(self.0.wait().unwrap().success(), "{errors}");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_report_is_repeated_to_the_next_daemon() {
    kit::require_programs!(&[PYTHON]);
    let mut stage = Stage::new("eager");
    let program = r#"
import os, socket, time
listener = socket.create_server(('127.0.0.1', 0))
a = socket.create_connection(listener.getsockname())
b, _ = listener.accept()
sent = 0
while not os.path.exists('go'):
    a.sendall(b'.')
    sent += 1
    time.sleep(0.002)
while sent:
    sent -= len(b.recv(sent))
def changed():
    lines = [line for line in open(os.environ['GINNEL_SOCKETS_REPORT'])
             if '"sent_after_us"' in line and '"received_after_us"' in line]
    return len({line.split('"connection":')[1].split(',')[0] for line in lines})
while changed() < 2:
    for one, other in ((a, b), (b, a)):
        one.sendall(b'.')
        assert other.recv(1) == b'.'
"#;
    let child = Program::start(&stage, program, &[]);
    let reports =
        |stage: &Stage| stage.world.good("status --json").json()["reports"].as_array().unwrap().len();
    wait_until("the report of one end", || reports(&stage) == 1);
    stage.world.replace_daemon();
    wait_until("its report to the next daemon", || reports(&stage) == 1);
    fs::write(stage.world.files().join("go"), "").unwrap();
    child.ends_well(&stage);
    let connections = stage.end();
    assert_eq!(changed(&connections, "python3").len(), 2, "{connections:#?}");
}

/// Bytes that both sides know: a piece of an endless stream, from a position on.
const STREAM: &str = r#"
import hashlib, os, socket, sys, threading, time
BLOCK = b''.join(hashlib.sha256(str(i).encode()).digest() for i in range(2048))
def send(c, until):
    sent = hashlib.sha256()
    turn = 0
    while not until(turn):
        part = BLOCK[turn % 977:]
        c.sendall(part)
        sent.update(part)
        turn += 1
    c.shutdown(socket.SHUT_WR)
    return sent.digest()
def receive(c):
    got = hashlib.sha256()
    while part := c.recv(100000):
        got.update(part)
    return got.digest()
stopped = lambda turn: os.path.exists('stop') and turn > 0
"#;

const SERVER: &str = r#"
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])), backlog=64)
def serve(c):
    # Received data is sent back, with its digest at the end.
    got = hashlib.sha256()
    while part := c.recv(100000):
        got.update(part)
        c.sendall(part)
    c.sendall(got.digest())
    c.close()
while True:
    c, _ = listener.accept()
    threading.Thread(target=serve, args=(c,), daemon=True).start()
"#;

const CLIENT: &str = r#"
def converse(until):
    c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
    got, length, last = hashlib.sha256(), 0, b''
    sent = []
    sender = threading.Thread(target=lambda: sent.append(send(c, until)))
    sender.start()
    while part := c.recv(100000):
        last += part
        got.update(last[:-32])
        last = last[-32:]
    sender.join()
    assert got.digest() == sent[0] == last, 'bytes were lost, or are wrong'
    c.close()
failed = []
def guarded(work):
    try:
        work()
    except BaseException as error:
        failed.append(error)
def short():
    number = 0
    while not stopped(1):
        number += 1
        converse(lambda turn: turn == (8 if number % 2 else 200))
        open('conversed', 'a').write('.')
threads = [threading.Thread(target=guarded, args=(lambda: converse(stopped),)), threading.Thread(target=guarded, args=(short,))]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
"#;

#[test]
fn no_byte_is_lost_while_daemons_are_killed() {
    kit::require_programs!(&[PYTHON]);
    let mut stage = Stage::new("auto");
    let port = free_port();
    stage.serve(port, &[PYTHON, "-c", &format!("{STREAM}{SERVER}"), &port.to_string()]);
    let child = Program::start(&stage, &format!("{STREAM}{CLIENT}"), &[&port.to_string()]);
    let conversed = stage.world.files().join("conversed");
    let conversations = || fs::metadata(&conversed).map_or(0, |file| file.len());
    for round in 0..10 {
        let (conversations_before, changed_before) =
            (conversations(), changed(&stage.all_connections(), "python3").len());
        stage.world.replace_daemon();
        wait_until("another connection's whole life", || conversations() > conversations_before);
        // The next daemon is killed at a random time, or when connections are known to have changed over again.
        if round % 3 == 0 {
            let is_more = || changed(&stage.all_connections(), "python3").len() > changed_before;
            wait_until("another connection's change", is_more);
        }
    }
    fs::write(stage.world.files().join("stop"), "").unwrap();
    child.ends_well(&stage);
    stage.end();
}
