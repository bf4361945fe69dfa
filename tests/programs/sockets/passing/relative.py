# A child passes on a connection that it shares with its parent, before the connection has changed over, and ends. The parent goes on, and
# whoever has got the connection may go on too, over TCP. (That is the parent itself here, under another number.)
import array
import os
import socket

listener = socket.create_server(('127.0.0.1', 0))
a = socket.create_connection(listener.getsockname())
b, _ = listener.accept()
here, there = socket.socketpair()
child = os.fork()
if child == 0:
    there.sendmsg([b'.'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [a.fileno()]))])
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
_, messages, _, _ = here.recvmsg(1, socket.CMSG_SPACE(4))
passed = socket.socket(fileno=array.array('i', messages[0][2])[0])
for _ in range(300):
    a.sendall(b'a')
    assert b.recv(1) == b'a'
    b.sendall(b'b')
    assert a.recv(1) == b'b'
passed.settimeout(20)
b.settimeout(20)
passed.sendall(b'c')
assert b.recv(1) == b'c'
b.sendall(b'd')
assert passed.recv(1) == b'd'
