//! What the journal is made of: each change of the books is one record. What a daemon does with a record that it does not
//! know is said in [`super::journal`].

use super::config::{MemoryKind, SegmentSpec, VmSpec};
use super::doorbells::Told;
use super::objects::Change;
use crate::pidwatch::Process;
use ginnel_layout::Name;
use ginnel_layout::dax::SMALL_PAGE;
use serde::de::value::{EnumAccessDeserializer, StrDeserializer};
use serde::de::{DeserializeSeed, EnumAccess, VariantAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// One change. The names of variants and fields stand in journals on disk: they may be added to, not changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", remote = "Self")]
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
        memory: MemoryKind,
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
    /// An endpoint lives for a while without owners.
    Hold {
        /// Number of the endpoint.
        endpoint: u32,
        /// What a process has to know to adopt it.
        token: Hex16,
        /// For how long, in milliseconds, from now on or from the start of the daemon.
        millis: u32,
    },
    /// A process has adopted an endpoint that was held.
    Adopted {
        /// Number of the endpoint.
        endpoint: u32,
        /// The token of the hold.
        token: Hex16,
        /// The process.
        process: Process,
    },
    /// A hold has ended.
    HoldEnded {
        /// Number of the endpoint.
        endpoint: u32,
        /// The token of the hold.
        token: Hex16,
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
    /// What happens to the objects of endpoints.
    #[serde(skip)]
    Object(Change),
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
            | Self::Hold { .. }
            | Self::Attach(_) => true,
            Self::Start { .. }
            | Self::MemberForgotten { .. }
            | Self::Left { .. }
            | Self::Session { .. }
            | Self::SegmentCut { .. }
            | Self::SegmentRemoved { .. }
            // It must not be taken for dead, so this is kept even if it is not in the journal yet.
            | Self::OwnerJoined { .. }
            | Self::OwnerGone { .. }
            | Self::Adopted { .. }
            | Self::HoldEnded { .. }
            | Self::Ending { .. }
            | Self::Dead { .. } => false,
            Self::Object(change) => change.gives(),
        }
    }
}

// In the journal, changes of objects stand beside the other records: an object with one member, which is called as the change.
impl Serialize for Record {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Object(change) => change.serialize(to),
            other => Self::serialize(other, to),
        }
    }
}

impl<'de> Deserialize<'de> for Record {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ByName;

        impl<'de> Visitor<'de> for ByName {
            type Value = Record;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a record")
            }

            fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<Record, A::Error> {
                let (name, content) = access.variant::<String>()?;
                let all = EnumAccessDeserializer::new(Named { name: &name, content });
                match Change::is_known(&name) {
                    true => Change::read(&name, all).map(Record::Object),
                    false => Record::deserialize(all),
                }
            }
        }

        from.deserialize_enum("Record", &[], ByName)
    }
}

/// A record whose name was read.
struct Named<'n, A> {
    name: &'n str,
    content: A,
}

impl<'de, A: VariantAccess<'de>> EnumAccess<'de> for Named<'_, A> {
    type Error = A::Error;
    type Variant = A;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, A), A::Error> {
        Ok((seed.deserialize(StrDeserializer::new(self.name))?, self.content))
    }
}

fn only_bar() -> MemoryKind {
    MemoryKind::Bar
}

pub(super) fn is_false(value: &bool) -> bool {
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
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
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
    use crate::host::objects::channel;
    use ginnel_layout::channel::Capacities;

    #[test]
    fn a_segment_of_an_older_journal_is_a_bar() {
        let old = r#"{"segment":{"name":"web","uuid":"000102030405060708090a0b0c0d0e0f","size":4194304,
            "members":[0,1],"runtime":{"size":4194304,"members":["host","a"],"page":null}}}"#;
        let Ok(Record::Segment { memory, page, readers, runtime, .. }) = serde_json::from_str(old) else {
            panic!("not read");
        };
        assert_eq!((memory, page, readers.len()), (MemoryKind::Bar, 4096, 0));
        assert_eq!(runtime.map(|spec| spec.members.len()), Some(2));
    }

    #[test]
    fn a_channel_of_an_older_journal_has_rings_of_one_size() {
        let old = r#"{"channel":{"number":1,"segment":"web","listener":1,"offset":2097152,"capacity":8192,"kind":1,"nonce":7,
            "initiator":{"endpoint":1,"epoch":1,"member":0,"closed":false},"accepted":true,"relayed":false,
            "acceptor":{"endpoint":2,"epoch":2,"member":0,"closed":false}}}"#;
        let Ok(Record::Object(Change::Channel(channel::Change::Opened(channel)))) = serde_json::from_str(old)
        else {
            panic!("not read");
        };
        assert_eq!(channel.capacities(), Capacities { initiator: 8192, acceptor: 8192 });
        let text = serde_json::to_string(&channel).unwrap();
        assert!(!text.contains("acceptor_capacity"), "an older daemon reads it too: {text}");
    }
}
