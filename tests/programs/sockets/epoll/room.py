# A thread sleeps for edges of a connection that has room, and another thread then fills the connection: the first one is told when there
# is room again.
import select
import threading

from pairs import pair

a, b = pair()
a.setblocking(False)
b.setblocking(False)
epoll = select.epoll()
epoll.register(a, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
is_filled, tid = threading.Event(), []
told = threading.Event()


def sleep():
    tid.append(threading.get_native_id())
    while True:
        [(_, events)] = epoll.poll()
        if is_filled.is_set() and events & select.EPOLLOUT:
            return told.set()


def sleeps():
    state = open(f'/proc/self/task/{tid[0]}/stat').read().rsplit(')', 1)[1].split()[0]
    return state == 'S'


thread = threading.Thread(target=sleep)
thread.start()
for turn in range(20):
    while not (tid and sleeps()):
        pass
    sent = 0
    try:
        while True:
            sent += a.send(b'x' * 3000)
    except BlockingIOError:
        pass
    is_filled.set()
    while sent:
        try:
            sent -= len(b.recv(1 << 20))
        except BlockingIOError:
            # The sender may have to take part.
            select.select([b], [], [], 0.01)
    assert told.wait(100), turn
    thread.join()
    told.clear()
    is_filled.clear()
    if turn < 19:
        thread = threading.Thread(target=sleep)
        tid.clear()
        thread.start()
