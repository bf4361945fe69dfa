# Threads that wait where the keeper of the wake bytes cannot sleep. They sleep too, and are woken.
import os
import select
import socket
import sys
import threading

from pairs import pair
from sleepers import settle

way = sys.argv[1]
a, b = pair()
told = []
ready = threading.Event()


def no_events():
    poll = select.poll()
    poll.register(b, 0)
    ready.set()
    told.append(poll.poll(60_000)[0][1] & ~select.POLLERR)


def edges():
    epoll = select.epoll()
    epoll.register(b, select.EPOLLIN | select.EPOLLET)
    assert epoll.poll(60)[0][1] & select.EPOLLIN
    ready.set()
    told.append(epoll.poll(60)[0][1] & select.EPOLLIN)


def many():
    poll = select.poll()
    for _ in range(300):
        poll.register(os.dup(os.pipe()[0]), select.POLLIN)
    poll.register(b, select.POLLIN)
    ready.set()
    told.append(poll.poll(60_000)[0][1])


if way == 'many':
    # This one is the keeper.
    receiver = threading.Thread(target=lambda: b.recv(1), daemon=True)
    receiver.start()
    settle(receiver)
else:
    b.shutdown(socket.SHUT_RD)
thread = threading.Thread(target={'no events': no_events, 'edges': edges, 'many': many}[way], daemon=True)
thread.start()
ready.wait()
settle(thread)
assert not told, told
if way == 'no events':
    # It is broken, because the peer has left a byte unread.
    b.send(b'x')
    a.close()
else:
    a.send(b'xy')
thread.join(30)
assert told == [{'no events': select.POLLHUP}.get(way, select.POLLIN)], told
