# A client of a proxy. The proxy's key `k` is another one in the cache.
import socket
import sys

port = int(sys.argv[1])


def ask(c, request, end):
    c.sendall(request)
    got = b''
    while not got.endswith(end):
        more = c.recv(1000)
        assert more, ('the connection ends', request, got)
        got += more
    return got


for i in range(20):
    c = socket.create_connection(('127.0.0.1', port))
    value = b'right %d' % i
    assert ask(c, b'set k 0 0 %d\r\n%s\r\n' % (len(value), value), b'\r\n') == b'STORED\r\n'
    assert ask(c, b'get k\r\n', b'END\r\n') == b'VALUE k 0 %d\r\n%s\r\nEND\r\n' % (len(value), value)
    assert ask(c, b'get only_in_the_cache\r\n', b'END\r\n') == b'END\r\n'
    if i % 2:
        c.close()
    else:
        assert ask(c, b'delete k\r\n', b'\r\n') == b'DELETED\r\n'
        assert ask(c, b'get k\r\n', b'END\r\n') == b'END\r\n'
print('good')
