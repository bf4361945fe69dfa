# Streams between the ends of a pair.
import hashlib
import json
import os
import random


def largest():
    ends = {}
    for line in open(os.environ['GINNEL_SOCKETS_REPORT']):
        # The last record may be incomplete.
        if not line.endswith('\n'):
            break
        record = json.loads(line)
        ends[record.get('connection')] = record.get('ring_bytes', 0)
    return sum(size == 256 << 10 for size in ends.values())


content = random.Random(1).randbytes(1 << 20)


class Stream:
    '''What one end sends, and the other receives.'''

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.sums = hashlib.blake2b(), hashlib.blake2b()
        self.bytes = [0, 0]
        self.rest = b''

    def send(self, c):
        '''One call.'''
        if not self.rest:
            at, n = self.random.randrange(1 << 20), self.random.choice((1, 100, 5000, 70000, 600000))
            self.rest = content[at:at + n]
        n = c.send(self.rest)
        self.sums[0].update(self.rest[:n])
        self.rest = self.rest[n:]
        self.bytes[0] += n

    def receive(self, c):
        '''One call. False at the end.'''
        data = c.recv(self.random.choice((1, 100, 5000, 70000, 600000)))
        self.sums[1].update(data)
        self.bytes[1] += len(data)
        return len(data) > 0

    def check(self):
        assert self.bytes[0] == self.bytes[1], self.bytes
        assert self.sums[0].digest() == self.sums[1].digest()
