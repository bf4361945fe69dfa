# Answers when its client sleeps.
import socket
import sys
import time

listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))


def sleeps(process):
    return open(f'/proc/{process}/stat').read().rpartition(')')[2].split()[0] == 'S'


while True:
    c, _ = listener.accept()
    while data := c.recv(16):
        while not sleeps(int(data)):
            time.sleep(0.0005)
        c.sendall(data)
