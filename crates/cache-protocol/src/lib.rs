//! The protocol of memcached 1.6, as bytes: no sockets, no memory of items.
//!
//! ```text
//! number   numbers as C reads them, which is what memcached does
//! key      keys in base64
//! text     requests in text, the meta ones included
//! binary   requests in the binary protocol, and its answers
//! returned words in the answers to meta requests
//! answer   where the answer to a request ends: for clients and those between a client and a server
//! follow   a connection, from between a client and a server
//! ```
//!
//! A request has a head, and the head says how many bytes of a value follow it. [`text::parse`] and [`binary::parse`] need the whole head, look at each byte a bounded
//! number of times, and allocate nothing. What they cannot make sense of becomes a request as well ([`text::Request::Refused`]): it says what
//! memcached answers.

pub mod answer;
pub mod binary;
pub mod follow;
pub mod key;
pub mod number;
pub mod returned;
pub mod text;

/// The longest key, in bytes.
pub const MOST_KEY: usize = 250;

/// The version of memcached whose answers these are.
pub const VERSION: &str = "1.6.18";

/// Which of the two protocols a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Lines.
    Text,
    /// Packets.
    Binary,
}

impl Protocol {
    /// The one whose first byte is this.
    pub const fn of(first: u8) -> Self {
        if first == binary::REQUEST { Self::Binary } else { Self::Text }
    }
}

/// How a value is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// In any case.
    Set,
    /// Only if there is none.
    Add,
    /// Only if there is one.
    Replace,
    /// Behind the one that is there.
    Append,
    /// In front of the one that is there.
    Prepend,
    /// Only if the one that is there has the version that the client names.
    Cas,
}
