//! Telling memcached's protocol from others by the first bytes of a connection.
//!
//! memcached accepts much that no client sends: commands with superfluous words, and statistics that do not exist. Other protocols
//! have lines like that too, so they are not accepted here.

use crate::text::{Parsed, Request, Words};
use crate::{Protocol, binary, text};

/// The statistics that clients ask for.
const STATISTICS: [&[u8]; 11] = [
    b"settings",
    b"items",
    b"slabs",
    b"sizes",
    b"conns",
    b"reset",
    b"detail",
    b"cachedump",
    b"threads",
    b"hot",
    b"ginnel",
];

/// Returns the protocol of a client whose first bytes these are, or `None` if they are not requests of memcached. The head of the
/// first request must be complete. What follows it may end at any place, and must be requests as far as it goes.
pub fn spoken(bytes: &[u8]) -> Option<Protocol> {
    let protocol = Protocol::of(*bytes.first()?);
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let step = match protocol {
            Protocol::Text => text_request(rest),
            Protocol::Binary => packet(rest),
        };
        at += match step {
            Step::Request(len) => len,
            Step::More if at > 0 => break,
            _ => return None,
        };
    }
    Some(protocol)
}

enum Step {
    /// A request of this length, of which a part may be missing at the end.
    Request(usize),
    /// The head is incomplete.
    More,
    /// Something else.
    Other,
}

fn text_request(bytes: &[u8]) -> Step {
    let (request, head) = match text::parse(bytes) {
        Parsed::Request(request, head) => (request, head),
        Parsed::More => return Step::More,
        Parsed::LongGet { .. } | Parsed::TooLong => return Step::Other,
    };
    let line = &bytes[..head - 1];
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    // memcached reads no line beyond a zero byte. Keys may have other control characters, and memaslap's do.
    if line.iter().any(|byte| matches!(byte, 0 | b'\r')) || !is_usual(&request, Words::of(line).count()) {
        return Step::Other;
    }
    let value = request.value();
    let behind = &bytes[head..];
    // The line end behind a value, as far as it is there.
    let end = behind.get(value.saturating_sub(2)..).unwrap_or_default();
    if value > 0 && !end.iter().zip(b"\r\n").all(|(is, should)| is == should) {
        return Step::Other;
    }
    Step::Request(head.saturating_add(value))
}

/// Returns whether clients send such a request. `words` is the number of words of its line.
fn is_usual(request: &Request<'_>, words: usize) -> bool {
    let with = |quiet: bool, usual: usize| words == usual + usize::from(quiet);
    match *request {
        Request::Get(_)
        | Request::Delete { .. }
        | Request::MetaGet(_)
        | Request::MetaSet(_)
        | Request::MetaDelete(_)
        | Request::MetaCount(_) => true,
        Request::Store(store) => with(store.quiet, if store.verb == crate::Verb::Cas { 6 } else { 5 }),
        Request::Count { quiet, .. } | Request::Touch { quiet, .. } => with(quiet, 3),
        Request::Flush { quiet, .. } => with(quiet, 1) || with(quiet, 2),
        Request::Verbosity { quiet, .. } | Request::Limit { quiet, .. } => with(quiet, 2),
        Request::Stats(mut of) => of.next().is_none_or(|of| STATISTICS.contains(&of)),
        Request::MetaDebug(_) => words <= 3,
        Request::MetaNothing | Request::Version => words == 1,
        // A client that begins with one of these expects nothing of a cache.
        Request::Quit | Request::Hits(_) | Request::Echo { .. } | Request::Refused { .. } => false,
    }
}

fn packet(bytes: &[u8]) -> Step {
    use binary::{Command, Parsed};
    match binary::parse(bytes) {
        // A client that authenticates (SASL) talks to another kind of server, and its packets are refused.
        Parsed::Request(request, head) => match request.command {
            Command::Refused { .. } | Command::Quit | Command::Hits { .. } | Command::Echo { .. } => {
                Step::Other
            }
            _ if bytes[5] != 0 => Step::Other,
            _ => Step::Request(head.saturating_add(request.value())),
        },
        Parsed::More => Step::More,
        Parsed::NoRequest => Step::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::binary::{HEADER, Header, REQUEST, opcode};
    use proptest::prelude::*;

    #[test]
    fn clients_of_memcached_are_known_by_their_first_request() {
        for first in [
            &b"get a\r\n"[..],
            b"gets a b c\r\n",
            b"gat 5 a\r\n",
            b"get a\r\nget b\r\nge",
            b"set a 0 0 3\r\n",
            b"set a 0 0 3\r\nab",
            b"set \x10a 0 0 3\r\n",
            b"set a 0 0 3\r\nabc\r",
            b"set a 0 0 3\r\nabc\r\nversion\r\n",
            b"cas a 0 0 1 7 noreply\r\nx\r\n",
            b"incr a 1 noreply\r\n",
            b"flush_all 5\r\n",
            b"verbosity 1\r\n",
            b"version\r\n",
            b"stats\n",
            b"stats items\r\n",
            b"mg a v\r\n",
            b"ms a 2 T0\r\nab\r\n",
            b"mn\r\n",
        ] {
            assert_eq!(spoken(first), Some(Protocol::Text), "{:?}", first.escape_ascii().to_string());
        }
        let get = Header { magic: REQUEST, opcode: opcode::GET, key: 1, body: 1, ..Header::default() };
        assert_eq!(spoken(&[&get.bytes()[..], b"a"].concat()), Some(Protocol::Binary));
        let noop = Header { magic: REQUEST, opcode: opcode::NOOP, ..Header::default() };
        assert_eq!(spoken(&noop.bytes()), Some(Protocol::Binary));
    }

    #[test]
    fn nobody_else_is() {
        for first in [
            &b""[..],
            b"get",
            b"get a",
            b"get\r\n",
            b"set the table\r\n",
            b"set a 0 0",
            b"set a 0 0 3\r\nabcde",
            b"set a 0 0 3 please\r\nabc\r\n",
            b"set a 0 0 3\r\nabc\r\nHost: x\r\n",
            b"add milk to the list\r\n",
            b"delete everything now\r\n",
            b"replace a with b\r\n",
            b"touch base\r\n",
            b"stats of the game\r\n",
            b"version 5 please\r\n",
            b"incr a x\r\n",
            b"get a\x00\r\n",
            b"get a\r\n\x16\x03\x01\r\n",
            b"get a\rb\r\n",
            b"GET / HTTP/1.1\r\n",
            b"quit\r\n",
            b"ginnel echo 1\r\n",
            b"\x16\x03\x01",
            b"\x80",
            &[0x80; 24],
        ] {
            assert_eq!(spoken(first), None, "{:?}", first.escape_ascii().to_string());
        }
        let auth = Header { magic: REQUEST, opcode: opcode::SASL_AUTH, key: 5, body: 6, ..Header::default() };
        assert_eq!(spoken(&[&auth.bytes()[..], b"PLAINx"].concat()), None);
    }

    proptest! {
        /// A client is not forgotten because more of its first call is there.
        #[test]
        fn what_is_spoken_stays_so(
            line in "(get|set|ms|mg|ma|md|cas|touch|incr|flush_all|delete|stats) [ a-z0-9]{0,20}\r\n",
            value in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let all = [line.as_bytes(), &value].concat();
            let whole = spoken(&all);
            if whole.is_some() {
                for len in line.len()..all.len() {
                    prop_assert_eq!(spoken(&all[..len]), whole);
                }
            }
            for len in 0..line.len() {
                prop_assert_eq!(spoken(&all[..len]), None);
            }
        }

        #[test]
        fn any_packet_is_looked_at(mut bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Some(first) = bytes.first_mut() {
                *first = REQUEST;
            }
            let is_long = bytes.len() >= HEADER;
            prop_assert!(spoken(&bytes).is_none() || is_long);
        }
    }
}
