# First bytes of many protocols, in random pieces, to a server at the port of caches: its connection carries exactly these bytes, and
# the program gets exactly what the server sends. Only if the first call sends requests of memcached, the library asks the server what it
# is, once, over a connection of its own.
import random
import socket
import sys
import threading

port, rounds = int(sys.argv[1]), int(sys.argv[2])
seed = random.randrange(1 << 32)
print('seed', seed, file=sys.stderr)
chance = random.Random(seed)


def word(most=9):
    return bytes(chance.choice(b'abcdefghijklmnopqrstuvwxyz0123456789/.-_') for _ in range(chance.randint(1, most)))


def anything(most):
    return bytes(chance.randrange(256) for _ in range(chance.randint(0, most)))


def store(verb, extra=b''):
    value = anything(300)
    head = b'%s %s %d %d %d%s' % (verb, word(), chance.randrange(99), chance.randrange(99), len(value), extra)
    return head + b'\r\n', value + b'\r\n'


def request():
    """Returns the head and the value of a request of memcached."""
    return chance.choice([
        lambda: (b'get ' + b' '.join(word() for _ in range(chance.randint(1, 5))) + b'\r\n', b''),
        lambda: (b'gets ' + word() + b'\r\n', b''),
        lambda: store(chance.choice([b'set', b'add', b'replace', b'append', b'prepend'])),
        lambda: store(b'set', b' noreply'),
        lambda: store(b'cas', b' 7'),
        lambda: (b'incr %s 5\r\n' % word(), b''),
        lambda: (b'delete %s\r\n' % word(), b''),
        lambda: (b'touch %s 0\r\n' % word(), b''),
        lambda: (b'version\r\n', b''),
        lambda: (b'stats\r\n', b''),
        lambda: (b'mg %s v k\r\n' % word(), b''),
        lambda: (b'ms %s 2 T0\r\n' % word(), b'ab\r\n'),
        lambda: (b'\x80\x00\x00\x03' + bytes(7) + b'\x03' + bytes(12) + b'key', b''),
        lambda: (b'\x80\x0a' + bytes(22), b''),
    ])()


def other():
    """Returns the first bytes of another protocol."""
    return chance.choice([
        lambda: b'set the table\r\n',
        lambda: b'add ' + b' '.join(word() for _ in range(6)) + b'\r\n',
        lambda: b'delete all of it\r\n',
        lambda: b'replace a with b please\r\n',
        lambda: b'incr x by one\r\n',
        lambda: b'stats of ' + word() + b'\r\n',
        lambda: b'touch base\r\n',
        lambda: b'get /%s\r\nHost: %s\r\n\r\n' % (word(), word()),
        lambda: b'GET /%s HTTP/1.1\r\nHost: x\r\n\r\n' % word(),
        lambda: b'EHLO ' + word() + b'\r\n',
        lambda: b'*2\r\n$3\r\nget\r\n$1\r\na\r\n',
        lambda: b'\x16\x03\x01' + anything(200),
        lambda: b'\x80' + bytes([chance.randrange(0x25, 0xe0)]) + anything(60),
        lambda: b'\x00' + anything(60),
        lambda: b'set k 0 0 %d\r\n' % 5 + b'12345678\r\n',
        lambda: b'set k 0 0 3 yes\r\nabc\r\n',
        lambda: b'get' + b' k' * chance.randrange(3),
        lambda: request()[0][:-1],
        lambda: b'version ' + word() + b'\r\n',
        lambda: b'get \x00\r\n',
    ])()


def serve(c, seen):
    """Answers each byte with another one."""
    text = b''
    while True:
        try:
            more = c.recv(4096)
        except ConnectionResetError:
            break
        if not more:
            break
        text += more
        try:
            c.sendall(bytes(byte ^ 0x55 for byte in more))
        except OSError:
            break
    seen.append(text)
    c.close()


def accept(listener, seen, threads):
    while True:
        c, _ = listener.accept()
        if c.recv(1, socket.MSG_PEEK) == b'\xff':
            return
        threads.append(threading.Thread(target=serve, args=(c, seen)))
        threads[-1].start()


asked = 0
for number in range(rounds):
    is_memcached = chance.random() < 0.4
    if is_memcached:
        head, rest = request()
        first = head + rest[:chance.randint(0, len(rest))]
        later = rest[len(first) - len(head):] + anything(100)
    else:
        first, later = other(), anything(100)
    # The server is at an address of its own, because a server that was asked is not asked again.
    address = '127.%d.%d.%d' % (1 + number // 62500, number // 250 % 250, 1 + number % 250), port
    seen, threads = [], []
    listener = socket.create_server(address)
    accepts = threading.Thread(target=accept, args=(listener, seen, threads))
    accepts.start()
    c = socket.create_connection(address)
    local = c.getsockname()
    how = chance.randrange(3)
    if how == 0:
        c.sendall(first)
    elif how == 1:
        cut = chance.randint(0, len(first))
        assert c.sendmsg([first[:cut], first[cut:]]) == len(first)
    else:
        c.setblocking(False)
        assert c.send(first) == len(first)
        c.setblocking(True)
    all = first + later
    while later:
        n = chance.randint(1, len(later))
        c.sendall(later[:n])
        later = later[n:]
    got = b''
    while len(got) < len(all):
        got += c.recv(chance.choice([1, 7, 4096]))
    assert got == bytes(byte ^ 0x55 for byte in all), (first, got)
    c.shutdown(socket.SHUT_WR)
    assert c.recv(1) == b''
    c.close()
    # Ends the thread that accepts.
    last = socket.create_connection(address)
    last.sendall(b'\xff')
    accepts.join()
    for thread in threads:
        thread.join()
    question = b'stats ginnel %s:%d\r\n' % (local[0].encode(), local[1])
    questions = seen.count(question)
    assert sorted(seen) == sorted([all] + [question] * questions), (first, seen)
    assert questions <= is_memcached, (first, seen)
    asked += questions
    last.close()
    listener.close()
# A busy machine may delay an answer, but the question has been asked.
assert asked >= rounds // 5, asked
print('good')
