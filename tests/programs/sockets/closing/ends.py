# What the two ends of a closed connection are told. Each pair has changed over when `pair` returns.
import errno
import os
import socket
import struct

listener = socket.create_server(('127.0.0.1', 0))


def pair():
    a = socket.create_connection(listener.getsockname())
    return a, listener.accept()[0]


def fails(number, call, *arguments):
    try:
        got = call(*arguments)
    except OSError as error:
        assert error.errno == number, error
    else:
        assert False, got


def abort(a):
    a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    a.close()


# Data sent before a reset is received first, and the reset is reported once.
a, b = pair()
a.sendall(b'data')
abort(a)
assert b.recv(2) == b'da'
assert b.recv(100) == b'ta'
fails(errno.ECONNRESET, b.recv, 100)
assert b.recv(100) == b''
# The same if the reset comes because data was not read.
a, b = pair()
a.sendall(b'data')
b.sendall(b'unread')
assert a.recv(1) == b'u'
a.close()
assert b.recv(100) == b'data'
fails(errno.ECONNRESET, b.recv, 100)
assert b.recv(100) == b''
fails(errno.EPIPE, b.send, b'more')
# The same if two processes share the connection, and the last to close it is not the one that opened it.
a, b = pair()
b.sendall(b'unread')
go, went = os.pipe()
child = os.fork()
if child == 0:
    b.close()
    os.read(go, 1)
    assert a.recv(1) == b'u'
    a.close()
    os._exit(0)
a.close()
os.write(went, b'.')
fails(errno.ECONNRESET, b.recv, 100)
assert os.waitpid(child, 0)[1] == 0
# The first data sent to a peer that has closed its end is lost.
a, b = pair()
a.close()
assert b.recv(100) == b''
assert b.sendmsg([b'lost', b'too']) == 7
fails(errno.EPIPE, b.send, b'more')
fails(errno.EPIPE, b.send, b'more')
assert b.recv(100) == b''
# After this side has shut down sending, nothing is sent.
a, b = pair()
b.shutdown(socket.SHUT_WR)
a.close()
fails(errno.EPIPE, b.send, b'more')
