//! Calls that a layer between a program and the C library forgets, under `ginnel run`.

use crate::epoll::PAIRS;
use crate::stage::{PYTHON, Stage, changed, have};

#[test]
fn trap_9_bytes_of_preadv2_and_pwritev2_are_in_the_stream() {
    if !have(&[PYTHON]) {
        return;
    }
    let stage = Stage::new("eager");
    let program = r#"
a, b = pair()
assert os.pwritev(a.fileno(), [b'first ', b'second'], -1) == 12
a.sendall(b' third')
assert receive(b, 6) == b'first '
rooms = [bytearray(3), bytearray(9)]
got = os.preadv(b.fileno(), rooms, -1)
assert b''.join(rooms)[:got] == b'second third', rooms
# It does not wait, and on a socket there is no offset.
fails(errno.EAGAIN, os.preadv, b.fileno(), rooms, -1, os.RWF_NOWAIT)
fails(errno.ESPIPE, os.preadv, b.fileno(), rooms, 0)
fails(errno.ESPIPE, os.pwritev, a.fileno(), [b'x'], 0)
fails(errno.EOPNOTSUPP, os.pwritev, a.fileno(), [b'x'], -1, 1 << 30)
b.sendall(b'end')
assert receive(a, 3) == b'end'
"#;
    stage.client(&[PYTHON, "-c", &format!("{PAIRS}{program}")]);
    assert_eq!(changed(&stage.end(), "python3").len(), 2);
}

#[test]
fn trap_15_a_handler_ends_a_call_that_waits_or_does_not_as_the_program_has_asked() {
    if !have(&[PYTHON]) {
        return;
    }
    let stage = Stage::new("eager");
    // The C library's calls, because Python's own make good for what is wrong.
    let program = r#"
import ctypes, signal
libc = ctypes.CDLL(None, use_errno=True)
a, b = pair()
idle, other = pair()
handled = 0
def handler(*_):
    global handled
    handled += 1
signal.signal(signal.SIGALRM, handler)
# Python's own handler is without SA_RESTART.
signal.signal(signal.SIGINT, signal.SIG_DFL)
block = bytes(1 << 16)
def fill():
    while libc.send(a.fileno(), block, len(block), socket.MSG_DONTWAIT) > 0:
        pass
def empty(until):
    while not until.is_set():
        while select.select([b], [], [], 0.01)[0]:
            b.recv(1 << 20)
def send():
    # The ring, and then TCP's buffers too, are full while it begins.
    fill()
    over = threading.Event()
    reader = threading.Timer(0.05, empty, [over])
    reader.start()
    sent = libc.send(a.fileno(), b'x', 1, 0)
    error = ctypes.get_errno()
    over.set()
    reader.join()
    return sent, error if sent < 0 else 0
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
for turn in range(20):
    signal.siginterrupt(signal.SIGALRM, False)
    result = send()
    assert result == (1, 0), (turn, result)
while send() != (-1, errno.EINTR):
    signal.siginterrupt(signal.SIGALRM, True)
# Two threads that wait for the same bytes: one of them sleeps by the clock.
def receive_one(into):
    room = ctypes.create_string_buffer(1)
    got = libc.recv(idle.fileno(), room, 1, 0)
    into.append((got, ctypes.get_errno() if got < 0 else 0))
for restarts, ends in ((True, {(1, 0)}), (False, {(1, 0), (-1, errno.EINTR)})):
    signal.siginterrupt(signal.SIGALRM, not restarts)
    results = []
    threads = [threading.Thread(target=receive_one, args=(results,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    # Signals are delivered to the threads that wait, too.
    for turn in range(50):
        for thread in threads:
            if thread.is_alive():
                signal.pthread_kill(thread.ident, signal.SIGALRM)
        time.sleep(0.001)
    signal.setitimer(signal.ITIMER_REAL, 0)
    other.sendall(b'..')
    for thread in threads:
        thread.join()
    assert set(results) <= ends, (restarts, results)
    left = 2 - sum(got == 1 for got, _ in results)
    if left:
        assert receive(idle, left) == b'.' * left
"#;
    stage.client(&[PYTHON, "-c", &format!("{PAIRS}{program}")]);
    assert_eq!(changed(&stage.end(), "python3").len(), 4);
}
