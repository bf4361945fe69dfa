//! The messages on the channel of a connection.
//!
//! All numbers are little-endian. A message begins with its kind and the version of this format, one byte each:
//!
//! | kind | what follows |
//! |---|---|
//! | 1 REQ | number of the port space (1 byte), source and destination address (19 bytes each), parameters, private data |
//! | 2 REP | parameters, private data |
//! | 3 REJ | reason (2 bytes), private data |
//! | 4 RTU | nothing |
//! | 5 DREQ | nothing |
//! | 6 DREP | nothing |
//!
//! An address is its family (4 or 6), its port, and its 16 bytes, of which IPv4 uses the first four. Parameters are the number of a
//! queue pair and its Q_Key (4 bytes each), then one byte for each of the other fields of [`Parameters`], in their order. Private data
//! extends to the end of the message.

use crate::cm::names::PortSpace;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The maximum length of private data, in bytes.
pub const MOST: usize = 255;

/// The maximum length of a message, in bytes.
pub const LARGEST: usize = 3 + 2 * ADDRESS + PARAMETERS + MOST;

const VERSION: u8 = 1;
/// Length of an encoded address, in bytes.
pub(crate) const ADDRESS: usize = 19;
const PARAMETERS: usize = 14;

/// The parameters of a connection that one side sends to the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Number of the queue pair; 0 means that there is none.
    pub queue_pair: u32,
    /// Q_Key for datagrams.
    pub qkey: u32,
    /// How many RDMA READs and atomic operations of the other side this side serves at a time.
    pub responder_resources: u8,
    /// How many RDMA READs and atomic operations of its own this side has in flight at a time.
    pub initiator_depth: u8,
    /// Whether the adapters do end-to-end flow control.
    pub flow_control: u8,
    /// How often to retry a request that the peer does not answer.
    pub retry_count: u8,
    /// How often to retry a request for which the peer has no receive.
    pub rnr_retry_count: u8,
    /// Whether the queue pair has a shared receive queue.
    pub srq: u8,
}

/// A connection request (REQ).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The port space of both addresses.
    pub space: PortSpace,
    /// Address of the requesting side.
    pub from: SocketAddr,
    /// Address that the request is for.
    pub to: SocketAddr,
    /// Parameters of the requesting side's queue pair.
    pub parameters: Parameters,
    /// Private data for the program.
    pub private: Vec<u8>,
}

/// The acceptance of a connection request (REP).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Parameters of the accepting side's queue pair.
    pub parameters: Parameters,
    /// Private data for the program.
    pub private: Vec<u8>,
}

/// A rejection (REJ).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// The reason (InfiniBand Architecture Specification 1.2.1, 12.6.7.2).
    pub reason: u16,
    /// Private data for the program.
    pub private: Vec<u8>,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// REQ.
    Request(Request),
    /// REP.
    Reply(Reply),
    /// REJ.
    Reject(Reject),
    /// RTU: the requesting side is ready to use the connection.
    Ready,
    /// DREQ: this side disconnects.
    Disconnect,
    /// DREP: the answer to a DREQ.
    Disconnected,
}

pub(crate) fn put_address(bytes: &mut Vec<u8>, address: SocketAddr) {
    let (family, raw) = match address.ip() {
        IpAddr::V4(ip) => {
            let mut raw = [0; 16];
            raw[..4].copy_from_slice(&ip.octets());
            (4, raw)
        }
        IpAddr::V6(ip) => (6, ip.octets()),
    };
    bytes.push(family);
    bytes.extend(address.port().to_le_bytes());
    bytes.extend(raw);
}

pub(crate) fn take_address(bytes: &[u8; ADDRESS]) -> Option<SocketAddr> {
    let [family, low, high, raw @ ..] = *bytes;
    let ip = match (family, raw) {
        (4, [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]) => Ipv4Addr::new(a, b, c, d).into(),
        (6, raw) => Ipv6Addr::from(raw).into(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_le_bytes([low, high])))
}

fn put_parameters(bytes: &mut Vec<u8>, parameters: &Parameters) {
    let Parameters {
        queue_pair,
        qkey,
        responder_resources,
        initiator_depth,
        flow_control,
        retry_count,
        rnr_retry_count,
        srq,
    } = *parameters;
    bytes.extend(queue_pair.to_le_bytes());
    bytes.extend(qkey.to_le_bytes());
    bytes.extend([responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, srq]);
}

fn take_parameters(bytes: &[u8; PARAMETERS]) -> Parameters {
    let [a, b, c, d, e, f, g, h, counts @ ..] = *bytes;
    let [responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, srq] = counts;
    Parameters {
        queue_pair: u32::from_le_bytes([a, b, c, d]),
        qkey: u32::from_le_bytes([e, f, g, h]),
        responder_resources,
        initiator_depth,
        flow_control,
        retry_count,
        rnr_retry_count,
        srq,
    }
}

impl Message {
    /// Encodes the message. Private data must not be longer than [`MOST`].
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LARGEST);
        match self {
            Self::Request(Request { space, from, to, parameters, private }) => {
                let number = PortSpace::ALL.iter().position(|other| other == space).unwrap_or(0);
                bytes.extend([1, VERSION, number as u8]);
                put_address(&mut bytes, *from);
                put_address(&mut bytes, *to);
                put_parameters(&mut bytes, parameters);
                bytes.extend(private);
            }
            Self::Reply(Reply { parameters, private }) => {
                bytes.extend([2, VERSION]);
                put_parameters(&mut bytes, parameters);
                bytes.extend(private);
            }
            Self::Reject(Reject { reason, private }) => {
                bytes.extend([3, VERSION]);
                bytes.extend(reason.to_le_bytes());
                bytes.extend(private);
            }
            Self::Ready => bytes.extend([4, VERSION]),
            Self::Disconnect => bytes.extend([5, VERSION]),
            Self::Disconnected => bytes.extend([6, VERSION]),
        }
        bytes
    }

    /// Decodes a message. The bytes are untrusted; returns `None` if they are invalid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let ([kind, VERSION], rest) = bytes.split_first_chunk()? else { return None };
        let private = |rest: &[u8]| (rest.len() <= MOST).then(|| rest.to_vec());
        Some(match kind {
            1 => {
                let (number, rest) = rest.split_first()?;
                let (from, rest) = rest.split_first_chunk()?;
                let (to, rest) = rest.split_first_chunk()?;
                let (parameters, rest) = rest.split_first_chunk()?;
                Self::Request(Request {
                    space: *PortSpace::ALL.get(usize::from(*number))?,
                    from: take_address(from)?,
                    to: take_address(to)?,
                    parameters: take_parameters(parameters),
                    private: private(rest)?,
                })
            }
            2 => {
                let (parameters, rest) = rest.split_first_chunk()?;
                Self::Reply(Reply { parameters: take_parameters(parameters), private: private(rest)? })
            }
            3 => {
                let (reason, rest) = rest.split_first_chunk()?;
                Self::Reject(Reject { reason: u16::from_le_bytes(*reason), private: private(rest)? })
            }
            4 if rest.is_empty() => Self::Ready,
            5 if rest.is_empty() => Self::Disconnect,
            6 if rest.is_empty() => Self::Disconnected,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn encoded_messages_are_decoded_unchanged() {
        let parameters = Parameters {
            queue_pair: 0x12_3456,
            qkey: 7,
            responder_resources: 1,
            initiator_depth: 2,
            flow_control: 3,
            retry_count: 4,
            rnr_retry_count: 5,
            srq: 6,
        };
        for message in [
            Message::Request(Request {
                space: PortSpace::Ib,
                from: "10.0.0.1:5".parse().unwrap(),
                to: "[fd00::1]:65535".parse().unwrap(),
                parameters,
                private: vec![9; MOST],
            }),
            Message::Reply(Reply { parameters, private: vec![] }),
            Message::Reject(Reject { reason: 28, private: vec![1] }),
            Message::Ready,
            Message::Disconnect,
            Message::Disconnected,
        ] {
            let bytes = message.encode();
            assert!(bytes.len() <= LARGEST);
            assert_eq!(Message::decode(&bytes), Some(message));
        }
    }

    proptest! {
        #[test]
        fn each_message_has_only_one_encoding(bytes in proptest::collection::vec(any::<u8>(), 0..400), kind in 0..8_u8) {
            let mut bytes = bytes;
            if let [first, second, ..] = &mut bytes[..] {
                (*first, *second) = (kind, VERSION);
            }
            if let Some(message) = Message::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
