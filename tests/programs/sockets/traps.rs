//! Calls that a layer between a program and the C library can easily forget, under `ginnel run`.

use crate::epoll::PAIRS;
use programs::stage::{PYTHON, Stage, changed};

#[test]
fn trap_9_bytes_of_preadv2_and_pwritev2_are_in_the_stream() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    let program = r#"
a, b = pair()
assert os.pwritev(a.fileno(), [b'first ', b'second'], -1) == 12
a.sendall(b' third')
assert receive(b, 6) == b'first '
rooms = [bytearray(3), bytearray(9)]
got = os.preadv(b.fileno(), rooms, -1)
assert b''.join(rooms)[:got] == b'second third', rooms
# The call does not wait, and a socket has no offset.
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
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    // These call the C library directly, because Python's own functions compensate for errors.
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
# Python installs handlers without SA_RESTART.
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
    # The ring and then TCP's buffers are full when the call begins.
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
# Two threads wait for the same bytes; one of them sleeps with a timeout.
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
    # Signals are delivered to waiting threads, too.
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

/// Runs a program that has both ends of its connections, all of which change over.
fn run(program: &str, ends: usize) {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    stage.client(&[PYTHON, "-c", &format!("{PAIRS}{CHECKS}{program}")]);
    let connections = stage.end();
    assert_eq!(changed(&connections, "python3").len(), ends, "{connections:#?}");
}

#[test]
fn trap_15_a_signal_that_a_call_unblocks_is_not_lost_while_it_looks() {
    run(
        r#"
import ctypes, random, select, signal
libc = ctypes.CDLL(None, use_errno=True)
class pollfd(ctypes.Structure):
    _fields_ = [('fd', ctypes.c_int), ('events', ctypes.c_short), ('revents', ctypes.c_short)]
class timespec(ctypes.Structure):
    _fields_ = [('seconds', ctypes.c_long), ('nanoseconds', ctypes.c_long)]
a, b = pair()
signal.signal(signal.SIGALRM, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
none = (ctypes.c_ulong * 16)()
polls = (pollfd * 1)(pollfd(a.fileno(), select.POLLIN, 0))
chance = random.Random(3)
with select.epoll() as epoll:
    epoll.register(a, select.EPOLLIN)
    events = ctypes.create_string_buffer(64)
    for turn in range(600):
        # About half of the time, while the call spins.
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00002, 0.0002))
        if turn % 2 == 0:
            result = libc.ppoll(polls, 1, ctypes.byref(timespec(10, 0)), none)
        else:
            result = libc.epoll_pwait(epoll.fileno(), events, 4, 10000, none)
        assert (result, ctypes.get_errno()) == (-1, errno.EINTR), turn
a.sendall(b'x')
assert receive(b, 1) == b'x'
"#,
        2,
    );
}

/// The code with which programs check that a connection still works.
const CHECKS: &str = r#"
def works(a, b):
    for turn in range(50):
        for one, other in ((a, b), (b, a)):
            data = os.urandom(1 + turn * 7)
            one.sendall(data)
            assert receive(other, len(data)) == data, turn
def is_asleep(thread):
    return open(f'/proc/self/task/{thread.native_id}/stat').read().rpartition(')')[2].split()[0] == 'S'
def sleeps(thread):
    # The thread may be seen once on its way to the sleeping call.
    for _ in range(3):
        while not is_asleep(thread):
            time.sleep(0.0005)
        time.sleep(0.0005)
"#;

#[test]
fn trap_2_a_daemon_outlives_the_processes_that_started_it() {
    run(
        r#"
import subprocess
a, b = pair()
subprocess.run(['true'], check=True)
assert os.system('exit 7') == 7 << 8
works(a, b)
# As `daemon` does: the grandchild continues, and its parents end.
there, here = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
    if os.fork() == 0:
        works(a, b)
        subprocess.run(['true'], check=True)
        works(a, b)
        os.write(here, b'worked')
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
a.close()
b.close()
os.close(here)
assert os.read(there, 100) == b'worked'
"#,
        2,
    );
}

#[test]
fn trap_3_the_child_of_vfork_changes_nothing_for_its_parent() {
    run(
        r#"
import subprocess
a, b = pair()
for turn in range(20):
    # This Python creates subprocesses with vfork, which close or replace (with dup2) the descriptors that they must not get.
    said = subprocess.run(['cat'], input=b'%d' % turn, stdout=subprocess.PIPE, close_fds=True, check=True)
    assert said.stdout == b'%d' % turn
    works(a, b)
"#,
        2,
    );
}

#[test]
fn trap_5_a_program_may_close_all_descriptors_that_it_does_not_know() {
    run(
        r#"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def opened():
    return {int(name) for name in os.listdir('/proc/self/fd')}
inherited = opened()
a, b = pair()
known = {0, 1, 2, listener.fileno(), a.fileno(), b.fileno()}
hidden = {fd for fd in opened() if fd > 900}
# Except for the descriptors that lend a connection to the daemon, which come and go, and notice when they are closed.
assert 0 < len(hidden) <= 8, hidden
for fd in opened() - hidden - known - inherited:
    # One is the descriptor with which they were listed.
    what = os.readlink(f'/proc/self/fd/{fd}') if os.path.exists(f'/proc/self/fd/{fd}') else 'socket:'
    assert what.startswith('socket:'), (fd, what)
first = max(known) + 1
ways = [lambda: os.closerange(first, 70000),
        lambda: libc.closefrom(first),
        lambda: libc.close_range(first, 0xffffffff, 0),
        lambda: [libc.close(fd) for fd in sorted(opened()) if fd >= first]]
for turn, way in enumerate(ways):
    way()
    assert hidden <= opened(), turn
    # Files that are opened now get the lowest numbers, and belong to the program.
    files = [open(f'file.{turn}.{n}', 'w+b', buffering=0) for n in range(20)]
    assert [file.fileno() for file in files] == list(range(first, first + 20))
    works(a, b)
    c, d = pair()
    works(c, d)
    c.close()
    d.close()
    for n, file in enumerate(files):
        file.write(b'%d' % n)
    for n, file in enumerate(files):
        file.seek(0)
        assert file.read() == b'%d' % n
        file.close()
for fd in hidden:
    fails(errno.EBADF, os.close, fd)
    fails(errno.EBUSY, os.dup2, 0, fd)
works(a, b)
"#,
        10,
    );
}

#[test]
fn trap_12_an_epoll_instance_may_be_in_another_one() {
    run(
        r#"
a, b = pair()
inner, outer = select.epoll(), select.epoll()
inner.register(b, select.EPOLLIN)
outer.register(inner, select.EPOLLIN)
poll = select.poll()
poll.register(inner, select.POLLIN)
ways = [lambda: outer.poll(60), lambda: poll.poll(60000), lambda: select.select([inner], [], [], 60)[0]]
def wait(way, into):
    # The inner instance may be reported as readable without need, but not for ever.
    for tries in range(10):
        assert way()
        found = inner.poll(0)
        if found:
            return into.append(found)
for turn in range(30):
    found = []
    thread = threading.Thread(target=wait, args=(ways[turn % 3], found))
    thread.start()
    if turn % 2:
        sleeps(thread)
    a.sendall(b'x')
    thread.join()
    assert found == [[(b.fileno(), select.EPOLLIN)]], (turn, found)
    assert b.recv(10) == b'x'
"#,
        2,
    );
}

#[test]
fn trap_13_edge_triggered_and_oneshot_events_are_reported_once() {
    run(
        r#"
a, b = pair()
epoll = select.epoll()
epoll.register(b, select.EPOLLIN | select.EPOLLONESHOT)
for turn in range(20):
    a.sendall(b'xy')
    assert epoll.poll(60) == [(b.fileno(), select.EPOLLIN)]
    # Not again, although there are unread bytes, and more arrive.
    a.sendall(b'z')
    assert epoll.poll(0.002) == []
    assert receive(b, 3) == b'xyz'
    epoll.modify(b, select.EPOLLIN | select.EPOLLONESHOT)
    assert epoll.poll(0.002) == []
epoll.modify(b, select.EPOLLIN | select.EPOLLET)
epoll.poll(0)
for turn in range(20):
    a.sendall(b'xy')
    assert epoll.poll(60) == [(b.fileno(), select.EPOLLIN)]
    assert epoll.poll(0.002) == []
    # Once more for new bytes, although the rest was not received.
    a.sendall(b'z')
    assert epoll.poll(60) == [(b.fileno(), select.EPOLLIN)]
    assert epoll.poll(0.002) == []
    assert receive(b, 3) == b'xyz'
# Exactly one of several threads gets the event.
found = []
epoll.modify(b, select.EPOLLIN | select.EPOLLET)
epoll.poll(0)
threads = [threading.Thread(target=lambda: found.append(epoll.poll(60))) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    sleeps(thread)
for turn in range(3):
    a.sendall(b'x')
    while len(found) <= turn:
        time.sleep(0.0005)
    assert receive(b, 1) == b'x'
for thread in threads:
    thread.join()
assert found == [[(b.fileno(), select.EPOLLIN)]] * 3, found
"#,
        2,
    );
}

#[test]
fn trap_14_a_waiting_thread_notices_what_another_thread_adds() {
    run(
        r#"
a, b = pair()
for turn in range(20):
    epoll = select.epoll()
    found = []
    thread = threading.Thread(target=lambda: found.append(epoll.poll(60)))
    thread.start()
    sleeps(thread)
    if turn % 2:
        # Nothing yet; then the registration is changed while bytes are there.
        epoll.register(b, 0)
        a.sendall(b'x')
        sleeps(thread)
        epoll.modify(b, select.EPOLLIN)
    else:
        a.sendall(b'x')
        epoll.register(b, select.EPOLLIN)
    thread.join()
    assert found == [[(b.fileno(), select.EPOLLIN)]], found
    assert receive(b, 1) == b'x'
    # A removed descriptor is not reported.
    thread = threading.Thread(target=lambda: found.append(epoll.poll(0.02)))
    thread.start()
    sleeps(thread)
    epoll.unregister(b)
    a.sendall(b'x')
    thread.join()
    assert found[1] == []
    assert receive(b, 1) == b'x'
    epoll.close()
"#,
        2,
    );
}

#[test]
fn trap_17_a_waiting_thread_uses_no_cpu() {
    run(
        r#"
ends = [pair() for _ in range(40)]
def used():
    times = os.times()
    return times.user + times.system
def idle(what):
    # New threads spin for a while before they sleep.
    end = time.monotonic() + 60
    while True:
        before = used()
        time.sleep(0.5)
        if used() - before <= 0.02:
            break
        assert time.monotonic() < end, (what, used() - before)
    # It must stay like that.
    before = used()
    time.sleep(1)
    assert used() - before <= 0.03, (what, used() - before)
epoll = select.epoll()
for a, b in ends:
    epoll.register(b, select.EPOLLIN)
waiting = threading.Thread(target=lambda: epoll.poll(60))
waiting.start()
idle('epoll')
ends[0][0].sendall(b'x')
waiting.join()
assert receive(ends[0][1], 1) == b'x'
threads = [threading.Thread(target=receive, args=(b, 1)) for a, b in ends]
for thread in threads:
    thread.start()
idle('a thread for each')
for a, b in ends:
    a.sendall(b'x')
for thread in threads:
    thread.join()
"#,
        80,
    );
}

#[test]
fn trap_17_a_byte_that_is_left_to_an_epoll_instance_keeps_nobody_awake() {
    run(
        r#"
def used():
    times = os.times()
    return times.user + times.system
def idle(what, call):
    before = used()
    call()
    assert used() - before <= 0.25, (what, used() - before)
# These threads occupy all slots at the doorbell, so others are woken by bytes.
ends = [pair() for _ in range(4)]
sleepers = [threading.Thread(target=receive, args=(b, 1)) for _, b in ends]
for sleeper in sleepers:
    sleeper.start()
for sleeper in sleepers:
    sleeps(sleeper)
a, b = pair()
epoll = select.epoll()
epoll.register(b, select.EPOLLIN)
poll = select.poll()
poll.register(b, select.POLLIN)
waiting = threading.Thread(target=lambda: poll.poll(60000))
waiting.start()
sleeps(waiting)
a.sendall(b'x')
waiting.join()
assert receive(b, 1) == b'x'
# No thread waits in the epoll instance, which would consume the byte.
idle('poll', lambda: poll.poll(1000))
b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 1, 0))
idle('recv', lambda: fails(errno.EAGAIN, b.recv, 1))
for end in [a] + [a for a, _ in ends]:
    end.sendall(b'y')
assert epoll.poll(60) and receive(b, 1) == b'y'
for sleeper in sleepers:
    sleeper.join()
"#,
        10,
    );
}

#[test]
fn a_program_with_few_descriptors_may_use_all_of_them() {
    run(
        r#"
import resource
def limited(limit):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
# So low that the library's descriptors are among the program's, and lower than those that it has.
for limit in (200, 50, 200):
    limited(limit)
    a, b = pair()
    files = []
    try:
        while True:
            files.append(open('/dev/null'))
    except OSError as error:
        assert error.errno == errno.EMFILE, error
    works(a, b)
    # A thread needs a slot to sleep in, although no descriptor is left.
    found = []
    thread = threading.Thread(target=lambda: found.append(receive(b, 1)))
    thread.start()
    time.sleep(0.01)
    a.sendall(b'x')
    thread.join()
    assert found == [b'x']
    for file in files:
        file.close()
    works(a, b)
"#,
        6,
    );
}
