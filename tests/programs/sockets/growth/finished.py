# A process ends its stream before a larger ring takes over. Another process that has the connection too sends nothing more.
import errno
import os
import socket
import time

from pairs import fails, pair


def call_for_a_while(c):
    """Makes calls that attend to the connection."""
    got = b''
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        try:
            got += c.recv(100)
        except BlockingIOError:
            time.sleep(0.002)
    return got


for _ in range(5):
    a, b = pair()
    a.setblocking(False)
    b.setblocking(False)
    sent = 0
    # A ring that is full twice is too small. (Behind a shorter message, the connection would go back to TCP.)
    for _ in range(3):
        try:
            sent += a.send(b'x' * 20_000)
        except BlockingIOError:
            pass
    # One end gets the larger rings first, so that it cannot continue there yet.
    call_for_a_while(a)
    got = call_for_a_while(b)
    child = os.fork()
    if child == 0:
        # The parent has ended its stream.
        while not a.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            time.sleep(0.002)
        fails(errno.EPIPE, a.send, b'y')
        os._exit(0)
    a.shutdown(socket.SHUT_WR)
    a.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    b.setblocking(True)
    while more := b.recv(1000):
        got += more
    assert got == b'x' * sent, (len(got), sent)
