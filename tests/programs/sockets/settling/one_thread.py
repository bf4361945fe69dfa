# Both ends of a connection, in one thread.
import socket

listener = socket.create_server(('127.0.0.1', 0))
a = socket.create_connection(listener.getsockname())
b, _ = listener.accept()
a.sendall(b'one')
assert b.recv(100) == b'one'
b.sendall(b'two')
a.close()
