# A process forks while another of its threads makes calls with the connection. From then on parent and child go on where the other has
# stopped.
import os
import select
import threading

from pairs import pair, receive

a, b = pair()
# A connection that has gone back to TCP asks for rings again, so each call looks who has it.
a.setblocking(False)
sent = 0
try:
    while True:
        sent += a.send(b'x' * 20_000)
except BlockingIOError:
    pass
a.setblocking(True)
receive(b, sent)

over = False


def look():
    poll = select.poll()
    poll.register(a, select.POLLPRI)
    while not over:
        poll.poll(0)


thread = threading.Thread(target=look, daemon=True)
thread.start()
for _ in range(300):
    child = os.fork()
    if child == 0:
        b.close()
        assert receive(a, 1) == b'1'
        os._exit(0)
    b.sendall(b'1')
    assert os.waitpid(child, 0)[1] == 0
    b.sendall(b'2')
    assert receive(a, 1) == b'2'
over = True
thread.join()
