//! What the journal is made of: each change of the books is one record.

use super::config::{Memory, SegmentSpec, VmSpec};
use crate::pidwatch::Process;
use ginnel_layout::dax::SMALL_PAGE;
use ginnel_layout::{Name, channel};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// One change. The names of variants and fields stand in journals on disk: they may be added to, not changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    /// A daemon has started. First record of a journal; sets all counters.
    Start {
        /// Boot identity of the host.
        boot_id: Hex16,
        /// Counts the daemon's starts.
        generation: u64,
        /// Epoch of the next endpoint.
        next_epoch: u32,
        /// Number of the next listener.
        next_listener: u32,
        /// Number of the next channel.
        next_channel: u64,
    },
    /// A member, new or changed.
    Member {
        /// Its number.
        number: u32,
        /// Its name.
        name: Text,
        /// How it was declared, if at run time.
        runtime: Option<VmSpec>,
        /// Not declared any more: only the number is remembered.
        retired: bool,
    },
    /// A member's number is free for others.
    MemberForgotten {
        /// Its number.
        number: u32,
    },
    /// A VM's QEMU has connected.
    Joined {
        /// The VM.
        member: u32,
        /// Its QEMU.
        qemu: Process,
        /// Members whose doorbells that QEMU has.
        knows: BTreeSet<u32>,
    },
    /// A VM's QEMU has gone. Its endpoints have been declared dead before.
    Left {
        /// The VM.
        member: u32,
    },
    /// The daemons of host and VM have a session.
    Session {
        /// The VM.
        member: u32,
        /// Boot identity of the guest.
        boot_id: Hex16,
        /// Whether the guest can be interrupted.
        interrupts: bool,
    },
    /// A segment, new or changed.
    Segment {
        /// Its name.
        name: Text,
        /// Its uuid.
        uuid: Hex16,
        /// Its bytes.
        size: u64,
        /// Who shares it, readers among them.
        members: BTreeSet<u32>,
        /// Which of them may only read.
        #[serde(default)]
        readers: BTreeSet<u32>,
        /// By which kind of device it comes to VMs. There was only one before this was written.
        #[serde(default = "only_bar")]
        memory: Memory,
        /// Unit in which it may be mapped.
        #[serde(default = "only_4k")]
        page: u32,
        /// The part of a file that it is, if it shares one with other slices.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        part: Option<FilePart>,
        /// How it was declared, if at run time.
        runtime: Option<SegmentSpec>,
    },
    /// A segment is gone. Its endpoints have been declared dead before.
    SegmentRemoved {
        /// Its name.
        name: Text,
    },
    /// A process has attached.
    Attach(Attach),
    /// An endpoint is gone.
    Dead {
        /// Its number.
        endpoint: u32,
    },
    /// Somebody listens.
    Listen {
        /// Number of the listener.
        listener: u32,
        /// Whose it is.
        endpoint: u32,
        /// At which name.
        name: Text,
        /// Kind of its channels.
        kind: u32,
        /// How many may wait.
        backlog: u32,
        /// Smallest ring.
        capacity: u64,
    },
    /// Nobody listens there any more.
    Unlisten {
        /// Number of the listener.
        listener: u32,
    },
    /// A channel.
    Channel(Channel),
    /// The acceptor has taken a channel.
    Accepted {
        /// Its number.
        channel: u64,
    },
    /// One side has closed a channel.
    Closed {
        /// Its number.
        channel: u64,
        /// Which side.
        initiator: bool,
    },
}

fn only_bar() -> Memory {
    Memory::Bar
}

fn only_4k() -> u32 {
    SMALL_PAGE
}

/// A part of a file: as long as the segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePart {
    /// The file.
    pub file: PathBuf,
    /// Where in it.
    pub offset: u64,
}

/// A process has attached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attach {
    /// Number of the endpoint.
    pub endpoint: u32,
    /// Its epoch.
    pub epoch: u32,
    /// Its token.
    pub token: Hex16,
    /// Its member.
    pub member: u32,
    /// Its segment.
    pub segment: Text,
    /// What it calls itself.
    pub name: Text,
    /// Its doorbell vector.
    pub vector: u32,
    /// Its process.
    pub process: Process,
    /// Its user.
    pub uid: u32,
}

/// A channel, as long as a side of it may touch its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Channel {
    /// Its number.
    pub number: u64,
    /// In which segment.
    pub segment: Text,
    /// The listener that it was opened to.
    pub listener: u32,
    /// Who has opened it.
    pub initiator: Side,
    /// Who was listening.
    pub acceptor: Side,
    /// Where its block lies.
    pub offset: u64,
    /// Data bytes of each ring.
    pub capacity: u64,
    /// Kind of its rings.
    pub kind: u32,
    /// The initiator's own number for its request.
    pub nonce: u64,
    /// The acceptor has taken it.
    pub accepted: bool,
    /// A side cannot ring the other itself: the daemon passes on.
    pub relayed: bool,
}

/// One side of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// The endpoint.
    pub endpoint: u32,
    /// Its epoch.
    pub epoch: u32,
    /// Its member.
    pub member: u32,
    /// It has closed the channel, or has died.
    pub closed: bool,
}

impl Channel {
    /// Bytes of its block. The capacity is valid in all channels of the books.
    pub fn block_len(&self) -> u64 {
        channel::footprint(self.capacity as usize) as u64
    }

    /// One side.
    pub fn side(&self, initiator: bool) -> &Side {
        if initiator { &self.initiator } else { &self.acceptor }
    }
}

/// A name, written as text. May be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text(pub Name);

impl Serialize for Text {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.as_str())
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        if text.is_empty() {
            return Ok(Self(Name::NONE));
        }
        Name::new(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

/// Sixteen bytes, written in hexadecimal.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Hex16(pub [u8; 16]);

// Tokens and uuids are secrets: they do not get into logs.
impl std::fmt::Debug for Hex16 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:02x}..", self.0[0])
    }
}

impl Serialize for Hex16 {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:032x}", u128::from_be_bytes(self.0)))
    }
}

impl<'de> Deserialize<'de> for Hex16 {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        match u128::from_str_radix(&text, 16) {
            Ok(number) if text.len() == 32 => Ok(Self(number.to_be_bytes())),
            _ => Err(serde::de::Error::custom("not 32 hexadecimal digits")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_of_an_older_journal_is_a_bar() {
        let old = r#"{"segment":{"name":"web","uuid":"000102030405060708090a0b0c0d0e0f","size":4194304,
            "members":[0,1],"runtime":{"size":4194304,"members":["host","a"],"page":null}}}"#;
        let Ok(Record::Segment { memory, page, readers, runtime, .. }) = serde_json::from_str(old) else {
            panic!("not read");
        };
        assert_eq!((memory, page, readers.len()), (Memory::Bar, 4096, 0));
        assert_eq!(runtime.map(|spec| spec.members.len()), Some(2));
    }
}
