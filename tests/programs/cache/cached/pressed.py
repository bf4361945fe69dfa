# Gets of items of a cache that is short of memory: hits are reported to it, in both protocols, and the program gets the same answers
# as otherwise.
import socket
import struct
import sys
import time

port = int(sys.argv[1])
value = b'v' * 4000


def receive(c, n):
    text = b''
    while len(text) < n:
        more = c.recv(n - len(text))
        assert more
        text += more
    return text


def dial():
    return socket.create_connection(('127.0.0.1', port))


def reader_hits():
    c = dial()
    c.sendall(b'stats\r\n')
    text = b''
    while not text.endswith(b'END\r\n'):
        text += c.recv(65536)
    return int(text.split(b'STAT ginnel_reader_hits ')[1].split()[0])


c = dial()
for i in range(9000):
    c.sendall(b'set key%05d 0 0 4000\r\n%s\r\n' % (i, value))
    assert receive(c, 8) == b'STORED\r\n'


def text(c, key):
    c.sendall(b'get %s\r\n' % key)
    head = b'VALUE %s 0 4000\r\n' % key
    expected = head + value + b'\r\nEND\r\n'
    assert receive(c, len(expected)) == expected


def binary(c, key):
    c.sendall(struct.pack('>BBHBBHIIQ', 0x80, 0, len(key), 0, 0, 0, len(key), 9, 0) + key)
    head = receive(c, 24)
    assert head[:2] == b'\x81\x00' and head[12:16] == struct.pack('>I', 9), head
    assert receive(c, 4004)[4:] == value


for get in (text, binary):
    before = reader_hits()
    end = time.monotonic() + 60
    while reader_hits() < before + 100:
        assert time.monotonic() < end, 'the cache is not told'
        # On a busy machine, not each connection finds the memory.
        c = dial()
        for turn in range(500):
            get(c, b'key%05d' % (8999 - turn % 100))
        c.close()
print('good')
