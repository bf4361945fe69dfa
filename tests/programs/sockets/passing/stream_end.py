# A connection whose stream has ended goes to another socket, in a message.
import socket
import threading

from common import content, receive
from joined import pair

for unread in (0, 1000):
    a, b = pair()
    a.sendall(content[:unread])
    a.shutdown(socket.SHUT_WR)
    ours, theirs = socket.socketpair()
    # Its peer waits for an answer.
    answer = []
    reader = threading.Thread(target=lambda: answer.append(receive(a, 10)))
    reader.start()
    socket.send_fds(ours, [b'.'], [b.fileno()])
    c = socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0])
    b.close()
    assert receive(c, unread) == content[:unread] and c.recv(1) == b''
    c.sendall(b'the answer')
    reader.join()
    assert answer == [b'the answer']
    c.shutdown(socket.SHUT_WR)
    assert a.recv(1) == b''
