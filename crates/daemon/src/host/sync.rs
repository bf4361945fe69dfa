//! Synchronisation objects: who uses which, and what is left to do when a user goes.
//!
//! What an object's words say is between its users; the daemon gives out the page and its slots, writes whose each slot
//! is, and takes back a slot as [`ginnel_sync::authority::reclaim`] does it, however its user has ended.

use super::account::Account;
use super::books::{Books, Endpoint, Misfit};
use super::broker::{Broker, Caller, Effect, FdRef, World};
use super::estate::{Estate, Shelf};
use super::record::{Record, SyncObject, SyncUser, Text};
use super::reply::Refusal;
use super::requests::{broken, checked};
use ginnel_layout::sync::{self, SyncKind};
use ginnel_layout::wire::{self, BellKind, ErrorCode, Fds, Kind};
use ginnel_layout::{Name, PAGE};
use ginnel_sync::authority::Left;
use std::collections::{BTreeMap, BTreeSet};
use tracing::debug;
use zerocopy::IntoBytes;

impl SyncObject {
    fn user(&self, slot: u32) -> Option<&SyncUser> {
        self.users.iter().find(|user| user.slot == slot)
    }

    fn free_slot(&self) -> Option<u32> {
        (0..sync::SLOTS as u32).find(|&slot| self.user(slot).is_none())
    }

    /// Whether nothing holds it any more.
    fn is_over(&self) -> bool {
        self.users.is_empty() && (self.name.0.is_none() || !(self.persistent || self.bereaved))
    }
}

impl Estate for SyncObject {
    type User = SyncUser;

    fn number(&self) -> u64 {
        self.number
    }

    fn key(&self) -> (Name, Name) {
        (self.segment.0, self.name.0)
    }

    fn account(&self) -> Account {
        Account::new(self.member, self.segment.0, self.uid)
    }

    fn place(&self) -> (u64, u64) {
        (self.offset, PAGE as u64)
    }

    fn is_possible(&self) -> bool {
        let kind = kind_of(self);
        let slots: BTreeSet<u32> = self.users().map(|user| user.slot).collect();
        let requests: BTreeSet<(u32, u64)> = self.users().map(|user| (user.endpoint, user.nonce)).collect();
        let apart = slots.len() == self.users.len() && requests.len() == self.users.len();
        kind.is_known() && kind.allows(self.limit) && !self.is_over() && apart
    }

    fn users(&self) -> impl Iterator<Item = SyncUser> {
        self.users.iter().copied()
    }

    fn add(&mut self, user: SyncUser) {
        self.next_epoch = following(user.epoch);
        self.bereaved = false;
        self.users.push(user);
        self.users.sort_unstable_by_key(|user| user.slot);
    }

    fn is_taken(&self, user: &SyncUser) -> bool {
        self.user(user.slot).is_some()
    }

    fn has_user(books: &Books, segment: &Name, user: &SyncUser) -> bool {
        let endpoint = books.endpoints.get(&user.endpoint).filter(|e| e.segment == *segment);
        endpoint.is_some_and(|e| !e.slots.contains_key(&user.nonce)) && (user.slot as usize) < sync::SLOTS
    }

    fn used(books: &mut Books, number: u64, user: &SyncUser) {
        if let Some(endpoint) = books.endpoints.get_mut(&user.endpoint) {
            endpoint.syncs.insert((number, user.slot));
            endpoint.slots.insert(user.nonce, (number, user.slot));
        }
        books.one_more_handle(user.endpoint);
    }

    fn all(books: &Books) -> &BTreeMap<u64, Self> {
        &books.syncs
    }

    fn shelf(books: &mut Books) -> Shelf<'_, Self> {
        (&mut books.syncs, &mut books.sync_names)
    }
}

impl Books {
    pub(super) fn syncs_of(&self, segment: &Name) -> Vec<u64> {
        self.syncs.values().filter(|s| s.segment.0 == *segment).map(|s| s.number).collect()
    }

    /// A user is gone. If it has died and was the last, the object stays for the next.
    pub(super) fn sync_left(&mut self, object: u64, slot: u32, left: Left) -> Result<(), Misfit> {
        let there = self.syncs.get_mut(&object).ok_or(Misfit("an unknown synchronisation object closed"))?;
        let at = there.users.iter().position(|user| user.slot == slot);
        let user = there.users.remove(at.ok_or(Misfit("a synchronisation object closed twice"))?);
        there.bereaved = left == Left::Died && there.users.is_empty();
        let over = there.is_over();
        if let Some(endpoint) = self.endpoints.get_mut(&user.endpoint) {
            endpoint.syncs.remove(&(object, slot));
            endpoint.slots.remove(&user.nonce);
        }
        self.one_less_handle(user.endpoint);
        if over {
            self.remove::<SyncObject>(object);
        }
        Ok(())
    }

    pub(super) fn sync_unlinked(&mut self, object: u64) -> Result<(), Misfit> {
        let there =
            self.syncs.get_mut(&object).ok_or(Misfit("an unknown synchronisation object unlinked"))?;
        let name = std::mem::replace(&mut there.name.0, Name::NONE);
        let (key, over) = ((there.segment.0, name), there.is_over());
        self.sync_names.remove(&key);
        if over {
            self.remove::<SyncObject>(object);
        }
        Ok(())
    }

    /// The doorbell of a user: member and vector.
    pub fn sync_bell(&self, object: u64, slot: u32) -> Option<(u32, u32)> {
        let user = self.syncs.get(&object)?.user(slot)?;
        self.endpoints.get(&user.endpoint).map(|endpoint| (endpoint.member, endpoint.vector))
    }
}

/// The epoch after this one. They go round; 0 is for slots that are free.
fn following(epoch: u16) -> u16 {
    epoch.checked_add(1).filter(|&next| next != u16::MAX).unwrap_or(1)
}

/// How a doorbell stands in a slot.
pub(super) fn bell_word(endpoint: &Endpoint) -> u32 {
    endpoint.member << 16 | endpoint.vector
}

impl Broker {
    pub(super) fn sync_open(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        wish: &wire::SyncOpen,
    ) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let (segment, bell) = (caller.segment, bell_word(endpoint));
        let name = checked(&wish.name, "object")?;
        let kind = SyncKind(wish.kind);
        if !kind.is_known() {
            let text = format!("there is no kind {} of synchronisation objects: use 1 to 6", wish.kind);
            return Err(Refusal::new(ErrorCode::INVALID, text));
        }
        let again = endpoint.slots.get(&wish.nonce).and_then(|(object, slot)| {
            let user = self.books.syncs.get(object)?.user(*slot)?;
            Some((*object, *user))
        });
        if let Some((object, user)) = again {
            return self.send_sync(caller, object, user, bell, false);
        }
        if world.is_broken(&segment) {
            return Err(broken(&segment));
        }
        self.handle_quota(endpoint)?;
        let there = self.books.sync_names.get(&(segment, name)).and_then(|n| self.books.syncs.get(n));
        let Some(object) = there else {
            return self.sync_create(caller, name, wish);
        };
        if wish.flags & wire::SyncOpen::EXCLUSIVE != 0 {
            let text =
                format!("{segment} has a {} {name} already: choose another name", kind_of(object).name());
            return Err(Refusal::new(ErrorCode::IN_USE, text));
        }
        if kind_of(object) != kind {
            let text = format!("{name} in {segment} is a {}, not a {}", kind_of(object).name(), kind.name());
            return Err(Refusal::new(ErrorCode::KIND, text));
        }
        if wish.limit != 0 && wish.limit != object.limit {
            let text = format!(
                "{} {name} in {segment} has a limit of {}, not {}: open it with 0 or the same",
                kind.name(),
                object.limit,
                wish.limit
            );
            return Err(Refusal::new(ErrorCode::INVALID, text));
        }
        let Some(slot) = object.free_slot() else {
            let text = format!(
                "{} {name} in {segment} has {} users, which is all that it can have: close some handles, or try later",
                kind.name(),
                sync::SLOTS
            );
            return Err(Refusal::new(ErrorCode::BUSY, text));
        };
        let (object, offset) = (object.number, object.offset);
        let user = SyncUser {
            slot,
            epoch: self.books.syncs.get(&object).map_or(1, |object| object.next_epoch),
            endpoint: number,
            nonce: wish.nonce,
        };
        self.seat(segment, offset, user);
        self.record(Record::SyncOpened { object, user })?;
        debug!(object, slot, endpoint = number, %segment, %name, "synchronisation object opened");
        self.send_sync(caller, object, user, bell, false)
    }

    fn sync_create(&mut self, caller: &Caller, name: Name, wish: &wire::SyncOpen) -> Result<(), Refusal> {
        let (endpoint, segment, bell) =
            (caller.endpoint, caller.segment, bell_word(self.endpoint_of(caller)?));
        let kind = SyncKind(wish.kind);
        if wish.flags & wire::SyncOpen::CREATE == 0 {
            let text = format!("there is no {} {name} in {segment}: create it first", kind.name());
            return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
        }
        let initial =
            if kind == SyncKind::SEMAPHORE { wish.initial <= wish.limit } else { wish.initial == 0 };
        if !kind.allows(wish.limit) || !initial {
            let text = format!(
                "a {} cannot have a limit of {} and begin with {}: semaphores take 1 to 4294967295 permits and begin \
                 with as many at most, barriers 1 to {} parties, others 0",
                kind.name(),
                wish.limit,
                wish.initial,
                sync::SLOTS
            );
            return Err(Refusal::new(ErrorCode::INVALID, text));
        }
        self.block_quota(caller.account(), 1, PAGE as u64)?;
        let page = PAGE as u64;
        let arena = self.books.segments.get(&segment).map(|s| &s.arena);
        let offset =
            arena.and_then(|arena| arena.find(page, page)).ok_or_else(|| no_room(&segment, page, 0))?;
        let user = SyncUser { slot: 0, epoch: 1, endpoint, nonce: wish.nonce };
        let object = SyncObject {
            number: self.books.next_object.max(1),
            segment: Text(segment),
            name: Text(name),
            kind: kind.0,
            limit: wish.limit,
            offset,
            persistent: wish.flags & wire::SyncOpen::PERSISTENT != 0,
            bereaved: false,
            member: caller.member,
            uid: caller.uid,
            next_epoch: 2,
            users: vec![user],
        };
        let number = object.number;
        self.effect(Effect::NewSync { segment, offset, kind, limit: wish.limit, initial: wish.initial });
        self.seat(segment, offset, user);
        self.record(Record::Sync(object))?;
        debug!(object = number, endpoint, %segment, %name, kind = kind.name(), "synchronisation object");
        self.send_sync(caller, number, user, bell, true)
    }

    /// Says in the page whose a slot is.
    fn seat(&mut self, segment: Name, offset: u64, user: SyncUser) {
        let Some(endpoint) = self.books.endpoints.get(&user.endpoint) else { return };
        let (endpoint_epoch, bell) = (endpoint.epoch, bell_word(endpoint));
        self.effect(Effect::Seat { segment, offset, user, endpoint_epoch, bell });
    }

    fn send_sync(
        &mut self,
        caller: &Caller,
        object: u64,
        user: SyncUser,
        bell: u32,
        created: bool,
    ) -> Result<(), Refusal> {
        let Some(object) = self.books.syncs.get(&object) else { return Ok(()) };
        let answer = wire::Sync {
            object: object.number,
            offset: object.offset,
            kind: object.kind,
            limit: object.limit,
            slot: user.slot,
            epoch: user.epoch.into(),
            bell,
            created: created.into(),
        };
        self.answer(caller, Kind::SYNC, answer.as_bytes(), vec![])
    }

    pub(super) fn sync_close(&mut self, caller: &Caller, wish: &wire::SyncRef) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let user = self.books.syncs.get(&wish.object).and_then(|object| object.user(wish.slot));
        if user.is_none_or(|user| user.endpoint != number || u32::from(user.epoch) != wish.epoch) {
            let text = format!("endpoint {number} has no slot {} of object {}", wish.slot, wish.object);
            return Err(Refusal::new(ErrorCode::CLOSED, text));
        }
        self.reclaim(wish.object, wish.slot, Left::Closed);
        self.record(Record::SyncClosed { object: wish.object, slot: wish.slot, died: false })?;
        self.ok(caller)
    }

    /// Takes back what the user of a slot has in the object's words, whatever it was doing.
    pub(super) fn reclaim(&mut self, object: u64, slot: u32, left: Left) {
        let Some(object) = self.books.syncs.get(&object) else { return };
        let effect = Effect::Reclaim {
            object: object.number,
            segment: object.segment.0,
            offset: object.offset,
            kind: kind_of(object),
            slot,
            left,
        };
        self.effect(effect);
    }

    pub(super) fn sync_unlink(&mut self, caller: &Caller, wish: &wire::ByName) -> Result<(), Refusal> {
        let name = checked(&wish.name, "object")?;
        let segment = caller.segment;
        let there = self.books.sync_names.get(&(segment, name)).and_then(|n| self.books.syncs.get(n));
        let Some(object) = there else {
            let text = format!("there is no synchronisation object {name} in {segment}");
            return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
        };
        if object.member != caller.member {
            let text = format!("member {} has made {name}, and only it can unlink it", object.member);
            return Err(Refusal::new(ErrorCode::DENIED, text));
        }
        self.record(Record::SyncUnlinked { object: object.number })?;
        self.ok(caller)
    }

    pub(super) fn bell_request(&mut self, caller: &Caller, wish: &wire::BellOf) -> Result<(), Refusal> {
        let (member, vector) = (wish.bell >> 16, wish.bell & 0xffff);
        // It stands in shared memory, where a neighbour may have written a doorbell of another segment.
        if !self.books.vectors_of(&caller.segment, member).contains(&vector) {
            let text = format!("segment {} has no doorbell {:#x}", caller.segment, wish.bell);
            return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
        }
        let (kind, bell) = self.bell(caller.member, member, vector);
        // Whoever asks has to ring it, and does not wait for the answer.
        self.effect(Effect::Ring { member, vector });
        let (fds, bits) = match kind {
            BellKind::EVENT => (vec![FdRef::Event(member, vector)], Fds::PEER_EVENT),
            _ => (vec![], 0),
        };
        let answer = wire::BellOk { kind, bell, fds: Fds(bits), reserved: 0 };
        self.answer(caller, Kind::BELL_OK, answer.as_bytes(), fds)
    }

    /// Whether an endpoint may have one more handle.
    pub(super) fn handle_quota(&self, endpoint: &Endpoint) -> Result<(), Refusal> {
        let limits = self.limits_of(endpoint.member);
        let own = endpoint.syncs.len() + endpoint.handles.len();
        let account = endpoint.account();
        let all = self.books.tally(account).handles as usize;
        for (key, open, limit) in [
            ("handles_per_endpoint", own, limits.handles_per_endpoint),
            ("handles_per_member", all, limits.handles_per_member),
        ] {
            if open >= limit as usize {
                let number = endpoint.number;
                let text = format!(
                    "endpoint {number}, or {account}, has {open} handles of blocks and synchronisation objects, which is its limit: \
                     close some, or raise {key}"
                );
                return Err(Refusal::new(ErrorCode::QUOTA, text));
            }
        }
        Ok(())
    }

    /// Whether an account may have so many more blocks and bytes of blocks.
    pub(super) fn block_quota(&self, account: Account, blocks: u64, bytes: u64) -> Result<(), Refusal> {
        let limits = self.limits_of(account.member);
        let tally = self.books.tally(account);
        for (key, used, more, limit) in [
            ("blocks_per_member", tally.blocks.into(), blocks, limits.blocks_per_member.into()),
            ("block_bytes_per_member", tally.block_bytes, bytes, limits.block_bytes_per_member),
        ] {
            if used.saturating_add(more) > limit {
                let text = format!(
                    "{account} has {used} of {limit}, and this takes {more} more: free some, or raise {key}"
                );
                return Err(Refusal::new(ErrorCode::QUOTA, text));
            }
        }
        Ok(())
    }
}

fn kind_of(object: &SyncObject) -> SyncKind {
    SyncKind(object.kind)
}

/// The segment is full.
pub(super) fn no_room(segment: &Name, len: u64, longest: u64) -> Refusal {
    let text = format!(
        "segment {segment} has no room for {len} bytes (its longest free run has {longest}): free blocks, close \
         channels, or make the segment larger"
    );
    Refusal::new(ErrorCode::NO_MEMORY, text)
}
