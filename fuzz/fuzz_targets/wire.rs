//! Every packet and every header that another party writes: each is read as every structure that exists, and compared with the
//! bytes from which it was read.
#![no_main]

use ginnel_layout::control::{ControlHeader, GuestLine, HostLine};
use ginnel_layout::ring::{RecordHeader, RecordKind, max_message, record_span};
use ginnel_layout::segment::{SegmentHeader, usable_size};
use ginnel_layout::{Name, relay, wire};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Checks that `bytes` are a `T` exactly if they have its length, and that the `T` is written as it was read.
fn body<T: FromBytes + IntoBytes + Immutable + KnownLayout>(bytes: &[u8]) -> Option<T> {
    let value = wire::body::<T>(bytes);
    assert_eq!(value.is_some(), bytes.len() == size_of::<T>());
    let value = value?;
    assert_eq!(value.as_bytes(), bytes);
    Some(value)
}

fn name(name: Name) {
    match name.checked() {
        Ok(text) => {
            assert!(!text.is_empty() && text.len() <= Name::MAX && !text.contains(['/', '\0', ' ', '\n']));
            assert_eq!(Name::new(text), Ok(name), "one text, two names");
            assert_eq!(name.as_str(), text);
        }
        Err(error) => {
            assert!(!format!("{error}").is_empty());
            assert!(name.is_none() || name.as_str() == "?");
        }
    }
}

fn packet(bytes: &[u8]) {
    let split = wire::split(bytes);
    assert_eq!(split.is_some(), bytes.len() >= size_of::<wire::Header>());
    let Some((header, rest)) = split else { return };
    assert_eq!([header.as_bytes(), rest].concat(), bytes);
    // A body of any kind may be tried, whatever the header says.
    body::<wire::Hello>(rest);
    if let Some(b) = body::<wire::HelloOk>(rest) {
        name(b.name);
    }
    if let Some(b) = body::<wire::Attach>(rest) {
        name(b.segment);
        name(b.name);
    }
    body::<wire::Attached>(rest);
    if let Some(b) = body::<wire::Listen>(rest) {
        name(b.name);
    }
    body::<wire::Listening>(rest);
    if let Some(b) = body::<wire::Connect>(rest) {
        name(b.name);
        let capacities = b.capacities();
        if capacities.are_valid() {
            let ((a, b), len) = (capacities.rings(true), capacities.footprint());
            let capacity = capacities.initiator as usize;
            assert!(a < b && b < len && max_message(capacity) < capacity);
        }
    }
    if let Some(b) = body::<wire::Channel>(rest) {
        name(b.peer_name);
        name(b.peer_member_name);
    }
    body::<wire::ChannelRef>(rest);
    body::<wire::ChannelSide>(rest);
    body::<wire::Hold>(rest);
    body::<wire::SocketReport>(rest);
    body::<wire::SocketFacts>(rest);
    body::<wire::SocketKey>(rest);
    body::<wire::SocketMatched>(rest);
    body::<wire::SocketStays>(rest);
    body::<wire::Error>(rest);
}

fn relayed(bytes: &[u8]) {
    let Ok((envelope, rest)) = relay::Envelope::read_from_prefix(bytes) else { return };
    if envelope.kind == relay::RelayKind::DATA {
        packet(rest);
    }
    body::<relay::Open>(rest);
    for chunk in rest.chunks(size_of::<relay::Segment>()) {
        if let Some(b) = body::<relay::Segment>(chunk) {
            name(b.name);
            let size = usable_size(b.size, true);
            assert!(size.is_none_or(|s| s.is_power_of_two() && s >= b.size));
        }
    }
    for chunk in rest.chunks(size_of::<relay::Endpoint>()) {
        body::<relay::Endpoint>(chunk);
    }
    if let Some(b) = body::<relay::Mapped>(rest) {
        name(b.name);
    }
}

fn record(bytes: &[u8]) {
    let Ok((word, rest)) = u64::read_from_prefix(bytes) else { return };
    let header = RecordHeader(word);
    assert!(header.kind().0 < 16 && header.len() < 1 << RecordHeader::LEN_BITS);
    assert!(record_span(header.len()) >= header.len() && record_span(header.len()) % 64 == 0);
    let Ok((position, _)) = u64::read_from_prefix(rest) else { return };
    let position = position & !63;
    let made = RecordHeader::new(RecordKind(word as u8), position, header.len());
    assert!(made.0 != 0 && made.is_for(position) && !made.is_for(position.wrapping_add(64)));
    assert_eq!((made.kind().0, made.len()), (word as u8 & 15, header.len()));
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&choice, bytes)) = input.split_first() else { return };
    match choice % 4 {
        0 => packet(bytes),
        1 => relayed(bytes),
        2 => record(bytes),
        _ => {
            if let Some(b) = body::<ControlHeader>(bytes) {
                name(b.name);
            }
            if let Some(b) = body::<SegmentHeader>(bytes) {
                name(b.name);
            }
            body::<HostLine>(bytes);
            body::<GuestLine>(bytes);
            if let Some(b) = body::<Name>(bytes) {
                name(b);
            }
        }
    }
});
