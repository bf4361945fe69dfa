//! What each record changes in the books.

use super::{Books, Endpoint, InvalidRecord, Member, Qemu, Segment, Session};
use crate::account::Tally;
use crate::arena::Arena;
use crate::numbers::Numbers;
use crate::objects::Change;
use crate::process::Process;
use crate::record::{Attach, Record};
use crate::text::Text;
use std::collections::{BTreeMap, BTreeSet};

impl Books {
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
                recipients,
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
                    recipients: recipients.clone(),
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
}
