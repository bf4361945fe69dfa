//! The books: who is there and what belongs to whom.
//!
//! They change by [`Record`]s alone ([`Books::apply`]), and each record goes into the journal. So reading the journal
//! makes the same books again: there is no second way to reach a state.

use super::arena::Arena;
use super::config::{Memory, SegmentSpec, VmSpec};
use super::record::{Attach, Block, Channel, FilePart, Hex16, Record, Side, SyncObject, Text};
use crate::pidwatch::Process;
use ginnel_layout::channel::ChannelKind;
use ginnel_layout::segment::Access;
use ginnel_layout::{HOST_MEMBER, Name, ring};
use ginnel_sync::authority::Left;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// A record that does not fit the books. Only a damaged journal, or a mistake of ours, makes one.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct Misfit(pub(super) &'static str);

/// All books.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Books {
    /// Boot identity of the host.
    pub boot_id: Hex16,
    /// Counts the daemon's starts.
    pub generation: u64,
    /// Epoch of the next endpoint.
    pub next_epoch: u32,
    /// Number of the next listener.
    pub next_listener: u32,
    /// Number of the next channel.
    pub next_channel: u64,
    /// Number of the next synchronisation object or block.
    pub next_object: u64,
    /// By number.
    pub members: BTreeMap<u32, Member>,
    /// By name.
    pub segments: BTreeMap<Name, Segment>,
    /// By number.
    pub endpoints: BTreeMap<u32, Endpoint>,
    /// By number.
    pub listeners: BTreeMap<u32, Listener>,
    /// By number.
    pub channels: BTreeMap<u64, Channel>,
    /// Listeners by segment and name.
    pub names: BTreeMap<(Name, Name), u32>,
    /// Channels whose doorbells the daemon passes on.
    pub relayed: BTreeSet<u64>,
    /// Synchronisation objects, by number.
    pub syncs: BTreeMap<u64, SyncObject>,
    /// The same, by segment and name.
    pub sync_names: BTreeMap<(Name, Name), u64>,
    /// Blocks, by number.
    pub blocks: BTreeMap<u64, Block>,
    /// The same, by segment and name.
    pub block_names: BTreeMap<(Name, Name), u64>,
    /// Which block a handle is of.
    pub handles: BTreeMap<u64, u64>,
}

/// The host, or a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: Name,
    /// How it was declared, if at run time.
    pub runtime: Option<VmSpec>,
    /// Not declared any more: only the number is remembered.
    pub retired: bool,
    /// Its QEMU, while it runs.
    pub qemu: Option<Qemu>,
    /// The guest, since its daemon has first come.
    pub session: Option<Session>,
    /// What its endpoints have.
    pub tally: Tally,
}

/// A running QEMU.
#[derive(Clone, Debug, PartialEq)]
pub struct Qemu {
    /// Its process.
    pub process: Process,
    /// Members whose doorbells it has.
    pub knows: BTreeSet<u32>,
}

/// A running guest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Session {
    /// Its boot identity.
    pub boot_id: Hex16,
    /// Whether it can be interrupted.
    pub interrupts: bool,
}

/// What the endpoints of a member have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many there are.
    pub endpoints: u32,
    /// Channels that they have opened and that still hold memory.
    pub channels: u32,
    /// That memory, in bytes.
    pub bytes: u64,
    /// Blocks and synchronisation objects that they have made and that still hold memory.
    pub blocks: u32,
    /// That memory, in bytes.
    pub block_bytes: u64,
}

/// A segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Its name.
    pub name: Name,
    /// Its uuid.
    pub uuid: Hex16,
    /// Its bytes.
    pub size: u64,
    /// Who shares it, readers among them.
    pub members: BTreeSet<u32>,
    /// Which of them may only read.
    pub readers: BTreeSet<u32>,
    /// By which kind of device it comes to VMs.
    pub memory: Memory,
    /// Unit in which it may be mapped, in bytes.
    pub page: u32,
    /// The part of a file that it is, if it shares one with other slices.
    pub part: Option<FilePart>,
    /// How it was declared, if at run time.
    pub runtime: Option<SegmentSpec>,
    /// Its free memory.
    pub arena: Arena,
}

/// An attached process.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// Its number.
    pub number: u32,
    /// Epoch of that number.
    pub epoch: u32,
    /// Its token.
    pub token: Hex16,
    /// Its member.
    pub member: u32,
    /// Its segment.
    pub segment: Name,
    /// What it calls itself.
    pub name: Name,
    /// Its doorbell vector.
    pub vector: u32,
    /// Its process.
    pub process: Process,
    /// Its user.
    pub uid: u32,
    /// Its channels, opened by either side, that it has not closed.
    pub channels: BTreeSet<u64>,
    /// Its listeners.
    pub listeners: BTreeSet<u32>,
    /// Bytes of the channels that it has opened.
    pub bytes: u64,
    /// Synchronisation objects that it uses, and its slots in them.
    pub syncs: BTreeSet<(u64, u32)>,
    /// Its handles of blocks, by the nonce of the request for each.
    pub handles: BTreeMap<u64, u64>,
    /// Blocks that it owns.
    pub blocks: BTreeSet<u64>,
    /// Their bytes.
    pub block_bytes: u64,
}

/// A name at which an endpoint listens.
#[derive(Clone, Debug, PartialEq)]
pub struct Listener {
    /// Its number.
    pub number: u32,
    /// Whose it is.
    pub endpoint: u32,
    /// In which segment.
    pub segment: Name,
    /// At which name.
    pub name: Name,
    /// Kind of its channels.
    pub kind: ChannelKind,
    /// How many may wait.
    pub backlog: u32,
    /// Smallest ring.
    pub capacity: u64,
    /// How many wait.
    pub waiting: u32,
}

impl Member {
    fn dump(&self) -> impl Iterator<Item = Record> {
        let (number, name) = (self.number, Text(self.name));
        let member = Record::Member { number, name, runtime: self.runtime.clone(), retired: self.retired };
        let joined = self.qemu.as_ref().map(|qemu| Record::Joined {
            member: number,
            qemu: qemu.process,
            knows: qemu.knows.clone(),
        });
        let session = self.session.map(|Session { boot_id, interrupts }| Record::Session {
            member: number,
            boot_id,
            interrupts,
        });
        std::iter::once(member).chain(joined).chain(session)
    }
}

impl Segment {
    /// What a member of it may do.
    pub fn access(&self, member: u32) -> Access {
        if self.readers.contains(&member) { Access::READ_ONLY } else { Access::READ_WRITE }
    }

    /// Where in its file it begins.
    pub fn file_offset(&self) -> u64 {
        self.part.as_ref().map_or(0, |part| part.offset)
    }
}

impl Books {
    /// The member of that name.
    pub fn member_named(&self, name: &Name) -> Option<&Member> {
        self.members.values().find(|m| m.name == *name)
    }

    /// Members that share a segment with this one, the host among them.
    pub fn neighbours(&self, member: u32) -> BTreeSet<u32> {
        let shared = self.segments.values().filter(|s| s.members.contains(&member));
        let mut all: BTreeSet<u32> = shared.flat_map(|s| s.members.iter().copied()).collect();
        all.insert(HOST_MEMBER);
        all.remove(&member);
        all
    }

    /// Segments of which somebody has memory, and so may be hurt when the file is truncated.
    pub fn segments_in_use(&self) -> Vec<Name> {
        self.segments.values().filter(|s| s.arena.used() > 0).map(|s| s.name).collect()
    }

    /// Whether there are any.
    pub fn is_memory_used(&self) -> bool {
        self.segments.values().any(|s| s.arena.used() > 0)
    }

    /// Changes the books. On error nothing has changed.
    pub fn apply(&mut self, record: &Record) -> Result<(), Misfit> {
        match record {
            &Record::Start { boot_id, generation, next_epoch, next_listener, next_channel, next_object } => {
                (self.boot_id, self.generation) = (boot_id, generation);
                (self.next_epoch, self.next_listener) = (next_epoch, next_listener);
                (self.next_channel, self.next_object) = (next_channel, next_object);
                Ok(())
            }
            Record::Member { number, name, runtime, retired } => {
                if self.members.values().any(|m| m.name == name.0 && m.number != *number) {
                    return Err(Misfit("two members of one name"));
                }
                let old = self.members.remove(number);
                if old
                    .as_ref()
                    .is_some_and(|o| o.name != name.0 && !(o.retired && o.tally == Tally::default()))
                {
                    self.members.extend(old.map(|old| (*number, old)));
                    return Err(Misfit("two members of one number"));
                }
                let old = old.filter(|old| old.name == name.0);
                let member = Member {
                    number: *number,
                    name: name.0,
                    runtime: runtime.clone(),
                    retired: *retired,
                    qemu: old.as_ref().and_then(|old| old.qemu.clone()),
                    session: old.as_ref().and_then(|old| old.session),
                    tally: old.map(|old| old.tally).unwrap_or_default(),
                };
                self.members.insert(*number, member);
                Ok(())
            }
            Record::MemberForgotten { number } => {
                let member =
                    self.members.get(number).ok_or(Misfit("a member forgotten that is not there"))?;
                if member.tally != Tally::default() {
                    return Err(Misfit("a member forgotten that has endpoints"));
                }
                self.members.remove(number);
                Ok(())
            }
            Record::Joined { member, qemu, knows } => {
                let member = self.members.get_mut(member).ok_or(Misfit("QEMU of an unknown member"))?;
                member.qemu = Some(Qemu { process: *qemu, knows: knows.clone() });
                Ok(())
            }
            Record::Left { member } => {
                let member = self.members.get_mut(member).ok_or(Misfit("QEMU of an unknown member"))?;
                (member.qemu, member.session) = (None, None);
                Ok(())
            }
            &Record::Session { member, boot_id, interrupts } => {
                let member = self.members.get_mut(&member).ok_or(Misfit("session of an unknown member"))?;
                member.session = Some(Session { boot_id, interrupts });
                Ok(())
            }
            Record::Segment { name, uuid, size, members, readers, memory, page, part, runtime } => {
                let arena = match self.segments.get_mut(&name.0) {
                    Some(old) if old.size == *size => std::mem::replace(&mut old.arena, Arena::of_segment(0)),
                    Some(old) if old.arena.used() > 0 => {
                        return Err(Misfit("a segment resized that is in use"));
                    }
                    _ => Arena::of_segment(*size),
                };
                let segment = Segment {
                    name: name.0,
                    uuid: *uuid,
                    size: *size,
                    members: members.clone(),
                    readers: readers.clone(),
                    memory: *memory,
                    page: *page,
                    part: part.clone(),
                    runtime: runtime.clone(),
                    arena,
                };
                self.segments.insert(name.0, segment);
                Ok(())
            }
            Record::SegmentRemoved { name } => {
                if self.endpoints.values().any(|e| e.segment == name.0) {
                    return Err(Misfit("a segment removed that has endpoints"));
                }
                // What stays without endpoints goes with the segment.
                for object in self.syncs_of(&name.0) {
                    self.remove::<SyncObject>(object);
                }
                for block in self.blocks_of(&name.0) {
                    self.block_removed(block);
                }
                self.segments.remove(&name.0).map(drop).ok_or(Misfit("a segment removed that is not there"))
            }
            Record::Attach(attach) => self.attach(attach),
            Record::Dead { endpoint } => self.dead(*endpoint),
            Record::Listen { listener, endpoint, name, kind, backlog, capacity } => {
                let owner = self.endpoints.get_mut(endpoint).ok_or(Misfit("a listener of nobody"))?;
                let key = (owner.segment, name.0);
                if self.names.contains_key(&key) || self.listeners.contains_key(listener) {
                    return Err(Misfit("two listeners at one name"));
                }
                owner.listeners.insert(*listener);
                self.names.insert(key, *listener);
                self.next_listener = self.next_listener.max(listener.saturating_add(1));
                let listener = Listener {
                    number: *listener,
                    endpoint: *endpoint,
                    segment: key.0,
                    name: name.0,
                    kind: ChannelKind(*kind),
                    backlog: *backlog,
                    capacity: *capacity,
                    waiting: 0,
                };
                self.listeners.insert(listener.number, listener);
                Ok(())
            }
            Record::Unlisten { listener } => self.unlisten(*listener),
            Record::Channel(channel) => self.channel(channel),
            Record::Accepted { channel } => {
                let channel = self.channels.get_mut(channel).ok_or(Misfit("an unknown channel accepted"))?;
                if channel.accepted || channel.acceptor.closed {
                    return Err(Misfit("a channel accepted twice"));
                }
                channel.accepted = true;
                let listener = channel.listener;
                self.one_less_waits(listener);
                Ok(())
            }
            Record::Closed { channel, initiator } => {
                let side = self.channels.get(channel).map(|c| *c.side(*initiator));
                match side {
                    Some(Side { closed: false, .. }) => {
                        self.close(*channel, *initiator);
                        Ok(())
                    }
                    _ => Err(Misfit("a channel closed twice")),
                }
            }
            Record::Sync(object) => self.enter(object),
            Record::SyncOpened { object, user } => self.open::<SyncObject>(*object, *user),
            Record::SyncClosed { object, slot } => self.sync_left(*object, *slot, Left::Closed),
            Record::SyncUnlinked { object } => self.sync_unlinked(*object),
            Record::Block(block) => self.block(block),
            Record::BlockLinked { block, name } => self.block_linked(*block, name.0),
            Record::BlockUnlinked { block } => self.block_unlinked(*block),
            Record::BlockOpened { block, handle } => self.open::<Block>(*block, *handle),
            Record::BlockClosed { handle } => self.block_closed(*handle),
            Record::BlockResized { block, size, span } => self.block_resized(*block, *size, *span),
            Record::BlockGranted { block, grant } => self.block_granted(*block, *grant),
            Record::BlockAcked { handle } => self.block_acked(*handle),
        }
    }

    fn attach(&mut self, attach: &Attach) -> Result<(), Misfit> {
        let segment =
            self.segments.get(&attach.segment.0).ok_or(Misfit("an endpoint in an unknown segment"))?;
        if attach.endpoint == 0 || self.endpoints.contains_key(&attach.endpoint) {
            return Err(Misfit("two endpoints of one number"));
        }
        let member =
            self.members.get_mut(&attach.member).ok_or(Misfit("an endpoint of an unknown member"))?;
        member.tally.endpoints += 1;
        self.next_epoch = self.next_epoch.max(attach.epoch.saturating_add(1));
        let endpoint = Endpoint {
            number: attach.endpoint,
            epoch: attach.epoch,
            token: attach.token,
            member: attach.member,
            segment: segment.name,
            name: attach.name.0,
            vector: attach.vector,
            process: attach.process,
            uid: attach.uid,
            channels: BTreeSet::new(),
            listeners: BTreeSet::new(),
            bytes: 0,
            syncs: BTreeSet::new(),
            handles: BTreeMap::new(),
            blocks: BTreeSet::new(),
            block_bytes: 0,
        };
        self.endpoints.insert(endpoint.number, endpoint);
        Ok(())
    }

    fn dead(&mut self, number: u32) -> Result<(), Misfit> {
        let endpoint = self.endpoints.get(&number).ok_or(Misfit("an unknown endpoint died"))?;
        let (listeners, channels) = (endpoint.listeners.clone(), endpoint.channels.clone());
        for listener in listeners {
            self.unlisten(listener)?;
        }
        for channel in channels {
            for initiator in [true, false] {
                let side = self.channels.get(&channel).map(|c| *c.side(initiator));
                if side.is_some_and(|side| side.endpoint == number && !side.closed) {
                    self.close(channel, initiator);
                }
            }
        }
        for (object, slot) in self.endpoints.get(&number).map(|e| e.syncs.clone()).unwrap_or_default() {
            self.sync_left(object, slot, Left::Died)?;
        }
        self.blocks_of_dead(number)?;
        if let Some(endpoint) = self.endpoints.remove(&number)
            && let Some(member) = self.members.get_mut(&endpoint.member)
        {
            member.tally.endpoints -= 1;
        }
        Ok(())
    }

    fn unlisten(&mut self, listener: u32) -> Result<(), Misfit> {
        let listener = self.listeners.remove(&listener).ok_or(Misfit("an unknown listener removed"))?;
        self.names.remove(&(listener.segment, listener.name));
        if let Some(endpoint) = self.endpoints.get_mut(&listener.endpoint) {
            endpoint.listeners.remove(&listener.number);
        }
        Ok(())
    }

    fn channel(&mut self, channel: &Channel) -> Result<(), Misfit> {
        let (number, segment) = (channel.number, channel.segment.0);
        if !ring::valid_capacity(channel.capacity) || self.channels.contains_key(&number) {
            return Err(Misfit("an impossible channel"));
        }
        let open = [channel.initiator, channel.acceptor].into_iter().filter(|side| !side.closed);
        for side in open.clone() {
            let endpoint = self.endpoints.get(&side.endpoint).ok_or(Misfit("a channel of nobody"))?;
            if endpoint.epoch != side.epoch || endpoint.segment != segment {
                return Err(Misfit("a channel of somebody else"));
            }
        }
        let charged = channel.initiator.member;
        if open.clone().count() == 0 || !self.members.contains_key(&charged) {
            return Err(Misfit("a channel of nobody"));
        }
        let len = channel.block_len();
        let arena = &mut self.segments.get_mut(&segment).ok_or(Misfit("a channel in no segment"))?.arena;
        if !arena.take(channel.offset, len) {
            return Err(Misfit("a channel without memory"));
        }
        for side in open {
            if let Some(endpoint) = self.endpoints.get_mut(&side.endpoint) {
                endpoint.channels.insert(number);
            }
        }
        if !channel.initiator.closed
            && let Some(endpoint) = self.endpoints.get_mut(&channel.initiator.endpoint)
        {
            endpoint.bytes += len;
        }
        if let Some(member) = self.members.get_mut(&charged) {
            member.tally.channels += 1;
            member.tally.bytes += len;
        }
        if !channel.accepted
            && let Some(listener) = self.listeners.get_mut(&channel.listener)
        {
            listener.waiting += 1;
        }
        self.next_channel = self.next_channel.max(number.saturating_add(1));
        if channel.relayed {
            self.relayed.insert(number);
        }
        self.channels.insert(number, channel.clone());
        Ok(())
    }

    /// Closes a side that is open; the memory is free when both are closed.
    fn close(&mut self, number: u64, initiator: bool) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let (side, other) = match initiator {
            true => (&mut channel.initiator, channel.acceptor),
            false => (&mut channel.acceptor, channel.initiator),
        };
        side.closed = true;
        let side = *side;
        let (listener, len) = (channel.listener, channel.block_len());
        if !initiator && !channel.accepted {
            channel.accepted = true;
            self.one_less_waits(listener);
        }
        let ends_here = other.closed;
        if let Some(endpoint) = self.endpoints.get_mut(&side.endpoint).filter(|e| e.epoch == side.epoch) {
            // Both sides may be one endpoint.
            if side.endpoint != other.endpoint || ends_here {
                endpoint.channels.remove(&number);
            }
            if initiator {
                endpoint.bytes = endpoint.bytes.saturating_sub(len);
            }
        }
        if ends_here && let Some(channel) = self.channels.remove(&number) {
            self.relayed.remove(&number);
            if let Some(member) = self.members.get_mut(&channel.initiator.member) {
                member.tally.channels -= 1;
                member.tally.bytes -= len;
            }
            if let Some(segment) = self.segments.get_mut(&channel.segment.0) {
                let given = segment.arena.give(channel.offset, len);
                debug_assert!(given, "the block of a channel was taken");
            }
        }
    }

    fn one_less_waits(&mut self, listener: u32) {
        if let Some(listener) = self.listeners.get_mut(&listener) {
            listener.waiting = listener.waiting.saturating_sub(1);
        }
    }

    /// Records that make these books out of empty ones.
    pub fn dump(&self) -> impl Iterator<Item = Record> {
        let start = Record::Start {
            boot_id: self.boot_id,
            generation: self.generation,
            next_epoch: self.next_epoch,
            next_listener: self.next_listener,
            next_channel: self.next_channel,
            next_object: self.next_object,
        };
        let segments = self.segments.values().map(|segment| Record::Segment {
            name: Text(segment.name),
            uuid: segment.uuid,
            size: segment.size,
            members: segment.members.clone(),
            readers: segment.readers.clone(),
            memory: segment.memory,
            page: segment.page,
            part: segment.part.clone(),
            runtime: segment.runtime.clone(),
        });
        let endpoints = self.endpoints.values().map(|endpoint| {
            Record::Attach(Attach {
                endpoint: endpoint.number,
                epoch: endpoint.epoch,
                token: endpoint.token,
                member: endpoint.member,
                segment: Text(endpoint.segment),
                name: Text(endpoint.name),
                vector: endpoint.vector,
                process: endpoint.process,
                uid: endpoint.uid,
            })
        });
        let listeners = self.listeners.values().map(|listener| Record::Listen {
            listener: listener.number,
            endpoint: listener.endpoint,
            name: Text(listener.name),
            kind: listener.kind.0,
            backlog: listener.backlog,
            capacity: listener.capacity,
        });
        std::iter::once(start)
            .chain(self.members.values().flat_map(Member::dump))
            .chain(segments)
            .chain(endpoints)
            .chain(listeners)
            .chain(self.channels.values().cloned().map(Record::Channel))
            .chain(self.syncs.values().cloned().map(Record::Sync))
            .chain(self.blocks.values().cloned().map(Record::Block))
    }

    /// The least used vector of a member, of `1..vectors`.
    pub fn quietest_vector(&self, member: u32, vectors: u32) -> u32 {
        let mut used = vec![0u32; vectors.max(2) as usize];
        for endpoint in self.endpoints.values().filter(|e| e.member == member) {
            if let Some(n) = used.get_mut(endpoint.vector as usize) {
                *n += 1;
            }
        }
        (1..).zip(&used[1..]).min_by_key(|(_, n)| **n).map_or(1, |(vector, _)| vector)
    }

    /// The lowest endpoint number that is free.
    pub fn free_endpoint(&self) -> u32 {
        let taken = self.endpoints.keys().copied();
        // The first number that is not the one that follows its predecessor.
        taken
            .zip(1..)
            .find(|(number, expected)| number != expected)
            .map_or(self.endpoints.len() as u32 + 1, |(_, n)| n)
    }

    /// The member number for a VM of this name: the one it had, else the lowest that nobody ever had, else the lowest
    /// that nobody has. `None` if all are taken.
    pub fn number_for(&self, name: &Name, reserved: &BTreeSet<u32>) -> Option<u32> {
        if let Some(member) = self.member_named(name) {
            return Some(member.number);
        }
        let numbers = || (1..=super::config::MAX_MEMBER).filter(|n| !reserved.contains(n));
        // So that the range of the doorbells stays small, "never had" is looked for among few.
        numbers().take_while(|&n| n <= 1024).find(|n| !self.members.contains_key(n)).or_else(|| {
            numbers().find(|n| self.members.get(n).is_none_or(|m| m.retired && m.tally == Tally::default()))
        })
    }
}
