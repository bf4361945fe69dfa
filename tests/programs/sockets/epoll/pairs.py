# Connections with both ends in this process, which have changed over.
import os
import socket

listener = socket.create_server(('127.0.0.1', 0))


def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data


def changed():
    lines = [line for line in open(os.environ['GINNEL_SOCKETS_REPORT'])
             if '"sent_after_us"' in line and '"received_after_us"' in line]
    return len({line.split('"connection":')[1].split(',')[0] for line in lines})


made = 0


def pair():
    global made
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    made += 1
    while changed() < 2 * made:
        for (one, other) in ((a, b), (b, a)):
            one.sendall(b'.')
            assert receive(other, 1) == b'.'
    return a, b


def fails(number, call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        assert error.errno == number, error
    else:
        assert False, 'no error'
