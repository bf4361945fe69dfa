# A server that sends back what it receives, and its digest at the end.
import hashlib
import socket
import sys
import threading

listener = socket.create_server(('127.0.0.1', int(sys.argv[1])), backlog=64)


def serve(c):
    # Received data is sent back, with its digest at the end.
    got = hashlib.sha256()
    while part := c.recv(100000):
        got.update(part)
        c.sendall(part)
    c.sendall(got.digest())
    c.close()


while True:
    c, _ = listener.accept()
    threading.Thread(target=serve, args=(c,), daemon=True).start()
