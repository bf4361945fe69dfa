# A thread sleeps for bytes since before the connection changed over, and another one sleeps for the end since afterwards. Whatever
# wakes the second one must not keep the first one asleep.
import select
import socket
import sys
import threading

from sleepers import change_over, settle

way = sys.argv[1]

for _ in range(5):
    listener = socket.create_server(('127.0.0.1', 0))
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    told = []

    def for_bytes():
        if way == 'select':
            told.append(bool(select.select([b], [], [], 60)[0]))
        elif way == 'poll':
            ready = select.poll()
            ready.register(b, select.POLLIN)
            told.append(bool(ready.poll(60_000)))
        else:
            ready = select.epoll()
            ready.register(b, select.EPOLLIN | (select.EPOLLET if way == 'edges' else 0))
            told.append(bool(ready.poll(60)))

    def for_the_end():
        ends = select.poll()
        ends.register(b, select.POLLRDHUP)
        told.append(ends.poll(60_000)[0][1] == select.POLLRDHUP)

    threads = [threading.Thread(target=call, daemon=True) for call in [for_bytes, for_the_end]]
    threads[0].start()
    settle(threads[0])
    if way == 'select':
        threads[1].start()
    change_over(a, b)
    if way != 'select':
        threads[1].start()
    settle(threads[1])
    assert not told, told
    a.send(b'y')
    threads[0].join(30)
    assert told == [True], told
    a.shutdown(socket.SHUT_WR)
    threads[1].join(30)
    assert told == [True, True], told
    a.close()
    b.close()
