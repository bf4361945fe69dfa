//! The broker decides who may attach, listen and connect, and what follows from it.
//!
//! It is a state machine. Requests go in, and [`Effect`]s come out in the order in which they must be performed: shared memory
//! and doorbells first, then the journal, then the answer. If the daemon is killed between two of them, its successor performs
//! the same effects again, by itself or because a client repeats its request: marks and rings may be repeated, and a client asks
//! again for an answer that it did not get. The broker treats programs on the host and in guests alike, except for how it names a
//! doorbell.

use crate::books::Books;
use crate::declared::Access;
pub use crate::effects::{ClientId, Effect, FdRef, Recording, Who, World};
use crate::endings::Endings;
use crate::limits::{Limits, MemberLimits};
use crate::objects::Change;
use crate::objects::block::Revocations;
use crate::process::Process;
use crate::record::Record;
use crate::relayed::Relayed;
pub use crate::reply::unrecorded;
use crate::reply::{self, Refusal};
use crate::sockets::Sockets;
use ginnel_layout::wire::{BellKind, ErrorCode, Kind};
use ginnel_layout::{HOST_MEMBER, Name, control};
use std::collections::{BTreeMap, BTreeSet};
use tracing::{error, info};

/// One connection.
#[derive(Debug)]
pub(crate) struct Client {
    pub who: Who,
    pub greeted: bool,
    pub endpoint: Option<u32>,
    /// The endpoint is older than this connection.
    pub returned: bool,
    /// Processes that have joined the endpoint over this connection, which they have inherited, and that have no connection of
    /// their own.
    pub joined: BTreeSet<Process>,
}

/// The state machine.
#[derive(Debug, Default)]
pub struct Broker {
    /// The books. Only the broker changes them.
    pub(crate) books: Books,
    pub(crate) limits: Limits,
    pub(crate) vectors: u32,
    /// The daemon's own user, which may attach to every segment.
    pub(crate) own_uid: u32,
    pub(crate) access: BTreeMap<Name, Access>,
    pub(crate) member_limits: BTreeMap<u32, MemberLimits>,
    pub(crate) clients: BTreeMap<ClientId, Client>,
    /// The connections of endpoints. An endpoint may have none for a while: its program connects again when it needs something.
    pub(crate) attached: BTreeMap<u32, Vec<ClientId>>,
    /// Owners that cannot be watched, so that nothing reports their end.
    pub(crate) unwatched: BTreeSet<(u32, Process)>,
    pub(crate) revocations: Revocations,
    pub(crate) relayed_bells: Relayed,
    pub(crate) endings: Endings,
    pub(crate) sockets: Sockets,
    pub(crate) recording: Recording,
    pub(crate) effects: Vec<Effect>,
}

impl Broker {
    /// Makes a broker that starts from these books.
    pub fn new(books: Books, limits: Limits, vectors: u32, own_uid: u32) -> Self {
        let (revocations, endings) = (Revocations::of(&books), Endings::of(&books));
        let mut broker = Self { books, limits, vectors, own_uid, revocations, endings, ..Self::default() };
        broker.index_relayed();
        broker
    }

    /// Returns the books.
    pub fn books(&self) -> &Books {
        &self.books
    }

    /// Returns the effects since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Returns whether a segment is an RDMA device.
    pub fn is_for_verbs(&self, segment: &Name) -> bool {
        self.access.get(segment).is_some_and(|access| access.verbs)
    }

    /// Sets which host programs may attach to a segment.
    pub fn set_access(&mut self, segment: Name, access: Access) {
        self.access.insert(segment, access);
    }

    /// Sets which records the journal accepts from now on.
    pub fn set_recording(&mut self, recording: Recording) {
        self.recording = recording;
    }

    /// Sets all limits, except those of members that have their own.
    pub fn set_all_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Sets the limits of a member.
    pub fn set_limits(&mut self, member: u32, limits: MemberLimits) {
        self.member_limits.insert(member, limits);
    }

    pub(crate) fn limits_of(&self, member: u32) -> MemberLimits {
        self.member_limits.get(&member).copied().unwrap_or(self.limits.member)
    }

    /// Registers a new connection.
    pub fn connected(&mut self, client: ClientId, who: Who) {
        let joined = BTreeSet::new();
        self.clients.insert(client, Client { who, greeted: false, endpoint: None, returned: false, joined });
    }

    /// Returns the program at the other end of a connection; `None` if the connection has ended.
    pub fn who(&self, client: ClientId) -> Option<&Who> {
        self.clients.get(&client).map(|client| &client.who)
    }

    /// Returns whether a client has become an endpoint.
    pub fn is_attached(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|client| client.endpoint.is_some())
    }

    /// Returns whether an endpoint has a connection.
    pub fn has_connection(&self, endpoint: u32) -> bool {
        self.attached.contains_key(&endpoint)
    }

    /// Ends an endpoint, because its member has no share in the segment any more.
    pub fn endpoint_ends(&mut self, endpoint: u32, epoch: u32) {
        if self.books.endpoints.get(&endpoint).is_some_and(|e| e.epoch == epoch) {
            self.die(endpoint);
        }
    }

    /// Ends everything that a VM has, because the VM or its kernel has ended.
    pub fn member_died(&mut self, member: u32) {
        self.forget_sockets_of(member);
        for endpoint in self.books.index.of_member(member).collect::<Vec<_>>() {
            self.die(endpoint);
        }
    }

    /// Ends all endpoints of a segment that is being removed.
    pub fn segment_ends(&mut self, segment: &Name) {
        for endpoint in self.books.index.of_segment(segment).collect::<Vec<_>>() {
            self.die(endpoint);
        }
        self.end_all();
    }

    /// Ends an endpoint, and tells the endpoints that have a channel with it.
    pub(crate) fn die(&mut self, number: u32) {
        let Some(endpoint) = self.books.endpoints.get(&number) else { return };
        let (segment, epoch, member, name) =
            (endpoint.segment, endpoint.epoch, endpoint.member, endpoint.name);
        if endpoint.is_ending {
            return;
        }
        let at_once = self.ends_at_once(number);
        self.cut_off(number);
        if !at_once {
            info!(endpoint = number, epoch, member, %segment, %name, "endpoint ends, and has much to give back");
            return self.begin_ending(number);
        }
        info!(endpoint = number, epoch, member, %segment, %name, "endpoint gone");
        self.remove_endpoint(number);
    }

    /// Removes an endpoint that has ended. Its number is then free for another.
    pub(crate) fn remove_endpoint(&mut self, number: u32) {
        // The endpoint is in the books, so they cannot refuse this record.
        let _ = self.record(Record::Dead { endpoint: number });
        self.revocations.forget(number);
    }

    /// Ends all connections, owners and holds of an endpoint, so that nobody can act as it any more.
    fn cut_off(&mut self, number: u32) {
        let endpoint = self.books.endpoints.get(&number);
        let epoch = endpoint.map_or(0, |e| e.epoch);
        let (owners, holds) = endpoint.map(|e| (e.owners.clone(), e.holds.clone())).unwrap_or_default();
        for token in holds.into_keys() {
            self.effects.push(Effect::ForgetHold { endpoint: number, token });
        }
        for id in self.attached.remove(&number).unwrap_or_default() {
            if let Some(client) = self.clients.get_mut(&id) {
                client.endpoint = None;
                client.joined.clear();
            }
            self.effects.push(Effect::Disconnect(id));
        }
        for process in owners {
            self.unwatched.remove(&(number, process));
            self.effects.push(Effect::Unwatch { endpoint: number, epoch, process });
        }
        self.revocations.forget(number);
    }

    /// Tells all users of a segment that its file was truncated and is as long as before. The truncated part reads as
    /// zeros, so nobody would notice otherwise. Each channel of the segment and each connection reports it.
    pub fn segment_cut(&mut self, segment: &Name) {
        Change::lose(self, segment);
        for number in self.books.index.of_segment(segment).collect::<Vec<_>>() {
            let Some(endpoint) = self.books.endpoints.get(&number) else { continue };
            self.effects.push(Effect::Ring { member: endpoint.member, vector: endpoint.vector });
            for client in self.connections(number) {
                self.send_cut(client);
            }
        }
    }

    /// Tells an endpoint that its segment's memory is lost.
    pub(crate) fn send_cut(&mut self, client: ClientId) {
        self.send(client, reply::packet(Kind::SEGMENT_CUT, 0, &[]), vec![]);
    }

    /// Changes the books and the journal at a client's request. Refuses a record that gives something ([`Record::gives`])
    /// while the journal does not accept it.
    pub(crate) fn record(&mut self, record: impl Into<Record>) -> Result<(), Refusal> {
        let record = record.into();
        if self.recording != Recording::Open && record.gives() {
            return Err(unrecorded());
        }
        self.change(record)
    }

    fn change(&mut self, record: Record) -> Result<(), Refusal> {
        self.unrelay(&record);
        if let Err(error) = self.books.apply(&record) {
            error!(%error, ?record, "a change that does not fit the books; please report this");
            return Err(Refusal::new(ErrorCode::INVALID, format!("the daemon's books refuse this: {error}")));
        }
        self.relay(&record);
        self.effects.push(Effect::Record(Box::new(record)));
        Ok(())
    }

    /// Applies a change that comes from outside the attach protocol: members, segments, sessions. Returns false if the record
    /// does not fit the books. If the record gives something ([`Record::gives`]), the caller must ask the journal first.
    pub fn note(&mut self, record: Record) -> bool {
        self.change(record).is_ok()
    }

    pub(crate) fn effect(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    pub(crate) fn send(&mut self, client: ClientId, packet: Vec<u8>, fds: Vec<FdRef>) {
        self.effects.push(Effect::Send { client, packet, fds });
    }

    /// Returns how a program of `member` rings a vector of another member.
    pub(crate) fn bell(&self, member: u32, peer: u32, vector: u32) -> (BellKind, u32) {
        let session = self.books.members.get(&peer).and_then(|m| m.session);
        if session.is_some_and(|session| !session.interrupts) {
            return (BellKind::NONE, 0);
        }
        if member == HOST_MEMBER {
            return (BellKind::EVENT, 0);
        }
        if let Some(position) = self.books.position(member, peer, vector) {
            return (BellKind::REGISTER, peer << 16 | position);
        }
        // The vector could not be announced to that QEMU, so the program rings the daemon, which relays the ring.
        (BellKind::REGISTER, HOST_MEMBER << 16 | control::DAEMON_VECTOR)
    }
}

#[cfg(any(test, fuzzing))]
mod consistency;
#[cfg(any(test, fuzzing))]
pub mod model;
#[cfg(test)]
mod tests;
