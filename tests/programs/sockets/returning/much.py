# Sends much before it receives, in both directions.
import socket

from pairs import pair, receive
from returns import returned
from streams import content

a, b = pair()
for turn in range(3):
    for one, other in ((a, b), (b, a)):
        data = content[turn:turn + 700000]
        one.sendall(data)
        one.sendall(b'and more')
        # A call with room for more data returns the data that there is.
        rest = data + b'and more'
        while rest:
            part = other.recv(1 << 20)
            assert part and rest.startswith(part)
            rest = rest[len(part):]
    # Until they have changed over again.
    while returned():
        for one, other in ((a, b), (b, a)):
            one.sendall(b'.')
            assert receive(other, 1) == b'.'
a.shutdown(socket.SHUT_WR)
assert b.recv(1) == b''
b.sendall(b'the end')
b.close()
assert receive(a, 7) == b'the end' and a.recv(1) == b''
