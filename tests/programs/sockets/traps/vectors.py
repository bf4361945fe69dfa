# Bytes of preadv2 and pwritev2.
import errno
import os

from pairs import fails, pair, receive

a, b = pair()
assert os.pwritev(a.fileno(), [b'first ', b'second'], -1) == 12
a.sendall(b' third')
assert receive(b, 6) == b'first '
rooms = [bytearray(3), bytearray(9)]
got = os.preadv(b.fileno(), rooms, -1)
assert b''.join(rooms)[:got] == b'second third', rooms
# The call does not wait, and a socket has no offset.
fails(errno.EAGAIN, os.preadv, b.fileno(), rooms, -1, os.RWF_NOWAIT)
fails(errno.ESPIPE, os.preadv, b.fileno(), rooms, 0)
fails(errno.ESPIPE, os.pwritev, a.fileno(), [b'x'], 0)
fails(errno.EOPNOTSUPP, os.pwritev, a.fileno(), [b'x'], -1, 1 << 30)
b.sendall(b'end')
assert receive(a, 3) == b'end'
