# Several threads wait in one epoll instance.
import select
import threading

from pairs import pair, receive

ends = [pair() for _ in range(4)]
of = {b.fileno(): b for _, b in ends}
for flags in (select.EPOLLET, select.EPOLLONESHOT):
    e = select.epoll()
    for b in of.values():
        e.register(b, select.EPOLLIN | flags)
    got = {b: threading.Semaphore(0) for b in of}
    goes_on = {b: threading.Semaphore(0) for b in of}

    def work():
        while True:
            # One event at a time, so other threads must be woken for the rest.
            for fd, events in e.poll(-1, 1):
                data = receive(of[fd], 1)
                if flags == select.EPOLLONESHOT:
                    e.modify(fd, select.EPOLLIN | flags)
                if data == b'e':
                    return
                got[fd].release()
                goes_on[fd].acquire()
    threads = [threading.Thread(target=work) for _ in ends]
    for thread in threads:
        thread.start()
    for turn in range(200):
        # Each event is taken by a thread that returns only after all others have been taken.
        order = ends[turn % 4:] + ends[:turn % 4]
        for a, b in order:
            a.sendall(b'x')
            if turn % 2:
                got[b.fileno()].acquire()
        if not turn % 2:
            for a, b in order:
                got[b.fileno()].acquire()
        for a, b in order:
            goes_on[b.fileno()].release()
    for a, b in ends:
        a.sendall(b'e')
    for thread in threads:
        thread.join()
    e.close()
