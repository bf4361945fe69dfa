# Connections with keepalive for which the kernel carries nothing, and what a program is told when the network is gone.
import errno
import select
import socket
import subprocess
import threading
import time

from pairs import fails, pair, receive


def probes():
    names, values = [line.split() for line in open('/proc/net/netstat') if line.startswith('TcpExt:')]
    return int(values[names.index('TCPKeepAlive')])


def by_recv(c):
    return c.recv(1)


def by_timeout(c):
    c.settimeout(100)
    return c.recv(1)


def by_looks(c):
    c.setblocking(False)
    while True:
        try:
            return c.recv(1)
        except BlockingIOError:
            time.sleep(0.001)


def by_poll(c):
    poll = select.poll()
    poll.register(c, select.POLLIN)
    [(_, events)] = poll.poll(100000)
    assert events & select.POLLERR and events & select.POLLIN, events
    return c.recv(1)


def by_epoll(c):
    with select.epoll() as epoll:
        epoll.register(c, select.EPOLLIN)
        while not (events := epoll.poll(100)):
            pass
    assert events[0][1] & select.EPOLLERR and events[0][1] & select.EPOLLIN, events
    error = c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    assert c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    raise OSError(error, 'by SO_ERROR')


def by_send(c):
    try:
        by_poll(c)
    except OSError:
        pass
    fails(errno.EPIPE, c.send, b'x')
    raise OSError(errno.ETIMEDOUT, 'told before')


waits = [by_recv, by_timeout, by_looks, by_poll, by_epoll, by_send]
ends = [pair() for wait in waits * 2]
for n, (a, b) in enumerate(ends):
    a.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 2)):
        a.setsockopt(socket.IPPROTO_TCP, option, value)
    if n >= len(waits):
        a.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1500)
# Longer than connections to a dead peer would live.
enough = probes() + 4 * len(ends)
while probes() < enough:
    for a, b in ends:
        for one, other in ((a, b), (b, a)):
            one.sendall(b'.')
            assert receive(other, 1) == b'.'
    time.sleep(0.01)
told = {}


def wait_for_the_end(n):
    a, b = ends[n]
    try:
        told[n] = waits[n % len(waits)](a)
    except OSError as error:
        told[n] = error.errno
    assert a.recv(1) == b'', 'the end comes after the error'


threads = [threading.Thread(target=wait_for_the_end, args=(n,)) for n in range(len(ends))]
for thread in threads:
    thread.start()
subprocess.run(['ip', 'link', 'set', 'lo', 'down'], check=True)
for thread in threads:
    thread.join()
assert told == {n: errno.ETIMEDOUT for n in range(len(ends))}, told
