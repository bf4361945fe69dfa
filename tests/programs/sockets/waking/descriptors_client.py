# Counts the descriptors that the library has for one connection.
import os
import socket
import sys


def opened():
    # Except for the descriptor with which they are listed.
    return {int(fd) for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')}


def has_changed():
    return any('"sent_after_us"' in line and '"received_after_us"' in line and f'"pid":{os.getpid()},' in line
               for line in open(os.environ['GINNEL_SOCKETS_REPORT']))


def ask():
    data = b'%16d' % os.getpid()
    c.sendall(data)
    got = b''
    while len(got) < len(data):
        more = c.recv(len(data) - len(got))
        assert more
        got += more
    assert got == data


before = opened()
c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
while not has_changed():
    ask()
for _ in range(100):
    ask()
hidden = {fd: os.readlink(f'/proc/self/fd/{fd}') for fd in opened() - before - {c.fileno()}}
assert len(hidden) <= 8, hidden
# The thread has slept on its doorbell.
assert 'anon_inode:[eventpoll]' in hidden.values(), hidden
print(len(hidden), hidden)
