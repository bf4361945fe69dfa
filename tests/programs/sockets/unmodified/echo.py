# A server that sends back what it gets, and connections that all talk until each has changed over, and for some time afterwards.
# Its arguments are "serve" or "talk", the server's address and port, and how many connections there are.
import asyncio
import os
import random
import resource
import sys

what, host, port, connections = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
all_have_changed = asyncio.Event()


async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def talk(seed):
    r = random.Random(seed)
    reader, writer = await asyncio.open_connection(host, port)
    turn = after = 0
    while after < 10:
        turn += 1
        after += all_have_changed.is_set()
        data = r.randbytes(r.choice([1, 10, 1000, 10000, 300000]) if turn % 9 == 0 else r.randint(1, 3000))
        writer.write(data)
        await writer.drain()
        assert await reader.readexactly(len(data)) == data, (seed, turn)
    writer.write_eof()
    assert await reader.read() == b''
    writer.close()
    await writer.wait_closed()


async def look():
    words = ['"pid":%d,' % os.getpid(), '"sent_after_us"', '"received_after_us"']
    while True:
        lines = [line for line in open(os.environ['GINNEL_SOCKETS_REPORT']) if all(word in line for word in words)]
        if len({line.split('"connection":')[1].split(',')[0] for line in lines}) == connections:
            return all_have_changed.set()
        await asyncio.sleep(0.1)


async def main():
    if what == 'serve':
        server = await asyncio.start_server(serve, host, port, backlog=connections)
        await server.serve_forever()
    await asyncio.gather(look(), *[talk(seed) for seed in range(connections)])
asyncio.run(main())
