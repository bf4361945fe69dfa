# Sends a thousand requests per second. The answers contain the server's CPU time.
import resource
import socket
import struct
import sys
import time

role, port = sys.argv[1], int(sys.argv[2])


def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if role == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    while True:
        c, _ = s.accept()
        c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := c.recv(64):
            c.sendall(struct.pack('d', cpu()) + data[8:])
c = socket.create_connection(('127.0.0.1', port))
c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times, N = [], 2000
next = time.monotonic()
for i in range(N + 200):
    if i == 200:
        own, other = cpu(), struct.unpack('d', data[:8])[0]
    next += 0.001
    left = next - time.monotonic()
    if left > 0:
        time.sleep(left)
    before = time.perf_counter()
    c.sendall(b'x' * 64)
    data = c.recv(64)
    times.append(time.perf_counter() - before)
used = cpu() - own + struct.unpack('d', data[:8])[0] - other
times = sorted(times[200:])
print('median', times[N // 2] * 1e6, 'cpu', used / N * 1e6)
