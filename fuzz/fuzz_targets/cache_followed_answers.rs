//! Answers of a server to requests that were passed on to it, as parsed by a process between the server and its client:
//! complete and in pieces.
#![no_main]

use ginnel_cache_protocol::Protocol;
use ginnel_cache_protocol::follow::{Answers, Awaited, Lost};
use libfuzzer_sys::fuzz_target;

/// Chooses the expected answer by a byte.
fn awaited(protocol: Protocol, byte: u8) -> Awaited {
    match (protocol, byte % 7) {
        (Protocol::Text, 0) => Awaited::Nothing,
        (Protocol::Text, 1) => Awaited::Line,
        (Protocol::Text, 2) => Awaited::Values,
        (Protocol::Text, 3) => Awaited::Stats,
        (Protocol::Text, 4) => Awaited::Meta,
        (Protocol::Text, 5) => Awaited::QuietMeta,
        (Protocol::Text, _) => Awaited::MetaEnd,
        (Protocol::Binary, 0) => Awaited::QuietPacket,
        (Protocol::Binary, 1) => Awaited::Packets(byte / 7),
        (Protocol::Binary, _) => Awaited::Packet(byte / 7),
    }
}

fn look(mut answers: Answers, said: &[u8], piece: usize) -> Result<bool, Lost> {
    for said in said.chunks(piece) {
        answers.look(said)?;
    }
    Ok(answers.is_idle())
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, rest)) = bytes.split_first() else { return };
    let protocol = if first & 1 == 0 { Protocol::Text } else { Protocol::Binary };
    let (requests, said) = rest.split_at(rest.len().min(usize::from(first >> 1) % 16));
    let mut answers = Answers::new(protocol);
    for byte in requests {
        if answers.expect(awaited(protocol, *byte)).is_err() {
            return;
        }
    }
    assert!(!answers.is_idle() || requests.is_empty());
    let whole = look(answers.clone(), said, said.len().max(1));
    for piece in [1, 3, 17] {
        assert_eq!(look(answers.clone(), said, piece), whole, "{piece}");
    }
});
