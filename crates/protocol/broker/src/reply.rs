//! Writes and reads packets of the attach protocol.

use ginnel_config::Problem;
use ginnel_layout::Name;
use ginnel_layout::wire::{self, ErrorCode, Header, Kind};
use zerocopy::{FromBytes, IntoBytes};

/// The refusal of a request, with a text that says what is wrong, where, and what helps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The code, for programs.
    pub code: ErrorCode,
    /// The text, for people.
    pub text: String,
}

impl Refusal {
    /// Makes a refusal.
    pub fn new(code: ErrorCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self::new(ErrorCode::INVALID, problem.to_string())
    }
}

/// Makes the refusal for a segment whose memory is lost.
pub fn broken(segment: &Name) -> Refusal {
    let text = format!(
        "the memory of segment {segment} is broken (its file was truncated or replaced): stop its VMs, remove the \
         segment and create it anew"
    );
    Refusal::new(ErrorCode::BROKEN, text)
}

/// Checks a name that a client has sent.
pub fn checked(name: &Name, what: &str) -> Result<Name, Refusal> {
    match name.checked() {
        Ok(_) => Ok(*name),
        Err(error) => Err(Refusal::new(ErrorCode::PROTOCOL, format!("the {what}'s name: {error}"))),
    }
}

/// Parses the body of a request.
pub fn body<T: FromBytes>(bytes: &[u8]) -> Result<T, Refusal> {
    wire::body(bytes).ok_or_else(|| {
        let text = match size_of::<T>() {
            0 => format!(
                "this request takes no body, and {} bytes follow its header: send the header alone",
                bytes.len()
            ),
            expected => format!("a body of {} bytes where {expected} are expected", bytes.len()),
        };
        Refusal::new(ErrorCode::PROTOCOL, text)
    })
}

/// Makes a packet.
pub fn packet(kind: Kind, request: u32, body: &[u8]) -> Vec<u8> {
    let mut packet = Header { kind, flags: 0, request }.as_bytes().to_vec();
    packet.extend_from_slice(body);
    packet
}

/// Makes an `ERROR` packet.
pub fn refusal(request: u32, refusal: &Refusal) -> Vec<u8> {
    let mut packet = packet(Kind::ERROR, request, wire::Error { code: refusal.code, reserved: 0 }.as_bytes());
    let room = wire::MAX_PACKET - packet.len();
    packet.extend_from_slice(&refusal.text.as_bytes()[..boundary(&refusal.text, room)]);
    packet
}

/// Makes `TEXT` packets that together carry `text`. Each is valid UTF-8 by itself.
pub fn text(request: u32, mut text: &str) -> Vec<Vec<u8>> {
    let room = wire::MAX_PACKET - size_of::<Header>();
    let mut packets = Vec::new();
    loop {
        let (now, later) = text.split_at(boundary(text, room));
        let flags = if later.is_empty() { 0 } else { Header::MORE };
        let mut packet = Header { kind: Kind::TEXT, flags, request }.as_bytes().to_vec();
        packet.extend_from_slice(now.as_bytes());
        packets.push(packet);
        if later.is_empty() {
            return packets;
        }
        text = later;
    }
}

/// Makes `TEXT` packets and a final `PAGE` packet that together carry a page of a status.
pub fn page(request: u32, next: &wire::Inspect, text: &str) -> Vec<Vec<u8>> {
    let room = wire::MAX_PACKET - size_of::<Header>();
    let (mut packets, mut rest) = (Vec::new(), text);
    while rest.len() > room - size_of::<wire::Inspect>() {
        let (now, later) = rest.split_at(boundary(rest, room));
        let mut packet = Header { kind: Kind::TEXT, flags: Header::MORE, request }.as_bytes().to_vec();
        packet.extend_from_slice(now.as_bytes());
        packets.push(packet);
        rest = later;
    }
    let mut last = packet(Kind::PAGE, request, next.as_bytes());
    last.extend_from_slice(rest.as_bytes());
    packets.push(last);
    packets
}

/// Returns the last boundary between two characters that is not behind `most`.
fn boundary(text: &str, most: usize) -> usize {
    (0..=most.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// Makes the refusal for a record that the journal does not accept.
pub fn unrecorded() -> Refusal {
    let text = "the host's daemon cannot record this, because its journal has no room or cannot be written: make room in \
                daemon.state_dir on the host (its log says more), then try again";
    Refusal::new(ErrorCode::UNRECORDED, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_between_characters_and_come_whole() {
        for n in [0, 1, 8183, 8184, 8185, 20_000] {
            let long = "ä".repeat(n);
            let packets = text(7, &long);
            let joined: String = packets
                .iter()
                .map(|packet| {
                    assert!(packet.len() <= wire::MAX_PACKET);
                    let (header, body) = wire::split(packet).unwrap();
                    assert_eq!((header.kind, header.request), (Kind::TEXT, 7));
                    std::str::from_utf8(body).unwrap()
                })
                .collect();
            assert_eq!(joined, long);
            let more = packets.iter().filter(|p| wire::split(p).unwrap().0.flags == Header::MORE).count();
            assert_eq!(more, packets.len() - 1);
        }
    }

    #[test]
    fn a_refusal_fits_into_a_packet() {
        let packet = refusal(1, &Refusal::new(ErrorCode::LIMIT, "ä".repeat(9000)));
        assert!(packet.len() <= wire::MAX_PACKET);
        let (error, text) = wire::Error::read_from_prefix(wire::split(&packet).unwrap().1).unwrap();
        assert_eq!(error.code, ErrorCode::LIMIT);
        assert!(std::str::from_utf8(text).is_ok());
    }
}
