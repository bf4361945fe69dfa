# gRPC: a server, and a client that makes one call after another for some seconds.
import sys
import time
from concurrent import futures

import grpc

role, port = sys.argv[1:3]
address = f'127.0.0.1:{port}'


class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


if role == 'serve':
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((Echo(),))
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()
else:
    call = grpc.insecure_channel(address).unary_unary('/bench/echo')
    for _ in range(100):
        call(b'x' * 64)
    calls, begun = 0, time.monotonic()
    while time.monotonic() < begun + float(sys.argv[3]):
        call(b'x' * 64)
        calls += 1
    print('calls', calls / (time.monotonic() - begun))
