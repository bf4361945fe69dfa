# A socket that is registered with EPOLLEXCLUSIVE.
import select
import socket
import threading

from pairs import changed, listener, receive

a = socket.create_connection(listener.getsockname())
b, _ = listener.accept()
e = select.epoll()
e.register(a, select.EPOLLIN | select.EPOLLEXCLUSIVE)
while changed() < 2:
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
