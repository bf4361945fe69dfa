# Connections with a timeout for data that is not acknowledged. One of them has sent nothing when the network goes.
import errno
import select
import socket
import subprocess
import threading

from pairs import pair, receive


def by_recv(c):
    c.sendall(b'request')
    return c.recv(1)


def by_poll(c):
    c.sendall(b'request')
    poll = select.poll()
    poll.register(c, select.POLLIN)
    [(_, events)] = poll.poll(100000)
    assert events & select.POLLERR, events
    return c.recv(1)


# The last connection is not checked any more when it sends.
waiting = {}


def by_epoll(c):
    if c not in waiting:
        waiting[c] = select.epoll()
        waiting[c].register(c, select.EPOLLIN)
    c.sendall(b'request')
    while not (events := waiting[c].poll(100)):
        pass
    assert events[0][1] & select.EPOLLERR, events
    return c.recv(1)


waits = [by_recv, by_poll, by_epoll, by_epoll]
ends = [pair() for _ in range(len(waits) + 1)]
for a, b in ends:
    a.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1500)
cold = ends[len(waits) - 1][0]
waiting[cold] = select.epoll()
waiting[cold].register(cold, select.EPOLLIN)
for turn in range(1000):
    assert waiting[cold].poll(0) == []
subprocess.run(['ip', 'link', 'set', 'lo', 'down'], check=True)
told = {}


def wait_for_the_end(n):
    try:
        told[n] = waits[n](ends[n][0])
    except OSError as error:
        told[n] = error.errno


threads = [threading.Thread(target=wait_for_the_end, args=(n,)) for n in range(len(waits))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert told == {n: errno.ETIMEDOUT for n in range(len(waits))}, told
subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)
a, b = ends[-1]
for one, other in ((a, b), (b, a)):
    one.sendall(b'.')
    assert receive(other, 1) == b'.'
