"""Two processes that send each other messages, and write, read and count in each other's memory.

pingpong.py DEVICE PORT ROUNDS          waits for the other process
pingpong.py DEVICE PORT ROUNDS HOST     is the other process
"""

import json
import socket
import sys

from pyverbs.addr import AHAttr
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context, get_device_list
from pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_ATOMIC,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_MTU_1024,
    IBV_QPT_RC,
    IBV_SEND_SIGNALED,
    IBV_WC_SUCCESS,
    IBV_WR_ATOMIC_FETCH_AND_ADD,
    IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE,
    IBV_WR_SEND,
)
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import RecvWR, SendWR, SGE

SIZE = 10000
RECEIVED, SENT = 1, 2
ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC


def pattern(seed):
    return bytes((seed * 7 + i * 13 + i // 256) % 256 for i in range(SIZE))


class End:
    def __init__(self, device, connection):
        self.reader, self.writer = connection.makefile("r"), connection.makefile("w")
        self.done = []
        names = [found.name.decode() for found in get_device_list()]
        assert device in names, names
        self.context = Context(name=device)
        assert self.context.query_device().max_qp > 0
        self.pd = PD(self.context)
        self.channel = CompChannel(self.context)
        self.cq = CQ(self.context, 16, channel=self.channel)
        self.sent = MR(self.pd, SIZE, ACCESS)
        self.received = MR(self.pd, SIZE, ACCESS)
        # The memory that the other end writes, reads and counts in.
        self.target = MR(self.pd, SIZE, ACCESS)
        cap = QPCap(max_send_wr=4, max_recv_wr=4)
        self.qp = QP(self.pd, QPInitAttr(qp_type=IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))
        self.other = self.swap(
            lid=self.context.query_port(1).lid,
            qpn=self.qp.qp_num,
            address=self.target.buf,
            rkey=self.target.rkey,
        )
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.path_mtu = IBV_MTU_1024
        attr.dest_qp_num = self.other["qpn"]
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        attr.ah_attr = AHAttr(port_num=1, is_global=0, dlid=self.other["lid"])
        self.qp.to_rts(attr)

    def swap(self, **mine):
        """Exchanges a value with the other end over TCP: sends its own, and returns the other one."""
        print(json.dumps(mine), file=self.writer, flush=True)
        return json.loads(self.reader.readline())

    def receive(self):
        self.qp.post_recv(RecvWR(sg=[SGE(self.received.buf, SIZE, self.received.lkey)], num_sge=1, wr_id=RECEIVED))

    def request(self, opcode, memory, length=SIZE):
        element = SGE(memory.buf, length, memory.lkey)
        return SendWR(wr_id=SENT, opcode=opcode, num_sge=1, sg=[element], send_flags=IBV_SEND_SIGNALED)

    def access(self, opcode, memory, length=SIZE, add=None):
        wr = self.request(opcode, memory, length)
        if add is None:
            wr.set_wr_rdma(self.other["rkey"], self.other["address"])
        else:
            wr.set_wr_atomic(self.other["rkey"], self.other["address"], add)
        self.qp.post_send(wr)
        self.wait(SENT)

    def poll(self):
        count, completions = self.cq.poll(1)
        for completion in completions if count else []:
            assert completion.status == IBV_WC_SUCCESS, completion
            self.done.append(completion.wr_id)

    def wait(self, wanted, sleeps=False):
        """Waits until a request has completed."""
        while wanted not in self.done:
            if sleeps:
                self.cq.req_notify()
            self.poll()
            if sleeps and wanted not in self.done:
                self.channel.get_cq_event(self.cq)
                self.cq.ack_events(1)
        self.done.remove(wanted)

    def check(self, memory, expected):
        assert memory.read(SIZE, 0) == expected


def run(device, connection, rounds, begins):
    end = End(device, connection)
    end.receive()
    end.swap()
    # Messages go there and back. In half of the rounds the program sleeps until one arrives.
    for n in range(rounds):
        for sends in (begins, not begins):
            if sends:
                end.sent.write(pattern(2 * n + begins), SIZE)
                end.qp.post_send(end.request(IBV_WR_SEND, end.sent))
                end.wait(SENT, sleeps=n % 2 == 1)
            else:
                end.wait(RECEIVED, sleeps=n % 2 == 1)
        end.check(end.received, pattern(2 * n + (not begins)))
        end.receive()
    end.swap()
    # Each end writes to the other's memory, and reads it back.
    end.sent.write(pattern(5000 + begins), SIZE)
    end.access(IBV_WR_RDMA_WRITE, end.sent)
    end.swap()
    end.check(end.target, pattern(5000 + (not begins)))
    end.swap()
    end.received.write(bytes(SIZE), SIZE)
    end.access(IBV_WR_RDMA_READ, end.received)
    end.check(end.received, pattern(5000 + begins))
    end.swap()
    # Each end counts in the other's memory.
    end.target.write((1000).to_bytes(8, "little"), 8)
    end.swap()
    for n in range(10):
        end.access(IBV_WR_ATOMIC_FETCH_AND_ADD, end.received, 8, add=3)
        assert int.from_bytes(end.received.read(8, 0), "little") == 1000 + 3 * n
    end.swap()
    assert int.from_bytes(end.target.read(8, 0), "little") == 1030
    end.swap()
    print(f"{device}: {rounds} rounds, all data are right")


device, port, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
begins = len(sys.argv) > 4
if begins:
    connection = socket.create_connection((sys.argv[4], port))
else:
    connection = socket.create_server(("", port)).accept()[0]
with connection:
    run(device, connection, rounds, begins)
