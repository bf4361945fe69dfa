# A thread waits for room, in a call that sends and in `poll`.
import hashlib
import os
import select
import socket
import threading
import time

from pairs import pair

a, b = pair()
data = os.urandom(1 << 20) * 4


def send(wait):
    if wait == 'call':
        a.sendall(data)
        return
    poll = select.poll()
    poll.register(a, select.POLLOUT)
    sent = 0
    while sent < len(data):
        assert poll.poll(60000)
        try:
            sent += a.send(data[sent:sent + 65536], socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass


for wait in ('call', 'poll') * 3:
    thread = threading.Thread(target=send, args=(wait,))
    thread.start()
    got = hashlib.sha256()
    left = len(data)
    while left:
        # A slow receiver, for which the sender waits.
        part = b.recv(20000)
        assert part
        got.update(part)
        left -= len(part)
        if left % 7 == 0:
            time.sleep(0.0005)
    thread.join()
    assert got.digest() == hashlib.sha256(data).digest()
