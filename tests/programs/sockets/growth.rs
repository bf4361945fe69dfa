//! Connections under `ginnel run` whose rings grow while bytes flow.

use crate::epoll::PAIRS;
use programs::stage::{PYTHON, Stage, changed};

/// Data bytes of the rings with which a connection begins, and of the largest rings.
const SMALLEST: u64 = 4 << 10;
const LARGEST: u64 = 256 << 10;

/// Streams between the ends of a pair. An end continues until the report says that all rings have the largest size.
pub const STREAMS: &str = r#"
import hashlib, json, random, selectors
def largest():
    ends = {}
    for line in open(os.environ['GINNEL_SOCKETS_REPORT']):
        # The last record may be incomplete.
        if not line.endswith('\n'):
            break
        record = json.loads(line)
        ends[record.get('connection')] = record.get('ring_bytes', 0)
    return sum(size == 256 << 10 for size in ends.values())
content = random.Random(1).randbytes(1 << 20)
class Stream:
    '''What one end sends, and the other receives.'''
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.sums = hashlib.blake2b(), hashlib.blake2b()
        self.bytes = [0, 0]
        self.rest = b''
    def send(self, c):
        '''One call.'''
        if not self.rest:
            at, n = self.random.randrange(1 << 20), self.random.choice((1, 100, 5000, 70000, 600000))
            self.rest = content[at:at + n]
        n = c.send(self.rest)
        self.sums[0].update(self.rest[:n])
        self.rest = self.rest[n:]
        self.bytes[0] += n
    def receive(self, c):
        '''One call. False at the end.'''
        data = c.recv(self.random.choice((1, 100, 5000, 70000, 600000)))
        self.sums[1].update(data)
        self.bytes[1] += len(data)
        return len(data) > 0
    def check(self):
        assert self.bytes[0] == self.bytes[1], self.bytes
        assert self.sums[0].digest() == self.sums[1].digest()
"#;

#[test]
fn rings_grow_while_both_ends_wait() {
    kit::require_programs!(&[PYTHON]);
    for waits in ["poll", "epoll"] {
        let program = r#"
a, b = pair()
b.setblocking(False)
# An echo that receives nothing as long as it has something to send.
def serve():
    waiter = select.WAITS()
    waiter.register(b, select.POLLIN)
    rest = b''
    while True:
        waiter.poll()
        try:
            if not rest:
                rest = b.recv(16384)
                if not rest:
                    return
            rest = rest[b.send(rest):]
        except BlockingIOError:
            pass
        waiter.modify(b, select.POLLOUT if rest else select.POLLIN)
server = threading.Thread(target=serve)
server.start()
# More data than the small rings and the server hold.
for turn in range(20):
    bytes_ = content[turn:turn + 300000]
    a.sendall(bytes_)
    assert receive(a, len(bytes_)) == bytes_
a.shutdown(socket.SHUT_WR)
server.join()
"#;
        let sizes = run(&program.replace("WAITS", waits));
        assert_eq!(sizes, [LARGEST; 2], "{waits}");
    }
}

fn run(program: &str) -> Vec<u64> {
    let stage = Stage::new("eager");
    stage.client(&[PYTHON, "-c", &format!("{PAIRS}{STREAMS}{program}")]);
    let connections = stage.end();
    let mut sizes: Vec<u64> =
        changed(&connections, "python3").iter().map(|connection| connection.ring_bytes).collect();
    sizes.sort_unstable();
    sizes
}

#[test]
fn rings_grow_under_threads_that_wait_in_their_calls() {
    kit::require_programs!(&[PYTHON]);
    let sizes = run(r#"
idle = pair()
a, b = pair()
streams = Stream(1), Stream(2)
grown = threading.Event()
def sender(c, stream):
    while not grown.is_set() or stream.rest:
        stream.send(c)
    c.shutdown(socket.SHUT_WR)
def receiver(c, stream):
    while stream.receive(c):
        pass
threads = [threading.Thread(target=work, args=arguments) for work, arguments in
           ((sender, (a, streams[0])), (receiver, (b, streams[0])),
            (sender, (b, streams[1])), (receiver, (a, streams[1])))]
for thread in threads:
    thread.start()
while largest() < 2:
    time.sleep(0.01)
grown.set()
for thread in threads:
    thread.join()
for stream in streams:
    stream.check()
"#);
    assert_eq!(sizes, [SMALLEST, SMALLEST, LARGEST, LARGEST]);
}

#[test]
fn rings_grow_under_one_thread_that_waits_for_many() {
    kit::require_programs!(&[PYTHON]);
    for selector in ["EpollSelector", "PollSelector"] {
        let program = r#"
selector = selectors.SELECTOR()
streams, over = [], 0
for n in range(4):
    ends = pair()
    pair_streams = Stream(2 * n), Stream(2 * n + 1)
    for i, c in enumerate(ends):
        c.setblocking(False)
        out, into = pair_streams[i], pair_streams[1 - i]
        selector.register(c, selectors.EVENT_READ | selectors.EVENT_WRITE, (out, into))
        streams.append(out)
grown, turns = False, 0
while over < len(streams):
    turns += 1
    if not grown and turns % 50 == 0:
        grown = largest() == len(streams)
    for key, events in selector.select():
        c, (out, into) = key.fileobj, key.data
        try:
            if events & selectors.EVENT_READ and not into.receive(c):
                over += 1
                events &= ~selectors.EVENT_READ
                interest = key.events & ~selectors.EVENT_READ
                if interest:
                    key = selector.modify(c, interest, key.data)
                else:
                    selector.unregister(c)
        except BlockingIOError:
            pass
        try:
            if events & selectors.EVENT_WRITE:
                if grown and not out.rest:
                    c.shutdown(socket.SHUT_WR)
                    interest = key.events & ~selectors.EVENT_WRITE
                    if interest:
                        selector.modify(c, interest, key.data)
                    else:
                        selector.unregister(c)
                else:
                    out.send(c)
        except BlockingIOError:
            pass
for stream in streams:
    stream.check()
"#;
        let sizes = run(&program.replace("SELECTOR", selector));
        assert_eq!(sizes, [LARGEST; 8], "{selector}");
    }
}
