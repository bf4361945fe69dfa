//! Tracking a connection in a proxy between a client and a server. The proxy answers some of the client's requests itself
//! and forwards the others.
//!
//! The proxy forwards bytes in pieces of any size, as the client sends them. [`Requests`] finds the boundaries of the
//! requests in them, and the kind of answer that each request expects. [`Answers`] tracks which of these requests have been
//! answered. To keep answers in order, the proxy may answer a request itself only while no answer of the server is
//! outstanding ([`Answers::is_idle`]) and the client's stream is at the boundary between two requests
//! ([`Requests::is_between`]).
//!
//! Neither of the two trusts the bytes that it gets. If it cannot follow a stream, it returns [`Lost`]; from then on,
//! nothing is known about the state of that connection.

mod answers;
mod requests;

pub use answers::Answers;
pub use requests::{Passed, Requests};

/// The error that the stream is invalid, or continues in a way that cannot be tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost;

/// The answer that a forwarded request expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// No answer (`noreply`). The request is known to be done when a later request is answered.
    Nothing,
    /// One line.
    Line,
    /// The answer to a text `get`.
    Values,
    /// The answer to a text `stats`.
    Stats,
    /// The answer to a meta request.
    Meta,
    /// The answer to a quiet meta request, or no answer.
    QuietMeta,
    /// The answer to `mn`.
    MetaEnd,
    /// One packet with this opcode.
    Packet(u8),
    /// Packets with this opcode, up to and including one without a key.
    Packets(u8),
    /// A packet that answers a quiet command, or no answer.
    QuietPacket,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Protocol;
    use proptest::prelude::*;

    /// Returns the answers expected after these bytes, which are passed in pieces of these lengths, and whether the stream is
    /// between two requests.
    fn awaited(bytes: &[u8], lengths: &[usize]) -> Result<(Vec<Awaited>, bool), Lost> {
        let (mut requests, mut awaited, mut at) = (Requests::default(), Vec::new(), 0);
        let mut lengths = lengths.iter().cycle();
        while at < bytes.len() {
            let end = (at + lengths.next().map_or(bytes.len(), |len| *len)).min(bytes.len());
            requests.pass(&bytes[at..end], |passed| {
                awaited.push(passed.awaited);
                Ok(())
            })?;
            at = end;
        }
        Ok((awaited, requests.is_between()))
    }

    #[test]
    fn a_line_that_is_too_long_is_lost_however_it_comes() {
        let line = |len: usize| [&vec![b'x'; len][..], b"\r\nmn\r\n"].concat();
        let good = Ok((vec![Awaited::Line, Awaited::MetaEnd], true));
        for lengths in [&[][..], &[1000], &[2049, 1]] {
            assert_eq!(awaited(&line(2047), lengths), good);
            assert_eq!(awaited(&line(2048), lengths), Err(Lost));
        }
        // The line of a `get` may be longer.
        let get = [&b"get "[..], &b"key ".repeat(1000), b"\r\n"].concat();
        for lengths in [&[][..], &[1000], &[4003, 1]] {
            assert_eq!(awaited(&get, lengths), Ok((vec![Awaited::Values], true)));
        }
    }

    #[test]
    fn requests_are_told_with_what_they_wait_for() {
        let text = b"set a 0 0 5\r\nget b\r\nget c d\r\nset a 0 0 1 noreply\r\nx\r\nmg a q\r\nmn\r\nstats\r\nms a 2\r\nhi\r\nnonsense\r\nge";
        let (found, is_between) = awaited(text, &[]).unwrap();
        let expected = [
            Awaited::Line,
            Awaited::Values,
            Awaited::Nothing,
            Awaited::QuietMeta,
            Awaited::MetaEnd,
            Awaited::Stats,
            Awaited::Meta,
            Awaited::Line,
        ];
        assert_eq!((&found[..], is_between), (&expected[..], false));
        for end in [&b"quit\r\n"[..], &[b'x'; 4000]] {
            assert_eq!(awaited(end, &[]), Err(Lost));
            assert_eq!(awaited(end, &[1]), Err(Lost));
        }
    }

    #[test]
    fn a_long_get_is_one_request() {
        let long = [&b"get "[..], &b"key ".repeat(10_000), b"\r\nversion\r\n"].concat();
        for lengths in [&[][..], &[7], &[20_000]] {
            assert_eq!(awaited(&long, lengths), Ok((vec![Awaited::Values, Awaited::Line], true)));
        }
    }

    #[test]
    fn quiet_packets_are_done_with_the_next_loud_one() {
        use crate::binary::{ANSWER, Header, opcode};
        let packet = |opcode, body: u32| {
            let mut bytes = Vec::new();
            Header { magic: ANSWER, opcode, body, ..Header::default() }.append(&mut bytes);
            bytes.resize(bytes.len() + body as usize, b'x');
            bytes
        };
        let mut answers = Answers::new(Protocol::Binary);
        for awaited in [Awaited::QuietPacket, Awaited::Packet(opcode::NOOP), Awaited::QuietPacket] {
            answers.expect(awaited).unwrap();
        }
        answers.look(&packet(opcode::GETQ, 9)).unwrap();
        answers.look(&packet(opcode::NOOP, 0)).unwrap();
        assert!(!answers.is_idle(), "one more is quiet");
        answers.expect(Awaited::Packet(opcode::GET)).unwrap();
        answers.look(&packet(opcode::GET, 5)[..28]).unwrap();
        assert!(!answers.is_idle());
        answers.look(b"x").unwrap();
        assert!(answers.is_idle());
        assert_eq!(answers.look(b"x"), Err(Lost), "nothing was asked for");
        answers.expect(Awaited::Packet(opcode::GET)).unwrap();
        assert_eq!(answers.look(&packet(opcode::SET, 0)), Err(Lost), "another answer");
    }

    #[test]
    fn quiet_text_requests_are_complete_when_a_later_loud_one_is() {
        let mut answers = Answers::new(Protocol::Text);
        answers.expect(Awaited::Nothing).unwrap();
        assert!(!answers.is_idle());
        answers.expect(Awaited::Values).unwrap();
        answers.look(b"END\r").unwrap();
        assert!(!answers.is_idle());
        answers.look(b"\n").unwrap();
        assert!(answers.is_idle());
        // The error may be the answer to either of the two requests.
        answers.expect(Awaited::Nothing).unwrap();
        answers.expect(Awaited::Line).unwrap();
        assert_eq!(answers.look(b"SERVER_ERROR object too large for cache\r\n"), Err(Lost));
    }

    #[test]
    fn quiet_meta_requests_are_done_with_mn() {
        let mut answers = Answers::new(Protocol::Text);
        let all = [Awaited::QuietMeta, Awaited::Meta, Awaited::QuietMeta, Awaited::MetaEnd, Awaited::Line];
        for awaited in all {
            answers.expect(awaited).unwrap();
        }
        answers.look(b"VA 4\r\nMN\r\n\r\nHD\r\nMN\r\n").unwrap();
        assert!(!answers.is_idle());
        answers.look(b"VERSION 1\r\n").unwrap();
        assert!(answers.is_idle());
        answers.expect(Awaited::QuietMeta).unwrap();
        assert_eq!(answers.expect(Awaited::Values), Err(Lost), "a value may look like anything");
    }

    fn script() -> impl Strategy<Value = Vec<u8>> {
        let request = prop_oneof![
            "(get|gets|mg|delete|incr|stats|touch) [a-d ]{1,9}( v| q| noreply|)\r\n"
                .prop_map(String::into_bytes),
            ("(set|add|cas|append)", "[a-d]", prop::collection::vec(any::<u8>(), 0..50), any::<bool>())
                .prop_map(|(verb, key, value, quiet)| {
                    let cas = if verb == "cas" { " 1" } else { "" };
                    let quiet = if quiet { " noreply" } else { "" };
                    let mut bytes = format!("{verb} {key} 0 0 {}{cas}{quiet}\r\n", value.len()).into_bytes();
                    bytes.extend(value);
                    bytes.extend(b"\r\n");
                    bytes
                }),
            Just(b"mn\r\n".to_vec()),
            "[ -~]{0,9}\n".prop_map(String::into_bytes),
        ];
        prop::collection::vec(request, 0..20).prop_map(|all| all.concat())
    }

    proptest! {
        #[test]
        fn requests_are_the_same_in_any_pieces(
            bytes in prop_oneof![script(), prop::collection::vec(any::<u8>(), 0..300)],
            lengths in prop::collection::vec(1_usize..40, 1..20),
        ) {
            prop_assert_eq!(awaited(&bytes, &[]), awaited(&bytes, &lengths));
        }

        #[test]
        fn any_answers_are_looked_at(
            all in prop::collection::vec(prop_oneof![
                Just(Awaited::Nothing), Just(Awaited::Line), Just(Awaited::Values), Just(Awaited::Stats),
                Just(Awaited::Meta), Just(Awaited::QuietMeta), Just(Awaited::MetaEnd),
            ], 0..9),
            bytes in prop_oneof![
                "(VALUE a 0 [0-9]|END|STORED|HD|EN|MN|VA [0-9]|ERROR|x|\r\n|\n| ){0,30}".prop_map(String::into_bytes),
                prop::collection::vec(any::<u8>(), 0..300),
            ],
            lengths in prop::collection::vec(1_usize..9, 1..9),
        ) {
            let mut whole = Answers::new(Protocol::Text);
            if all.into_iter().any(|awaited| whole.expect(awaited).is_err()) {
                return Ok(());
            }
            let mut pieces = whole.clone();
            let whole_result = whole.look(&bytes).map(|()| whole.is_idle());
            let (mut at, mut result) = (0, Ok(()));
            for len in lengths.iter().cycle() {
                if at >= bytes.len() || result.is_err() {
                    break;
                }
                let end = (at + len).min(bytes.len());
                result = pieces.look(&bytes[at..end]);
                at = end;
            }
            prop_assert_eq!(whole_result, result.map(|()| pieces.is_idle()));
        }
    }
}
