//! The requests and answers of the binary protocol.

use crate::text::MOST_ECHO;
use crate::{MOST_KEY, Verb};

/// The first byte of a request.
pub const REQUEST: u8 = 0x80;
/// The first byte of an answer.
pub const ANSWER: u8 = 0x81;
/// The length of a packet's header, in bytes. The extras, the key and the value follow it.
pub const HEADER: usize = 24;

/// The status codes of answers.
pub mod status {
    /// Success.
    pub const OK: u16 = 0x00;
    /// The item does not exist.
    pub const NOT_FOUND: u16 = 0x01;
    /// The item exists already, or has another version than the client expects.
    pub const EXISTS: u16 = 0x02;
    /// The value is too large.
    pub const TOO_LARGE: u16 = 0x03;
    /// The request is invalid.
    pub const INVALID: u16 = 0x04;
    /// The item was not stored.
    pub const NOT_STORED: u16 = 0x05;
    /// The item's value is not a number.
    pub const NOT_A_NUMBER: u16 = 0x06;
    /// The command does not exist.
    pub const UNKNOWN: u16 = 0x81;
    /// No memory is left.
    pub const NO_MEMORY: u16 = 0x82;

    /// Returns memcached's text for a status.
    pub const fn text(status: u16) -> &'static str {
        match status {
            OK => "",
            NOT_FOUND => "Not found",
            EXISTS => "Data exists for key.",
            TOO_LARGE => "Too large.",
            INVALID => "Invalid arguments",
            NOT_STORED => "Not stored.",
            NOT_A_NUMBER => "Non-numeric server-side value for incr or decr",
            UNKNOWN => "Unknown command",
            _ => "Out of memory",
        }
    }
}

/// The header of a packet, which is a request or an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// [`REQUEST`] or [`ANSWER`].
    pub magic: u8,
    /// The command: one of the codes in [`opcode`].
    pub opcode: u8,
    /// The length of the key, in bytes.
    pub key: u16,
    /// The length of the extras, in bytes.
    pub extras: u8,
    /// The [`status`] of an answer.
    pub status: u16,
    /// The total length of extras, key and value, in bytes.
    pub body: u32,
    /// A number that the client chooses. The answer contains it unchanged.
    pub opaque: u32,
    /// The item's version.
    pub cas: u64,
}

impl Header {
    /// Parses the header at the beginning of some bytes. Returns `None` if there are fewer than [`HEADER`] bytes.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let header: &[u8; HEADER] = bytes.first_chunk()?;
        let [magic, opcode, k0, k1, extras, _, s0, s1, b0, b1, b2, b3, o0, o1, o2, o3, cas @ ..] = *header;
        Some(Self {
            magic,
            opcode,
            key: u16::from_be_bytes([k0, k1]),
            extras,
            status: u16::from_be_bytes([s0, s1]),
            body: u32::from_be_bytes([b0, b1, b2, b3]),
            opaque: u32::from_be_bytes([o0, o1, o2, o3]),
            cas: u64::from_be_bytes(cas),
        })
    }

    /// Appends the header to a packet.
    pub fn append(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes());
    }

    /// Returns the header as it is in a packet.
    pub fn bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        (bytes[0], bytes[1], bytes[4]) = (self.magic, self.opcode, self.extras);
        bytes[2..4].copy_from_slice(&self.key.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.status.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.body.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.opaque.to_be_bytes());
        bytes[16..].copy_from_slice(&self.cas.to_be_bytes());
        bytes
    }
}

/// The result of [`parse`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Parsed<'a> {
    /// The head of the request is incomplete.
    More,
    /// A request, and the length in bytes of its head: header, extras and key. The value, if any, follows the head
    /// ([`Request::value`]).
    Request(Request<'a>, usize),
    /// The bytes are not a request, so memcached would close the connection.
    NoRequest,
}

/// A request of the binary protocol.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request<'a> {
    /// The header of the request's packet.
    pub header: Header,
    /// Whether the server sends no answer on success, or for a get, on a miss.
    pub quiet: bool,
    /// The key, or an empty slice.
    pub key: &'a [u8],
    /// The decoded command and its arguments.
    pub command: Command,
}

/// A command and its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Returns the value.
    Get {
        /// Whether the answer contains the key.
        with_key: bool,
    },
    /// Sets a new expiration time.
    Touch {
        /// The expiration time, in memcached's format.
        end: i32,
    },
    /// Sets a new expiration time and returns the value.
    GetAndTouch {
        /// Whether the answer contains the key.
        with_key: bool,
        /// The expiration time, in memcached's format.
        end: i32,
    },
    /// Stores a value.
    Store {
        /// The condition and the manner of storing.
        verb: Verb,
        /// The client's flags, which are stored with the item.
        flags: u32,
        /// The expiration time, in memcached's format.
        end: i32,
        /// The length of the value, in bytes.
        len: usize,
    },
    /// Removes an item.
    Delete,
    /// Increments or decrements a number.
    Count {
        /// Whether to increment.
        up: bool,
        /// The amount.
        by: u64,
        /// The value of a new item.
        initial: u64,
        /// The expiration time of a new item, in memcached's format. If this is -1, no item is created.
        end: i32,
    },
    /// Makes all items expire.
    Flush {
        /// The time of the flush, in memcached's format.
        delay: i32,
    },
    /// Returns the statistics that the key names.
    Stats,
    /// Does nothing (`NOOP`).
    Nothing,
    /// Returns the server's version.
    Version,
    /// Closes the connection.
    Quit,
    /// Reports items that readers found in shared memory. The value consists of their hashes, eight bytes each. The server
    /// sends no answer. memcached does not have this command.
    Hits {
        /// The length of the value, in bytes.
        len: usize,
    },
    /// The answer is the value itself, without a header. memcached does not have this command.
    Echo {
        /// The length of the value, in bytes.
        len: usize,
    },
    /// An invalid request, or one that is not supported.
    Refused {
        /// The status of the answer.
        status: u16,
        /// The number of bytes after the head that must be ignored.
        swallow: u32,
        /// Whether the server closes the connection.
        closes: bool,
    },
}

/// The opcodes of commands.
pub mod opcode {
    #![allow(missing_docs)] // The names are those of the protocol's documentation.
    pub const GET: u8 = 0x00;
    pub const SET: u8 = 0x01;
    pub const ADD: u8 = 0x02;
    pub const REPLACE: u8 = 0x03;
    pub const DELETE: u8 = 0x04;
    pub const INCREMENT: u8 = 0x05;
    pub const DECREMENT: u8 = 0x06;
    pub const QUIT: u8 = 0x07;
    pub const FLUSH: u8 = 0x08;
    pub const GETQ: u8 = 0x09;
    pub const NOOP: u8 = 0x0a;
    pub const VERSION: u8 = 0x0b;
    pub const GETK: u8 = 0x0c;
    pub const GETKQ: u8 = 0x0d;
    pub const APPEND: u8 = 0x0e;
    pub const PREPEND: u8 = 0x0f;
    pub const STAT: u8 = 0x10;
    pub const SETQ: u8 = 0x11;
    pub const ADDQ: u8 = 0x12;
    pub const REPLACEQ: u8 = 0x13;
    pub const DELETEQ: u8 = 0x14;
    pub const INCREMENTQ: u8 = 0x15;
    pub const DECREMENTQ: u8 = 0x16;
    pub const QUITQ: u8 = 0x17;
    pub const FLUSHQ: u8 = 0x18;
    pub const APPENDQ: u8 = 0x19;
    pub const PREPENDQ: u8 = 0x1a;
    pub const TOUCH: u8 = 0x1c;
    pub const GAT: u8 = 0x1d;
    pub const GATQ: u8 = 0x1e;
    pub const SASL_LIST: u8 = 0x20;
    pub const SASL_AUTH: u8 = 0x21;
    pub const SASL_STEP: u8 = 0x22;
    pub const GATK: u8 = 0x23;
    pub const GATKQ: u8 = 0x24;
    pub const GINNEL_HITS: u8 = 0xe0;
    pub const GINNEL_ECHO: u8 = 0xe1;
}

/// Returns the command without its quiet variant, and whether it was quiet.
const fn aloud(code: u8) -> (u8, bool) {
    use opcode::*;
    match code {
        GETQ => (GET, true),
        GETKQ => (GETK, true),
        SETQ..=FLUSHQ => (code - SETQ + SET, true),
        APPENDQ | PREPENDQ => (code - APPENDQ + APPEND, true),
        GATQ => (GAT, true),
        GATKQ => (GATK, true),
        _ => (code, false),
    }
}

impl Request<'_> {
    /// Returns the length in bytes of the value that follows the head; 0 if there is no value.
    pub fn value(&self) -> usize {
        match self.command {
            Command::Store { len, .. } | Command::Hits { len } | Command::Echo { len } => len,
            _ => 0,
        }
    }
}

/// Parses a request at the beginning of some bytes.
pub fn parse(bytes: &[u8]) -> Parsed<'_> {
    let Some(header) = Header::parse(bytes) else {
        return match bytes.first() {
            Some(&first) if first != REQUEST && bytes.len() >= HEADER => Parsed::NoRequest,
            _ => Parsed::More,
        };
    };
    if header.magic != REQUEST {
        return Parsed::NoRequest;
    }
    let (extras_len, key_len) = (usize::from(header.extras), usize::from(header.key));
    let head = HEADER + extras_len + key_len;
    if bytes.len() < head {
        return Parsed::More;
    }
    let (extras, key) = (&bytes[HEADER..HEADER + extras_len], &bytes[HEADER + extras_len..head]);
    let (code, quiet) = aloud(header.opcode);
    let command = command(&header, code, extras, key.len());
    Parsed::Request(Request { header, quiet, key, command }, head)
}

/// The highest length of the hashes in one request, in bytes.
const MOST_HITS: usize = 16 << 10;

/// Returns how many bytes of a request [`parse`] needs to make progress, if the request begins with these bytes.
pub fn wanted(bytes: &[u8]) -> usize {
    match Header::parse(bytes) {
        Some(header) => HEADER + usize::from(header.extras) + usize::from(header.key),
        None => HEADER,
    }
}

fn command(header: &Header, code: u8, extras: &[u8], key: usize) -> Command {
    use opcode::*;
    let body = header.body as usize;
    let unknown = |swallow| Command::Refused { status: status::UNKNOWN, swallow, closes: false };
    let invalid = Command::Refused { status: status::INVALID, swallow: 0, closes: true };
    if key + extras.len() > body {
        return Command::Refused { status: status::UNKNOWN, swallow: 0, closes: true };
    }
    if key > MOST_KEY {
        return invalid;
    }
    let value = body - key - extras.len();
    let word = |at: usize| extras[at..].first_chunk().map_or(0, |word| u32::from_be_bytes(*word));
    let long = |at: usize| extras[at..].first_chunk().map_or(0, |word| u64::from_be_bytes(*word));
    match (code, extras.len(), key, value) {
        (GET | GETK, 0, 1.., 0) => Command::Get { with_key: code == GETK },
        (SET | ADD | REPLACE, 8, 1.., _) => {
            let verb = match code {
                _ if header.cas != 0 => Verb::Cas,
                SET => Verb::Set,
                ADD => Verb::Add,
                _ => Verb::Replace,
            };
            Command::Store { verb, flags: word(0), end: word(4) as i32, len: value }
        }
        (APPEND | PREPEND, 0, 1.., _) => {
            let verb = if code == APPEND { Verb::Append } else { Verb::Prepend };
            Command::Store { verb, flags: 0, end: 0, len: value }
        }
        (DELETE, 0, 1.., 0) => Command::Delete,
        (INCREMENT | DECREMENT, 20, 1.., 0) => {
            Command::Count { up: code == INCREMENT, by: long(0), initial: long(8), end: word(16) as i32 }
        }
        (TOUCH, 4, 1.., _) => Command::Touch { end: word(0) as i32 },
        (GAT | GATK, 4, 1.., _) => Command::GetAndTouch { with_key: code == GATK, end: word(0) as i32 },
        (FLUSH, 0, 0, 0) => Command::Flush { delay: 0 },
        (FLUSH, 4, 0, 0) => Command::Flush { delay: word(0) as i32 },
        (STAT, 0, _, _) => Command::Stats,
        (NOOP, 0, 0, 0) => Command::Nothing,
        (VERSION, 0, 0, 0) => Command::Version,
        (QUIT, 0, 0, 0) => Command::Quit,
        (GINNEL_HITS, 0, 0, 0..=MOST_HITS) => Command::Hits { len: value },
        (GINNEL_ECHO, 0, 0, 0..=MOST_ECHO) => Command::Echo { len: value },
        (SASL_LIST, 0, 0, 0) => unknown(0),
        (SASL_AUTH | SASL_STEP, 0, 1.., _) => unknown(value as u32),
        (0..=APPEND | PREPEND | STAT | TOUCH | GAT | GATK | SASL_LIST..=SASL_STEP, ..) => invalid,
        _ => unknown(value as u32),
    }
}
