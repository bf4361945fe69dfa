# A child shuts down receiving, which keeps the connection on TCP in that child, and leaves it to a child of its own. As long as
# that one has the connection, it does not change over.
import os
import socket
import time

for _ in range(3):
    listener = socket.create_server(('127.0.0.1', 0))
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    a.settimeout(30)
    order, orders = os.pipe()
    child = os.fork()
    if child == 0:
        b.shutdown(socket.SHUT_RD)
        if os.fork() == 0:
            a.close()
            os.close(orders)
            os.read(order, 1)
            b.send(b'grandchild')
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    # If it can change over, it does so within this second.
    end = time.monotonic() + 1
    while time.monotonic() < end:
        b.send(b'x')
        assert a.recv(1) == b'x'
        time.sleep(0.001)
    os.close(orders)
    assert a.recv(100) == b'grandchild'
    a.close()
    b.close()
