# The program to which the connection goes: continues with the rest of the request.
import random
import socket
import sys

content = random.Random(5).randbytes(400000)


def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data


fd, unread = int(sys.argv[1]), int(sys.argv[2])
c = socket.socket(fileno=fd)
assert receive(c, unread) == content[:unread], 'the rest of the request'
c.sendall(b'the other one')
assert receive(c, len(content)) == content
c.sendall(content[::-1])
assert c.recv(1) == b''
c.close()
