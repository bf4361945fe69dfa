# Makes changes and reads. What it reads must be what it has stored.
import sys

from pymemcache.client.base import Client
client = Client((sys.argv[1], int(sys.argv[2])), no_delay=True)
right = 0
for i in range(int(sys.argv[3])):
    value = b"%d" % i * 20
    client.set("python", value, noreply=False)
    right += client.get("python") == value
print(right, "right")
