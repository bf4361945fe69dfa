//! One client: its bytes, and where they come from and go to.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ginnel::{Error, StreamChannel};
use ginnel_shmem::SharedMemory;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::engine::Engine;
use crate::talk::{State, Talk};

/// Bytes that one call reads of a client that keeps none.
pub(crate) const READ: usize = 64 << 10;
/// The least that is read otherwise.
const LEAST_READ: usize = 4 << 10;
/// Reads of one client until the others have their turn.
const ROUNDS: usize = 8;

/// How reading or writing went.
pub(crate) enum Moved {
    Bytes(usize),
    /// Nothing can be done now.
    Later,
    /// The peer has gone, or sends no more.
    Gone,
}

/// Where bytes come from and go to.
pub(crate) trait Transport {
    /// Whether it is said again and again that there are bytes; else once, after [`Moved::Later`].
    fn says_again(&self) -> bool;
    fn read(&mut self, into: &mut [u8]) -> Moved;
    fn write(&mut self, from: &[u8]) -> Moved;
}

/// A socket, of TCP or Unix.
pub(crate) struct Socket(pub OwnedFd);

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn moved(result: Result<usize, Errno>) -> Moved {
    match result {
        Ok(0) => Moved::Gone,
        Ok(count) => Moved::Bytes(count),
        Err(Errno::AGAIN | Errno::INTR) => Moved::Later,
        Err(_) => Moved::Gone,
    }
}

impl Transport for Socket {
    fn says_again(&self) -> bool {
        true
    }

    fn read(&mut self, into: &mut [u8]) -> Moved {
        moved(recv(&self.0, into, RecvFlags::DONTWAIT).map(|(count, _)| count))
    }

    fn write(&mut self, from: &[u8]) -> Moved {
        moved(send(&self.0, from, SendFlags::DONTWAIT | SendFlags::NOSIGNAL))
    }
}

impl Transport for StreamChannel {
    fn says_again(&self) -> bool {
        false
    }

    fn read(&mut self, into: &mut [u8]) -> Moved {
        match self.receiver().read(into) {
            Ok(0) => Moved::Gone,
            Ok(count) => Moved::Bytes(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Moved::Later,
            Err(_) => Moved::Gone,
        }
    }

    fn write(&mut self, from: &[u8]) -> Moved {
        match self.sender().write(from) {
            Ok(count) => Moved::Bytes(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Moved::Later,
            Err(_) => Moved::Gone,
        }
    }
}

/// Either of them.
pub(crate) enum Either {
    Socket(Socket),
    Channel(Box<StreamChannel>),
}

impl Either {
    /// A channel whose halves report these keys.
    pub fn channel(
        mut channel: StreamChannel,
        set: &ginnel::ReadySet,
        keys: [u64; 2],
    ) -> Result<Self, Error> {
        channel.receiver().register(set, keys[0])?;
        channel.sender().register(set, keys[1])?;
        Ok(Self::Channel(Box::new(channel)))
    }
}

impl Transport for Either {
    fn says_again(&self) -> bool {
        matches!(self, Self::Socket(_))
    }

    fn read(&mut self, into: &mut [u8]) -> Moved {
        match self {
            Self::Socket(socket) => socket.read(into),
            Self::Channel(channel) => Transport::read(&mut **channel, into),
        }
    }

    fn write(&mut self, from: &[u8]) -> Moved {
        match self {
            Self::Socket(socket) => socket.write(from),
            Self::Channel(channel) => Transport::write(&mut **channel, from),
        }
    }
}

/// Buffers that all clients use in turn: a client that keeps nothing has none of its own.
pub(crate) struct Scratch {
    pub input: Box<[u8]>,
    pub output: Vec<u8>,
}

impl Scratch {
    pub fn new() -> Self {
        Self { input: vec![0; READ].into_boxed_slice(), output: Vec::new() }
    }
}

/// What a client waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// For its next request.
    Read,
    /// Until it takes its answers.
    Write,
    /// For its next turn.
    Again,
    /// For nothing any more.
    Close,
}

/// A client.
pub(crate) struct Connection<T> {
    pub transport: T,
    talk: Talk,
    /// Bytes of a request that is not whole, or of requests that wait for answers to be sent.
    input: Vec<u8>,
    /// Answers that it has not taken, from `sent` on.
    output: Vec<u8>,
    sent: usize,
    state: State,
}

impl<T: Transport> Connection<T> {
    pub fn new(transport: T) -> Self {
        let (input, output) = (Vec::new(), Vec::new());
        Self { transport, talk: Talk::default(), input, output, sent: 0, state: State::Hungry }
    }

    /// Does what can be done now.
    pub fn step<M: SharedMemory>(&mut self, engine: &mut Engine<M>, scratch: &mut Scratch) -> Next {
        for _ in 0..ROUNDS {
            if let Some(next) = self.flush(engine) {
                return next;
            }
            match self.state {
                State::Closed => return Next::Close,
                State::Full => {
                    let input = std::mem::take(&mut self.input);
                    let done = self.work(engine, &input, &mut scratch.output);
                    self.keep(input, done);
                    continue;
                }
                State::Hungry => {}
            }
            let is_all = if self.input.is_empty() {
                let count = match self.transport.read(&mut scratch.input) {
                    Moved::Bytes(count) => count,
                    Moved::Later => return Next::Read,
                    Moved::Gone => return Next::Close,
                };
                engine.numbers.bytes_read += count as u64;
                let done = self.work(engine, &scratch.input[..count], &mut scratch.output);
                self.input.extend_from_slice(&scratch.input[done..count]);
                count < scratch.input.len()
            } else {
                let len = self.input.len();
                let more =
                    self.talk.wanted().saturating_sub(len).clamp(LEAST_READ, READ.max(more_at_once(len)));
                let wanted = self.talk.wanted().max(len + more);
                self.input.reserve_exact(wanted - len);
                self.input.resize(len + more, 0);
                let read = self.transport.read(&mut self.input[len..]);
                let count = if let Moved::Bytes(count) = read { count } else { 0 };
                self.input.truncate(len + count);
                match read {
                    Moved::Bytes(_) => {}
                    Moved::Later => return Next::Read,
                    Moved::Gone => return Next::Close,
                }
                engine.numbers.bytes_read += count as u64;
                if self.input.len() >= self.talk.wanted() {
                    let input = std::mem::take(&mut self.input);
                    let done = self.work(engine, &input, &mut scratch.output);
                    self.keep(input, done);
                }
                count < more
            };
            // A socket says again that it is readable, so there is no need to ask.
            if is_all && self.transport.says_again() && self.state == State::Hungry && self.output.is_empty()
            {
                return Next::Read;
            }
        }
        Next::Again
    }

    /// Keeps what is not done with. A client that is done with all keeps no buffer.
    fn keep(&mut self, mut input: Vec<u8>, done: usize) {
        if done < input.len() {
            input.drain(..done);
            self.input = input;
        }
    }

    /// Answers requests in some bytes, and sends the answers as far as the client takes them. How many bytes are done with. As a run has its end, so has
    /// a turn: the client may take all answers at once, and others wait.
    fn work<M: SharedMemory>(&mut self, engine: &mut Engine<M>, bytes: &[u8], out: &mut Vec<u8>) -> usize {
        out.clear();
        let (done, state) = self.talk.run(engine, bytes, out);
        self.state = state;
        if out.is_empty() {
            return done;
        }
        let sent = match self.transport.write(out) {
            Moved::Bytes(count) => count,
            Moved::Later => 0,
            Moved::Gone => {
                self.state = State::Closed;
                return bytes.len();
            }
        };
        engine.numbers.bytes_written += sent as u64;
        self.output.extend_from_slice(&out[sent..]);
        done
    }

    /// Sends what is left. What to wait for, if it is not all gone.
    fn flush<M: SharedMemory>(&mut self, engine: &mut Engine<M>) -> Option<Next> {
        while self.sent < self.output.len() {
            match self.transport.write(&self.output[self.sent..]) {
                Moved::Bytes(count) => {
                    engine.numbers.bytes_written += count as u64;
                    self.sent += count;
                }
                Moved::Later => return Some(Next::Write),
                Moved::Gone => return Some(Next::Close),
            }
        }
        if !self.output.is_empty() {
            (self.output, self.sent) = (Vec::new(), 0);
        }
        None
    }
}

/// How much of a large value is read at once.
fn more_at_once(len: usize) -> usize {
    len.min(256 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::engine;

    /// A client that takes all answers at once.
    struct Greedy {
        requests: Vec<u8>,
        taken: usize,
    }

    impl Transport for Greedy {
        fn says_again(&self) -> bool {
            true
        }

        fn read(&mut self, into: &mut [u8]) -> Moved {
            let count = self.requests.len().min(into.len());
            into[..count].copy_from_slice(&self.requests[..count]);
            self.requests.drain(..count);
            if count > 0 { Moved::Bytes(count) } else { Moved::Later }
        }

        fn write(&mut self, from: &[u8]) -> Moved {
            self.taken += from.len();
            Moved::Bytes(from.len())
        }
    }

    /// Turns of a client until it has nothing more to ask for, and the most bytes that it took in one of them.
    fn turns(prepare: &[u8], request: &[u8], count: usize) -> (usize, usize, Vec<u64>) {
        let (mut engine, mut scratch) = (engine(), Scratch::new());
        let mut once = Connection::new(Greedy { requests: prepare.to_vec(), taken: 0 });
        while once.step(&mut engine, &mut scratch) == Next::Again {}
        let mut client = Connection::new(Greedy { requests: request.repeat(count), taken: 0 });
        let (mut turns, mut most, mut sets) = (0, 0, Vec::new());
        loop {
            let (taken, set) = (client.transport.taken, engine.numbers.cmd_set);
            let next = client.step(&mut engine, &mut scratch);
            turns += 1;
            most = most.max(client.transport.taken - taken);
            sets.push(engine.numbers.cmd_set - set);
            match next {
                Next::Again => {}
                Next::Read if client.transport.requests.is_empty() => return (turns, most, sets),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_client_s_turn_ends() {
        let large = [b"set k 0 0 1000000\r\n".to_vec(), vec![b'v'; 1_000_000], b"\r\n".to_vec()].concat();
        // Each of these has much more to do than its bytes tell.
        let (_, most, _) = turns(&large, b"get k\r\n", 200);
        assert!(most <= ROUNDS * 1_200_000, "{most}");
        let (count, _, sets) = turns(&large, b"append k 0 0 0 noreply\r\n\r\n", 200);
        assert!(count > 20 && sets.iter().all(|sets| *sets <= ROUNDS as u64), "{count} {sets:?}");
        let (count, ..) = turns(b"", b"stats\r\n", 200);
        assert!(count > 2, "{count}");
    }
}
