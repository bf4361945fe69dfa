# Measures one connection among many idle ones, all of which have changed over. Fails if the idle ones cost CPU time, or more than a
# few descriptors.
import os
import re
import resource
import select
import socket
import sys
import time

role, port, count, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
if role == 'serve':
    s = socket.create_server(('127.0.0.1', port), backlog=4096)
    with open(f'{folder}/idle.pid', 'w') as f:
        f.write(str(os.getpid()))
    poll = select.epoll()
    poll.register(s, select.EPOLLIN)
    connections = {}
    while True:
        for fd, _ in poll.poll():
            if fd == s.fileno():
                c, _ = s.accept()
                c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections[c.fileno()] = c
                poll.register(c, select.EPOLLIN)
            elif data := connections[fd].recv(64):
                connections[fd].sendall(data)
            else:
                poll.unregister(fd)
                connections.pop(fd).close()
server = int(open(f'{folder}/idle.pid').read())


def used():
    words = open(f'/proc/{server}/stat').read().rpartition(')')[2].split()
    times = os.times()
    return times.user + times.system + (int(words[11]) + int(words[12])) / os.sysconf('SC_CLK_TCK')


def opened():
    # But for the one by which they are listed.
    return {int(fd) for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')}


before = opened()
connections = [socket.create_connection(('127.0.0.1', port)) for _ in range(count)]
for c in connections:
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def turn(c):
    c.sendall(b'x' * 64)
    got = 0
    while got < 64:
        got += len(c.recv(64 - got))


def changed():
    own = f'"pid":{os.getpid()},'
    lines = (line for line in open(os.environ['GINNEL_SOCKETS_REPORT']) if own in line)
    return len({re.search('"connection":([0-9]+)', line)[1] for line in lines
                if '"sent_after_us"' in line and '"received_after_us"' in line})


while True:
    for c in connections:
        turn(c)
    if changed() >= count:
        break
time.sleep(0.5)
cpu = used()
time.sleep(2)
idle = (used() - cpu) / 2 * 100
hidden = opened() - before - {c.fileno() for c in connections}
# The clock of CPU time has steps, and floating-point numbers make 1.0000000000000002 of one per cent.
assert round(idle, 3) <= 1, f'{idle} % CPU while all are idle'
# Two connections to the daemon, the segment, two eventfds, two epoll instances, a pidfd, and /proc/loadavg.
assert len(hidden) <= 9, f'descriptors that are not the program\'s: {hidden}'
busy = connections[count // 2]
for _ in range(1000):
    turn(busy)
end, turns = time.monotonic() + 2, 0
while time.monotonic() < end:
    for _ in range(100):
        turn(busy)
    turns += 100
print('turns', turns / 2, 'idle', idle, '% hidden', len(hidden))
