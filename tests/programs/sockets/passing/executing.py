# Executes other programs while a thread uses a connection.
import os
import subprocess
import threading
import time

from common import receive
from joined import pair

a, b = pair()
# Descriptors that are inheritable, as C programs often leave them.
for end in (a, b):
    os.set_inheritable(end.fileno(), True)
    assert os.get_inheritable(end.fileno())
stop = threading.Event()


def serve():
    while not stop.is_set():
        for one, other in ((a, b), (b, a)):
            one.sendall(b'.')
            assert receive(other, 1) == b'.'


server_thread = threading.Thread(target=serve)
server_thread.start()
for turn in range(3):
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os.execv('/bin/true', ['true'])
    assert os.waitpid(child, 0)[1] == 0
    assert subprocess.run(['true'], close_fds=False).returncode == 0
stop.set()
server_thread.join()
for end in (a, b):
    os.set_inheritable(end.fileno(), False)
    assert not os.get_inheritable(end.fileno())
