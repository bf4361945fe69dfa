//! The requests to open, close and unlink synchronisation objects.

use super::record::{Change, SyncObject, SyncUser, kind_of};
use crate::books::Endpoint;
use crate::broker::Broker;
use crate::caller::Caller;
use crate::effects::{Effect, World};
use crate::objects::quota::no_room;
use crate::reply::{Refusal, body, broken, checked};
use crate::service::{Request, Service};
use crate::text::Text;
use ginnel_layout::sync::{self, SyncKind};
use ginnel_layout::wire::{self, ErrorCode, Kind};
use ginnel_layout::{Name, PAGE};
use ginnel_sync::authority::Left;
use tracing::debug;
use zerocopy::IntoBytes;

impl Service for Change {
    const REQUESTS: &[Request] = &[
        Request::write(Kind::SYNC_OPEN, |broker, world, caller, bytes| {
            broker.sync_open(world, caller, &body(bytes)?)
        }),
        Request::new(Kind::SYNC_CLOSE, |broker, _, caller, bytes| broker.sync_close(caller, &body(bytes)?)),
        Request::new(Kind::SYNC_UNLINK, |broker, _, caller, bytes| broker.sync_unlink(caller, &body(bytes)?)),
    ];

    fn mark_end(&self, broker: &mut Broker) {
        if let Self::Closed { object, slot, .. } = *self {
            broker.reclaim(object, slot, Left::Died);
        }
    }
}

impl Broker {
    pub(crate) fn sync_open(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        body: &wire::SyncOpen,
    ) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let (segment, bell) = (caller.segment, bell_word(endpoint));
        let name = checked(&body.name, "object")?;
        let kind = SyncKind(body.kind);
        if !kind.is_known() {
            let text = format!("there is no kind {} of synchronisation objects: use 1 to 6", body.kind);
            return Err(Refusal::new(ErrorCode::INVALID, text));
        }
        let again = endpoint.slots.get(&body.nonce).and_then(|(object, slot)| {
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
            return self.sync_create(caller, name, body);
        };
        if body.flags & wire::SyncOpen::EXCLUSIVE != 0 {
            let text =
                format!("{segment} has a {} {name} already: choose another name", kind_of(object).name());
            return Err(Refusal::new(ErrorCode::IN_USE, text));
        }
        if kind_of(object) != kind {
            let text = format!("{name} in {segment} is a {}, not a {}", kind_of(object).name(), kind.name());
            return Err(Refusal::new(ErrorCode::KIND, text));
        }
        if body.limit != 0 && body.limit != object.limit {
            let text = format!(
                "{} {name} in {segment} has a limit of {}, not {}: open it with 0 or the same",
                kind.name(),
                object.limit,
                body.limit
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
            nonce: body.nonce,
        };
        self.seat(segment, offset, user);
        self.record(Change::Opened { object, user })?;
        debug!(object, slot, endpoint = number, %segment, %name, "synchronisation object opened");
        self.send_sync(caller, object, user, bell, false)
    }

    fn sync_create(&mut self, caller: &Caller, name: Name, body: &wire::SyncOpen) -> Result<(), Refusal> {
        let (endpoint, segment, bell) =
            (caller.endpoint, caller.segment, bell_word(self.endpoint_of(caller)?));
        let kind = SyncKind(body.kind);
        if body.flags & wire::SyncOpen::CREATE == 0 {
            let text = format!("there is no {} {name} in {segment}: create it first", kind.name());
            return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
        }
        let initial =
            if kind == SyncKind::SEMAPHORE { body.initial <= body.limit } else { body.initial == 0 };
        if !kind.allows(body.limit) || !initial {
            let text = format!(
                "a {} cannot have a limit of {} and begin with {}: semaphores take 1 to 4294967295 permits and begin \
                 with as many at most, barriers 1 to {} parties, others 0",
                kind.name(),
                body.limit,
                body.initial,
                sync::SLOTS
            );
            return Err(Refusal::new(ErrorCode::INVALID, text));
        }
        self.block_quota(caller.account(), 1, PAGE as u64)?;
        let page = PAGE as u64;
        let arena = self.books.segments.get(&segment).map(|s| &s.arena);
        let offset =
            arena.and_then(|arena| arena.find(page, page)).ok_or_else(|| no_room(&segment, page, 0))?;
        let user = SyncUser { slot: 0, epoch: 1, endpoint, nonce: body.nonce };
        let object = SyncObject {
            number: self.books.next_object.max(1),
            segment: Text(segment),
            name: Text(name),
            kind: kind.0,
            limit: body.limit,
            offset,
            persistent: body.flags & wire::SyncOpen::PERSISTENT != 0,
            bereaved: false,
            member: caller.member,
            uid: caller.uid,
            next_epoch: 2,
            users: vec![user],
        };
        let number = object.number;
        self.effect(Effect::NewSync { segment, offset, kind, limit: body.limit, initial: body.initial });
        self.seat(segment, offset, user);
        self.record(Change::Made(object))?;
        debug!(object = number, endpoint, %segment, %name, kind = kind.name(), "synchronisation object");
        self.send_sync(caller, number, user, bell, true)
    }

    /// Writes into the page who has a slot.
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

    pub(crate) fn sync_close(&mut self, caller: &Caller, body: &wire::SyncRef) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let user = self.books.syncs.get(&body.object).and_then(|object| object.user(body.slot));
        if user.is_none_or(|user| user.endpoint != number || u32::from(user.epoch) != body.epoch) {
            let text = format!("endpoint {number} has no slot {} of object {}", body.slot, body.object);
            return Err(Refusal::new(ErrorCode::CLOSED, text));
        }
        self.reclaim(body.object, body.slot, Left::Closed);
        self.record(Change::Closed { object: body.object, slot: body.slot, died: false })?;
        self.ok(caller)
    }

    /// Takes back what the user of a slot has in the object's words, whatever it was doing.
    pub(crate) fn reclaim(&mut self, object: u64, slot: u32, left: Left) {
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

    pub(crate) fn sync_unlink(&mut self, caller: &Caller, body: &wire::ByName) -> Result<(), Refusal> {
        let name = checked(&body.name, "object")?;
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
        self.record(Change::Unlinked { object: object.number })?;
        self.ok(caller)
    }
}

/// Returns a doorbell in the form in which a slot contains it.
fn bell_word(endpoint: &Endpoint) -> u32 {
    endpoint.member << 16 | endpoint.vector
}
