# The CPU time of a thread that waits while the byte that has woken it is left in the kernel's socket, to an epoll instance.
import errno
import os
import select
import socket
import struct
import threading

from checks import sleeps
from pairs import fails, pair, receive


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
