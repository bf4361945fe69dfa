# Connections that are reported and closed in this order, in both ways of closing. The first one is for the daemon's greeting.
import os
import socket
import struct
import sys
import time

listener = socket.create_server(('127.0.0.1', 0))


def pair():
    a = socket.create_connection(listener.getsockname())
    return a, listener.accept()[0]


a, b = pair()
# The daemon is there, and has read its messages.
while '"sent_after_us"' not in open(os.environ['GINNEL_SOCKETS_REPORT']).read():
    a.sendall(b'.')
    assert b.recv(1) == b'.'
open('ready', 'x')
while not os.path.exists('stopped'):
    time.sleep(0.001)
for turn in range(40):
    for abort in (False, True):
        a, b = pair()
        if abort:
            a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        # Reported with this call.
        a.sendall(b'request')
        a.close()
        if abort:
            try:
                while b.recv(100):
                    pass
                assert False, 'an end in order'
            except ConnectionResetError:
                pass
        else:
            assert b.recv(100) == b'request'
            assert b.recv(100) == b''
        b.close()
a, b = pair()
# A child that shares the socket is not affected when the parent closes it; the connection ends with the last close.
a.sendall(b'1')
go, went = os.pipe()
child = os.fork()
if child == 0:
    os.read(go, 1)
    a.sendall(b'2')
    a.close()
    os._exit(0)
a.close()
assert b.recv(1) == b'1'
os.write(went, b'.')
assert b.recv(1) == b'2'
assert b.recv(1) == b''
os.waitpid(child, 0)
# A program exits while a connection is open. Its peer is another process.
a, b = pair()
if os.fork() == 0:
    a.close()
    assert b.recv(1) == b'3'
    assert b.recv(1) == b''
    open('ended', 'x')
    os._exit(0)
b.close()
a.sendall(b'3')
sys.exit(0)
