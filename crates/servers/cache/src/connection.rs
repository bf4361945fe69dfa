//! One client: its socket or channel, and the buffers for its requests and answers.

use crate::engine::Engine;
use crate::talk::{State, Talk};
use ginnel::{Error, StreamChannel};
use ginnel_shmem::SharedMemory;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The most bytes that one call reads from a client that has no unhandled bytes in a buffer.
pub(crate) const READ: usize = 64 << 10;
/// The smallest number of bytes that one call asks for if the client has unhandled bytes.
const LEAST_READ: usize = 4 << 10;
/// The number of reads from one client before the other clients have their turn.
const ROUNDS: usize = 8;

/// The result of a read or a write.
pub(crate) enum Moved {
    Bytes(usize),
    /// No byte can be moved now.
    Later,
    /// The peer has closed the connection or its sending side, or the connection has failed.
    Gone,
}

/// A non-blocking byte stream to a client.
pub(crate) trait Transport {
    /// Returns whether readiness is reported as long as there are bytes (level-triggered). Otherwise it is reported only
    /// once, and only after [`Moved::Later`].
    fn says_again(&self) -> bool;
    fn read(&mut self, into: &mut [u8]) -> Moved;
    fn write(&mut self, from: &[u8]) -> Moved;
}

/// A TCP or Unix socket.
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

/// The transport of a client: a socket or a channel.
pub(crate) enum Either {
    Socket(Socket),
    Channel(Box<StreamChannel>),
}

impl Either {
    /// Registers a channel in the set and returns its transport. The set reports the receiver with the first key and the
    /// sender with the second.
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

/// Buffers that all clients use in turn, so a client without unhandled bytes needs no buffer of its own.
pub(crate) struct Scratch {
    pub input: Box<[u8]>,
    pub output: Vec<u8>,
}

impl Scratch {
    pub fn new() -> Self {
        Self { input: vec![0; READ].into_boxed_slice(), output: Vec::new() }
    }
}

/// What a client needs before its next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// More bytes from the client.
    Read,
    /// Room for its answers in the socket or channel.
    Write,
    /// Another turn; it has more to do now.
    Again,
    /// Nothing: the connection is to be closed.
    Close,
}

/// A client and the bytes that are still in its buffers.
pub(crate) struct Connection<T> {
    pub transport: T,
    talk: Talk,
    /// Bytes of an incomplete request, or of requests that wait until earlier answers are sent.
    input: Vec<u8>,
    /// Answers. The part from `sent` on has not been sent yet.
    output: Vec<u8>,
    sent: usize,
    state: State,
}

impl<T: Transport> Connection<T> {
    pub fn new(transport: T) -> Self {
        let (input, output) = (Vec::new(), Vec::new());
        Self { transport, talk: Talk::default(), input, output, sent: 0, state: State::Hungry }
    }

    /// Reads requests, handles them and sends answers, as far as that is possible without blocking and within one turn.
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
            // The socket will be reported as readable again, so another read to find it empty is not needed.
            if is_all && self.transport.says_again() && self.state == State::Hungry && self.output.is_empty()
            {
                return Next::Read;
            }
        }
        Next::Again
    }

    /// Keeps the bytes after the first `done`. If none are left, the client keeps no buffer.
    fn keep(&mut self, mut input: Vec<u8>, done: usize) {
        if done < input.len() {
            input.drain(..done);
            self.input = input;
        }
    }

    /// Handles the requests in `bytes`, and sends as many bytes of the answers as the client accepts. Returns the number of
    /// bytes that are consumed.
    ///
    /// One run of the protocol is bounded, and so a turn is bounded too. It must be, because a client may accept all answers
    /// at once while other clients wait.
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

    /// Sends the answers that are left. Returns what to wait for, or `None` if all of them are sent.
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

/// Returns how many bytes of a large value are read at once if `len` bytes of it are there.
fn more_at_once(len: usize) -> usize {
    len.min(256 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::engine;

    /// A client that accepts all answers at once.
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

    /// Returns the number of turns that a client needs for all its requests, the most bytes of answers in one turn, and the
    /// number of stored values in each turn.
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
        // Each of these requests causes much more work than its length suggests.
        let (_, most, _) = turns(&large, b"get k\r\n", 200);
        assert!(most <= ROUNDS * 1_200_000, "{most}");
        let (count, _, sets) = turns(&large, b"append k 0 0 0 noreply\r\n\r\n", 200);
        assert!(count > 20 && sets.iter().all(|sets| *sets <= ROUNDS as u64), "{count} {sets:?}");
        let (count, ..) = turns(b"", b"stats\r\n", 200);
        assert!(count > 2, "{count}");
    }
}
