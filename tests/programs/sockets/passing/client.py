# The client, which knows nothing of the handover.
import socket
import sys

from common import ask_until_changed, content, receive

how, port, unread = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
c = socket.create_connection(('127.0.0.1', port))
ask_until_changed(c, True)
c.sendall(b'%6d' % unread + content[:unread])
assert receive(c, 13) == b'the other one'
c.sendall(content)
assert receive(c, len(content)) == content[::-1]
c.close()
