# Pairs of processes that send 64 bytes back and forth.
import os
import socket
import sys
import time

role, port, pairs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def receive(c):
    data = b''
    while len(data) < 64:
        more = c.recv(64 - len(data))
        if not more:
            return None
        data += more
    return data


if role == 'serve':
    s = socket.create_server(('127.0.0.1', port), backlog=pairs)
    for i in range(pairs):
        if os.fork() == 0:
            c, _ = s.accept()
            c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := receive(c):
                c.sendall(data)
            os._exit(0)
    while True:
        time.sleep(100)
out = []
for i in range(pairs):
    r, w = os.pipe()
    out.append(r)
    if os.fork() == 0:
        c = socket.create_connection(('127.0.0.1', port))
        c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end, turns = time.monotonic() + float(sys.argv[4]), 0
        while time.monotonic() < end:
            c.sendall(b'x' * 64)
            receive(c)
            turns += 1
        c.close()
        os.write(w, b'%d' % turns)
        os._exit(0)
    os.close(w)
print('turns', sum(int(os.read(r, 100)) for r in out) / float(sys.argv[4]))
