# An epoll instance in another one.
import select
import threading

from checks import sleeps
from pairs import pair

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
