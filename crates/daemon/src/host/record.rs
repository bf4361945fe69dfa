//! What the journal is made of: each change of the books is one record. What a daemon does with a record that it does not
//! know is said in [`super::journal`].

use super::config::{Memory, SegmentSpec, VmSpec};
use super::doorbells::Told;
use super::handles::{Grants, Handles};
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
        /// An epoch that no endpoint has had. Of use to releases that had one count of epochs for all numbers.
        next_epoch: u32,
        /// Number of the next listener, if it is free.
        next_listener: u32,
        /// Number of the next channel.
        next_channel: u64,
        /// Number of the next synchronisation object or block.
        #[serde(default)]
        next_object: u64,
        /// Numbers that endpoints have had, and the next epoch of each.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        epochs: Vec<(u32, u32)>,
        /// [`super::journal::FORMAT`] of the daemon that wrote this journal. 0 in journals that are older than the field.
        #[serde(default)]
        format: u32,
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
        /// Members of whose doorbells that QEMU has some.
        knows: BTreeSet<u32>,
        /// Which they are. Journals of before this was written do not say.
        #[serde(default)]
        told: Told,
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
    /// A segment's file was truncated while it was in use, or it is whole again because nobody uses it any more.
    SegmentCut {
        /// Its name.
        name: Text,
        /// Which of the two.
        cut: bool,
    },
    /// A segment is gone. Its endpoints have been declared dead before.
    SegmentRemoved {
        /// Its name.
        name: Text,
    },
    /// Which doorbell vectors of a member serve its programs in a segment.
    Vectors {
        /// The segment.
        segment: Text,
        /// The member.
        member: u32,
        /// Its vectors.
        vectors: Vec<u32>,
    },
    /// A process has attached.
    Attach(Attach),
    /// Another process owns an endpoint too.
    OwnerJoined {
        /// Number of the endpoint.
        endpoint: u32,
        /// The process.
        process: Process,
    },
    /// A process owns an endpoint no more.
    OwnerGone {
        /// Number of the endpoint.
        endpoint: u32,
        /// The process.
        process: Process,
    },
    /// An endpoint ends, and what it has is given back by the records that follow; the last of them is `dead`.
    Ending {
        /// Its number.
        endpoint: u32,
    },
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
    /// An endpoint has a readiness board.
    Board(Board),
    /// A synchronisation object.
    Sync(SyncObject),
    /// It has another user.
    SyncOpened {
        /// Number of the object.
        object: u64,
        /// The user.
        user: SyncUser,
    },
    /// A user has gone, and the object with its last one, unless it is persistent and has its name.
    SyncClosed {
        /// Number of the object.
        object: u64,
        /// The user's slot.
        slot: u32,
        /// It has died. Left out by earlier daemons, which recorded the end of its endpoint as a whole.
        #[serde(default, skip_serializing_if = "is_false")]
        died: bool,
    },
    /// Its name is gone.
    SyncUnlinked {
        /// Number of the object.
        object: u64,
    },
    /// A block.
    Block(Block),
    /// It has got a name.
    BlockLinked {
        /// Number of the block.
        block: u64,
        /// The name.
        name: Text,
    },
    /// Its name is gone, and the block if nobody has it open.
    BlockUnlinked {
        /// Number of the block.
        block: u64,
    },
    /// Somebody has opened it.
    BlockOpened {
        /// Number of the block.
        block: u64,
        /// The handle.
        handle: BlockHandle,
    },
    /// A handle is closed, and with the last one a block without a name is gone.
    BlockClosed {
        /// Number of the handle.
        handle: u64,
    },
    /// It is longer, or shorter.
    BlockResized {
        /// Number of the block.
        block: u64,
        /// Bytes wished for.
        size: u64,
        /// Bytes that it has.
        span: u64,
    },
    /// Somebody may do something else with it.
    BlockGranted {
        /// Number of the block.
        block: u64,
        /// Who, and what.
        grant: BlockGrant,
    },
    /// Whoever has a handle knows that it has been left less.
    BlockAcked {
        /// Number of the handle.
        handle: u64,
    },
}

impl Record {
    /// A VM's QEMU has connected, and has these doorbells.
    pub fn joined(member: u32, qemu: Process, told: Told) -> Self {
        Self::Joined { member, qemu, knows: told.keys().copied().collect(), told }
    }

    /// Whether it gives somebody something. A successor that does not know of it would give the same to somebody else, so
    /// it must be in the journal before anybody is told. The other records end something or change a detail: a
    /// successor that does not know of them believes too much to be in use, which is safe.
    pub fn gives(&self) -> bool {
        match self {
            Self::Member { .. }
            | Self::Joined { .. }
            | Self::Segment { .. }
            | Self::Vectors { .. }
            | Self::Attach(_)
            | Self::Listen { .. }
            | Self::Channel(_)
            | Self::Board(_)
            | Self::Sync(_)
            | Self::SyncOpened { .. }
            | Self::Block(_)
            | Self::BlockLinked { .. }
            | Self::BlockOpened { .. }
            | Self::BlockResized { .. }
            | Self::BlockGranted { .. } => true,
            Self::Start { .. }
            | Self::MemberForgotten { .. }
            | Self::Left { .. }
            | Self::Session { .. }
            | Self::SegmentCut { .. }
            | Self::SegmentRemoved { .. }
            // It must not be taken for dead, so this is kept even if it is not in the journal yet.
            | Self::OwnerJoined { .. }
            | Self::OwnerGone { .. }
            | Self::Ending { .. }
            | Self::Dead { .. }
            | Self::Unlisten { .. }
            | Self::Accepted { .. }
            | Self::Closed { .. }
            | Self::SyncClosed { .. }
            | Self::SyncUnlinked { .. }
            | Self::BlockUnlinked { .. }
            | Self::BlockClosed { .. }
            | Self::BlockAcked { .. } => false,
        }
    }
}

fn only_bar() -> Memory {
    Memory::Bar
}

fn is_false(value: &bool) -> bool {
    !value
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
    /// The initiator's user, who pays for it. Journals of before this was written have none; it is root's then.
    #[serde(default)]
    pub uid: u32,
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

/// A readiness board: a page of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Board {
    /// The endpoint whose it is, or was.
    pub endpoint: u32,
    /// That endpoint's epoch.
    pub epoch: u32,
    /// In which segment.
    pub segment: Text,
    /// The endpoint's member, ...
    pub member: u32,
    /// ... and user, which are charged for it.
    pub uid: u32,
    /// Where it lies.
    pub offset: u64,
    /// The endpoint's own number for its request.
    pub nonce: u64,
}

/// A synchronisation object: a page of a segment, and who uses it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SyncObject {
    /// Its number.
    pub number: u64,
    /// In which segment.
    pub segment: Text,
    /// Its name; none once it is unlinked.
    pub name: Text,
    /// [`ginnel_layout::sync::SyncKind`].
    pub kind: u32,
    /// Most permits, or parties.
    pub limit: u32,
    /// Where its page lies.
    pub offset: u64,
    /// It stays without users.
    pub persistent: bool,
    /// Its last user has died, so it stays until it was used again: what a lock says of its dead owner must not get lost.
    #[serde(default)]
    pub bereaved: bool,
    /// Member of who has made it, and pays for it.
    pub member: u32,
    /// Its user. Journals of before this was written have none; it is root's then.
    #[serde(default)]
    pub uid: u32,
    /// Epoch of its next user.
    pub next_epoch: u16,
    /// Its users, by slot.
    pub users: Vec<SyncUser>,
}

/// A user of a synchronisation object: an open handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncUser {
    /// Its slot.
    pub slot: u32,
    /// Epoch of the slot.
    pub epoch: u16,
    /// Whose handle it is.
    pub endpoint: u32,
    /// The endpoint's own number for its request.
    pub nonce: u64,
}

/// A block of a segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// Its number.
    pub number: u64,
    /// In which segment.
    pub segment: Text,
    /// Its name, if it has one.
    pub name: Text,
    /// The endpoint that has made it.
    pub owner: u32,
    /// That endpoint's epoch.
    pub owner_epoch: u32,
    /// Its member, which pays for the block.
    pub member: u32,
    /// Its user.
    pub uid: u32,
    /// Where it lies.
    pub offset: u64,
    /// Bytes wished for.
    pub size: u64,
    /// Bytes that it has.
    pub span: u64,
    /// Its name outlives the endpoint.
    pub persistent: bool,
    /// When it was made, in seconds since 1970.
    pub made: u64,
    /// What those may ([`ginnel_layout::wire::Rights`]) who are not in `grants`.
    pub others: u32,
    /// What some may.
    #[serde(default, skip_serializing_if = "Grants::is_empty")]
    pub grants: Grants,
    /// Who has it open.
    pub handles: Handles,
}

/// What a member or an endpoint may do with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockGrant {
    /// The member.
    pub member: u32,
    /// Number of one of its endpoints. Journals of before this was written have none: there, the epoch tells which.
    #[serde(default)]
    pub endpoint: u32,
    /// Epoch of that endpoint; 0 if the grant is to all others of the member.
    pub epoch: u32,
    /// What it may do.
    pub rights: u32,
}

/// An open handle of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockHandle {
    /// Its number.
    pub number: u64,
    /// Whose it is.
    pub endpoint: u32,
    /// What it can do: what its library has mapped.
    pub rights: u32,
    /// What it has been left, until its library says that it has heard of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<u32>,
    /// The endpoint's own number for its request.
    pub nonce: u64,
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
