# Answers until its connection has changed over, and then hands it to another process.
import os
import socket
import subprocess
import sys

from common import ask_until_changed, receive

GO_ON = open('go_on.py').read()
how, port = sys.argv[1], int(sys.argv[2])
s = socket.create_server(('127.0.0.1', port))
c, _ = s.accept()
ask_until_changed(c, False)
# Data that arrives with the request is for the other process.
unread = int(receive(c, 6))
if how == 'half':
    c.sendall(b'take your time')
other = [sys.executable, '-c', GO_ON]
os.environ['PYTHONUNBUFFERED'] = '1'
if how == 'exec':
    os.set_inheritable(c.fileno(), True)
    os.execv(other[0], other + [str(c.fileno()), str(unread)])
elif how == 'exec of nothing':
    os.set_inheritable(c.fileno(), True)
    try:
        os.execv('/nowhere', ['nowhere'])
    except FileNotFoundError:
        pass
    assert os.get_inheritable(c.fileno())
    sys.argv[1:] = [str(c.detach()), str(unread)]
    exec(GO_ON)
elif how in ('spawn', 'fork and exec'):
    wait = (lambda: None) if how == 'fork and exec' else None
    # With a preexec function, subprocess uses fork; otherwise vfork.
    child = subprocess.Popen(other + ['0', str(unread)], stdin=c, preexec_fn=wait)
    c.close()
    assert child.wait() == 0
elif how == 'posix_spawn':
    actions = [(os.POSIX_SPAWN_DUP2, c.fileno(), 0)]
    child = os.posix_spawn(other[0], other + ['0', str(unread)], os.environ, file_actions=actions)
    c.close()
    assert os.waitpid(child, 0)[1] == 0
else:
    ours, theirs = socket.socketpair()
    receiver = 'import os, socket, sys\n' \
        's = socket.socket(fileno=0)\n' \
        'fd = socket.recv_fds(s, 1, 1)[1][0]\n' \
        'os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], str(os.dup2(fd, 9)), sys.argv[2]])\n'
    environment = dict(os.environ)
    if how == 'message to a stranger':
        environment.pop('LD_PRELOAD')
    child = subprocess.Popen([sys.executable, '-c', receiver, GO_ON, str(unread)], stdin=theirs, env=environment)
    theirs.close()
    socket.send_fds(ours, [b'.'], [c.fileno()])
    c.close()
    assert child.wait() == 0
