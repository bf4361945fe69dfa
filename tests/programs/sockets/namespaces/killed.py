# A server that is killed where its kernel cannot report it, and a client that detects that.
import os
import select
import signal
import socket
import subprocess
import sys
import time

from common import ask_until_changed, receive

how, role = sys.argv[1:]
if role == 'serve':
    s = socket.create_server(('10.77.0.2', 7000))
    c, _ = s.accept()
    ask_until_changed(c, False)
    c.sendall(b'%10d' % os.getpid())
    c.recv(1)
    assert False, 'the server lives'
while True:
    try:
        c = socket.create_connection(('10.77.0.2', 7000))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
ask_until_changed(c, True)
if how == 'poll':
    poll = select.poll()
    poll.register(c, select.POLLIN)
elif how != 'looks':
    poll = select.epoll()
    poll.register(c, select.EPOLLIN | (select.EPOLLET if how == 'edge' else 0))
    # From now on, an edge is news only if something happens.
    assert poll.poll(30)
server = int(receive(c, 10))
c.setblocking(False)
subprocess.run(['ip', 'link', 'set', 'eth0', 'down'], check=True)
os.kill(server, signal.SIGKILL)
longest, calls = 0, 0
while True:
    if how != 'looks':
        while not poll.poll(30000):
            pass
    begun = time.monotonic()
    try:
        assert c.recv(1) == b'', 'bytes from nowhere'
        assert False, 'an end in order'
    except BlockingIOError:
        calls += 1
    except ConnectionResetError:
        break
    finally:
        longest = max(longest, time.monotonic() - begun)
assert how == 'looks' or calls == 0, 'nothing to receive although poll said so %d times' % calls
assert c.recv(1) == b''
print('longest', int(longest * 1000))
