# Connections with both ends in this process.
import socket

from common import receive

server = socket.create_server(('127.0.0.1', 0))


def pair():
    a = socket.create_connection(server.getsockname())
    b, _ = server.accept()
    for one, other in ((a, b), (b, a)):
        one.sendall(b'.')
        assert receive(other, 1) == b'.'
    return a, b
