//! The requests by which a connection becomes an endpoint, and the requests that do not concern an object.

use crate::account::Account;
use crate::broker::Broker;
use crate::caller::Caller;
use crate::declared::Access;
use crate::effects::{ClientId, Effect, FdRef, Who, World};
use crate::holds::token_matches;
use crate::objects::Change;
use crate::recipients::Recipient;
use crate::record::{Attach, Record};
use crate::reply::{self, Refusal, body, broken, checked};
use crate::service::Request;
use crate::text::{Hex16, Text};
use ginnel_layout::segment::{self, MappingKind};
use ginnel_layout::wire::{self, BellKind, ErrorCode, Fds, Kind};
use ginnel_layout::{HOST_MEMBER, Name};
use std::collections::BTreeSet;
use tracing::info;
use zerocopy::IntoBytes;

/// The requests of endpoints that do not concern an object.
pub(crate) const REQUESTS: &[Request] = &[
    Request::new(Kind::BELL, |broker, _, caller, bytes| broker.bell_request(caller, &body(bytes)?)),
    Request::new(Kind::DETACH, |broker, _, caller, bytes| {
        let []: [u8; 0] = body(bytes)?;
        broker.detach(caller)
    }),
    Request::gift(Kind::HOLD, |broker, _, caller, bytes| broker.hold(caller, &body(bytes)?)),
];

impl Broker {
    pub(crate) fn hello(&mut self, id: ClientId, request: u32, hello: wire::Hello) -> Result<(), Refusal> {
        if hello.version != wire::VERSION {
            let text = format!(
                "the client speaks version {} of the attach protocol, this daemon version {}: use programs and daemon \
                 of one release",
                hello.version,
                wire::VERSION
            );
            return Err(Refusal::new(ErrorCode::VERSION, text));
        }
        let Some(client) = self.clients.get_mut(&id) else { return Ok(()) };
        client.greeted = true;
        let member = client.who.member;
        let name = self.books.members.get(&member).map_or(Name::NONE, |m| m.name);
        let features = hello.features & self.features();
        let answer = wire::HelloOk { version: wire::VERSION, member, features, name };
        self.send(id, reply::packet(Kind::HELLO_OK, request, answer.as_bytes()), vec![]);
        Ok(())
    }

    pub(crate) fn attach(
        &mut self,
        world: &mut dyn World,
        id: ClientId,
        request: u32,
        body: &wire::Attach,
    ) -> Result<(), Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(()) };
        if client.endpoint.is_some() {
            return Err(Refusal::new(
                ErrorCode::PROTOCOL,
                "this connection is an endpoint already: open another",
            ));
        }
        let segment = checked(&body.segment, "segment")?;
        let name = checked(&body.name, "endpoint")?;
        let returned = body.endpoint != 0;
        let number =
            if returned { self.returning(id, body)? } else { self.arriving(world, id, segment, name)? };
        let Some(endpoint) = self.books.endpoints.get(&number) else { return Ok(()) };
        let Some(books) = self.books.segments.get(&endpoint.segment) else { return Ok(()) };
        let member = endpoint.member;
        let access = books.access(member);
        let mut answer = wire::Attached {
            member,
            endpoint: number,
            epoch: endpoint.epoch,
            vector: endpoint.vector,
            token: endpoint.token.0,
            uuid: books.uuid.0,
            segment_len: books.size,
            map_offset: segment::RESERVED + books.file_offset(),
            fds: Fds(0),
            page: books.page,
            // A guest's daemon replaces this by the kind of device that it has found.
            kind: MappingKind::FILE,
            access,
        };
        let mut fds = Vec::new();
        if member == HOST_MEMBER {
            // A process that comes back to a broken segment gets its doorbell and its channels, but there is no memory to give to
            // it.
            if !world.is_broken(&segment) {
                answer.fds.0 |= Fds::MEMORY;
                fds.push(match access.is_read_only() {
                    true => FdRef::ReadOnlyMemory(segment),
                    false => FdRef::Memory(segment),
                });
            }
            answer.fds.0 |= Fds::EVENT;
            fds.push(FdRef::Event(member, endpoint.vector));
        }
        if let Some(client) = self.clients.get_mut(&id) {
            (client.endpoint, client.returned) = (Some(number), returned);
        }
        let cut = returned && books.cut;
        self.bind(number, id);
        self.send(id, reply::packet(Kind::ATTACHED, request, answer.as_bytes()), fds);
        if cut {
            self.send_cut(id);
        }
        Change::greet(self, number, id);
        Ok(())
    }

    /// Makes a new endpoint.
    fn arriving(
        &mut self,
        world: &mut dyn World,
        id: ClientId,
        segment: Name,
        name: Name,
    ) -> Result<u32, Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(0) };
        let who = client.who.clone();
        let host = who.member == HOST_MEMBER;
        if self.books.segments.get(&segment).is_none_or(|s| !s.members.contains(&who.member)) {
            let text = match host {
                true => format!("the host has no segment {segment:?}: `ginnel status` lists those it has"),
                false => format!(
                    "this VM has no segment {segment:?}: add it to that segment's members on the host"
                ),
            };
            return Err(Refusal::new(ErrorCode::NO_SEGMENT, text));
        }
        if host && !self.may_attach(&segment, who.uid, &who.groups) {
            let text = format!(
                "user {} may not use segment {segment}: add the user to allow_users, or a group to allow_groups, of \
                 [segment.{segment}]",
                who.uid
            );
            return Err(Refusal::new(ErrorCode::DENIED, text));
        }
        if world.is_broken(&segment) {
            return Err(world.why_broken(&segment).map_or_else(
                || broken(&segment),
                |why| Refusal::new(ErrorCode::BROKEN, format!("segment {segment} is out of service: {why}")),
            ));
        }
        let limit = self.limits_of(who.member).endpoints_per_member;
        let account = Account::new(who.member, segment, who.uid);
        let endpoints = self.books.tally(account).endpoints;
        if endpoints >= limit {
            let text = format!(
                "{account} has {endpoints} endpoints, which is the limit: end some, or raise endpoints_per_member"
            );
            return Err(Refusal::new(ErrorCode::LIMIT, text));
        }
        let Some((endpoint, epoch)) = self.books.numbers.vacant() else {
            return Err(Refusal::new(ErrorCode::LIMIT, "there are 4294967295 endpoints: end some"));
        };
        self.note_recipient(&segment, &who)?;
        let attach = Attach {
            endpoint,
            epoch,
            token: Hex16(world.random()),
            member: who.member,
            segment: Text(segment),
            name: Text(name),
            vector: self.books.least_used_vector(&segment, who.member, self.vectors),
            process: who.process,
            uid: who.uid,
        };
        self.record(Record::Attach(attach))?;
        info!(endpoint, epoch, member = who.member, %segment, %name, pid = who.process.pid, uid = who.uid, "endpoint");
        if host {
            self.effect(Effect::Watch { endpoint, epoch, process: who.process });
        }
        Ok(endpoint)
    }

    /// Returns an existing endpoint to a process that has lost its connection, or that becomes another owner, or that adopts it.
    fn returning(&mut self, id: ClientId, body: &wire::Attach) -> Result<u32, Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(0) };
        let number = body.endpoint;
        let stale = |why: &str| {
            let text = format!("endpoint {number} of epoch {}: {why}; attach anew", body.epoch);
            Err(Refusal::new(ErrorCode::STALE, text))
        };
        let known = self.books.endpoints.get(&number).filter(|e| e.epoch == body.epoch && !e.is_ending);
        let Some(endpoint) = known else {
            return stale("it is not known (any more)");
        };
        let process = client.who.process;
        let is_own = token_matches(&endpoint.token, &body.token);
        let hold = endpoint.hold_for(&body.token, &process);
        // All errors get the same answer, so that it tells nothing to a program that guesses.
        if endpoint.member != client.who.member
            || endpoint.segment != body.segment
            || !(is_own || hold.is_some())
        {
            return stale("segment, member or token are not its own");
        }
        let (segment, who) = (endpoint.segment, client.who.clone());
        self.may_adopt(endpoint, &who)?;
        self.note_recipient(&segment, &who)?;
        self.owner_returns(number, process)?;
        if let Some(hold) = hold {
            self.adopted(number, hold, process)?;
        }
        Ok(number)
    }

    /// Returns whether a user of the host may attach to a segment.
    pub fn may_attach(&self, segment: &Name, uid: u32, groups: &[u32]) -> bool {
        let access = self.access.get(segment);
        self.is_root(uid) || access.is_some_and(|access| access.admits(Some(uid), groups))
    }

    /// Notes that a user of the host is given the memory of a segment, unless it was noted before.
    fn note_recipient(&mut self, segment: &Name, who: &Who) -> Result<(), Refusal> {
        // The daemon's user is noted, because another daemon may have another one.
        if who.member != HOST_MEMBER || who.uid == 0 {
            return Ok(());
        }
        let Some(books) = self.books.segments.get(segment) else { return Ok(()) };
        let (nobody, access) = (Access::default(), self.access.get(segment));
        let known = books.recipients.as_ref();
        let all = known.and_then(|all| all.with(who.uid, &who.groups, access.unwrap_or(&nobody)));
        let record = all.map(|all| books.with_recipients(all));
        record.map_or(Ok(()), |record| self.record(record))
    }

    /// Returns who was given the memory of a segment and may not attach to it under `access`.
    pub fn excluded(&self, segment: &Name, access: &Access) -> BTreeSet<Recipient> {
        let known = self.books.segments.get(segment).and_then(|segment| segment.recipients.as_ref());
        let may = |one: &&Recipient| {
            one.user.is_some_and(|user| self.is_root(user)) || access.admits(one.user, &one.groups)
        };
        known.into_iter().flat_map(|known| known.iter()).filter(|one| !may(one)).cloned().collect()
    }

    /// Returns whether a user of the host may attach to every segment.
    pub(crate) fn is_root(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own_uid
    }

    fn bell_request(&mut self, caller: &Caller, body: &wire::BellOf) -> Result<(), Refusal> {
        let (member, vector) = (body.bell >> 16, body.bell & 0xffff);
        // The program has read this number in shared memory, where another member may have written a doorbell of another segment.
        if !self.books.vectors_of(&caller.segment, member).contains(&vector) {
            let text = format!("segment {} has no doorbell {:#x}", caller.segment, body.bell);
            return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
        }
        let (kind, bell) = self.bell(caller.member, member, vector);
        // The caller asks because it must ring this doorbell, and need not wait for the answer.
        self.effect(Effect::Ring { member, vector });
        let (fds, bits) = match kind {
            BellKind::EVENT => (vec![FdRef::Event(member, vector)], Fds::PEER_EVENT),
            _ => (vec![], 0),
        };
        let answer = wire::BellOk { kind, bell, fds: Fds(bits), reserved: 0 };
        self.answer(caller, Kind::BELL_OK, answer.as_bytes(), fds)
    }
}
