# Another process gets a connection on which answers out of memory wait to be received: it gets exactly these, and nobody gets them again.
import os
import socket
import subprocess
import sys

port = int(sys.argv[1])
VALUE = b'v' * 1000
ANSWER = b'VALUE a 0 1000\r\n' + VALUE + b'\r\nEND\r\n'

if len(sys.argv) > 2:
    # An executed program: receives so many bytes, and no more are there.
    c = socket.socket(fileno=int(sys.argv[2]))
    expected = bytes.fromhex(sys.argv[3])
    got = b''
    while len(got) < len(expected):
        more = c.recv(len(expected) - len(got))
        assert more, 'the connection has ended'
        got += more
    assert got == expected, got
    c.setblocking(False)
    try:
        raise AssertionError(c.recv(1000))
    except BlockingIOError:
        pass
    c.setblocking(True)
    c.sendall(b'get a\r\n')
    got = b''
    while len(got) < len(ANSWER):
        got += c.recv(4096)
    assert got == ANSWER
    os._exit(0)


def receive(c, n):
    got = b''
    while len(got) < n:
        more = c.recv(n - len(got))
        assert more, 'the connection has ended'
        got += more
    return got


def is_empty(c):
    try:
        return c.recv(1000, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True


def ended(pid):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def queued(way):
    """Returns a connection with answers that wait, and these answers."""
    c = socket.create_connection(('127.0.0.1', port))
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    c.sendall(b'set a 0 0 1000\r\n' + VALUE + b'\r\n')
    assert receive(c, 8) == b'STORED\r\n'
    if way == 'one':
        c.sendall(b'get a\r\n')
        return c, ANSWER
    if way == 'part':
        c.sendall(b'get a\r\nget a\r\n')
        assert receive(c, 500) == ANSWER[:500]
        return c, ANSWER[500:] + ANSWER
    if way == 'more':
        # The server's own answer comes behind.
        c.sendall(b'get a\r\nset b 0 0 1\r\nx\r\nget a\r\n')
        return c, ANSWER + b'STORED\r\n' + ANSWER
    c.sendall(b'get a\r\n' * 40)
    return c, ANSWER * 40


def executed(c, expected):
    return [sys.executable, '-c', SOURCE, str(port), str(c.fileno()), expected.hex()]


SOURCE = os.environ['SOURCE']


def by_fork(c, expected):
    child = os.fork()
    if child == 0:
        assert receive(c, len(expected)) == expected
        os._exit(0 if is_empty(c) is True else 1)
    ended(child)
    assert is_empty(c) is True
    c.sendall(b'get a\r\n')
    assert receive(c, len(ANSWER)) == ANSWER


def by_fork_for_the_parent(c, expected):
    child = os.fork()
    if child == 0:
        c.close()
        os._exit(0)
    ended(child)
    assert receive(c, len(expected)) == expected
    assert is_empty(c) is True


def by_exec(way):
    child = os.fork()
    if child == 0:
        c, expected = queued(way)
        c.set_inheritable(True)
        os.execv(sys.executable, executed(c, expected))
    ended(child)


def by_spawn(c, expected):
    c.set_inheritable(True)
    ended(os.posix_spawn(sys.executable, executed(c, expected), os.environ))


def by_vfork(c, expected):
    # Python makes a child by vfork, if the C library allows that.
    assert subprocess.run(executed(c, expected), pass_fds=[c.fileno()]).returncode == 0


def by_message(c, expected):
    socket.send_fds(CHILD[1], [b'x'], [c.fileno()])
    CHILD[1].sendall(len(expected).to_bytes(4, 'big') + expected)
    assert CHILD[1].recv(1) == b'y'


def by_splice(c, expected):
    reads, writes = os.pipe()
    got = b''
    while len(got) < len(expected):
        n = os.splice(c.fileno(), writes, len(expected) - len(got))
        assert n > 0
        got += os.read(reads, n)
    assert got == expected


# A process that gets connections in messages.
here, there = socket.socketpair()
CHILD = (os.fork(), here)
if CHILD[0] == 0:
    here.close()
    while True:
        text, fds, *_ = socket.recv_fds(there, 1, 1)
        if not text:
            os._exit(0)
        expected = receive(there, int.from_bytes(receive(there, 4), 'big'))
        c = socket.socket(fileno=fds[0])
        assert receive(c, len(expected)) == expected
        assert is_empty(c) is True
        c.close()
        there.sendall(b'y')
there.close()

for way in ('one', 'part', 'more', 'many'):
    for by in (by_fork, by_fork_for_the_parent, by_exec, by_spawn, by_vfork, by_message, by_splice):
        try:
            if by is by_exec:
                by(way)
                continue
            c, expected = queued(way)
            by(c, expected)
            c.close()
        except BaseException:
            print(way, by.__name__, file=sys.stderr, flush=True)
            raise
here.close()
ended(CHILD[0])
print('good')
