# A signal that ppoll or epoll_pwait unblocks.
import ctypes
import errno
import random
import select
import signal

from pairs import pair, receive

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
