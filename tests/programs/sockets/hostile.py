# Ends of connections that make the usual calls, and only expect each call to return. Prints how many connections were reset.
# Arguments: a seed, the file that ends the program when it appears, and the file to make at the first reset.
import os
import random
import select
import socket
import sys
import time

from pairs import changed, listener, receive

listener.listen(64)
chance = random.Random(int(sys.argv[1]))
resets, ends, peers = 0, [], {}
watch = select.epoll()


def make():
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    for c, other in ((a, b), (b, a)):
        c.settimeout(0.05 if chance.random() < 0.3 else 0)
        ends.append(c)
        peers[c] = other
        watch.register(c, select.EPOLLIN | (select.EPOLLET if chance.random() < 0.3 else 0))


def drop(c):
    for end in (c, peers.pop(c)):
        ends.remove(end)
        peers.pop(end, None)
        end.close()


data = bytes(range(256)) * 400
while not os.path.exists(sys.argv[2]):
    while len(ends) < 24:
        make()
    for turn in range(200):
        if not ends:
            break
        c = chance.choice(ends)
        try:
            what = chance.randrange(10)
            if what < 4:
                c.send(data[:chance.choice((1, 64, 1000, 5000, 100000))])
            elif what < 8:
                if c.recv(chance.choice((1, 64, 5000, 100000))) == b'':
                    drop(c)
            elif what == 8:
                c.recv(100, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            else:
                select.select([c], [c], [], 0)
                watch.poll(0)
        except (BlockingIOError, TimeoutError):
            pass
        except ConnectionError:
            if not resets:
                open(sys.argv[3], 'w').close()
            resets += 1
            drop(c)
        if chance.random() < 0.002 and c in peers:
            drop(c)
while ends:
    drop(ends[0])
# New connections work as usual.
a, b = socket.create_connection(listener.getsockname()), None
b, _ = listener.accept()
before = changed()
end = time.monotonic() + 60
while changed() < before + 2:
    assert time.monotonic() < end, 'a new connection does not change over'
    for one, other in ((a, b), (b, a)):
        one.sendall(b'.')
        assert receive(other, 1) == b'.'
for one, other in ((a, b), (b, a)):
    for n in range(100):
        one.sendall(data[:3000])
        assert receive(other, 3000) == data[:3000]
a.close()
assert b.recv(1) == b''
print(resets)
