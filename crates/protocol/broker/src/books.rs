//! The books: the members, the segments, and who owns what in them.
//!
//! They change only by [`Record`]s ([`Books::apply`]), and each record goes into the journal. So reading the journal
//! makes the same books again: there is no second way to reach a state.

mod index;

use crate::account::{Account, Tally};
use crate::arena::Arena;
use crate::declared::{SegmentSpec, VmSpec};
use crate::hold::Hold;
use crate::memory::{FilePart, MemoryFile, MemoryKind};
use crate::numbers::Numbers;
use crate::objects::Change;
use crate::objects::block::record::Block;
use crate::objects::board::boards::Boards;
use crate::objects::channel::listener::Listener;
use crate::objects::channel::record::Channel;
use crate::objects::sync::record::SyncObject;
use crate::process::Process;
use crate::record::{Attach, Record};
use crate::text::{Hex16, Text};
use crate::told::Told;
use ginnel_layout::segment::Access;
use ginnel_layout::{HOST_MEMBER, Name};
pub use index::Index;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;
use tracing::warn;

/// The error for a record that does not fit the books. Only a damaged journal, or a bug of the daemon, makes such a record.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct InvalidRecord(pub(crate) &'static str);

/// The whole state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Books {
    /// The boot identity of the host.
    pub boot_id: Hex16,
    /// The number of starts of the daemon.
    pub generation: u64,
    /// The number of the next listener, if it is free.
    pub next_listener: u32,
    /// The number of the next channel.
    pub next_channel: u64,
    /// The number of the next synchronisation object or block.
    pub next_object: u64,
    /// The members by number.
    pub members: BTreeMap<u32, Member>,
    /// The charges of each account; accounts without charges are not in it.
    pub(crate) tallies: BTreeMap<Account, Tally>,
    /// The segments by name.
    pub segments: BTreeMap<Name, Segment>,
    /// The endpoints by number.
    pub endpoints: BTreeMap<u32, Endpoint>,
    /// The numbers that endpoints have had so far.
    pub(crate) numbers: Numbers,
    /// The listeners by number.
    pub listeners: BTreeMap<u32, Listener>,
    /// The channels by number.
    pub channels: BTreeMap<u64, Channel>,
    /// The readiness boards.
    pub(crate) boards: Boards,
    /// The listeners by segment and name.
    pub names: BTreeMap<(Name, Name), u32>,
    /// The channels whose doorbells the daemon relays.
    pub relayed: BTreeSet<u64>,
    /// The synchronisation objects by number.
    pub syncs: BTreeMap<u64, SyncObject>,
    /// The synchronisation objects by segment and name.
    pub sync_names: BTreeMap<(Name, Name), u64>,
    /// The blocks by number.
    pub blocks: BTreeMap<u64, Block>,
    /// The blocks by segment and name.
    pub block_names: BTreeMap<(Name, Name), u64>,
    /// The block of each handle.
    pub handles: BTreeMap<u64, u64>,
    /// The endpoints by other keys than their number.
    pub index: Index,
}

/// A member: the host or a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// The member number.
    pub number: u32,
    /// The member's name.
    pub name: Name,
    /// The declaration, if the member was declared at run time.
    pub runtime: Option<VmSpec>,
    /// The member is not declared any more; only its number is remembered.
    pub retired: bool,
    /// The member's QEMU, while it runs.
    pub qemu: Option<Qemu>,
    /// The guest, once its daemon has had a session.
    pub session: Option<Session>,
}

/// A running QEMU.
#[derive(Clone, Debug, PartialEq)]
pub struct Qemu {
    /// The process of QEMU.
    pub process: Process,
    /// The doorbells that QEMU has been told of.
    pub told: Told,
}

/// A running guest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Session {
    /// The boot identity of the guest's kernel.
    pub boot_id: Hex16,
    /// Whether the guest can be interrupted.
    pub interrupts: bool,
}

/// A segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// The segment's name.
    pub name: Name,
    /// The uuid in the segment's header and info block.
    pub uuid: Hex16,
    /// The size in bytes.
    pub size: u64,
    /// The numbers of all members that share it, including readers.
    pub members: BTreeSet<u32>,
    /// The numbers of those that may only read.
    pub readers: BTreeSet<u32>,
    /// The kind of device by which the segment reaches VMs.
    pub memory: MemoryKind,
    /// The unit in which the segment can be mapped, in bytes.
    pub page: u32,
    /// The part of a file that the segment is, if it shares the file with other slices.
    pub part: Option<FilePart>,
    /// The file is in the daemon's own folder. Older daemons made it in the folder above, and there it stays until it is removed.
    pub own_folder: bool,
    /// The file that has the segment's memory.
    pub file: MemoryFile,
    /// The declaration, if the segment was declared at run time.
    pub runtime: Option<SegmentSpec>,
    /// The allocator of the segment's memory.
    pub arena: Arena,
    /// The doorbell vectors of each member that serve its programs in this segment.
    pub vectors: BTreeMap<u32, Vec<u32>>,
    /// The file was truncated while it was in use. It may be as long as before, but the data that was cut off is lost.
    pub cut: bool,
    /// The processes of former members that may still have the file, with the names of their VMs. `None` if no member was removed since
    /// the file was new. While one of the processes runs, the segment is out of service.
    pub former: Option<BTreeMap<Process, Name>>,
}

/// An endpoint, which one process has attached and others may have joined.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// The endpoint's number.
    pub number: u32,
    /// The epoch of that number.
    pub epoch: u32,
    /// The secret with which a process proves that it belongs to the endpoint.
    pub token: Hex16,
    /// The number of the endpoint's member.
    pub member: u32,
    /// The name of the endpoint's segment.
    pub segment: Name,
    /// The name that the program has given itself.
    pub name: Name,
    /// The endpoint's doorbell vector.
    pub vector: u32,
    /// The processes that own the endpoint. If there are none, a connection that one of them has left open keeps it alive.
    pub owners: BTreeSet<Process>,
    /// The holds that keep the endpoint alive without owners, by token.
    pub holds: BTreeMap<Hex16, Hold>,
    /// The user number.
    pub uid: u32,
    /// The channels that the endpoint has not closed, whichever side has opened them.
    pub channels: BTreeSet<u64>,
    /// The endpoint's channels that wait to be accepted, as pairs of the listener's and the channel's number.
    pub waiting: BTreeSet<(u32, u64)>,
    /// The numbers of the endpoint's listeners.
    pub listeners: BTreeSet<u32>,
    /// The number of sides of existing channels that are or were the endpoint's own.
    pub sides: u32,
    /// The memory of the channels that the endpoint has opened, in bytes.
    pub bytes: u64,
    /// The channels that the endpoint has opened and not closed, by the nonce of the request.
    pub opened: BTreeMap<u64, u64>,
    /// The synchronisation objects that the endpoint uses, with its slots in them.
    pub syncs: BTreeSet<(u64, u32)>,
    /// The same objects and slots, by the nonce of the request.
    pub slots: BTreeMap<u64, (u64, u32)>,
    /// The endpoint's handles of blocks, by the nonce of the request.
    pub handles: BTreeMap<u64, u64>,
    /// The blocks that the endpoint owns.
    pub blocks: BTreeSet<u64>,
    /// The endpoint's blocks whose names end with it.
    pub ending_names: BTreeSet<u64>,
    /// The size in bytes of all blocks that the endpoint owns.
    pub block_bytes: u64,
    /// The blocks of which a right was granted to this endpoint alone.
    pub granted: BTreeSet<u64>,
    /// The endpoint has ended, and its objects are being given back.
    pub is_ending: bool,
}

impl Member {
    fn dump(&self) -> impl Iterator<Item = Record> {
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
    /// Returns one of its processes, to show to people; 0 if none is known.
    pub fn pid(&self) -> u32 {
        self.owners.first().map_or(0, |process| process.pid)
    }

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
    /// Returns what a member of the segment may do.
    pub fn access(&self, member: u32) -> Access {
        if self.readers.contains(&member) { Access::READ_ONLY } else { Access::READ_WRITE }
    }

    /// Returns the record that declares it.
    fn declaration(&self) -> Record {
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
            runtime: self.runtime.clone(),
        }
    }

    /// Returns the record that gives the segment these members, and leaves the rest as it is.
    pub fn with_members(&self, members: BTreeSet<u32>, readers: BTreeSet<u32>) -> Record {
        Self { members, readers, ..self.clone() }.declaration()
    }

    /// Returns the record of its former members, if there is anything to record.
    fn dump_former(&self) -> Option<Record> {
        let processes = self.former.as_ref()?;
        let processes = processes.iter().map(|(process, vm)| (Text(*vm), *process)).collect();
        Some(Record::SegmentFormer { name: Text(self.name), processes: Some(processes) })
    }

    /// Returns the offset in its file at which the segment begins.
    pub fn file_offset(&self) -> u64 {
        self.part.as_ref().map_or(0, |part| part.offset)
    }
}

impl Books {
    /// Prepares the books for a new daemon. After a reboot of the host, nothing of the earlier programs and VMs is left.
    pub fn begin(&mut self, boot_id: Hex16) {
        let mut records = Vec::new();
        if self.boot_id != boot_id {
            // A reboot has emptied their memory.
            records.extend(Change::rebooted(self).map(Record::Object));
            records.extend(self.endpoints.keys().map(|&endpoint| Record::Dead { endpoint }));
            records.extend(self.members.keys().map(|&member| Record::Left { member }));
            // No file is left at an old place.
            let old = self.segments.values().filter(|segment| !segment.own_folder);
            records.extend(old.map(|old| Segment { own_folder: true, ..old.clone() }.declaration()));
            let waiting = self.segments.values().filter(|segment| segment.former.is_some());
            records.extend(waiting.map(|s| Record::SegmentFormer { name: Text(s.name), processes: None }));
        }
        records.push(Record::Start {
            boot_id,
            generation: self.generation + 1,
            next_epoch: self.numbers.latest(),
            next_listener: self.next_listener.max(1),
            next_channel: self.next_channel.max(1),
            next_object: self.next_object.max(1),
            epochs: self.numbers.dump(),
            format: crate::lines::FORMAT,
        });
        for record in records {
            if let Err(error) = self.apply(&record) {
                warn!(%error, ?record, "the books do not accept this; please report it");
            }
        }
    }

    /// Keeps what is declared, and nothing about programs, QEMUs and memory, because the journal does not say all of that. They may live,
    /// and have memory, but these books do not know of it.
    pub fn distrust(&mut self) {
        let old = std::mem::take(self);
        let members =
            old.members.values().map(|member| Member { qemu: None, session: None, ..member.clone() });
        let members: Vec<Member> = members.collect();
        let segments =
            old.segments.values().map(|segment| Segment { file: MemoryFile::Unknown, ..segment.clone() });
        let records = old.dump().take(1).chain(members.iter().flat_map(Member::dump));
        for record in records.chain(segments.map(|segment| segment.declaration())) {
            if let Err(error) = self.apply(&record) {
                warn!(%error, ?record, "the books do not accept this; please report it");
            }
        }
    }

    /// Returns the member with this name.
    pub fn member_named(&self, name: &Name) -> Option<&Member> {
        self.members.values().find(|m| m.name == *name)
    }

    /// Returns the members that share a segment with this one, including the host.
    pub fn neighbours(&self, member: u32) -> BTreeSet<u32> {
        let shared = self.segments.values().filter(|s| s.members.contains(&member));
        let mut all: BTreeSet<u32> = shared.flat_map(|s| s.members.iter().copied()).collect();
        all.insert(HOST_MEMBER);
        all.remove(&member);
        all
    }

    /// Returns the segments with allocated memory. Truncating the file of such a segment may harm its users.
    pub fn segments_in_use(&self) -> Vec<Name> {
        self.segments.values().filter(|s| s.arena.used() > 0).map(|s| s.name).collect()
    }

    /// Returns whether there are any such segments.
    pub fn is_memory_used(&self) -> bool {
        self.segments.values().any(|s| s.arena.used() > 0)
    }

    /// Changes the books. On an error nothing has changed.
    pub fn apply(&mut self, record: &Record) -> Result<(), InvalidRecord> {
        match record {
            Record::Start {
                boot_id,
                generation,
                next_epoch: _,
                next_listener,
                next_channel,
                next_object,
                epochs,
                format: _,
            } => {
                (self.boot_id, self.generation, self.next_listener) = (*boot_id, *generation, *next_listener);
                (self.next_channel, self.next_object) = (*next_channel, *next_object);
                self.numbers = Numbers::restore(epochs, self.endpoints.keys().copied());
                Ok(())
            }
            Record::Member { number, name, runtime, retired } => {
                if self.members.values().any(|m| m.name == name.0 && m.number != *number) {
                    return Err(InvalidRecord("two members of one name"));
                }
                let old = self.members.remove(number);
                if old
                    .as_ref()
                    .is_some_and(|o| o.name != name.0 && (!o.retired || self.has_accounts(*number)))
                {
                    self.members.extend(old.map(|old| (*number, old)));
                    return Err(InvalidRecord("two members of one number"));
                }
                let old = old.filter(|old| old.name == name.0);
                let member = Member {
                    number: *number,
                    name: name.0,
                    runtime: runtime.clone(),
                    retired: *retired,
                    qemu: old.as_ref().and_then(|old| old.qemu.clone()),
                    session: old.as_ref().and_then(|old| old.session),
                };
                self.members.insert(*number, member);
                Ok(())
            }
            Record::MemberForgotten { number } => {
                if self.has_accounts(*number) {
                    return Err(InvalidRecord("a member forgotten that has endpoints"));
                }
                let member = self.members.remove(number);
                member.map(drop).ok_or(InvalidRecord("a member forgotten that is not there"))
            }
            Record::Joined { member, qemu, told, .. } => {
                let member =
                    self.members.get_mut(member).ok_or(InvalidRecord("QEMU of an unknown member"))?;
                member.qemu = Some(Qemu { process: *qemu, told: told.clone() });
                Ok(())
            }
            Record::Left { member } => {
                let member =
                    self.members.get_mut(member).ok_or(InvalidRecord("QEMU of an unknown member"))?;
                (member.qemu, member.session) = (None, None);
                Ok(())
            }
            &Record::Session { member, boot_id, interrupts } => {
                let member =
                    self.members.get_mut(&member).ok_or(InvalidRecord("session of an unknown member"))?;
                member.session = Some(Session { boot_id, interrupts });
                Ok(())
            }
            Record::Segment {
                name,
                uuid,
                size,
                members,
                readers,
                memory,
                page,
                part,
                own_folder,
                file,
                runtime,
            } => {
                let arena = match self.segments.get_mut(&name.0) {
                    Some(old) if old.size == *size => std::mem::replace(&mut old.arena, Arena::of_segment(0)),
                    Some(old) if old.arena.used() > 0 => {
                        return Err(InvalidRecord("a segment resized that is in use"));
                    }
                    _ => Arena::of_segment(*size),
                };
                let cut = self.segments.get(&name.0).is_some_and(|s| s.cut);
                let former = self.segments.get(&name.0).and_then(|s| s.former.clone());
                let mut vectors = self.segments.get(&name.0).map(|s| s.vectors.clone()).unwrap_or_default();
                vectors.retain(|member, _| members.contains(member));
                let segment = Segment {
                    name: name.0,
                    uuid: *uuid,
                    size: *size,
                    members: members.clone(),
                    readers: readers.clone(),
                    memory: *memory,
                    page: *page,
                    part: part.clone(),
                    own_folder: *own_folder,
                    file: *file,
                    runtime: runtime.clone(),
                    arena,
                    vectors,
                    cut,
                    former,
                };
                self.segments.insert(name.0, segment);
                Ok(())
            }
            Record::SegmentCut { name, cut } => {
                let segment =
                    self.segments.get_mut(&name.0).ok_or(InvalidRecord("an unknown segment was cut"))?;
                segment.cut = *cut;
                Ok(())
            }
            Record::SegmentFormer { name, processes } => {
                let segment = self
                    .segments
                    .get_mut(&name.0)
                    .ok_or(InvalidRecord("former members of an unknown segment"))?;
                let map =
                    |all: &Vec<(Text, Process)>| all.iter().map(|(vm, process)| (*process, vm.0)).collect();
                segment.former = processes.as_ref().map(map);
                Ok(())
            }
            Record::SegmentRemoved { name } => {
                if self.index.of_segment(&name.0).next().is_some() {
                    return Err(InvalidRecord("a segment removed that has endpoints"));
                }
                // Objects that remain without endpoints are removed with the segment.
                Change::clear(self, &name.0);
                self.segments
                    .remove(&name.0)
                    .map(drop)
                    .ok_or(InvalidRecord("a segment removed that is not there"))
            }
            Record::Vectors { segment, member, vectors } => {
                self.vectors_allotted(&segment.0, *member, vectors)
            }
            Record::Attach(attach) => self.attach(attach),
            Record::OwnerJoined { endpoint, process } => {
                let endpoint = self
                    .endpoints
                    .get_mut(endpoint)
                    .ok_or(InvalidRecord("an unknown endpoint was joined"))?;
                endpoint
                    .owners
                    .insert(*process)
                    .then_some(())
                    .ok_or(InvalidRecord("an endpoint joined twice"))
            }
            Record::OwnerGone { endpoint, process } => {
                let endpoint =
                    self.endpoints.get_mut(endpoint).ok_or(InvalidRecord("an unknown endpoint was left"))?;
                if !endpoint.owners.remove(process) {
                    return Err(InvalidRecord("an endpoint left by a process that does not own it"));
                }
                self.boards.leave(endpoint.number, endpoint.epoch, *process);
                Ok(())
            }
            Record::Hold { endpoint, token, millis } => self.hold(*endpoint, *token, *millis),
            Record::Adopted { endpoint, token, process } => self.adopted(*endpoint, token, *process),
            Record::HoldEnded { endpoint, token } => self.hold_ended(*endpoint, token),
            Record::Ending { endpoint } => self.ending(*endpoint),
            Record::Dead { endpoint } => self.dead(*endpoint),
            Record::Object(change) => change.apply(self),
        }
    }

    fn attach(&mut self, attach: &Attach) -> Result<(), InvalidRecord> {
        let segment =
            self.segments.get(&attach.segment.0).ok_or(InvalidRecord("an endpoint in an unknown segment"))?;
        if attach.endpoint == 0 || self.endpoints.contains_key(&attach.endpoint) {
            return Err(InvalidRecord("two endpoints of one number"));
        }
        if !self.members.contains_key(&attach.member) {
            return Err(InvalidRecord("an endpoint of an unknown member"));
        }
        self.numbers.take(attach.endpoint, attach.epoch);
        let endpoint = Endpoint {
            number: attach.endpoint,
            epoch: attach.epoch,
            token: attach.token,
            member: attach.member,
            segment: segment.name,
            name: attach.name.0,
            vector: attach.vector,
            owners: [attach.process].into(),
            holds: BTreeMap::new(),
            uid: attach.uid,
            channels: BTreeSet::new(),
            listeners: BTreeSet::new(),
            sides: 0,
            bytes: 0,
            waiting: BTreeSet::new(),
            opened: BTreeMap::new(),
            syncs: BTreeSet::new(),
            slots: BTreeMap::new(),
            handles: BTreeMap::new(),
            blocks: BTreeSet::new(),
            ending_names: BTreeSet::new(),
            block_bytes: 0,
            granted: BTreeSet::new(),
            is_ending: false,
        };
        self.index.insert(&endpoint);
        self.charge(endpoint.account(), Tally::ENDPOINT);
        self.endpoints.insert(endpoint.number, endpoint);
        Ok(())
    }

    fn dead(&mut self, number: u32) -> Result<(), InvalidRecord> {
        let endpoint = self.endpoints.get(&number).ok_or(InvalidRecord("an unknown endpoint died"))?;
        for change in Change::ends(self, endpoint).collect::<Vec<_>>() {
            change.apply(self)?;
        }
        if let Some(endpoint) = self.endpoints.remove(&number) {
            self.index.remove(&endpoint);
            Change::forget(self, &endpoint);
            self.numbers.give(number);
            self.discharge(endpoint.account(), Tally::ENDPOINT.plus(Tally::holds(endpoint.holds.len())));
        }
        Ok(())
    }

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
            format: crate::lines::FORMAT,
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

    /// Returns the member number for a VM with this name: the one that it had, or else the lowest that no member ever had, or
    /// else the lowest that no member has now. `None` if all are taken.
    pub fn number_for(&self, name: &Name, reserved: &BTreeSet<u32>) -> Option<u32> {
        if let Some(member) = self.member_named(name) {
            return Some(member.number);
        }
        let numbers = || (1..=crate::limits::MAX_MEMBER).filter(|n| !reserved.contains(n));
        // The search for a number that was never used is limited to small numbers, so that the range of the doorbells stays
        // small.
        numbers().take_while(|&n| n <= 1024).find(|n| !self.members.contains_key(n)).or_else(|| {
            numbers().find(|n| self.members.get(n).is_none_or(|m| m.retired && !self.has_accounts(*n)))
        })
    }
}
