//! Finding the end of the answer to a request.
//!
//! This is for a client, or for a proxy between a client and a server: the request determines the kind of its answer, and
//! so how to find the answer's end.

use crate::binary::{self, Header};
use crate::number::unsigned;
use crate::text;

/// The longest line of an answer, in bytes.
const MOST_LINE: usize = 8 << 10;

/// The kind of the answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// No answer.
    Nothing,
    /// One line.
    Line,
    /// Any number of `VALUE` lines, each followed by a value, then `END`; or an error.
    Values,
    /// Any number of lines of statistics, then `END` or a line of another kind.
    Stats,
    /// One line that answers a meta request. A value follows it if it begins with `VA`.
    Meta,
    /// The same as [`Meta`](Self::Meta), or no answer. The next answer on the connection shows which.
    MetaOrNothing,
    /// One packet.
    Packet,
    /// Packets up to and including one without a key, or an error.
    Packets,
    /// A packet with the request's opaque number, or no answer. The next packet on the connection shows which.
    PacketOrNothing,
    /// The request's own value.
    Echo,
    /// The server closes the connection.
    Close,
}

/// Returns the kind of the answer to a text request.
pub fn of_text(request: &text::Request<'_>) -> Expected {
    use text::Request;
    let unless = |quiet: bool| if quiet { Expected::Nothing } else { Expected::Line };
    match request {
        Request::Get(_) => Expected::Values,
        Request::Store(store) => unless(store.quiet),
        Request::Delete { quiet, .. }
        | Request::Count { quiet, .. }
        | Request::Touch { quiet, .. }
        | Request::Flush { quiet, .. }
        | Request::Verbosity { quiet, .. }
        | Request::Limit { quiet, .. } => unless(*quiet),
        Request::Stats(_) => Expected::Stats,
        Request::MetaGet(meta)
        | Request::MetaSet(meta)
        | Request::MetaDelete(meta)
        | Request::MetaCount(meta) => {
            if meta.quiet {
                Expected::MetaOrNothing
            } else {
                Expected::Meta
            }
        }
        Request::MetaDebug(_) | Request::MetaNothing | Request::Version => Expected::Line,
        Request::Quit => Expected::Close,
        Request::Hits(_) => Expected::Nothing,
        Request::Echo { .. } => Expected::Echo,
        Request::Refused { answer: "", .. } => Expected::Nothing,
        Request::Refused { .. } => Expected::Line,
    }
}

/// Returns the kind of the answer to a request of the binary protocol.
pub fn of_binary(request: &binary::Request<'_>) -> Expected {
    use binary::Command;
    match request.command {
        Command::Stats => Expected::Packets,
        Command::Quit if request.quiet => Expected::Close,
        Command::Refused { .. } => Expected::Packet,
        Command::Hits { .. } => Expected::Nothing,
        Command::Echo { .. } => Expected::Echo,
        _ if request.quiet => Expected::PacketOrNothing,
        _ => Expected::Packet,
    }
}

/// The result of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The answer continues after the given bytes.
    More,
    /// The answer ends after this many of the given bytes.
    End(usize),
    /// The bytes are not an answer of memcached.
    NoAnswer,
}

/// A scanner that finds the end of an answer that arrives in pieces. It examines each byte a bounded number of times.
#[derive(Clone, Debug)]
pub struct Scan {
    expected: Expected,
    /// The number of bytes before the next line or header.
    skip: u64,
    /// Whether the answer ends after these bytes.
    is_last: bool,
    /// The beginning of an incomplete line or header.
    begun: Vec<u8>,
}

impl Scan {
    /// Creates a scanner for an answer of this kind. It assumes that an optional answer is there.
    pub fn new(expected: Expected) -> Self {
        let is_last = expected == Expected::Nothing;
        Self { expected, skip: 0, is_last, begun: Vec::new() }
    }

    /// Examines the next bytes of the stream.
    pub fn look(&mut self, bytes: &[u8]) -> Found {
        let mut at = 0;
        loop {
            let skipped = self.skip.min((bytes.len() - at) as u64);
            self.skip -= skipped;
            at += skipped as usize;
            if self.skip > 0 {
                return Found::More;
            }
            if self.is_last {
                return Found::End(at);
            }
            let rest = &bytes[at..];
            let taken = match self.expected {
                // The length of the request's value is not known here.
                Expected::Close | Expected::Echo => return Found::More,
                Expected::Packet | Expected::Packets | Expected::PacketOrNothing => self.header(rest),
                _ => self.line(rest),
            };
            match taken {
                Some(Ok(taken)) => at += taken,
                Some(Err(())) => return Found::NoAnswer,
                None => return Found::More,
            }
        }
    }

    /// Consumes a line. Returns how many of the bytes belong to the line, or `None` if it is incomplete.
    fn line(&mut self, bytes: &[u8]) -> Option<Result<usize, ()>> {
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let part = &bytes[..end.map_or(bytes.len(), |end| end + 1)];
        if self.begun.len() + part.len() > MOST_LINE {
            return Some(Err(()));
        }
        if end.is_none() || !self.begun.is_empty() {
            self.begun.extend_from_slice(part);
        }
        end?;
        let begun = std::mem::take(&mut self.begun);
        let line = if begun.is_empty() { part } else { &begun };
        let is_good = self.judge(line.strip_suffix(b"\r\n").unwrap_or(line));
        Some(if is_good { Ok(part.len()) } else { Err(()) })
    }

    /// Determines from a line what follows it. Returns false if the line is invalid.
    fn judge(&mut self, line: &[u8]) -> bool {
        let mut words = text::Words::of(line);
        let first = words.next().unwrap_or_default();
        let mut value = |behind: usize| {
            let len = words.nth(behind).and_then(unsigned);
            len.and_then(|len| len.checked_add(2))
        };
        let is_error = matches!(first, b"ERROR" | b"CLIENT_ERROR" | b"SERVER_ERROR");
        match (self.expected, first) {
            (Expected::Values, b"VALUE") => match value(2) {
                Some(len) => self.skip = len,
                None => return false,
            },
            (Expected::Values, b"END") => self.is_last = true,
            (Expected::Values, _) => return std::mem::replace(&mut self.is_last, true) || is_error,
            (Expected::Stats, b"STAT" | b"ITEM" | b"PREFIX") => {}
            (Expected::Meta | Expected::MetaOrNothing, b"VA") => match value(0) {
                Some(len) => (self.skip, self.is_last) = (len, true),
                None => return false,
            },
            _ => self.is_last = true,
        }
        true
    }

    /// Consumes a header. Returns how many of the bytes belong to the header, or `None` if it is incomplete.
    fn header(&mut self, bytes: &[u8]) -> Option<Result<usize, ()>> {
        let taken = (binary::HEADER - self.begun.len()).min(bytes.len());
        self.begun.extend_from_slice(&bytes[..taken]);
        let header = Header::parse(&self.begun)?;
        self.begun.clear();
        if header.magic != binary::ANSWER {
            return Some(Err(()));
        }
        self.skip = u64::from(header.body);
        self.is_last =
            self.expected != Expected::Packets || header.key == 0 || header.status != binary::status::OK;
        Some(Ok(taken))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the place where the answer ends, and checks that it is the same if the bytes arrive one by one.
    fn end(expected: Expected, bytes: &[u8]) -> Option<usize> {
        let whole = match Scan::new(expected).look(bytes) {
            Found::End(at) => Some(at),
            Found::More => None,
            Found::NoAnswer => panic!("{:?}", bytes.escape_ascii().to_string()),
        };
        let (mut scan, mut at) = (Scan::new(expected), 0);
        let by_bytes = loop {
            match scan.look(&bytes[at..bytes.len().min(at + 1)]) {
                Found::End(more) => break Some(at + more),
                _ if at >= bytes.len() => break None,
                _ => at += 1,
            }
        };
        assert_eq!(whole, by_bytes);
        whole
    }

    #[test]
    fn answers_end_where_they_end() {
        assert_eq!(end(Expected::Line, b"STORED\r\nSTORED\r\n"), Some(8));
        assert_eq!(end(Expected::Line, b"STORED\r"), None);
        assert_eq!(end(Expected::Values, b"VALUE a 0 4\r\nEND\r\r\nEND\r\nX"), Some(26 - 2));
        assert_eq!(end(Expected::Values, b"CLIENT_ERROR no\r\nX"), Some(17));
        assert_eq!(end(Expected::Meta, b"VA 2 f1\r\nHD\r\nHD\r\n"), Some(13));
        assert_eq!(end(Expected::Meta, b"EN\r\nX"), Some(4));
        assert_eq!(end(Expected::Stats, b"STAT a 1\r\nEND\r\nX"), Some(15));
        assert_eq!(end(Expected::Stats, b"ERROR\r\nX"), Some(7));
        assert_eq!(end(Expected::Nothing, b"X"), Some(0));
        let mut packets = Vec::new();
        for (key, body) in [(1, 3), (0, 0)] {
            Header { magic: binary::ANSWER, key, body, ..Header::default() }.append(&mut packets);
            packets.resize(packets.len() + body as usize, b'x');
        }
        assert_eq!(end(Expected::Packets, &packets), Some(51));
        assert_eq!(end(Expected::Packet, &packets), Some(27));
    }

    #[test]
    fn an_invalid_answer_is_recognised() {
        assert_eq!(Scan::new(Expected::Values).look(b"what\r\n"), Found::NoAnswer);
        assert_eq!(Scan::new(Expected::Line).look(&[b'x'; MOST_LINE + 1]), Found::NoAnswer);
        assert_eq!(Scan::new(Expected::Packet).look(&[0; 24]), Found::NoAnswer);
        assert_eq!(Scan::new(Expected::Values).look(b"VALUE a 0 x\r\n"), Found::NoAnswer);
    }
}
