# Each pair has changed over when `pair` returns. Conditions that become true later are polled until the test's time limit.
import array
import fcntl
import socket
import termios

listener = socket.create_server(('127.0.0.1', 0))


def pair():
    a = socket.create_connection(listener.getsockname())
    return a, listener.accept()[0]


def queued(of, request):
    word = array.array('i', [0])
    fcntl.ioctl(of, request, word)
    return word[0]


a, b = pair()
for turn in range(3):
    a.sendall(b'x' * 1000)
    while queued(b, termios.FIONREAD) != 1000:
        pass
    assert len(b.recv(400)) == 400
    assert queued(b, termios.FIONREAD) == 600
    assert len(b.recv(1000)) == 600
    assert queued(b, termios.FIONREAD) == 0
    while queued(a, termios.TIOCOUTQ) != 0:
        pass
