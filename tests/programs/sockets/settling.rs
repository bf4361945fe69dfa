//! `GINNEL_SOCKETS_WAIT`, with which connections whose ends are in one process change over before they carry any data.

use programs::stage::{PYTHON, Stage};

fn run(program: &str, ends: usize) {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager").settling();
    stage.client(&[PYTHON, "-c", program]);
    let connections = stage.end();
    let changed = |one: &&_| {
        let one: &ginnel_report::Record<'_> = one;
        one.sent_after_us.is_some() && one.received_after_us.is_some() && one.tcp_sent + one.tcp_received == 0
    };
    assert_eq!(connections.iter().filter(changed).count(), ends, "{connections:#?}");
}

#[test]
fn both_ends_may_be_in_one_thread() {
    run(
        r#"
import socket
listener = socket.create_server(('127.0.0.1', 0))
a = socket.create_connection(listener.getsockname())
b, _ = listener.accept()
a.sendall(b'one')
assert b.recv(100) == b'one'
b.sendall(b'two')
a.close()
"#,
        2,
    );
}

/// A thread may sleep in the kernel for a connection that another thread changes over.
#[test]
fn a_thread_that_polls_meanwhile_is_woken() {
    for wait in ["poll.poll()", "select.select([a], [], [])", "select.select([a], [], [], 1000)"] {
        let program = r#"
import os, select, socket, threading, time
listener = socket.create_server(('127.0.0.1', 0))
a = socket.create_connection(listener.getsockname())
poll = select.poll()
poll.register(a, select.POLLIN)
def client():
    while True:
        WAIT
        data = a.recv(100)
        if not data:
            break
        a.sendall(data)
thread = threading.Thread(target=client)
thread.start()
# Wait until the thread sleeps. Where that cannot be seen, it may sleep later, which is the easier case.
for _ in range(100):
    if open(f'/proc/self/task/{thread.native_id}/syscall').read().split()[0] in ('7', '23', '270', '271'):
        break
    time.sleep(0.01)
b, _ = listener.accept()
for turn in range(100):
    b.sendall(b'data')
    assert b.recv(100) == b'data'
b.shutdown(socket.SHUT_WR)
thread.join()
"#;
        run(&program.replace("WAIT", wait), 2);
    }
}
