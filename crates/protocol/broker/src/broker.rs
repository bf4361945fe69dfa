//! The broker decides who may attach, listen and connect, and what follows from it.
//!
//! It is a state machine. Requests go in, and [`Effect`]s come out in the order in which they must be performed: shared memory
//! and doorbells first, then the journal, then the answer. If the daemon is killed between two of them, its successor performs
//! the same effects again, by itself or because a client repeats its request: marks and rings may be repeated, and a client asks
//! again for an answer that it did not get. The broker treats programs on the host and in guests alike, except for how it names a
//! doorbell.

use crate::books::Books;
use crate::declared::Access;
use crate::endings::Endings;
use crate::limits::{Limits, MemberLimits};
use crate::objects::Change;
use crate::objects::block::Revocations;
use crate::objects::sync::SyncUser;
use crate::process::{Image, Process};
use crate::record::{Hex16, Record};
use crate::relayed::Relayed;
use crate::reply::{self, Refusal};
use crate::session;
use crate::sockets::Sockets;
use ginnel_layout::channel::Capacities;
use ginnel_layout::ring::SideState;
use ginnel_layout::sync::SyncKind;
use ginnel_layout::wire::{self, BellKind, ErrorCode, Kind};
use ginnel_layout::{HOST_MEMBER, Name, control};
use ginnel_sync::authority::Left;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tracing::{error, info};

/// A connection to the attach socket, or one that a guest's daemon relays. Numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// The program at the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// The member in which the program runs.
    pub member: u32,
    /// The program's process, as its member numbers it.
    pub process: Process,
    /// The program that the process ran when it connected. `None` if that is not known, or if it is not on the host.
    pub image: Option<Image>,
    /// The user number.
    pub uid: u32,
    /// The group numbers.
    pub groups: Vec<u32>,
}

impl Who {
    /// Returns whether the program runs in a VM. There doorbells are registers, and file descriptors cannot be sent to it from
    /// here.
    pub fn is_relayed(&self) -> bool {
        self.member != HOST_MEMBER
    }
}

/// A descriptor to send along with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdRef {
    /// A segment's file.
    Memory(Name),
    /// A segment's file, open for reading only.
    ReadOnlyMemory(Name),
    /// The eventfd of a member's vector: member, then vector.
    Event(u32, u32),
}

/// An action that the server must perform.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Make a block ready for a channel by zeroing the headers of its rings.
    Zero {
        /// The segment's name.
        segment: Name,
        /// The offset of the block in the segment.
        offset: u64,
        /// The data bytes of the rings.
        capacities: Capacities,
    },
    /// Write the state of a side into a ring.
    Mark {
        /// The segment's name.
        segment: Name,
        /// The offset of the word in the segment.
        at: u64,
        /// The state to write.
        state: SideState,
    },
    /// Make a page a synchronisation object: zero it and write the daemon's fields in front.
    NewSync {
        /// The segment's name.
        segment: Name,
        /// The offset of the page in the segment.
        offset: u64,
        /// The kind of object.
        kind: SyncKind,
        /// The most permits of a semaphore, or the parties of a barrier.
        limit: u32,
        /// The permits of a semaphore at first.
        initial: u32,
    },
    /// Write into a synchronisation object who has a slot.
    Seat {
        /// The segment's name.
        segment: Name,
        /// The offset of the page in the segment.
        offset: u64,
        /// The user of the slot.
        user: SyncUser,
        /// The epoch of the user's endpoint.
        endpoint_epoch: u32,
        /// The user's doorbell: member << 16 | vector.
        bell: u32,
    },
    /// Take back a slot of a synchronisation object, and ring the users that must continue because of it.
    Reclaim {
        /// The number of the object.
        object: u64,
        /// The segment's name.
        segment: Name,
        /// The offset of the page in the segment.
        offset: u64,
        /// The kind of object.
        kind: SyncKind,
        /// The slot.
        slot: u32,
        /// The way in which the user left.
        left: Left,
    },
    /// Ring a doorbell.
    Ring {
        /// The member that has the doorbell.
        member: u32,
        /// The vector.
        vector: u32,
    },
    /// Write a record into the journal. The books have applied it already.
    Record(Box<Record>),
    /// Send a packet.
    Send {
        /// The receiver.
        client: ClientId,
        /// The packet, with its header.
        packet: Vec<u8>,
        /// The descriptors to send along, for a client on the host.
        fds: Vec<FdRef>,
    },
    /// Make a page of a segment a readiness board.
    NewBoard {
        /// The segment's name.
        segment: Name,
        /// The offset of the page in the segment.
        offset: u64,
    },
    /// Wake all who sleep at a readiness board.
    PostAll {
        /// The segment's name.
        segment: Name,
        /// The offset of the board in the segment.
        offset: u64,
    },
    /// Wake the sides of two rings whose peer has ended, through the boards at which they sleep, if they do.
    Post {
        /// The segment's name.
        segment: Name,
        /// The offsets of the sides' wake words in the segment.
        words: [u64; 2],
        /// The offsets of the boards of their endpoint.
        boards: Vec<u64>,
    },
    /// End a connection after everything has been sent that was queued for it.
    Disconnect(ClientId),
    /// Watch an owner of an endpoint on the host. Report its end with [`Broker::owner_ended`], or report with
    /// [`Broker::owner_unwatched`] that it cannot be watched.
    Watch {
        /// The number of the endpoint.
        endpoint: u32,
        /// The epoch of the endpoint.
        epoch: u32,
        /// The owner.
        process: Process,
    },
    /// Stop watching an owner.
    Unwatch {
        /// The number of the endpoint.
        endpoint: u32,
        /// The epoch of the endpoint.
        epoch: u32,
        /// The owner.
        process: Process,
    },
    /// Start the timer of a hold, and report its end with [`Broker::hold_over`].
    TimeHold {
        /// The number of the endpoint.
        endpoint: u32,
        /// The epoch of the endpoint.
        epoch: u32,
        /// The token of the hold.
        token: Hex16,
        /// The duration in milliseconds.
        millis: u32,
    },
    /// Stop the timer of a hold, because the hold has ended.
    ForgetHold {
        /// The number of the endpoint.
        endpoint: u32,
        /// The token of the hold.
        token: Hex16,
    },
    /// Find out whether a process still runs this program. If it does not, report that with [`Broker::owner_ended`].
    Examine {
        /// The number of the endpoint.
        endpoint: u32,
        /// The epoch of the endpoint.
        epoch: u32,
        /// The owner.
        process: Process,
        /// The program that the owner ran when it attached.
        image: Image,
    },
    /// Accept whatever program a process runs now: it owns the endpoint, so the result of an [`Effect::Examine`] does not matter
    /// any more.
    Recognize {
        /// The number of the endpoint.
        endpoint: u32,
        /// The owner.
        process: Process,
    },
    /// Answer with a page of the daemon's state.
    Inspect {
        /// The client that asks.
        client: ClientId,
        /// The number of the request.
        request: u32,
        /// The position at which the previous page ended.
        from: wire::Inspect,
    },
    /// Perform an administrator's request, and answer it.
    Admin {
        /// The client that asks.
        client: ClientId,
        /// The number of the request.
        request: u32,
        /// The request in JSON.
        text: String,
    },
}

/// The records that the journal accepts at present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recording {
    /// All records.
    #[default]
    Open,
    /// Only records that do not give a client anything ([`Record::gives`]).
    Closed,
    /// The same as `Closed`. In addition, the books contain something that was given to a client and is not in the journal.
    /// No client may learn of it, even if it repeats its request.
    Owing,
}

/// The facts from outside that the broker needs for its decisions.
pub trait World {
    /// Returns whether a segment's memory is lost.
    fn is_broken(&mut self, segment: &Name) -> bool;
    /// Returns why a segment could not be opened, if it could not.
    fn why_broken(&self, _segment: &Name) -> Option<String> {
        None
    }
    /// Returns sixteen bytes that nobody can guess.
    fn random(&mut self) -> [u8; 16];
    /// Returns the time in seconds since 1970.
    fn now(&mut self) -> u64;
    /// Returns the time that has passed since a moment which does not change.
    fn elapsed(&self) -> Duration;
}

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
    recording: Recording,
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

    /// Handles a packet from the process that has opened a connection.
    pub fn packet(&mut self, world: &mut dyn World, client: ClientId, packet: &[u8]) {
        if let Some(sender) = self.who(client).map(|who| who.process) {
            self.packet_from(world, client, sender, packet);
        }
    }

    /// Handles a packet that `sender` has sent over a connection, which it may have inherited. Whatever the packet contains, the
    /// broker either answers it or ends the connection; only `JOIN` has no answer.
    pub fn packet_from(&mut self, world: &mut dyn World, client: ClientId, sender: Process, packet: &[u8]) {
        let Some((header, body)) = wire::split(packet) else {
            let refusal = Refusal::new(
                ErrorCode::PROTOCOL,
                format!(
                    "a packet of {} bytes is shorter than a header: speak the attach protocol",
                    packet.len()
                ),
            );
            self.send(client, reply::refusal(0, &refusal), vec![]);
            self.effects.push(Effect::Disconnect(client));
            return;
        };
        let before = self.effects.len();
        if let Err(refusal) = self.request(world, client, sender, header, body) {
            if refusal.code == ErrorCode::UNRECORDED {
                // The request has changed nothing, so its effects are dropped.
                self.effects.truncate(before);
            }
            self.send(client, reply::refusal(header.request, &refusal), vec![]);
            if matches!(refusal.code, ErrorCode::VERSION) {
                self.effects.push(Effect::Disconnect(client));
            }
        }
    }

    fn request(
        &mut self,
        world: &mut dyn World,
        id: ClientId,
        sender: Process,
        header: wire::Header,
        body: &[u8],
    ) -> Result<(), Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(()) };
        // A guest's daemon answers HELLO itself.
        if header.kind != Kind::HELLO && !client.greeted && !client.who.is_relayed() {
            return Err(Refusal::new(ErrorCode::PROTOCOL, "say HELLO first"));
        }
        let request =
            Change::request(header.kind).or_else(|| session::REQUESTS.iter().find(|r| r.kind == header.kind));
        let gives = match header.kind {
            Kind::ATTACH | Kind::ADMIN => true,
            _ => request.is_some_and(|request| request.is_gift),
        };
        if self.recording == Recording::Owing && gives {
            return Err(unrecorded());
        }
        match header.kind {
            Kind::HELLO => self.hello(id, header.request, reply::body(body)?),
            Kind::ATTACH => self.attach(world, id, header.request, &reply::body(body)?),
            Kind::JOIN => {
                let []: [u8; 0] = reply::body(body)?;
                self.join(id, sender);
                Ok(())
            }
            Kind::SOCK_REPORT => self.socket_relayed(world, id, body),
            Kind::SOCK_WITHDRAW => self.socket_withdrawn(id, body),
            Kind::INSPECT => {
                let from = reply::body(body)?;
                self.effects.push(Effect::Inspect { client: id, request: header.request, from });
                Ok(())
            }
            Kind::ADMIN => {
                let text = std::str::from_utf8(body).map_err(|_| {
                    Refusal::new(ErrorCode::PROTOCOL, "ADMIN takes JSON, and this is not UTF-8")
                })?;
                let text = text.to_owned();
                self.effects.push(Effect::Admin { client: id, request: header.request, text });
                Ok(())
            }
            kind => {
                let Some(request) = request else {
                    let text = format!("kind {} is not a request of version {}", kind.0, wire::VERSION);
                    return Err(Refusal::new(ErrorCode::PROTOCOL, text));
                };
                let caller = self.caller(id, header.request, sender)?;
                if request.is_write {
                    self.may_write(&caller)?;
                }
                (request.serve)(self, world, &caller, body)
            }
        }
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

    /// Compares tokens of an endpoint, in a time that does not depend on their contents.
    pub(crate) fn token_matches(ours: &Hex16, theirs: &[u8; 16]) -> bool {
        ours.0.iter().zip(theirs).fold(0, |different, (a, b)| different | (a ^ b)) == 0
    }
}

/// Makes the refusal for a record that the journal does not accept.
pub fn unrecorded() -> Refusal {
    let text = "the host's daemon cannot record this, because its journal has no room or cannot be written: make room in \
                daemon.state_dir on the host (its log says more), then try again";
    Refusal::new(ErrorCode::UNRECORDED, text)
}

#[cfg(any(test, fuzzing))]
mod consistency;
#[cfg(any(test, fuzzing))]
pub mod model;
#[cfg(test)]
mod tests;
