# Asks for signals of connections that have changed over.
from pairs import pair, receive
from signals import ask_for_signals, ping, signals

for how in ('fcntl', 'ioctl'):
    a, b = pair()
    b.sendall(b'before')
    ask_for_signals(a, how)
    assert receive(a, 6) == b'before'
    for turn in range(100):
        ping(a, b)
    b.close()
    assert signals() and a.recv(1) == b''
