# A thread sleeps for bytes since before the connection changed over, and another one sleeps for the end since afterwards. Whatever
# wakes the second one must not keep the first one asleep.
import select
import socket
import struct
import sys
import threading
import time

from sleepers import settle

way = sys.argv[1]


def has_left_tcp(s, sent):
    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
    over_tcp, = struct.unpack_from('Q', info, 200)
    return sent > over_tcp


for _ in range(5):
    listener = socket.create_server(('127.0.0.1', 0))
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    told = []

    def for_bytes():
        if way == 'select':
            told.append(bool(select.select([b], [], [], 60)[0]))
        elif way == 'poll':
            ready = select.poll()
            ready.register(b, select.POLLIN)
            told.append(bool(ready.poll(60_000)))
        else:
            ready = select.epoll()
            ready.register(b, select.EPOLLIN | (select.EPOLLET if way == 'edges' else 0))
            told.append(bool(ready.poll(60)))

    def for_the_end():
        ends = select.poll()
        ends.register(b, select.POLLRDHUP)
        told.append(ends.poll(60_000)[0][1] == select.POLLRDHUP)

    threads = [threading.Thread(target=call, daemon=True) for call in [for_bytes, for_the_end]]
    threads[0].start()
    settle(threads[0])
    if way == 'select':
        threads[1].start()
    # The other way changes over without a byte.
    sent = 0
    while not has_left_tcp(b, sent):
        sent += b.send(b'x')
        a.recv(1)
        time.sleep(0.0005)
        assert sent < 10_000, 'it has not changed over'
    for _ in range(100):
        b.send(b'x')
        a.recv(1)
    if way != 'select':
        threads[1].start()
    settle(threads[1])
    assert not told, told
    a.send(b'y')
    threads[0].join(30)
    assert told == [True], told
    a.shutdown(socket.SHUT_WR)
    threads[1].join(30)
    assert told == [True, True], told
    a.close()
    b.close()
