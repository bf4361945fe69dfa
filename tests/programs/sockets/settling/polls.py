# A thread waits, in the call that the argument names, for a connection that another thread changes over.
import select
import socket
import sys
import threading
import time

listener = socket.create_server(('127.0.0.1', 0))
a = socket.create_connection(listener.getsockname())
poll = select.poll()
poll.register(a, select.POLLIN)
waits = {
    'poll': poll.poll,
    'select': lambda: select.select([a], [], []),
    'select for a time': lambda: select.select([a], [], [], 1000),
}


def client():
    while True:
        waits[sys.argv[1]]()
        data = a.recv(100)
        if not data:
            break
        a.sendall(data)


thread = threading.Thread(target=client)
thread.start()
# Wait until the thread sleeps. Where that cannot be seen, it may sleep later, which is the easier case.
for _ in range(100):
    if open(f'/proc/self/task/{thread.native_id}/syscall').read().split()[0] in ('7', '23', '270', '271'):
        break
    time.sleep(0.01)
b, _ = listener.accept()
for turn in range(100):
    b.sendall(b'data')
    assert b.recv(100) == b'data'
b.shutdown(socket.SHUT_WR)
thread.join()
