# A thread sleeps for bytes since before the connection changed over, and a child of a fork that came afterwards sleeps for them too. Both
# are woken.
import os
import select
import socket
import threading
import time

from sleepers import change_over, settle


def poll(s):
    ready = select.poll()
    ready.register(s, select.POLLIN)
    return bool(ready.poll(30_000))


for _ in range(20):
    listener = socket.create_server(('127.0.0.1', 0))
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    told = []
    thread = threading.Thread(target=lambda: told.append(poll(b)), daemon=True)
    thread.start()
    settle(thread)
    change_over(a, b)
    child = os.fork()
    if child == 0:
        os._exit(0 if poll(b) and b.recv(1, socket.MSG_PEEK) == b'y' else 1)
    end = time.monotonic() + 30
    while open(f'/proc/{child}/stat').read().rpartition(')')[2].split()[0] != 'S':
        assert time.monotonic() < end, 'the child does not sleep'
        time.sleep(0.001)
    assert not told, told
    a.send(b'y')
    assert os.waitpid(child, 0)[1] == 0, 'the child was not woken'
    thread.join(35)
    assert told == [True], told
    a.close()
    b.close()
