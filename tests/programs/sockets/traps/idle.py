# The CPU time of threads that wait, in epoll and in calls that receive.
import os
import select
import threading
import time

from pairs import pair, receive

ends = [pair() for _ in range(40)]


def used():
    times = os.times()
    return times.user + times.system


def idle(what):
    # New threads spin for a while before they sleep.
    end = time.monotonic() + 60
    while True:
        before = used()
        time.sleep(0.5)
        if used() - before <= 0.02:
            break
        assert time.monotonic() < end, (what, used() - before)
    # It must stay like that.
    before = used()
    time.sleep(1)
    assert used() - before <= 0.03, (what, used() - before)


epoll = select.epoll()
for a, b in ends:
    epoll.register(b, select.EPOLLIN)
waiting = threading.Thread(target=lambda: epoll.poll(60))
waiting.start()
idle('epoll')
ends[0][0].sendall(b'x')
waiting.join()
assert receive(ends[0][1], 1) == b'x'
threads = [threading.Thread(target=receive, args=(b, 1)) for a, b in ends]
for thread in threads:
    thread.start()
idle('a thread for each')
for a, b in ends:
    a.sendall(b'x')
for thread in threads:
    thread.join()
