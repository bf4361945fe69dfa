# Processes of a server that share a connection send and receive in turn.
import os
import random
import signal
import socket
import sys

port, when = int(sys.argv[2]), sys.argv[3]


def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data


def changed():
    words = ['"pid":%d,' % os.getpid(), '"sent_after_us"', '"received_after_us"']
    return any(all(word in line for word in words) for line in open(os.environ['GINNEL_SOCKETS_REPORT']))


def echo(c):
    n = int(receive(c, 8))
    c.sendall(receive(c, n))


def echo_until_changed(c):
    while True:
        has = changed()
        receive(c, 100)
        c.sendall((b'!' if has else b'?') * 100)
        if has:
            break


if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    c, _ = s.accept()
    if when == 'after':
        echo_until_changed(c)
    # Each process waits until the one before it is done.
    pipes = [os.pipe() for _ in range(3)]
    children = []
    for i in range(1, 3):
        child = os.fork()
        if child == 0:
            for turn in range(20):
                os.read(pipes[i][0], 1)
                echo(c)
                os.write(pipes[(i + 1) % 3][1], b'.')
            os._exit(0)
        children.append(child)
    for turn in range(20):
        echo(c)
        os.write(pipes[1][1], b'.')
        os.read(pipes[0][0], 1)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    # Now the process is the only one with the connection, because an executed program does not get it.
    sleeper = os.fork()
    if sleeper == 0:
        os.execvp('sleep', ['sleep', '100'])
    if when == 'before':
        assert not changed()
        echo_until_changed(c)
    for turn in range(20):
        echo(c)
    # A process that is killed while it waits does no harm.
    child = os.fork()
    if child == 0:
        c.recv(1)
        os._exit(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    c.sendall(b'+')
    echo(c)
    os.kill(sleeper, signal.SIGKILL)
else:
    c = socket.create_connection(('127.0.0.1', port))

    def ask_until_changed():
        while True:
            c.sendall(b'.' * 100)
            if receive(c, 100) == b'!' * 100:
                break

    def ask(turns):
        for turn in range(turns):
            data = random.randbytes(random.choice([1, 100, 3000, 5000]))
            c.sendall(b'%8d' % len(data) + data)
            assert receive(c, len(data)) == data, turn
    if when == 'after':
        ask_until_changed()
    ask(60)
    if when == 'before':
        ask_until_changed()
    ask(20)
    assert receive(c, 1) == b'+'
    ask(1)
    assert c.recv(1) == b''
