//! Connections under `ginnel run` that go back to TCP because their receiver does something else for a while, and then
//! change over again.

use crate::epoll::PAIRS;
use crate::growth::STREAMS;
use programs::stage::{PYTHON, Stage, changed};

/// Returns what the report says about this process's connections.
const RETURNS: &str = r#"
def report():
    ends = {}
    for line in open(os.environ['GINNEL_SOCKETS_REPORT']):
        if not line.endswith('\n'):
            break
        record = json.loads(line)
        ends[record.get('connection')] = record
    return ends.values()
def returns():
    return sum(end.get('returns', 0) for end in report())
def returned():
    return sum(end.get('returned', 0) for end in report())
"#;

/// Runs a program, and returns how often its connections have gone back to TCP.
fn run(program: &str, ends: usize) -> u64 {
    let stage = Stage::new("eager");
    stage.client(&[PYTHON, "-c", &format!("{PAIRS}{STREAMS}{RETURNS}{program}")]);
    let connections = stage.end();
    let connections = changed(&connections, "python3");
    assert_eq!(connections.len(), ends);
    connections.iter().map(|connection| connection.returns).sum()
}

#[test]
fn a_program_may_send_much_before_it_receives() {
    kit::require_programs!(&[PYTHON]);
    // TCP's buffers take this much data, and the peer receives nothing before all of it is sent.
    let returns = run(
        r#"
a, b = pair()
for turn in range(3):
    for one, other in ((a, b), (b, a)):
        data = content[turn:turn + 700000]
        one.sendall(data)
        one.sendall(b'and more')
        # A call with room for more data returns the data that there is.
        rest = data + b'and more'
        while rest:
            part = other.recv(1 << 20)
            assert part and rest.startswith(part)
            rest = rest[len(part):]
    # Until they have changed over again.
    while returned():
        for one, other in ((a, b), (b, a)):
            one.sendall(b'.')
            assert receive(other, 1) == b'.'
a.shutdown(socket.SHUT_WR)
assert b.recv(1) == b''
b.sendall(b'the end')
b.close()
assert receive(a, 7) == b'the end' and a.recv(1) == b''
"#,
        2,
    );
    // Each change is counted at both ends.
    assert!(returns >= 2, "{returns}");
}

#[test]
fn connections_that_have_gone_back_end_as_over_tcp() {
    kit::require_programs!(&[PYTHON]);
    run(
        r#"
data = content[:700000]
# Shut down, closed, and closed with unread bytes, before the receiver has seen anything.
for end in ('shutdown', 'close', 'reset'):
    a, b = pair()
    a.sendall(data)
    if end == 'reset':
        b.sendall(b'unread')
        while not select.select([a], [], [], 0)[0]:
            pass
    a.shutdown(socket.SHUT_WR) if end == 'shutdown' else a.close()
    if end == 'reset':
        try:
            while b.recv(100000):
                pass
            assert False, 'an end in order'
        except ConnectionResetError:
            pass
    else:
        assert receive(b, len(data)) == data
        assert b.recv(1) == b''
    b.close()
    a.close()
"#,
        6,
    );
}

#[test]
fn connections_that_go_back_and_change_over_again_lose_nothing() {
    kit::require_programs!(&[PYTHON]);
    // A thousand times in a soak test. Each time with new connections, because a connection that has often gone back
    // rests for a long time.
    let rounds = if std::env::var_os("GINNEL_SOAK").is_some() { 25 } else { 1 };
    for seed in 0..rounds {
        for selector in ["EpollSelector", "PollSelector"] {
            let program = STUTTER.replace("SELECTOR", selector).replace("SEED", &seed.to_string());
            let returns = run(&program.replace("RETURNS", "40"), 24);
            assert!(returns >= 40, "{selector} {seed}: {returns}");
        }
    }
}

/// Streams whose receivers stop now and then, until connections have gone back this often.
const STUTTER: &str = r#"
selector = selectors.SELECTOR()
chance = random.Random(SEED)
streams, over, stopped = [], 0, []
for n in range(12):
    ends = pair()
    pair_streams = Stream(2 * n), Stream(2 * n + 1)
    for i, c in enumerate(ends):
        c.setblocking(False)
        # For some, TCP takes less than a ring does, so that the repeated send is only partial.
        c.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, (65536, 32768, 16384)[n % 3])
        out, into = pair_streams[i], pair_streams[1 - i]
        selector.register(c, selectors.EVENT_READ | selectors.EVENT_WRITE, (out, into))
        streams.append(out)
done, turns = False, 0

while over < len(streams):
    turns += 1
    if not done and turns % 500 == 0:
        done = returns() >= RETURNS
    now = time.monotonic()
    for until, c, data in stopped:
        if until <= now or done:
            key = selector.get_map().get(c)
            if key:
                selector.modify(c, key.events | selectors.EVENT_READ, data)
            else:
                selector.register(c, selectors.EVENT_READ, data)
    stopped = [(until, c, data) for until, c, data in stopped if until > now and not done]
    for key, events in selector.select(0.01):
        c, (out, into) = key.fileobj, key.data
        interest = key.events
        try:
            if events & selectors.EVENT_READ:
                if not into.receive(c):
                    over += 1
                    interest &= ~selectors.EVENT_READ
                elif not done and chance.random() < 0.01:
                    interest &= ~selectors.EVENT_READ
                    stopped.append((now + chance.choice((0.03, 1.2)), c, key.data))
        except BlockingIOError:
            pass
        try:
            if events & selectors.EVENT_WRITE:
                if done and not out.rest:
                    c.shutdown(socket.SHUT_WR)
                    interest &= ~selectors.EVENT_WRITE
                else:
                    out.send(c)
        except BlockingIOError:
            pass
        if interest != key.events:
            if interest:
                selector.modify(c, interest, key.data)
            else:
                selector.unregister(c)
for stream in streams:
    stream.check()
"#;

#[test]
fn a_nonblocking_call_takes_all_of_a_short_message() {
    kit::require_programs!(&[PYTHON]);
    // TCP's buffers take this much data, and programs rely on that.
    run(
        r#"
for lens in ([5000], [16000], [1000] * 16, [4096, 1, 10000]):
    a, b = pair()
    a.setblocking(False)
    for n in lens:
        assert a.send(content[:n]) == n, (lens, n)
    assert receive(b, sum(lens)) == b''.join(content[:n] for n in lens)
    b.sendall(b'back')
    a.setblocking(True)
    assert receive(a, 4) == b'back'
"#,
        8,
    );
}
