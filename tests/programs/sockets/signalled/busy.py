# A server that asks for signals while its client makes no call for a while, and that client.
import os
import signal
import socket
import sys
import time

from common import ask_until_changed, receive
from signals import ask_for_signals, signals

port = int(sys.argv[2])
if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    b, _ = s.accept()
    ask_until_changed(b, False)
    client = int(receive(b, 10))
    while 'sigtimedwait' not in open('/proc/%d/wchan' % client).read():
        time.sleep(0.001)
    begun = time.monotonic()
    ask_for_signals(b, 'fcntl')
    assert 0.9 < time.monotonic() - begun < 30
    os.kill(client, signal.SIGUSR1)
    b.setblocking(False)
    for turn in range(100):
        got = b''
        while len(got) < 10:
            assert signals(), (turn, got)
            try:
                while part := b.recv(7):
                    got += part
            except BlockingIOError:
                pass
        assert got == b'%10d' % turn
        b.sendall(b'.')
else:
    a = socket.create_connection(('127.0.0.1', port))
    ask_until_changed(a, True)
    a.sendall(b'%10d' % os.getpid())
    assert signal.sigtimedwait([signal.SIGUSR1], 50)
    for turn in range(100):
        a.sendall(b'%10d' % turn)
        assert receive(a, 1) == b'.'
