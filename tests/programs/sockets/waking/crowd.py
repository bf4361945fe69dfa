# More threads wait, in the way that the argument names, than the doorbell has room for.
import sys
import time

from sleepers import answering, ask, by_recv, end, ways

crowd = [answering(ways[sys.argv[1]]) for _ in range(12)]
for turn in range(20):
    time.sleep(0.001)
    for a, b, thread in crowd:
        ask(a, thread, turn, by_recv)
for a, b, thread in crowd:
    end(a, b, thread)
