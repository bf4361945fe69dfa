# Sets and gets while servers are killed and replaced. Each value contains its key and its version. A get never returns a version
# that is older than the one stored last, or newer than the one sent last.
import os
import socket
import sys
import time

port = int(sys.argv[1])
sent, stored = {}, {}
connections = gets = ended = turn = 0


def is_over():
    if turn % 64:
        return False
    # Tells the test how far it has come.
    with open('progress.part', 'w') as file:
        file.write(f'{connections} {gets}')
    os.rename('progress.part', 'progress')
    return os.path.exists('enough')


def receive(c, text):
    while not text.endswith(b'\r\n') or (text.startswith(b'VALUE') and not text.endswith(b'END\r\n')):
        more = c.recv(65536)
        if not more:
            raise EOFError
        text += more
    return text


def ask(c, request):
    c.sendall(request)
    return receive(c, b'')


while not is_over():
    try:
        c = socket.create_connection(('127.0.0.1', port))
    except ConnectionRefusedError:
        turn += 1
        time.sleep(0.005)
        continue
    c.settimeout(10)
    connections += 1
    try:
        while not is_over():
            turn += 1
            key = b'key%d' % (turn % 17)
            if turn % 50 < 2:
                sent[key] = turn
                value = b'%s:%d:%s' % (key, turn, b'x' * (turn % 200))
                # Newer than every version that readers have seen until now.
                if ask(c, b'set %s 0 0 %d\r\n%s\r\n' % (key, len(value), value)) == b'STORED\r\n':
                    stored[key] = turn
            else:
                answer = ask(c, b'get %s\r\n' % key)
                gets += 1
                if key in stored:
                    assert answer != b'END\r\n', ('lost', key)
                if answer != b'END\r\n':
                    head, value, last, rest = answer.split(b'\r\n')
                    name, version, filling = value.split(b':')
                    version = int(version)
                    assert name == key and len(filling) == version % 200 and last == b'END', answer
                    assert stored.get(key, 0) <= version <= sent[key], (answer, stored, sent)
    except (EOFError, ConnectionError):
        ended += 1
    c.close()
assert connections > 8 and ended >= 8 and gets > 1000, (connections, ended, gets)
