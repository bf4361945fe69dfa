//! One client's requests, from bytes to bytes: no sockets.

use ginnel_cache_protocol::Protocol;
use ginnel_cache_protocol::binary;
use ginnel_cache_protocol::text::{self, Get, NextKey, Request};
use ginnel_shmem::Memory;

use crate::engine::{After, Engine};

/// With so many bytes of answers, no further request is looked at until they are sent. Bytes that requests have had moved to no answer count as well, so
/// that a run ends after a while.
pub const MOST_ANSWERS: usize = 128 << 10;

/// What a client waits for, or is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// For bytes of the next request.
    Hungry,
    /// For its answers to be sent, if there are any; there may be further requests.
    Full,
    /// For its answers to be sent; then the connection is closed.
    Closed,
}

/// A client's side of the protocol.
#[derive(Debug, Default)]
pub struct Talk {
    protocol: Option<Protocol>,
    /// Bytes that come and are of no use.
    swallow: u64,
    /// A get, some of whose keys are not answered yet.
    get: Option<Keys>,
    /// The rest of the line is of no use.
    skips_line: bool,
    /// Bytes of a request without which it is not worth another look.
    wanted: usize,
}

#[derive(Clone, Copy, Debug)]
struct Keys {
    with_cas: bool,
    end: Option<i32>,
}

impl Talk {
    /// How many bytes there must be so that it is worth going on, if the last state was [`State::Hungry`].
    pub fn wanted(&self) -> usize {
        self.wanted
    }

    /// Answers the requests in some bytes. How many of the bytes are done with, and how it goes on.
    pub fn run<M: Memory>(
        &mut self,
        engine: &mut Engine<M>,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> (usize, State) {
        // As long as a value is not there, its line need not be looked at again.
        if bytes.len() < self.wanted {
            return (0, State::Hungry);
        }
        self.wanted = 0;
        let (mut at, moved) = (0, engine.moved());
        loop {
            let rest = &bytes[at..];
            let skipped = self.swallow.min(rest.len() as u64);
            self.swallow -= skipped;
            at += skipped as usize;
            let rest = &bytes[at..];
            if rest.is_empty() {
                self.wanted = 1;
                return (at, State::Hungry);
            }
            if out.len() + engine.moved().wrapping_sub(moved) >= MOST_ANSWERS {
                return (at, State::Full);
            }
            let protocol = *self.protocol.get_or_insert_with(|| Protocol::of(rest[0]));
            let step = match protocol {
                Protocol::Text => self.text(engine, rest, out),
                Protocol::Binary => self.binary(engine, rest, out),
            };
            match step {
                Step::Done(done) => at += done,
                Step::Wants(wanted) => {
                    self.wanted = wanted.max(rest.len() + 1);
                    return (at, State::Hungry);
                }
                Step::Full(done) => return (at + done, State::Full),
                Step::Closed => return (bytes.len(), State::Closed),
            }
        }
    }

    fn text<M: Memory>(&mut self, engine: &mut Engine<M>, bytes: &[u8], out: &mut Vec<u8>) -> Step {
        if self.skips_line {
            let end = bytes.iter().position(|byte| *byte == b'\n');
            self.skips_line = end.is_none();
            return Step::Done(end.map_or(bytes.len(), |end| end + 1));
        }
        if let Some(keys) = self.get {
            return self.next_key(engine, keys, bytes, out);
        }
        let (request, head) = match text::parse(bytes) {
            text::Parsed::More => return Step::Wants(0),
            text::Parsed::TooLong => return Step::Closed,
            text::Parsed::LongGet { with_cas, head } => {
                self.get = Some(Keys { with_cas, end: None });
                return Step::Done(head);
            }
            text::Parsed::Request(request, head) => (request, head),
        };
        match &request {
            Request::Get(get) => return self.get(engine, *get, bytes, head, out),
            Request::Refused { swallow, .. } => self.swallow = *swallow,
            _ => {}
        }
        let value = request.value();
        if value > 0 {
            if engine.refuses_text(&request, out) {
                self.swallow = value as u64;
                return Step::Done(head);
            }
            if bytes.len() < head + value {
                return Step::Wants(head + value);
            }
        }
        match engine.text(&request, &bytes[head..head + value], out) {
            After::Goes => Step::Done(head + value),
            After::Closes => Step::Closed,
        }
    }

    fn get<M: Memory>(
        &mut self,
        engine: &mut Engine<M>,
        get: Get<'_>,
        bytes: &[u8],
        head: usize,
        out: &mut Vec<u8>,
    ) -> Step {
        let mut keys = get.keys;
        while out.len() < MOST_ANSWERS {
            let Some(key) = keys.next() else {
                out.extend_from_slice(b"END\r\n");
                return Step::Done(head);
            };
            engine.get(key, get.with_cas, get.end, out);
        }
        // The rest of the line once these are sent.
        self.get = Some(Keys { with_cas: get.with_cas, end: get.end });
        Step::Full(keys.rest().as_ptr() as usize - bytes.as_ptr() as usize)
    }

    fn next_key<M: Memory>(
        &mut self,
        engine: &mut Engine<M>,
        keys: Keys,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Step {
        match text::next_key(bytes) {
            // Spaces are kept by nobody: there may be no end of them.
            NextKey::More => match bytes.iter().take_while(|byte| **byte == b' ').count() {
                0 => Step::Wants(0),
                spaces => Step::Done(spaces),
            },
            NextKey::Key(key, len) => {
                engine.get(key, keys.with_cas, keys.end, out);
                Step::Done(len)
            }
            NextKey::TooLong => {
                (self.get, self.skips_line) = (None, true);
                out.extend_from_slice(b"CLIENT_ERROR bad command line format\r\n");
                Step::Done(0)
            }
            NextKey::End(len) => {
                self.get = None;
                out.extend_from_slice(b"END\r\n");
                Step::Done(len)
            }
        }
    }

    fn binary<M: Memory>(&mut self, engine: &mut Engine<M>, bytes: &[u8], out: &mut Vec<u8>) -> Step {
        let (request, head) = match binary::parse(bytes) {
            binary::Parsed::More => return Step::Wants(binary::wanted(bytes)),
            binary::Parsed::NoRequest => return Step::Closed,
            binary::Parsed::Request(request, head) => (request, head),
        };
        if let binary::Command::Refused { swallow, .. } = request.command {
            self.swallow = u64::from(swallow);
        }
        let value = request.value();
        if engine.refuses_binary(&request, out) {
            self.swallow = value as u64;
            return Step::Done(head);
        }
        if bytes.len() < head + value {
            return Step::Wants(head + value);
        }
        match engine.binary(&request, &bytes[head..head + value], out) {
            After::Goes => Step::Done(head + value),
            After::Closes => Step::Closed,
        }
    }
}

enum Step {
    /// So many bytes are done with.
    Done(usize),
    /// So many bytes are needed.
    Wants(usize),
    /// So many bytes are done with, and the answers must go first.
    Full(usize),
    Closed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::engine;

    #[test]
    fn the_spaces_of_a_long_get_are_not_kept() {
        let (mut engine, mut talk) = (engine(), Talk::default());
        let begin = [b"get".to_vec(), b" key".repeat(5000)].concat();
        let mut out = Vec::new();
        let (done, state) = talk.run(&mut engine, &begin, &mut out);
        assert_eq!(state, State::Hungry);
        // The last key may go on.
        assert_eq!(&begin[done..], b"key");
        let spaces = [b"key".to_vec(), vec![b' '; 100_000]].concat();
        assert_eq!(talk.run(&mut engine, &spaces, &mut out), (spaces.len(), State::Hungry));
        assert_eq!(talk.run(&mut engine, &spaces[3..], &mut out), (spaces.len() - 3, State::Hungry));
        talk.run(&mut engine, b" key\r\n", &mut out);
        assert_eq!(out, b"END\r\n");
    }
}
