# Polls as many entries as it may have descriptors.
import ctypes
import resource
import select
import threading

from pairs import pair, receive

a, b = pair()
limit = 300
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


class Entry(ctypes.Structure):
    _fields_ = [('fd', ctypes.c_int), ('events', ctypes.c_short), ('revents', ctypes.c_short)]


libc = ctypes.CDLL(None, use_errno=True)
entries = (Entry * limit)(*[Entry(b.fileno() if n == 0 else -1, select.POLLIN, 0) for n in range(limit)])
for turn in range(20):
    threading.Timer(0.005, lambda: a.sendall(b'x')).start()
    assert libc.poll(entries, limit, 60000) == 1, ctypes.get_errno()
    assert entries[0].revents == select.POLLIN
    assert receive(b, 1) == b'x'
