# Passes connections on whose peer only sends, or sleeps.
import selectors
import socket
import threading
import time

from common import content, receive
from joined import pair

for how in ('sends', 'epoll', 'poll'):
    a, b = pair()
    ours, theirs = socket.socketpair()
    stop, sent = threading.Event(), [0]

    def send():
        while not stop.is_set():
            a.sendall(content[sent[0]:sent[0] + 10])
            sent[0] += 10
            time.sleep(0.001)

    def wait():
        a.setblocking(False)
        with (selectors.EpollSelector if how == 'epoll' else selectors.PollSelector)() as selector:
            selector.register(a, selectors.EVENT_READ)
            while not selector.select():
                pass
    peer = threading.Thread(target=send if how == 'sends' else wait)
    peer.start()
    if how == 'sends':
        # A part of the data has arrived.
        assert receive(b, 25) == content[:25]
    begun = time.monotonic()
    socket.send_fds(ours, [b'.'], [b.fileno()])
    c = socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0])
    b.close()
    stop.set()
    c.sendall(b'the answer')
    peer.join()
    a.setblocking(True)
    assert receive(a, 10) == b'the answer'
    if how == 'sends':
        assert receive(c, sent[0] - 25) == content[25:sent[0]]
