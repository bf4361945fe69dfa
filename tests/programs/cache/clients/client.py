# A client in Python: pymemcache. Arguments: HOST PORT.
import sys

from pymemcache.client.base import Client, PooledClient

at = (sys.argv[1], int(sys.argv[2]))
for client in Client(at, no_delay=True, timeout=20), PooledClient(at, timeout=20):
    assert client.flush_all()
    assert client.get("py:none") is None
    for i in range(200):
        value = b"%d" % i * (i + 1)
        assert client.set(f"py:{i}", value, expire=100, noreply=i % 3 == 0)
        assert client.get(f"py:{i}") == value
    found = client.get_many([f"py:{i}" for i in range(300)])
    assert len(found) == 200 and found["py:7"] == b"7" * 8
    assert client.set_many({f"py:many{i}": b"x" * i for i in range(100)}, noreply=False) == []
    assert client.add("py:1", b"x", noreply=False) is False
    assert client.replace("py:none", b"x", noreply=False) is False
    assert client.append("py:1", b"!", noreply=False) and client.prepend("py:1", b"?", noreply=False)
    value, cas = client.gets("py:1")
    assert value == b"?11!"
    assert client.cas("py:1", b"new", cas, noreply=False) is True
    assert client.cas("py:1", b"newer", cas, noreply=False) is False
    assert client.cas("py:none", b"new", cas, noreply=False) is None
    assert client.get("py:1") == b"new"
    client.set("py:count", b"40")
    assert client.incr("py:count", 2) == 42 and client.decr("py:count", 50) == 0
    assert client.incr("py:none", 1) is None
    assert client.touch("py:1", 100, noreply=False) and not client.touch("py:none", noreply=False)
    assert client.delete("py:1", noreply=False) and not client.delete("py:1", noreply=False)
    assert client.get("py:1") is None
    large = b"l" * 900_000
    client.set("py:large", large)
    assert client.get("py:large") == large
    try:
        client.set("py:larger", b"l" * 1_100_000, noreply=False)
        assert False, "too large"
    except Exception as error:
        assert "too large" in str(error), error
    assert client.get("py:large") == large
    client.close()
print("all right")
