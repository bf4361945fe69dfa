# Sockets are removed from an epoll instance and added again.
import errno
import select
import threading

from pairs import fails, pair, receive

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
