# A thread waits for the end alone, while TCP still has bytes that nobody has received, and the peer has changed over. The end comes
# in the ring.
import select
import socket
import struct
import threading
import time


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


def wait():
    ends = select.poll()
    ends.register(b, select.POLLRDHUP)
    events.extend(ends.poll(60_000))


thread = threading.Thread(target=wait)
thread.start()
# The thread may sleep by now, and must be woken; or it finds the end without that.
time.sleep(0.2)
a.shutdown(socket.SHUT_WR)
thread.join()
assert events == [(b.fileno(), select.POLLRDHUP)], events
received = 0
while True:
    n = len(b.recv(100_000))
    if n == 0:
        break
    received += n
assert received == sent, (received, sent)
