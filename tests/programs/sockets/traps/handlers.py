# Handlers of signals, with and without SA_RESTART, while calls wait. The calls go to the C library directly, because Python's own
# functions compensate for errors.
import ctypes
import errno
import select
import signal
import socket
import threading
import time

from pairs import pair, receive

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
