# Ways of waiting for a byte, and threads that answer each byte with the next one.
import select
import socket
import struct
import threading
import time

from pairs import pair


def by_recv(c):
    return c.recv(1)


def by_poll(c):
    poll = select.poll()
    poll.register(c, select.POLLIN)
    assert poll.poll(60000)
    return c.recv(1, socket.MSG_DONTWAIT)


def by_select(c):
    assert select.select([c], [], [], 60)[0]
    return c.recv(1, socket.MSG_DONTWAIT)


epolls = {}


def by_epoll(c):
    if c not in epolls:
        epolls[c] = select.epoll()
        epolls[c].register(c, select.EPOLLIN)
    while not epolls[c].poll(60):
        pass
    return c.recv(1, socket.MSG_DONTWAIT)


ways = {'recv': by_recv, 'poll': by_poll, 'select': by_select, 'epoll': by_epoll}


def is_asleep(thread):
    return open(f'/proc/self/task/{thread.native_id}/stat').read().rpartition(')')[2].split()[0] == 'S'


def switches(thread):
    status = open(f'/proc/self/task/{thread.native_id}/status').read()
    return [line.split()[1] for line in status.splitlines() if line.startswith(('State', 'voluntary', 'nonvoluntary'))]


# Until the thread sleeps, and does not look by the clock.
def settle(thread):
    end = time.monotonic() + 30
    while True:
        before = switches(thread)
        time.sleep(0.02)
        after = switches(thread)
        if before == after and after[0] == 'S':
            return
        assert time.monotonic() < end, f'it does not sleep: {before} {after}'


def answer(c, wait):
    while byte := wait(c):
        c.sendall(bytes([(byte[0] + 1) % 256]))


def answering(wait):
    a, b = pair()
    thread = threading.Thread(target=answer, args=(b, wait))
    thread.start()
    return a, b, thread


def ask(a, thread, byte, wait):
    # Until the thread sleeps in its call. (It may also be found asleep on the way there; then it looks a little later.)
    while not is_asleep(thread):
        time.sleep(0.0005)
    a.sendall(bytes([byte]))
    assert wait(a) == bytes([(byte + 1) % 256])


def end(a, b, thread):
    a.shutdown(socket.SHUT_WR)
    thread.join()
    a.close()
    b.close()


def has_left_tcp(s, sent):
    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
    over_tcp, = struct.unpack_from('Q', info, 200)
    return sent > over_tcp


# Sends until the connection has changed over. The other way does so without a byte.
def change_over(a, b):
    sent = 0
    while not has_left_tcp(b, sent):
        sent += b.send(b'x')
        a.recv(1)
        time.sleep(0.0005)
        assert sent < 10_000, 'it has not changed over'
    for _ in range(100):
        b.send(b'x')
        a.recv(1)
