//! The books as records.

use super::{Books, Endpoint, Member, Segment, Session};
use crate::objects::Change;
use crate::process::Process;
use crate::recipients::Recipients;
use crate::record::{Attach, FORMAT, Record};
use crate::text::Text;
use std::collections::BTreeSet;

impl Member {
    pub(super) fn dump(&self) -> impl Iterator<Item = Record> {
        let (number, name) = (self.number, Text(self.name));
        let member = Record::Member { number, name, runtime: self.runtime.clone(), retired: self.retired };
        let joined = self.qemu.as_ref().map(|qemu| Record::joined(number, qemu.process, qemu.told.clone()));
        let session = self.session.map(|Session { boot_id, interrupts }| Record::Session {
            member: number,
            boot_id,
            interrupts,
        });
        std::iter::once(member).chain(joined).chain(session)
    }
}

impl Endpoint {
    fn dump(&self) -> impl Iterator<Item = Record> {
        let endpoint = self.number;
        let first = self.owners.first().copied();
        // The record always has one.
        let process = first.unwrap_or(Process { pid: 0, started: 0 });
        let attach = Record::Attach(Attach {
            endpoint,
            epoch: self.epoch,
            token: self.token,
            member: self.member,
            segment: Text(self.segment),
            name: Text(self.name),
            vector: self.vector,
            process,
            uid: self.uid,
        });
        let gone = first.is_none().then_some(Record::OwnerGone { endpoint, process });
        let others = self.owners.iter().skip(1);
        let others = others.map(move |&process| Record::OwnerJoined { endpoint, process });
        std::iter::once(attach).chain(gone).chain(others).chain(self.dump_holds())
    }
}

impl Segment {
    /// Returns the record that declares it.
    pub(super) fn declaration(&self) -> Record {
        Record::Segment {
            name: Text(self.name),
            uuid: self.uuid,
            size: self.size,
            members: self.members.clone(),
            readers: self.readers.clone(),
            memory: self.memory,
            page: self.page,
            part: self.part.clone(),
            own_folder: self.own_folder,
            file: self.file,
            recipients: self.recipients.clone(),
            runtime: self.runtime.clone(),
        }
    }

    /// Returns the record that gives the segment these members, and leaves the rest as it is.
    pub fn with_members(&self, members: BTreeSet<u32>, readers: BTreeSet<u32>) -> Record {
        let mut record = self.declaration();
        if let Record::Segment { members: all, readers: some, .. } = &mut record {
            (*all, *some) = (members, readers);
        }
        record
    }

    /// Returns the record that these were given the segment's memory, and leaves the rest as it is.
    pub fn with_recipients(&self, recipients: Recipients) -> Record {
        let mut record = self.declaration();
        if let Record::Segment { recipients: known, .. } = &mut record {
            *known = Some(recipients);
        }
        record
    }

    /// Returns the record of its former members, if there is anything to record.
    fn dump_former(&self) -> Option<Record> {
        let processes = self.former.as_ref()?;
        let processes = processes.iter().map(|(process, vm)| (Text(*vm), *process)).collect();
        Some(Record::SegmentFormer { name: Text(self.name), processes: Some(processes) })
    }
}

impl Books {
    /// Returns records that make these books out of empty ones.
    pub fn dump(&self) -> impl Iterator<Item = Record> {
        let start = Record::Start {
            boot_id: self.boot_id,
            generation: self.generation,
            next_epoch: self.numbers.latest(),
            next_listener: self.next_listener,
            next_channel: self.next_channel,
            next_object: self.next_object,
            epochs: self.numbers.dump(),
            format: FORMAT,
        };
        let segments = self.segments.values().map(Segment::declaration);
        let cut = self.segments.values().filter(|segment| segment.cut);
        let cut = cut.map(|segment| Record::SegmentCut { name: Text(segment.name), cut: true });
        let former = self.segments.values().filter_map(Segment::dump_former);
        let vectors = self.segments.values().flat_map(|segment| {
            segment.vectors.iter().map(|(member, vectors)| Record::Vectors {
                segment: Text(segment.name),
                member: *member,
                vectors: vectors.clone(),
            })
        });
        let endpoints = self.endpoints.values().flat_map(Endpoint::dump);
        let ending = self.endpoints.values().filter(|endpoint| endpoint.is_ending);
        let ending = ending.map(|endpoint| Record::Ending { endpoint: endpoint.number });
        std::iter::once(start)
            .chain(self.members.values().flat_map(Member::dump))
            .chain(segments)
            .chain(cut)
            .chain(former)
            .chain(vectors)
            .chain(endpoints)
            .chain(ending)
            .chain(Change::dump(self).map(Record::Object))
    }
}
