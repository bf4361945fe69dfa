# One end of a connection reports that it has changed over; the other end follows after the next daemon has come.
import os
import socket
import time

listener = socket.create_server(('127.0.0.1', 0))
a = socket.create_connection(listener.getsockname())
b, _ = listener.accept()
sent = 0
while not os.path.exists('go'):
    a.sendall(b'.')
    sent += 1
    time.sleep(0.002)
while sent:
    sent -= len(b.recv(sent))


def changed():
    lines = [line for line in open(os.environ['GINNEL_SOCKETS_REPORT'])
             if '"sent_after_us"' in line and '"received_after_us"' in line]
    return len({line.split('"connection":')[1].split(',')[0] for line in lines})


while changed() < 2:
    for one, other in ((a, b), (b, a)):
        one.sendall(b'.')
        assert other.recv(1) == b'.'
