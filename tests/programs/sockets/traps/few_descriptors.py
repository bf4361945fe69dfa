# Uses all descriptors that it may have.
import errno
import resource
import threading
import time

from checks import works
from pairs import pair, receive


def limited(limit):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


# So low that the library's descriptors are among the program's, and lower than those that it has.
for limit in (200, 50, 200):
    limited(limit)
    a, b = pair()
    files = []
    try:
        while True:
            files.append(open('/dev/null'))
    except OSError as error:
        assert error.errno == errno.EMFILE, error
    works(a, b)
    # A thread needs a slot to sleep in, although no descriptor is left.
    found = []
    thread = threading.Thread(target=lambda: found.append(receive(b, 1)))
    thread.start()
    time.sleep(0.01)
    a.sendall(b'x')
    thread.join()
    assert found == [b'x']
    for file in files:
        file.close()
    works(a, b)
