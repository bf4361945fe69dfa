# A thread that waits in the way that the first argument names is woken this many times.
import sys
import time

from sleepers import answering, ask, end, ways

wait = ways[sys.argv[1]]
a, b, thread = answering(wait)
for turn in range(int(sys.argv[2])):
    time.sleep(0.001)
    ask(a, thread, turn % 256, wait)
end(a, b, thread)
