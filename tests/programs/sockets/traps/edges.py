# Events of EPOLLONESHOT and of EPOLLET.
import select
import threading
import time

from checks import sleeps
from pairs import pair, receive

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
