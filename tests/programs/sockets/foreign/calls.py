"""A server and a client of gRPC, with calls of all four kinds: `calls.py serve PORT` and `calls.py talk PORT SECONDS`.

The client checks each answer. Each round has new connections, of threads and of coroutines, with many calls at a time.
"""

import asyncio
import random
import struct
import sys
import threading
import time
import zlib
from concurrent import futures

import grpc

# Of a call, in seconds. None takes nearly as long, also on a busy machine.
WATCHDOG = 60
THREADS = 6
COROUTINES = 6
# The shape of a stream: its seed, and how many messages it has.
SHAPE = struct.Struct("!QI")
# What is known of a stream that was received: the number of messages, of bytes, and their checksum.
SUM = struct.Struct("!IQI")


def messages(seed, count):
    """The messages of a stream: most are short, some are longer than a ring."""
    choose = random.Random(seed)
    for _ in range(count):
        yield choose.randbytes(choose.choice([0, 1, 40, 1000, 5000, 70_000, 300_000]))


def summed(stream):
    count = length = checksum = 0
    for message in stream:
        count, length, checksum = count + 1, length + len(message), zlib.crc32(message, checksum)
    return SUM.pack(count, length, checksum)


class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        # Without serializers, requests and answers are bytes.
        return {
            "/test/turn": grpc.unary_unary_rpc_method_handler(lambda request, _: request[::-1]),
            "/test/list": grpc.unary_stream_rpc_method_handler(lambda request, _: messages(*SHAPE.unpack(request))),
            "/test/sum": grpc.stream_unary_rpc_method_handler(lambda stream, _: summed(stream)),
            "/test/turn_each": grpc.stream_stream_rpc_method_handler(lambda stream, _: (one[::-1] for one in stream)),
        }.get(details.method)


def serve(port):
    # A stream takes a thread for as long as it lasts.
    server = grpc.server(futures.ThreadPoolExecutor(2 * (THREADS + COROUTINES)), handlers=[Handler()])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def channel(package, port):
    """Each channel has a connection of its own."""
    return package.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


def same(got, expected, what):
    if got != expected:
        raise AssertionError(f"{what}: {got!r:.60} and not {expected!r:.60}")


def call_all(channel, seed):
    """Calls of all kinds, one after another."""
    turn, list_ = channel.unary_unary("/test/turn"), channel.unary_stream("/test/list")
    sum_, turn_each = channel.stream_unary("/test/sum"), channel.stream_stream("/test/turn_each")
    for message in messages(seed, 20):
        same(turn(message, timeout=WATCHDOG), message[::-1], "turn")
    shape = (seed, 20)
    same(list(list_(SHAPE.pack(*shape), timeout=WATCHDOG)), list(messages(*shape)), "list")
    same(sum_(messages(*shape), timeout=WATCHDOG), summed(messages(*shape)), "sum")
    turned = [message[::-1] for message in messages(*shape)]
    same(list(turn_each(messages(*shape), timeout=WATCHDOG)), turned, "turn_each")
    # A conversation: the next request is sent when the last one has its answer.
    answered = threading.Semaphore(1)

    def requests():
        for message in messages(*shape):
            answered.acquire()
            yield message

    for answer, expected in zip(turn_each(requests(), timeout=WATCHDOG), turned, strict=True):
        same(answer, expected, "a conversation")
        answered.release()


async def await_all(channel, seed):
    """The same with coroutines."""
    turn, list_ = channel.unary_unary("/test/turn"), channel.unary_stream("/test/list")
    sum_, turn_each = channel.stream_unary("/test/sum"), channel.stream_stream("/test/turn_each")
    for message in messages(seed, 20):
        same(await turn(message, timeout=WATCHDOG), message[::-1], "turn")
    shape = (seed, 20)
    same([one async for one in list_(SHAPE.pack(*shape), timeout=WATCHDOG)], list(messages(*shape)), "list")
    same(await sum_(messages(*shape), timeout=WATCHDOG), summed(messages(*shape)), "sum")
    turned = [message[::-1] for message in messages(*shape)]
    same([one async for one in turn_each(messages(*shape), timeout=WATCHDOG)], turned, "turn_each")
    call = turn_each(timeout=WATCHDOG)
    for message in messages(*shape):
        await call.write(message)
        same(await call.read(), message[::-1], "a conversation")
    await call.done_writing()
    same(await call.read(), grpc.aio.EOF, "a conversation")


def threads(port, seed):
    # Two threads have one connection.
    channels = [channel(grpc, port) for _ in range(THREADS // 2)]
    with futures.ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda n: call_all(channels[n // 2], seed + n), range(THREADS)):
            pass
    for one in channels:
        one.close()


async def coroutines(port, seed):
    channels = [channel(grpc.aio, port) for _ in range(COROUTINES // 2)]
    await asyncio.gather(*(await_all(channels[n // 2], seed + n) for n in range(COROUTINES)))
    for one in channels:
        await one.close()


def talk(port, seconds):
    rounds, end = 0, time.monotonic() + seconds
    while rounds == 0 or time.monotonic() < end:
        threads(port, 1000 * rounds)
        asyncio.run(coroutines(port, 1000 * rounds + 500))
        rounds += 1
    print(f"{rounds} rounds")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        talk(sys.argv[2], float(sys.argv[3]))
