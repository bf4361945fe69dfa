# Shuts down, closes and resets connections that have gone back, before the receiver has seen anything.
import select
import socket

from pairs import pair, receive
from streams import content

data = content[:700000]
# Shut down, closed, and closed with unread bytes, before the receiver has seen anything.
for end in ('shutdown', 'close', 'reset'):
    a, b = pair()
    a.sendall(data)
    if end == 'reset':
        b.sendall(b'unread')
        while not select.select([a], [], [], 0)[0]:
            pass
    a.shutdown(socket.SHUT_WR) if end == 'shutdown' else a.close()
    if end == 'reset':
        try:
            while b.recv(100000):
                pass
            assert False, 'an end in order'
        except ConnectionResetError:
            pass
    else:
        assert receive(b, len(data)) == data
        assert b.recv(1) == b''
    b.close()
    a.close()
