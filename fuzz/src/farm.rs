//! Translates bytes into events of a farm.

use ginnel_layout::farm::{Header, Kind, VERSION};
use ginnel_layout::ring::footprint;
use zerocopy::IntoBytes;

/// The number of data bytes of a ring.
pub const CAPACITY: usize = 4096;

/// An event of a farm.
pub enum Event {
    /// The manager gives the worker a piece.
    Give,
    /// The manager takes back the last piece.
    TakeBack,
    /// The other side sends this message.
    Say(Vec<u8>),
    /// The other side writes this word at this offset.
    Scribble(usize, u64),
    /// The manager receives the messages that have arrived.
    Hear,
}

/// Parses events of twelve bytes: the kind of event, which of two workers, and three numbers. Each item is the worker and the
/// event.
pub fn events(input: &[u8]) -> impl Iterator<Item = (usize, Event)> {
    input.as_chunks::<12>().0.iter().take(1000).map(|&[what, kind, a0, a1, n @ ..]| {
        let (small, number) = (u16::from_le_bytes([a0, a1]), u64::from_le_bytes(n));
        let event = match what >> 1 {
            0..=40 => Event::Give,
            41..=44 => Event::TakeBack,
            45..=79 => {
                // The message is correct except for its kind and piece, and perhaps its version, and has any length.
                let version = if kind & 0x80 == 0 { VERSION } else { u32::from(kind) };
                let header =
                    Header { kind: Kind(u32::from(kind & 7)), version, piece: number, offset: number };
                let mut message = header.as_bytes().to_vec();
                message.resize(usize::from(small) % 1016, b'x');
                Event::Say(message)
            }
            80..=85 => Event::Say(n.repeat(usize::from(small) % 100)),
            // The words in front of the data are hit more often than the rest.
            86..=89 => Event::Scribble(usize::from(small) * 8 % 0x240, number),
            90..=92 => Event::Scribble(usize::from(small) * 8 % footprint(CAPACITY), number),
            _ => Event::Hear,
        };
        (usize::from(what & 1), event)
    })
}

/// Returns an event as bytes, for seeds.
pub fn bytes(what: u8, who: u8, kind: u8, small: u16, number: u64) -> Vec<u8> {
    [&[what << 1 | who, kind][..], &small.to_le_bytes(), &number.to_le_bytes()].concat()
}
