//! The records of the journal: each change of the books is one record. [`crate::lines`] says what a daemon does with a record
//! that it does not know.

use crate::declared::{SegmentSpec, VmSpec};
use crate::memory::{FilePart, MemoryFile, MemoryKind};
use crate::objects::{Change, with_all_classes};
use crate::process::Process;
use crate::recipients::Recipients;
use crate::text::{Hex16, Text};
use crate::told::Told;
use ginnel_layout::dax::SMALL_PAGE;
use serde::de::value::{EnumAccessDeserializer, StrDeserializer};
use serde::de::{DeserializeSeed, EnumAccess, VariantAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeSet;

/// The version of the journals that this daemon writes, and the latest that it reads. Since format 2 the files of segments may be in the
/// daemon's own folder, where earlier daemons do not look for them. Since format 3 lines have numbers, and snapshots an end.
pub const FORMAT: u32 = 3;

/// One change. Journals on disk contain the names of variants and fields: new ones may be added, but existing ones must not
/// change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", remote = "Self")]
pub enum Record {
    /// A daemon has started. This is the first record of a journal, and it sets all counters.
    Start {
        /// The boot identity of the host.
        boot_id: Hex16,
        /// The number of starts of the daemon.
        generation: u64,
        /// An epoch that no endpoint has had. Only older releases use it, which had one counter of epochs for all numbers.
        next_epoch: u32,
        /// The number of the next listener, if it is free.
        next_listener: u32,
        /// The number of the next channel.
        next_channel: u64,
        /// The number of the next synchronisation object or block.
        #[serde(default)]
        next_object: u64,
        /// The numbers that endpoints have had, and the next epoch of each.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        epochs: Vec<(u32, u32)>,
        /// The [`FORMAT`] of the daemon that wrote this journal; 0 in journals that are older than the field.
        #[serde(default)]
        format: u32,
    },
    /// A member is new or has changed.
    Member {
        /// The member number.
        number: u32,
        /// The member's name.
        name: Text,
        /// The declaration, if the member was declared at run time.
        runtime: Option<VmSpec>,
        /// The member is not declared any more; only its number is remembered.
        retired: bool,
    },
    /// A member's number is free for others.
    MemberForgotten {
        /// The member number.
        number: u32,
    },
    /// A VM's QEMU has connected.
    Joined {
        /// The member number of the VM.
        member: u32,
        /// The process of QEMU.
        qemu: Process,
        /// The members of whose doorbells this QEMU has been told.
        knows: BTreeSet<u32>,
        /// The doorbells themselves. Older journals do not have this field.
        #[serde(default)]
        told: Told,
    },
    /// A VM's QEMU has ended. Earlier records have declared its endpoints dead.
    Left {
        /// The member number of the VM.
        member: u32,
    },
    /// The daemons of host and VM have a session.
    Session {
        /// The member number of the VM.
        member: u32,
        /// The boot identity of the guest's kernel.
        boot_id: Hex16,
        /// Whether the guest can be interrupted.
        interrupts: bool,
    },
    /// A segment is new or has changed.
    Segment {
        /// The segment's name.
        name: Text,
        /// The uuid in the segment's header and info block.
        uuid: Hex16,
        /// The size in bytes.
        size: u64,
        /// The numbers of all members that share it, including readers.
        members: BTreeSet<u32>,
        /// The numbers of those that may only read.
        #[serde(default)]
        readers: BTreeSet<u32>,
        /// The kind of device by which the segment reaches VMs. Journals from the time when there was only one kind do not have
        /// this field.
        #[serde(default = "only_bar")]
        memory: MemoryKind,
        /// The unit in which the segment can be mapped, in bytes.
        #[serde(default = "only_4k")]
        page: u32,
        /// The part of a file that the segment is, if it shares the file with other slices.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        part: Option<FilePart>,
        /// The file is in the daemon's own folder. Older daemons made it in the folder above.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        own_folder: bool,
        /// The file that has the segment's memory.
        #[serde(default)]
        file: MemoryFile,
        /// Who was given the memory. Older daemons did not note it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        recipients: Option<Recipients>,
        /// The declaration, if the segment was declared at run time.
        runtime: Option<SegmentSpec>,
    },
    /// A segment's file was truncated while it was in use; or the segment is whole again, because nobody uses the truncated
    /// memory any more.
    SegmentCut {
        /// The segment's name.
        name: Text,
        /// True if the file was truncated, false if the segment is whole again.
        cut: bool,
    },
    /// Members have lost their share in a segment, or the right to write in it, and may still have its file.
    SegmentFormer {
        /// The segment's name.
        name: Text,
        /// Their processes, each with the name of its VM, if that is known. `None` if none of them can have the file any more.
        processes: Option<Vec<(Text, Process)>>,
    },
    /// A segment was removed. Earlier records have declared its endpoints dead.
    SegmentRemoved {
        /// The segment's name.
        name: Text,
    },
    /// The doorbell vectors of a member that serve its programs in a segment.
    Vectors {
        /// The segment's name.
        segment: Text,
        /// The member number.
        member: u32,
        /// The doorbell vectors of the member that serve the segment.
        vectors: Vec<u32>,
    },
    /// A process has attached.
    Attach(Attach),
    /// Another process owns an endpoint too.
    OwnerJoined {
        /// The number of the endpoint.
        endpoint: u32,
        /// The new owner.
        process: Process,
    },
    /// A process does not own an endpoint any more.
    OwnerGone {
        /// The number of the endpoint.
        endpoint: u32,
        /// The former owner.
        process: Process,
    },
    /// An endpoint stays alive for a while without owners.
    Hold {
        /// The number of the endpoint.
        endpoint: u32,
        /// The token with which a process can adopt the endpoint.
        token: Hex16,
        /// The duration in milliseconds, from this record or from the start of the daemon.
        millis: u32,
    },
    /// A process has adopted an endpoint that was held.
    Adopted {
        /// The number of the endpoint.
        endpoint: u32,
        /// The token of the hold.
        token: Hex16,
        /// The process that adopted it.
        process: Process,
    },
    /// A hold has ended.
    HoldEnded {
        /// The number of the endpoint.
        endpoint: u32,
        /// The token of the hold.
        token: Hex16,
    },
    /// An endpoint is ending. The records that follow give back what it has; the last of them is `dead`.
    Ending {
        /// The number of the endpoint.
        endpoint: u32,
    },
    /// An endpoint has ended.
    Dead {
        /// The number of the endpoint.
        endpoint: u32,
    },
    /// A change of an object that an endpoint has made.
    #[serde(skip)]
    Object(Change),
}

impl Record {
    /// Makes the record that a VM's QEMU has connected and that these doorbells were announced to it.
    pub fn joined(member: u32, qemu: Process, told: Told) -> Self {
        Self::Joined { member, qemu, knows: told.keys().copied().collect(), told }
    }

    /// Returns whether the record gives a resource to a client or member. A successor that does not know of it could give the
    /// same resource away again, so the record must be in the journal before anybody learns of it. The other records end
    /// something or change a detail: a successor that does not know of them believes that more is in use than really is, which
    /// is safe.
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
            | Self::SegmentFormer { .. }
            | Self::SegmentRemoved { .. }
            // This process must not be taken for dead, so the books keep it as an owner even if the journal does not have it yet.
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

/// Makes the change of each class a record.
macro_rules! records {
    ($($Class:ident: $Change:ty,)*) => {
        $(impl From<$Change> for Record {
            fn from(change: $Change) -> Self {
                Self::Object(Change::$Class(change))
            }
        })*
    };
}

with_all_classes!(records);

// In the journal, changes of objects look like the other records: an object with one member, whose name is that of the change.
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

/// A record of which the name has been read.
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

fn only_4k() -> u32 {
    SMALL_PAGE
}

/// A process has attached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attach {
    /// The number of the endpoint.
    pub endpoint: u32,
    /// The epoch of the endpoint.
    pub epoch: u32,
    /// The secret with which a process proves that it belongs to the endpoint.
    pub token: Hex16,
    /// The number of its member.
    pub member: u32,
    /// The name of its segment.
    pub segment: Text,
    /// The name that the program has given itself.
    pub name: Text,
    /// The endpoint's doorbell vector.
    pub vector: u32,
    /// The process that attached.
    pub process: Process,
    /// The user number.
    pub uid: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::channel;
    use ginnel_layout::channel::Capacities;

    #[test]
    fn a_segment_of_an_older_journal_is_a_bar_at_its_old_place() {
        let old = r#"{"segment":{"name":"web","uuid":"000102030405060708090a0b0c0d0e0f","size":4194304,
            "members":[0,1],"runtime":{"size":4194304,"members":["host","a"],"page":null}}}"#;
        let Ok(Record::Segment { memory, page, readers, own_folder, recipients, runtime, .. }) =
            serde_json::from_str(old)
        else {
            panic!("not read");
        };
        assert_eq!(recipients, None, "they are not known");
        assert_eq!((memory, page, readers.len(), own_folder), (MemoryKind::Bar, 4096, 0, false));
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
