# Data for an echo, which waits with the class of `select` that the argument names.
import select
import socket
import sys
import threading
import time

from pairs import pair, receive
from streams import content, largest

a, b = pair()
b.setblocking(False)


# An echo that receives nothing as long as it has something to send.
def serve():
    waiter = getattr(select, sys.argv[1])()
    waiter.register(b, select.POLLIN)
    rest = b''
    while True:
        waiter.poll()
        try:
            if not rest:
                rest = b.recv(16384)
                if not rest:
                    return
            rest = rest[b.send(rest):]
        except BlockingIOError:
            pass
        waiter.modify(b, select.POLLOUT if rest else select.POLLIN)


server = threading.Thread(target=serve)
server.start()
# More data than the small rings and the server hold, until both directions have the largest rings. How soon a ring grows depends on
# the machine.
turn, end = 0, time.monotonic() + 60
while turn < 20 or largest() < 2:
    assert time.monotonic() < end, 'the rings do not grow'
    bytes_ = content[turn % 20:turn % 20 + 300000]
    a.sendall(bytes_)
    assert receive(a, len(bytes_)) == bytes_
    turn += 1
a.shutdown(socket.SHUT_WR)
server.join()
