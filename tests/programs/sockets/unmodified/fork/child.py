# A server whose child continues a connection that has changed over, after other programs were executed, and the client.
import os
import socket
import subprocess
import sys

port = int(sys.argv[2])


def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data


def echo(c):
    for _ in range(300):
        c.sendall(receive(c, 100))


def has_changed():
    own = '"pid":%d,' % os.getpid()
    words = [own, '"sent_after_us"', '"received_after_us"']
    return any(all(word in line for word in words) for line in open(os.environ['GINNEL_SOCKETS_REPORT']))


if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    c, _ = s.accept()
    # Until the connection has changed over.
    while True:
        changed = has_changed()
        receive(c, 100)
        c.sendall((b'!' if changed else b'?') * 100)
        if changed:
            break
    subprocess.run(['true'], check=True)
    assert os.system('true') == 0
    echo(c)
    if os.fork() == 0:
        s.close()
        echo(c)
        c.close()
        os._exit(0)
    c.close()
    assert os.wait()[1] == 0
else:
    c = socket.create_connection(('127.0.0.1', port))
    while True:
        c.sendall(b'.' * 100)
        if receive(c, 100) == b'!' * 100:
            break
    for turn in range(600):
        data = os.urandom(100)
        c.sendall(data)
        assert receive(c, 100) == data, turn
    assert c.recv(1) == b''
