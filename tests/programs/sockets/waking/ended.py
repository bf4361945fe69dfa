# A thread waits for the end alone, or for more bytes than are there, while TCP still has bytes that nobody has received, and the peer
# has changed over. What it waits for comes in the ring. Until then it sleeps.
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
    waiting, = struct.unpack_from('I', info, 144)
    return sent > over_tcp + waiting


listener = socket.create_server(('127.0.0.1', 0))
a = socket.create_connection(listener.getsockname())
b, _ = listener.accept()
a.sendall(b'x' * 20000)
sent = 20000
ready = select.poll()
ready.register(b, select.POLLIN)
while not has_left_tcp(a, sent):
    sent += a.send(b'y')
    assert ready.poll(0)
    time.sleep(0.001)
    assert sent < 30000, 'it has not changed over'

events = []
ENOUGH = 100_000


def wait():
    if way == 'poll':
        ends = select.poll()
        ends.register(b, select.POLLRDHUP)
        events.extend(event for _, event in ends.poll(60_000))
    elif way == 'epoll':
        ends = select.epoll()
        ends.register(b, select.EPOLLRDHUP)
        events.extend(event for _, event in ends.poll(60))
    else:
        # It wants more bytes than are there (SO_RCVLOWAT).
        events.append(select.POLLIN if select.select([b], [], [], 60)[0] else 0)


wants_bytes = way == 'select'
if wants_bytes:
    b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, ENOUGH)
thread = threading.Thread(target=wait, daemon=True)
thread.start()
settle(thread)
assert not events, events
if wants_bytes:
    a.sendall(b'z' * (ENOUGH - sent))
    sent = ENOUGH
    thread.join()
    b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
a.shutdown(socket.SHUT_WR)
thread.join()
assert events == [select.POLLIN if wants_bytes else select.POLLRDHUP], events
received = 0
while True:
    n = len(b.recv(100_000))
    if n == 0:
        break
    received += n
assert received == sent, (received, sent)
