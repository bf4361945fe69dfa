# Nonblocking calls that send short messages.
from pairs import pair, receive
from streams import content

for lens in ([5000], [16000], [1000] * 16, [4096, 1, 10000]):
    a, b = pair()
    a.setblocking(False)
    for n in lens:
        assert a.send(content[:n]) == n, (lens, n)
    assert receive(b, sum(lens)) == b''.join(content[:n] for n in lens)
    b.sendall(b'back')
    a.setblocking(True)
    assert receive(a, 4) == b'back'
