# Sets and gets values until the connection has changed over, and a number of them afterwards. Its arguments are the server's address
# and port.
import os
import random
import sys

from pymemcache.client.base import Client


def has_changed():
    words = ['"pid":%d,' % os.getpid(), '"sent_after_us"', '"received_after_us"']
    return any(all(word in line for word in words) for line in open(os.environ['GINNEL_SOCKETS_REPORT']))


client = Client((sys.argv[1], int(sys.argv[2])), timeout=60)
r = random.Random(1)


def talk(turn):
    values = {'%d-%d' % (turn, i): r.randbytes(r.choice([0, 1, 100, 10000, 900000])) for i in range(5)}
    for key, value in values.items():
        assert client.set(key, value, noreply=False)
    assert client.get_many(values) == values, turn
    assert client.delete_many(values)


turn = 0
while not has_changed():
    turn += 1
    talk(turn)
for turn in range(turn, turn + 20):
    talk(turn)
client.close()
