# Closes all descriptors that it does not know, in several ways.
import ctypes
import errno
import os

from checks import works
from pairs import fails, listener, pair

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
