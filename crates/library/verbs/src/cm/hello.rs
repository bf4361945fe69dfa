//! What the two sides of an rsocket exchange on their stream before the program's bytes.
//!
//! The side that connects sends a hello, and the program's bytes directly behind it. If it offers memory for I/O maps, it waits for an
//! answer first, so that both queue pairs are connected before either program uses them. A hello without an offer is not answered.
//!
//! All numbers are little-endian. A hello consists of a magic number (8 bytes), the source and the destination address (19 bytes each,
//! as in [`crate::cm::message`]), and an offer. An answer consists of the magic number and an offer. An offer is the number of a queue
//! pair (4 bytes; 0 means no offer, and the rest is 0 then), and the table of I/O maps: its address (8 bytes), its key and its number of
//! entries (4 bytes each).

use crate::cm::message::{ADDRESS, put_address, take_address};
use std::net::SocketAddr;

const MARK: [u8; 8] = *b"rsocket\x01";
const OFFER: usize = 20;

/// The table to which the other side writes its I/O maps, and the queue pair by which it does so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// Number of the queue pair; 0 means that there is no offer.
    pub queue_pair: u32,
    /// Address of the table.
    pub table: u64,
    /// Key of the region that contains the table.
    pub key: u32,
    /// Number of entries of the table.
    pub entries: u32,
}

/// The first message of an rsocket's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Address of the side that connects.
    pub from: SocketAddr,
    /// Address that it connects to.
    pub to: SocketAddr,
    /// The offer for I/O maps, if there is one.
    pub offer: Option<Offer>,
}

/// The answer to a hello with an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The offer of the accepting side; `None` if it does not support I/O maps.
    pub offer: Option<Offer>,
}

fn put_offer(bytes: &mut Vec<u8>, offer: Option<Offer>) {
    let Offer { queue_pair, table, key, entries } = offer.unwrap_or_default();
    bytes.extend(queue_pair.to_le_bytes());
    bytes.extend(table.to_le_bytes());
    bytes.extend(key.to_le_bytes());
    bytes.extend(entries.to_le_bytes());
}

/// Decodes an offer. Returns `None` if the bytes are invalid, and `Some(None)` if they say that there is no offer.
fn take_offer(bytes: &[u8; OFFER]) -> Option<Option<Offer>> {
    let (queue_pair, rest) = bytes.split_first_chunk()?;
    let (table, rest) = rest.split_first_chunk()?;
    let (key, rest) = rest.split_first_chunk()?;
    let offer = Offer {
        queue_pair: u32::from_le_bytes(*queue_pair),
        table: u64::from_le_bytes(*table),
        key: u32::from_le_bytes(*key),
        entries: u32::from_le_bytes(*rest.first_chunk()?),
    };
    match offer.queue_pair {
        0 => (offer == Offer::default()).then_some(None),
        _ => Some(Some(offer)),
    }
}

impl Hello {
    /// Length of an encoded hello, in bytes.
    pub const LEN: usize = MARK.len() + 2 * ADDRESS + OFFER;

    /// Encodes the hello.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MARK.to_vec();
        put_address(&mut bytes, self.from);
        put_address(&mut bytes, self.to);
        put_offer(&mut bytes, self.offer);
        bytes
    }

    /// Decodes a hello. The bytes are untrusted; returns `None` if they are invalid.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let (mark, rest) = bytes.split_first_chunk()?;
        let (from, rest) = rest.split_first_chunk()?;
        let (to, rest) = rest.split_first_chunk()?;
        let offer = take_offer(rest.first_chunk()?)?;
        let hello = Self { from: take_address(from)?, to: take_address(to)?, offer };
        (*mark == MARK).then_some(hello)
    }
}

impl Answer {
    /// Length of an encoded answer, in bytes.
    pub const LEN: usize = MARK.len() + OFFER;

    /// Encodes the answer.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MARK.to_vec();
        put_offer(&mut bytes, self.offer);
        bytes
    }

    /// Decodes an answer. The bytes are untrusted; returns `None` if they are invalid.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let (mark, rest) = bytes.split_first_chunk()?;
        let offer = take_offer(rest.first_chunk()?)?;
        (*mark == MARK).then_some(Self { offer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn encoded_messages_are_decoded_unchanged() {
        let offer = Offer { queue_pair: 0x12_3456, table: 0x7fff_0000_1000, key: 9, entries: 128 };
        for offer in [None, Some(offer)] {
            for [from, to] in [["10.0.0.1:5", "10.0.0.2:65535"], ["[fd00::1]:1", "[::1]:7471"]] {
                let hello = Hello { from: from.parse().unwrap(), to: to.parse().unwrap(), offer };
                let bytes = hello.encode();
                assert_eq!(Hello::decode(bytes.first_chunk().unwrap()), Some(hello));
                assert_eq!(bytes.len(), Hello::LEN);
            }
            let bytes = Answer { offer }.encode();
            assert_eq!(Answer::decode(bytes.first_chunk().unwrap()), Some(Answer { offer }));
            assert_eq!(bytes.len(), Answer::LEN);
        }
    }

    proptest! {
        #[test]
        fn each_message_has_only_one_encoding(bytes: [u8; Hello::LEN], families in prop::array::uniform2(0..8_u8), is_marked: bool) {
            let mut bytes = bytes;
            if is_marked {
                bytes[..MARK.len()].copy_from_slice(&MARK);
            }
            (bytes[MARK.len()], bytes[MARK.len() + ADDRESS]) = (families[0], families[1]);
            if let Some(hello) = Hello::decode(&bytes) {
                prop_assert_eq!(hello.encode(), bytes.to_vec());
            }
            let mut answer = [0; Answer::LEN];
            answer.copy_from_slice(&bytes[..Answer::LEN]);
            if let Some(heard) = Answer::decode(&answer) {
                prop_assert_eq!(heard.encode(), answer.to_vec());
            }
        }
    }
}
