# One or both ends of a connection. An end sends its own name for each byte that it receives, and counts the names that it receives.
import os
import socket
import sys
import threading
import time

name, role, address, seconds = sys.argv[1], sys.argv[2], ('10.77.0.2', int(sys.argv[3])), float(sys.argv[4])
end = time.monotonic() + seconds


def serve(listener):
    c, _ = listener.accept()
    while True:
        line = c.recv(100)
        if not line:
            break
        assert line == name.encode(), (name, line)
        c.sendall(name.encode())


def connect():
    while True:
        try:
            return socket.create_connection(address, source_address=('10.77.0.1', 33000 + address[1]))
        except ConnectionRefusedError:
            assert time.monotonic() < end + 30
            time.sleep(0.01)


def call():
    c = connect()
    while time.monotonic() < end:
        for n in range(20):
            c.sendall(name.encode())
            line = c.recv(100)
            assert line == name.encode(), (name, line)
    c.close()


def fail(problem):
    sys.__excepthook__(problem.exc_type, problem.exc_value, problem.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


threading.excepthook = fail
threads = []
if role in ('server', 'both'):
    listener = socket.create_server(('', address[1]))
    threads.append(threading.Thread(target=serve, args=(listener,)))
if role in ('client', 'both'):
    threads.append(threading.Thread(target=call))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
