# A proxy of memcached's protocol in front of a cache. It puts a prefix before keys, as mcrouter can. `closes`: it closes a connection with
# a command that it does not know, as twemproxy does. `errors`: it answers ERROR. `relays`: it passes such commands on.
import socket
import sys
import threading

port, cache, way, log = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]


def serve(client):
    server = socket.create_connection(('127.0.0.1', cache))
    requests, answers = client.makefile('rb'), server.makefile('rb')

    def ask(text):
        server.sendall(text)
        return answers.readline()

    for line in requests:
        words = line.split()
        if words[0] == b'get' and len(words) == 2:
            head = ask(b'get p:%s\r\n' % words[1])
            if head.startswith(b'VALUE'):
                value = answers.read(int(head.split()[3]) + 2)
                assert answers.readline() == b'END\r\n'
                client.sendall(head.replace(b'p:', b'', 1) + value + b'END\r\n')
            else:
                client.sendall(head)
        elif words[0] == b'set' and len(words) == 5:
            value = requests.read(int(words[4]) + 2)
            client.sendall(ask(b'set p:' + line[4:] + value))
        elif words[0] == b'delete' and len(words) == 2:
            client.sendall(ask(b'delete p:%s\r\n' % words[1]))
        else:
            with open(log, 'ab') as file:
                file.write(line)
            if way == 'closes':
                break
            if way == 'errors':
                client.sendall(b'ERROR\r\n')
                continue
            answer = ask(line)
            while answer.startswith(b'STAT'):
                client.sendall(answer)
                answer = answers.readline()
            client.sendall(answer)
    client.close()
    server.close()


listener = socket.create_server(('127.0.0.1', port), backlog=100)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
