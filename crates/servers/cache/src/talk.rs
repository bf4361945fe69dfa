//! The protocol of one client: takes the bytes of requests and appends the bytes of answers. It does not read or write
//! sockets.

use crate::engine::{After, Engine};
use ginnel_cache_protocol::text::{self, Get, NextKey, Request};
use ginnel_cache_protocol::{Protocol, binary};
use ginnel_shmem::SharedMemory;

/// Once this many bytes of answers are waiting, no further request is handled until they are sent. Bytes that requests
/// have moved without putting them into an answer count as well, so that each run ends after a bounded amount of work.
pub const MOST_ANSWERS: usize = 128 << 10;

/// What must happen before the next request of a client can be handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The client must send more bytes of the next request.
    Hungry,
    /// The answers, if any, must be sent. After that, the bytes already received may contain further requests.
    Full,
    /// The answers must be sent; then the connection is closed.
    Closed,
}

/// The state of the protocol with one client.
#[derive(Debug, Default)]
pub struct Talk {
    protocol: Option<Protocol>,
    /// The number of bytes still to come that are skipped, such as a refused value.
    swallow: u64,
    /// A `get` of which some keys are not answered yet.
    get: Option<Keys>,
    /// True while the rest of a refused line is skipped.
    skips_line: bool,
    /// The number of bytes that must be there before it is worth parsing the request again.
    wanted: usize,
}

#[derive(Clone, Copy, Debug)]
struct Keys {
    with_cas: bool,
    end: Option<i32>,
}

impl Talk {
    /// Returns how many bytes must be there before it is worth calling [`run`](Self::run) again after
    /// [`State::Hungry`].
    pub fn wanted(&self) -> usize {
        self.wanted
    }

    /// Handles the requests in `bytes` and appends their answers to `out`. Returns how many of the bytes it has consumed,
    /// and what must happen next.
    pub fn run<M: SharedMemory>(
        &mut self,
        engine: &mut Engine<M>,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> (usize, State) {
        // While the value of a request is incomplete, its line need not be parsed again.
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

    fn text<M: SharedMemory>(&mut self, engine: &mut Engine<M>, bytes: &[u8], out: &mut Vec<u8>) -> Step {
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

    fn get<M: SharedMemory>(
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
        // The other keys of the line are answered once these answers are sent.
        self.get = Some(Keys { with_cas: get.with_cas, end: get.end });
        Step::Full(keys.rest().as_ptr() as usize - bytes.as_ptr() as usize)
    }

    fn next_key<M: SharedMemory>(
        &mut self,
        engine: &mut Engine<M>,
        keys: Keys,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Step {
        match text::next_key(bytes) {
            // Spaces are consumed at once and not buffered, because a client may send any number of them.
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

    fn binary<M: SharedMemory>(&mut self, engine: &mut Engine<M>, bytes: &[u8], out: &mut Vec<u8>) -> Step {
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
    /// This many bytes are consumed.
    Done(usize),
    /// The request needs this many bytes.
    Wants(usize),
    /// This many bytes are consumed, and the answers must be sent before the next step.
    Full(usize),
    Closed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::Settings;
    use ginnel_cache_store::shape::plan;
    use ginnel_cache_store::store::Store;
    use ginnel_shmem::Mapping;
    use proptest::prelude::*;

    fn engine() -> Engine<Mapping> {
        let memory = Mapping::anonymous(8 << 20).unwrap();
        let shape = plan(8 << 20, 1 << 20, 100).unwrap();
        let store = Store::create(memory, shape, [1, 2], 1000).unwrap();
        let settings = Settings {
            place: "web/main".into(),
            item_size: 1 << 20,
            connections: 1,
            verbosity: 0,
            listens: Vec::new(),
            unix: None,
        };
        Engine::new(store, settings, 1_700_000_000)
    }

    #[test]
    fn a_value_is_waited_for_and_a_large_one_is_not() {
        let (mut engine, mut talk, mut out) = (engine(), Talk::default(), Vec::new());
        let line = b"set a 0 0 1000\r\n";
        assert_eq!(talk.run(&mut engine, line, &mut out), (0, State::Hungry));
        assert_eq!(talk.wanted(), line.len() + 1002);
        let mut talk = Talk::default();
        let line = b"set a 0 0 2000000\r\nxxx";
        assert_eq!(talk.run(&mut engine, line, &mut out), (line.len(), State::Hungry));
        assert_eq!(out, b"SERVER_ERROR object too large for cache\r\n");
        // The rest of the refused value is skipped.
        out.clear();
        let rest = [&[b'x'; 2_000_000 - 3][..], b"\r\nmn\r\n"].concat();
        assert_eq!(talk.run(&mut engine, &rest, &mut out), (rest.len(), State::Hungry));
        assert_eq!(out, b"MN\r\n");
    }

    #[test]
    fn answers_are_bounded_within_a_request() {
        let (mut engine, mut talk, mut out) = (engine(), Talk::default(), Vec::new());
        let set = [b"set a 0 0 50000\r\n", &[b'v'; 50_000][..], b"\r\n"].concat();
        talk.run(&mut engine, &set, &mut out);
        let line = format!("get {}\r\nmn\r\n", "a ".repeat(100));
        let (mut at, mut all) = (0, 0);
        loop {
            out.clear();
            let (done, state) = talk.run(&mut engine, &line.as_bytes()[at..], &mut out);
            assert!(out.len() < MOST_ANSWERS + 51_000);
            (at, all) = (at + done, all + out.len());
            if state == State::Hungry {
                break;
            }
            assert_eq!(state, State::Full);
        }
        assert!(out.ends_with(b"END\r\nMN\r\n"));
        assert_eq!((at, all), (line.len(), 100 * (50_000 + 19) + 9));
    }

    #[test]
    fn the_first_byte_says_which_protocol_it_is() {
        let (mut engine, mut out) = (engine(), Vec::new());
        let mut noop = [0; 24];
        (noop[0], noop[1]) = (binary::REQUEST, binary::opcode::NOOP);
        let mut talk = Talk::default();
        assert_eq!(talk.run(&mut engine, &noop, &mut out), (24, State::Hungry));
        assert_eq!(out[..2], [binary::ANSWER, binary::opcode::NOOP]);
        // The connection keeps that protocol.
        assert_eq!(talk.run(&mut engine, &[b'x'; 24], &mut out), (24, State::Closed));
        assert_eq!(Talk::default().run(&mut engine, b"quit\r\nmn\r\n", &mut out), (10, State::Closed));
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_in_any_pieces(
            parts in prop::collection::vec(prop_oneof![
                prop::sample::select(vec![
                    &b"set "[..], b"get ", b"gets ", b"gat 0 ", b"mg ", b"ms ", b"ma ", b"md ", b"me ", b"cas ", b"append ", b"incr ", b"touch ", b"stats ",
                    b"flush_all ", b"ginnel hits ", b"a ", b"aa ", b"YQ== b ", b"0 0 1", b"1 ", b"5 q ", b"-1 ", b"v k t c ", b"N1 T9 ", b"MA ", b"I ",
                    b"\r\n", b"\r\n", b"\r\n", b"x\r\n", b"\n", b"\x80\x01\x00\x01\x08\0\0\0\0\0\0\x0a", b"\x80\x10\0\0\0\0\0\0\0\0\0\0",
                ]).prop_map(<[u8]>::to_vec),
                prop::collection::vec(any::<u8>(), 0..30),
            ], 1..60),
            cut in 1_usize..200,
        ) {
            let (mut engine, mut talk) = (engine(), Talk::default());
            let (mut kept, mut out) = (Vec::new(), Vec::new());
            'pieces: for piece in parts.concat().chunks(cut) {
                kept.extend_from_slice(piece);
                loop {
                    let (done, state) = talk.run(&mut engine, &kept, &mut out);
                    prop_assert!(done <= kept.len());
                    kept.drain(..done);
                    prop_assert!(out.len() <= MOST_ANSWERS + (1 << 20) + (32 << 10));
                    match state {
                        State::Closed => break 'pieces,
                        State::Full => out.clear(),
                        State::Hungry => break,
                    }
                }
                prop_assert!(kept.len() < talk.wanted());
                out.clear();
            }
        }
    }

    #[test]
    fn the_spaces_of_a_long_get_are_not_kept() {
        let (mut engine, mut talk) = (engine(), Talk::default());
        let begin = [b"get".to_vec(), b" key".repeat(5000)].concat();
        let mut out = Vec::new();
        let (done, state) = talk.run(&mut engine, &begin, &mut out);
        assert_eq!(state, State::Hungry);
        // The last key may be incomplete.
        assert_eq!(&begin[done..], b"key");
        let spaces = [b"key".to_vec(), vec![b' '; 100_000]].concat();
        assert_eq!(talk.run(&mut engine, &spaces, &mut out), (spaces.len(), State::Hungry));
        assert_eq!(talk.run(&mut engine, &spaces[3..], &mut out), (spaces.len() - 3, State::Hungry));
        talk.run(&mut engine, b" key\r\n", &mut out);
        assert_eq!(out, b"END\r\n");
    }
}
