# Clients that come and go, and one that stays, until there is a file `stop`: each gets all of its bytes back.
import hashlib
import os
import socket
import sys
import threading

BLOCK = b''.join(hashlib.sha256(str(i).encode()).digest() for i in range(2048))


def send(c, until):
    sent = hashlib.sha256()
    turn = 0
    while not until(turn):
        part = BLOCK[turn % 977:]
        c.sendall(part)
        sent.update(part)
        turn += 1
    c.shutdown(socket.SHUT_WR)
    return sent.digest()


def stopped(turn):
    return os.path.exists('stop') and turn > 0


def converse(until):
    c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
    got, last = hashlib.sha256(), b''
    sent = []
    sender = threading.Thread(target=lambda: sent.append(send(c, until)))
    sender.start()
    while part := c.recv(100000):
        last += part
        got.update(last[:-32])
        last = last[-32:]
    sender.join()
    assert got.digest() == sent[0] == last, 'bytes were lost, or are wrong'
    c.close()


failed = []


def guarded(work):
    try:
        work()
    except BaseException as error:
        failed.append(error)


def short():
    number = 0
    while not stopped(1):
        number += 1
        converse(lambda turn: turn == (8 if number % 2 else 200))
        open('conversed', 'a').write('.')


threads = [threading.Thread(target=guarded, args=(lambda: converse(stopped),)),
           threading.Thread(target=guarded, args=(short,))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
