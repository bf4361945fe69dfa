//! Tells the server which items were found (hits), so that it keeps items that are used. This happens only while the server is
//! short of memory.

use crate::process::lock::Lock;
use crate::system::clock::now;
use ginnel_cache_protocol::Protocol;
use ginnel_cache_protocol::binary::{Header, REQUEST, opcode};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of places for remembered hashes. The place of a hash follows from its value. The server is not told a remembered
/// hash again.
const ENTRIES: usize = 4096;
/// The maximum number of hits in one request. Further hits are left out, because a sample is enough.
const MOST: usize = 256;
/// The shortest time between two such requests, in microseconds.
const BETWEEN: u64 = 10_000;
/// The time after which all remembered hashes are forgotten, so that they can be told again, in microseconds.
const FORGOTTEN: u64 = 1_000_000;
/// How often `note` looks at the clock for remembered keys: once in this number of hits.
const LOOKS: u64 = 64;

/// A request that tells the server of hits, and its length.
pub type Line = ([u8; LINE], usize);
/// The maximum length of the request, in bytes. This is the length of the longest line; a packet of the binary protocol is shorter.
pub const LINE: usize = "ginnel hits\r\n".len() + MOST * " 0123456789abcdef".len();

/// The hits that the server was told, and those that it is still to be told.
pub struct Hits {
    /// The remembered hashes.
    known: [AtomicU64; ENTRIES],
    /// The number of hits.
    count: AtomicU64,
    pending: Lock<Pending>,
}

struct Pending {
    hashes: [u64; MOST],
    len: usize,
    /// When the server may be told next, in microseconds.
    due: u64,
    /// When all remembered hashes are forgotten, in microseconds.
    forget: u64,
}

impl Hits {
    pub fn new() -> Self {
        Self {
            known: [const { AtomicU64::new(0) }; ENTRIES],
            count: AtomicU64::new(0),
            pending: Lock::new(Pending { hashes: [0; MOST], len: 0, due: 0, forget: 0 }),
        }
    }

    /// Notes a hit. Returns true if it is time to tell the server.
    #[cold]
    pub fn note(&self, hash: u64) -> bool {
        let entry = &self.known[(hash >> 20) as usize % ENTRIES];
        let is_new = entry.load(Ordering::Relaxed) != hash;
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if !is_new && !count.is_multiple_of(LOOKS) {
            return false;
        }
        let mut pending = self.pending.lock();
        let now = now();
        if now >= pending.forget {
            pending.forget = now + FORGOTTEN;
            self.known.iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
        }
        let len = pending.len.min(MOST);
        if is_new && len < MOST {
            entry.store(hash, Ordering::Relaxed);
            pending.hashes[len] = hash;
            pending.len = len + 1;
        }
        now >= pending.due && pending.len > 0
    }

    /// Takes the pending hits. Returns the request by which the caller must tell the server, or `None` if none is due.
    #[cold]
    pub fn take(&self, protocol: Protocol) -> Option<Line> {
        let mut pending = self.pending.lock();
        let (now, len) = (now(), pending.len.min(MOST));
        if now < pending.due || len == 0 {
            return None;
        }
        pending.due = now + BETWEEN;
        pending.len = 0;
        let mut line = [0; LINE];
        let mut rest = &mut line[..];
        let hashes = &pending.hashes[..len];
        let mut put = || {
            match protocol {
                Protocol::Text => {
                    rest.write_all(b"ginnel hits")?;
                    hashes.iter().try_for_each(|hash| write!(rest, " {hash:016x}"))?;
                    rest.write_all(b"\r\n")?;
                }
                Protocol::Binary => {
                    let (opcode, body) = (opcode::GINNEL_HITS, len as u32 * 8);
                    rest.write_all(&Header { magic: REQUEST, opcode, body, ..Header::default() }.bytes())?;
                    hashes.iter().try_for_each(|hash| rest.write_all(&hash.to_be_bytes()))?;
                }
            }
            Ok::<_, std::io::Error>(rest.len())
        };
        let left = put().ok()?;
        Some((line, LINE - left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_cache_protocol::binary::HEADER;
    use ginnel_cache_protocol::text::{Parsed, Request, parse};

    #[test]
    fn each_key_is_told_once_in_a_while() {
        let hits = Hits::new();
        let hash = |key: u64| key << 20;
        assert!(hits.note(hash(1)));
        assert!(!hits.note(hash(1)), "known, and the clock is not looked at");
        hits.note(hash(2));
        let (line, len) = hits.take(Protocol::Text).unwrap();
        let Parsed::Request(Request::Hits(words), end) = parse(&line[..len]) else { panic!() };
        assert_eq!((words.count(), end), (2, len));
        assert!(!hits.note(hash(3)), "too soon");
        for key in 4..5000 {
            hits.note(hash(key));
        }
        assert!(hits.take(Protocol::Text).is_none());
        std::thread::sleep(std::time::Duration::from_micros(BETWEEN));
        assert!(hits.note(hash(9000)), "time has passed");
        let (line, len) = hits.take(Protocol::Text).unwrap();
        let Parsed::Request(Request::Hits(words), end) = parse(&line[..len]) else { panic!() };
        assert_eq!((words.count(), end), (MOST, len));
        hits.note(hash(9001));
        std::thread::sleep(std::time::Duration::from_micros(BETWEEN));
        let (packet, len) = hits.take(Protocol::Binary).unwrap();
        let (head, body) = packet[..len].split_at(HEADER);
        assert_eq!((Header::parse(head).unwrap().body as usize, body), (8, &hash(9001).to_be_bytes()[..]));
    }
}
