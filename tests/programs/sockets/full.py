# Opens connections, with both ends in one process, until the segment has no room for another one, and then closes some of them.
import json
import os
import random
import socket

listener = socket.create_server(('127.0.0.1', 0))
content = random.Random(1).randbytes(1 << 16)


def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data


def talk(a, b, n=1000):
    '''Both ways, something else each time.'''
    for one, other in ((a, b), (b, a)):
        data = random.choices((content, content[::-1]))[0][random.randrange(1000):][:n]
        one.sendall(data)
        assert receive(other, n) == data, 'wrong bytes'


report = open(os.environ['GINNEL_SOCKETS_REPORT'])
known, half = {}, ''


def records():
    '''The last line of each end, by its addresses.'''
    global half
    *lines, half = (half + report.read()).split('\n')
    for record in map(json.loads, lines):
        if 'local' in record:
            known[record['local'], record['remote']] = record
    return known


def name(address):
    return '%s:%d' % address


def pair():
    '''A connection, and why it has stayed on TCP: None if it has changed over.'''
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    names = name(a.getsockname()), name(a.getpeername())
    while True:
        talk(a, b)
        ends = [records().get(n, {}) for n in (names, names[::-1])]
        if all('sent_after_us' in end and 'received_after_us' in end for end in ends):
            return a, b, None
        reasons = [end['reason'] for end in ends if end.get('event') == 'stays']
        # The end that asks for memory is refused; the other one waits for it for some seconds.
        if reasons:
            return a, b, reasons


pairs, stayed = [], []
while len(stayed) < 5:
    a, b, reasons = pair()
    (stayed if reasons else pairs).append((a, b))
    if reasons:
        assert reasons == ['the segment has no room for its rings'], reasons
assert len(pairs) >= 2


def check():
    for a, b in pairs + stayed:
        talk(a, b)
        talk(a, b, 50000 if (a, b) in stayed else 3000)


check()
# Room for others.
for a, b in pairs[::2]:
    a.close()
    assert b.recv(1) == b''
    b.close()
del pairs[::2]
while True:
    a, b, reasons = pair()
    if not reasons:
        break
    stayed.append((a, b))
pairs.append((a, b))
check()
