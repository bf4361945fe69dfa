# One process sends and another one receives, each more than a ring holds.
import os
import random
import socket
import sys

port = int(sys.argv[2])


def has_changed():
    words = ['"pid":%d,' % os.getpid(), '"sent_after_us"', '"received_after_us"']
    return any(all(word in line for word in words) for line in open(os.environ['GINNEL_SOCKETS_REPORT']))


def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data


if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    c, _ = s.accept()
    while data := c.recv(65536):
        c.sendall(data)
else:
    c = socket.create_connection(('127.0.0.1', port))
    while not has_changed():
        c.sendall(b'.' * 100)
        receive(c, 100)
    pieces = [random.Random(seed).randbytes(seed * 40000) for seed in range(30)]
    child = os.fork()
    if child == 0:
        for piece in pieces:
            assert receive(c, len(piece)) == piece
        os._exit(0)
    for piece in pieces:
        c.sendall(piece)
    assert os.waitpid(child, 0)[1] == 0
