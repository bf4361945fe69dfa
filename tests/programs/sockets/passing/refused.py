# A server that tries to pass its connection on while its client is busy with something else, and that client.
import os
import signal
import socket
import sys
import time

from common import ask_until_changed, content, receive

port = int(sys.argv[2])
if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    b, _ = s.accept()
    ask_until_changed(b, False)
    ours, theirs = socket.socketpair()
    # The client makes no call on the connection before it is told to.
    assert receive(b, 500) == content[:500]
    client = int(receive(b, 10))
    while 'sigtimedwait' not in open('/proc/%d/wchan' % client).read():
        time.sleep(0.001)
    begun = time.monotonic()
    try:
        socket.send_fds(ours, [b'.'], [b.fileno()])
        assert False, 'the message was sent'
    except BlockingIOError:
        pass
    assert 0.9 < time.monotonic() - begun < 30
    # Data that has arrived can still be received, and the refused call can be repeated.
    assert receive(b, 500) == content[500:1000]
    os.kill(client, signal.SIGUSR1)
    socket.send_fds(ours, [b'.'], [b.fileno()])
    c = socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0])
    assert receive(c, 3000) == content[1000:4000]
    c.sendall(b'the answer')
    assert c.recv(1) == b''
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    a = socket.create_connection(('127.0.0.1', port))
    ask_until_changed(a, True)
    a.sendall(content[:500] + b'%10d' % os.getpid() + content[500:2000])
    assert signal.sigtimedwait([signal.SIGUSR1], 50)
    a.sendall(content[2000:4000])
    assert receive(a, 10) == b'the answer'
