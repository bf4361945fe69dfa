# Uses memcached's commands with an unmodified client library. Prints "good" if all work.
import sys
from pymemcache.client.base import Client, PooledClient
from pymemcache.client.hash import HashClient

at = ('127.0.0.1', int(sys.argv[1]))


def check(client):
    client.flush_all()
    assert client.get('a') is None
    assert client.set('a', b'1', noreply=False)
    for turn in range(300):
        value = b'%d' % turn
        if turn % 10 == 0:
            client.set('a', value, noreply=turn % 20 == 0)
            now = value
        assert client.get('a') == now
    many = {'key%d' % i: b'v' * i for i in range(40)}
    assert client.set_many(many) == []
    assert client.get_many(many) == many
    assert client.get_many(['none', 'a', 'nil']) == {'a': now}
    value, version = client.gets('a')
    assert value == now and client.cas('a', b'7', version)
    assert client.cas('a', b'8', version) is False
    assert client.get('a') == b'7'
    assert client.incr('a', 5) == 12 and client.get('a') == b'12'
    assert client.decr('a', 20) == 0
    assert client.get('a').strip() == b'0'
    assert client.append('a', b'x', noreply=False) and client.get('a').replace(b' ', b'') == b'0x'
    assert client.prepend('a', b'y', noreply=True) and client.get('a').replace(b' ', b'') == b'y0x'
    assert client.add('a', b'z', noreply=False) is False and client.replace('a', b'z', noreply=False)
    assert client.get('a') == b'z'
    assert client.touch('a', 100, noreply=False) and client.get('a') == b'z'
    assert client.delete('a', noreply=False) and client.get('a') is None
    large = bytes(range(256)) * 3000
    client.set('large', large)
    assert client.get('large') == large
    assert client.get('a' * 250) is None
    client.set('short', b'x', expire=1, noreply=False)
    assert client.get('short') in (b'x', None)


for options in ({}, {'timeout': 20, 'connect_timeout': 20}, {'no_delay': True}):
    client = Client(at, **options)
    check(client)
    client.close()
check(PooledClient(at, max_pool_size=2))
check(HashClient([at]))
print('good')
