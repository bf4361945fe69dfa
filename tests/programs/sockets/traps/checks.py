# Checks that a connection still works, and that a thread sleeps.
import os
import time

from pairs import receive


def works(a, b):
    for turn in range(50):
        for one, other in ((a, b), (b, a)):
            data = os.urandom(1 + turn * 7)
            one.sendall(data)
            assert receive(other, len(data)) == data, turn


def is_asleep(thread):
    return open(f'/proc/self/task/{thread.native_id}/stat').read().rpartition(')')[2].split()[0] == 'S'


def sleeps(thread):
    # The thread may be seen once on its way to the sleeping call. It may also have woken and ended before it is seen.
    try:
        for _ in range(3):
            while not is_asleep(thread):
                time.sleep(0.0005)
            time.sleep(0.0005)
    except FileNotFoundError:
        pass
