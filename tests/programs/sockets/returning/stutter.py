# Streams whose receivers stop now and then.
# Arguments: the class of the selector, a seed, and how often connections must have gone back.
import random
import selectors
import socket
import sys
import time

from pairs import pair
from returns import returns
from streams import Stream

selector = getattr(selectors, sys.argv[1])()
chance = random.Random(int(sys.argv[2]))
streams, over, stopped = [], 0, []
for n in range(12):
    ends = pair()
    pair_streams = Stream(2 * n), Stream(2 * n + 1)
    for i, c in enumerate(ends):
        c.setblocking(False)
        # For some, TCP takes less than a ring does, so that the repeated send is only partial.
        c.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, (65536, 32768, 16384)[n % 3])
        out, into = pair_streams[i], pair_streams[1 - i]
        selector.register(c, selectors.EVENT_READ | selectors.EVENT_WRITE, (out, into))
        streams.append(out)
done, turns = False, 0

while over < len(streams):
    turns += 1
    if not done and turns % 500 == 0:
        done = returns() >= int(sys.argv[3])
    now = time.monotonic()
    for until, c, data in stopped:
        if until <= now or done:
            key = selector.get_map().get(c)
            if key:
                selector.modify(c, key.events | selectors.EVENT_READ, data)
            else:
                selector.register(c, selectors.EVENT_READ, data)
    stopped = [(until, c, data) for until, c, data in stopped if until > now and not done]
    for key, events in selector.select(0.01):
        c, (out, into) = key.fileobj, key.data
        interest = key.events
        try:
            if events & selectors.EVENT_READ:
                if not into.receive(c):
                    over += 1
                    interest &= ~selectors.EVENT_READ
                elif not done and chance.random() < 0.01:
                    interest &= ~selectors.EVENT_READ
                    stopped.append((now + chance.choice((0.03, 1.2)), c, key.data))
        except BlockingIOError:
            pass
        try:
            if events & selectors.EVENT_WRITE:
                if done and not out.rest:
                    c.shutdown(socket.SHUT_WR)
                    interest &= ~selectors.EVENT_WRITE
                else:
                    out.send(c)
        except BlockingIOError:
            pass
        if interest != key.events:
            if interest:
                selector.modify(c, interest, key.data)
            else:
                selector.unregister(c)
for stream in streams:
    stream.check()
