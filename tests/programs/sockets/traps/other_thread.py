# Changes an epoll instance in which another thread waits.
import select
import threading

from checks import sleeps
from pairs import pair, receive

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
    thread = threading.Thread(target=lambda: found.append(epoll.poll(0.1)))
    thread.start()
    sleeps(thread)
    epoll.unregister(b)
    a.sendall(b'x')
    thread.join()
    assert found[1] == []
    assert receive(b, 1) == b'x'
    epoll.close()
