# Streams of one thread, which waits for all of them with the selector that the argument names.
import selectors
import socket
import sys

from pairs import pair
from streams import Stream, largest

selector = getattr(selectors, sys.argv[1])()
streams, over = [], 0
for n in range(4):
    ends = pair()
    pair_streams = Stream(2 * n), Stream(2 * n + 1)
    for i, c in enumerate(ends):
        c.setblocking(False)
        out, into = pair_streams[i], pair_streams[1 - i]
        selector.register(c, selectors.EVENT_READ | selectors.EVENT_WRITE, (out, into))
        streams.append(out)
grown, turns = False, 0
while over < len(streams):
    turns += 1
    if not grown and turns % 50 == 0:
        grown = largest() == len(streams)
    for key, events in selector.select():
        c, (out, into) = key.fileobj, key.data
        try:
            if events & selectors.EVENT_READ and not into.receive(c):
                over += 1
                events &= ~selectors.EVENT_READ
                interest = key.events & ~selectors.EVENT_READ
                if interest:
                    key = selector.modify(c, interest, key.data)
                else:
                    selector.unregister(c)
        except BlockingIOError:
            pass
        try:
            if events & selectors.EVENT_WRITE:
                if grown and not out.rest:
                    c.shutdown(socket.SHUT_WR)
                    interest = key.events & ~selectors.EVENT_WRITE
                    if interest:
                        selector.modify(c, interest, key.data)
                    else:
                        selector.unregister(c)
                else:
                    out.send(c)
        except BlockingIOError:
            pass
for stream in streams:
    stream.check()
