//! The question to a server, whether it is a cache.

use ginnel_cache_protocol::Protocol;
use ginnel_cache_protocol::answer::{Expected, Scan};

pub const KEY: &[u8] = b"ginnel";

/// The question to a server, and what has come of the answer.
pub struct Asked {
    pub protocol: Protocol,
    pub scan: Scan,
    /// The bytes of the answer that have come.
    pub text: Vec<u8>,
}

impl Asked {
    pub fn new(protocol: Protocol) -> Self {
        let expected = if protocol == Protocol::Text { Expected::Stats } else { Expected::Packets };
        Self { protocol, scan: Scan::new(expected), text: Vec::new() }
    }
}
