# Times GETs of an unmodified client: HOST PORT COUNT. Prints its figures as JSON, in microseconds.
import json
import sys
import time

from pymemcache.client.base import Client

host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
client = Client((host, port), no_delay=True)
client.set("key", b"v" * 100)
times = []
for i in range(count + count // 10):
    begun = time.perf_counter_ns()
    value = client.get("key")
    taken = time.perf_counter_ns() - begun
    assert len(value) == 100
    if i >= count // 10:
        times.append(taken / 1000)
times.sort()
print(json.dumps({"median": times[count // 2], "p99": times[count * 99 // 100], "rate": 0, "cpu": 0}))
