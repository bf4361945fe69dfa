//! The protocol of memcached 1.6, as bytes, without sockets and without a store of items.
//!
//! ```text
//! number   numbers as C reads them, which is what memcached does
//! key      keys in base64
//! text     requests in text, the meta ones included
//! binary   requests in the binary protocol, and its answers
//! returned words in the answers to meta requests
//! answer   where the answer to a request ends, for a client or for a program between a client and a server
//! first    whether the first bytes of a connection are memcached's
//! follow   the state of a connection, for a program between the client and the server
//! ```
//!
//! A request has a head, and the head says how many bytes of a value follow it. [`text::parse`] and [`binary::parse`]
//! need the whole head, look at each byte a bounded number of times, and allocate nothing. An invalid request also
//! becomes a request ([`text::Request::Refused`]), which contains memcached's answer to it.

pub mod answer;
pub mod binary;
pub mod first;
pub mod follow;
pub mod key;
pub mod number;
pub mod returned;
pub mod text;

/// The longest key, in bytes.
pub const MOST_KEY: usize = 250;

/// The version of memcached that these answers imitate.
pub const VERSION: &str = "1.6.18";

/// The two protocols that a connection can speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// The text protocol, with lines.
    Text,
    /// The binary protocol, with packets.
    Binary,
}

impl Protocol {
    /// Returns the protocol whose requests begin with this byte.
    pub const fn of(first: u8) -> Self {
        if first == binary::REQUEST { Self::Binary } else { Self::Text }
    }
}

/// The condition and the manner in which a value is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Always.
    Set,
    /// Only if there is no such item.
    Add,
    /// Only if there is such an item.
    Replace,
    /// Appended to the existing value.
    Append,
    /// Put before the existing value.
    Prepend,
    /// Only if the existing item has the version that the client names.
    Cas,
}
