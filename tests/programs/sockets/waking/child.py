# Children use their own doorbells, even in epoll instances that they have inherited.
import os
import socket
import time

import pairs
from sleepers import answering, ask, by_epoll, by_poll, by_recv, end

a, b, thread = answering(by_epoll)
for turn in range(20):
    ask(a, thread, turn, by_recv)
end(a, b, thread)


def own():
    for wait in (by_recv, by_poll, by_epoll):
        a, b, thread = answering(wait)
        for turn in range(50):
            time.sleep(0.001)
            ask(a, thread, turn, wait)
        end(a, b, thread)


def changed():
    # The report contains the parent's connections too.
    lines = [line for line in open(os.environ['GINNEL_SOCKETS_REPORT'])
             if '"sent_after_us"' in line and '"received_after_us"' in line and f'"pid":{os.getpid()},' in line]
    return len({line.split('"connection":')[1].split(',')[0] for line in lines})


children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        pairs.listener.close()
        pairs.listener = socket.create_server(('127.0.0.1', 0))
        pairs.changed, pairs.made = changed, 0
        own()
        os._exit(0)
    children.append(child)
own()
for child in children:
    assert os.waitpid(child, 0)[1] == 0
