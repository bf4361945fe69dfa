# A thread that waits in the way that the argument names is woken again and again.
import sys
import time

from sleepers import answering, ask, end, ways

wait = ways[sys.argv[1]]
a, b, thread = answering(wait)
for turn in range(200):
    time.sleep(0.001)
    ask(a, thread, turn, wait)
end(a, b, thread)
