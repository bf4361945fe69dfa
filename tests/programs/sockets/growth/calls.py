# Streams of threads that wait in their calls, until the rings have the largest size.
import socket
import threading
import time

from pairs import pair
from streams import Stream, largest

idle = pair()
a, b = pair()
streams = Stream(1), Stream(2)
grown = threading.Event()


def sender(c, stream):
    while not grown.is_set() or stream.rest:
        stream.send(c)
    c.shutdown(socket.SHUT_WR)


def receiver(c, stream):
    while stream.receive(c):
        pass


threads = [threading.Thread(target=work, args=arguments) for work, arguments in
           ((sender, (a, streams[0])), (receiver, (b, streams[0])),
            (sender, (b, streams[1])), (receiver, (a, streams[1])))]
for thread in threads:
    thread.start()
while largest() < 2:
    time.sleep(0.01)
grown.set()
for thread in threads:
    thread.join()
for stream in streams:
    stream.check()
