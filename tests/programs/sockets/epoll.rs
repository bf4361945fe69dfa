//! epoll under `ginnel run`, for connections that have changed over, compared with the kernel's behaviour.

use programs::stage::{PYTHON, Stage, changed};

/// The part that the programs have in common: connections with both ends in one process, which have changed over.
pub const PAIRS: &str = r#"
import errno, os, select, socket, struct, sys, threading, time
listener = socket.create_server(('127.0.0.1', 0))
def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data
def changed():
    lines = [line for line in open(os.environ['GINNEL_SOCKETS_REPORT'])
             if '"sent_after_us"' in line and '"received_after_us"' in line]
    return len({line.split('"connection":')[1].split(',')[0] for line in lines})
pairs = 0
def pair():
    global pairs
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    pairs += 1
    while changed() < 2 * pairs:
        for (one, other) in ((a, b), (b, a)):
            one.sendall(b'.')
            assert receive(other, 1) == b'.'
    return a, b
def fails(number, call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        assert error.errno == number, error
    else:
        assert False, 'no error'
"#;

/// Runs a program that uses them.
fn run(program: &str, ends: usize) {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    stage.client(&[PYTHON, "-c", &format!("{PAIRS}{program}")]);
    let connections = stage.end();
    assert_eq!(changed(&connections, "python3").len(), ends, "{connections:#?}");
}

#[test]
fn sockets_can_be_removed_and_added_again() {
    run(
        r#"
a, b = pair()
e = select.epoll()
fails(errno.ENOENT, e.modify, a, select.EPOLLIN)
fails(errno.ENOENT, e.unregister, a)
e.register(a, select.EPOLLIN)
for turn in range(1000):
    fails(errno.EEXIST, e.register, a, select.EPOLLIN)
    e.unregister(a)
    fails(errno.ENOENT, e.modify, a, select.EPOLLIN)
    fails(errno.ENOENT, e.unregister, a)
    b.sendall(b'x')
    assert e.poll(0) == []
    # Sent while the socket was removed.
    e.register(a, select.EPOLLIN | select.EPOLLOUT)
    assert e.poll() == [(a.fileno(), select.EPOLLIN | select.EPOLLOUT)]
    assert receive(a, 1) == b'x'
    assert e.poll() == [(a.fileno(), select.EPOLLOUT)]
    e.modify(a, select.EPOLLIN)
    assert e.poll(0) == []
# A thread waits in other calls while the socket is removed: epoll does not consume the byte that wakes it.
e.unregister(a)
for turn in range(200):
    thread = threading.Thread(target=lambda: b.sendall(b'y'))
    thread.start()
    if turn % 2:
        assert receive(a, 1) == b'y'
    else:
        p = select.poll()
        p.register(a, select.POLLIN)
        assert p.poll() == [(a.fileno(), select.POLLIN)]
        assert receive(a, 1) == b'y'
    thread.join()
# The next socket with the same number is a different one.
e.register(a, select.EPOLLIN)
e.unregister(a)
number = a.fileno()
a.close()
b.close()
while True:
    c, d = pair()
    if number in (c.fileno(), d.fileno()):
        break
if c.fileno() != number:
    c, d = d, c
fails(errno.ENOENT, e.modify, c, select.EPOLLIN)
e.register(c, select.EPOLLIN)
d.sendall(b'z')
assert e.poll() == [(number, select.EPOLLIN)]
"#,
        4,
    );
}

#[test]
fn exclusive_registrations_work_as_in_the_kernel() {
    run(
        r#"
a = socket.create_connection(listener.getsockname())
b, _ = listener.accept()
pairs += 1
e = select.epoll()
e.register(a, select.EPOLLIN | select.EPOLLEXCLUSIVE)
while changed() < 2 * pairs:
    for (one, other) in ((a, b), (b, a)):
        one.sendall(b'.')
        assert receive(other, 1) == b'.'
for turn in range(100):
    thread = threading.Thread(target=lambda: b.sendall(b'y'))
    thread.start()
    assert e.poll() == [(a.fileno(), select.EPOLLIN)]
    assert receive(a, 1) == b'y'
    thread.join()
e.unregister(a)
b.sendall(b'x')
assert e.poll(0) == []
"#,
        2,
    );
}

#[test]
fn several_threads_can_wait_in_one_instance() {
    run(
        r#"
ends = [pair() for _ in range(4)]
of = {b.fileno(): b for _, b in ends}
for flags in (select.EPOLLET, select.EPOLLONESHOT):
    e = select.epoll()
    for b in of.values():
        e.register(b, select.EPOLLIN | flags)
    got = {b: threading.Semaphore(0) for b in of}
    goes_on = {b: threading.Semaphore(0) for b in of}
    def work():
        while True:
            # One event at a time, so other threads must be woken for the rest.
            for fd, events in e.poll(-1, 1):
                data = receive(of[fd], 1)
                if flags == select.EPOLLONESHOT:
                    e.modify(fd, select.EPOLLIN | flags)
                if data == b'e':
                    return
                got[fd].release()
                goes_on[fd].acquire()
    threads = [threading.Thread(target=work) for _ in ends]
    for thread in threads:
        thread.start()
    for turn in range(200):
        # Each event is taken by a thread that returns only after all others have been taken.
        order = ends[turn % 4:] + ends[:turn % 4]
        for a, b in order:
            a.sendall(b'x')
            if turn % 2:
                got[b.fileno()].acquire()
        if not turn % 2:
            for a, b in order:
                got[b.fileno()].acquire()
        for a, b in order:
            goes_on[b.fileno()].release()
    for a, b in ends:
        a.sendall(b'e')
    for thread in threads:
        thread.join()
    e.close()
"#,
        8,
    );
}
