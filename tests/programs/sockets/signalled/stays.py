# Asks for signals of connections that have not changed over yet.
import os
import socket

from pairs import listener
from signals import ask_for_signals, ping

expected = 0
for when in ('before connect', 'before accept', 'after'):
    if when == 'before accept':
        ask_for_signals(listener, 'fcntl')
    a = socket.socket()
    if when == 'before connect':
        ask_for_signals(a, 'ioctl')
    a.connect(listener.getsockname())
    b, _ = listener.accept()
    if when != 'before connect':
        ask_for_signals(a, 'fcntl')
    for turn in range(200):
        ping(a, b)
    # When the daemon would take the connection.
    expected += 1
    while open(os.environ['GINNEL_SOCKETS_REPORT']).read().count('O_ASYNC') < expected:
        ping(a, b)
