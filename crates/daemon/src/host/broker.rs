//! The broker: who may attach, listen and connect, and what follows from it.
//!
//! A state machine. Requests go in, and what is to be done comes out as [`Effect`]s, in the order in which they must be
//! done: shared memory and doorbells, then the journal, then the answer. A daemon that is killed between two of
//! them does, or is asked for, the same again after its restart: marks and rings may be repeated, and an answer that
//! was not given is asked for again. Programs on the host and programs in guests are the same here, but for how a
//! doorbell is named.

use super::books::Books;
use super::config::{Access, Limits, MemberLimits};
use super::endings::Endings;
use super::objects::Change;
use super::objects::block::Revocations;
use super::objects::sync::SyncUser;
use super::record::{Hex16, Record};
use super::relayed::Relayed;
use super::reply::{self, Refusal};
use super::session;
use super::sockets::Sockets;
use crate::pidwatch::{Image, Process};
use ginnel_layout::channel::Capacities;
use ginnel_layout::ring::SideState;
use ginnel_layout::sync::SyncKind;
use ginnel_layout::wire::{self, BellKind, ErrorCode, Kind};
use ginnel_layout::{HOST_MEMBER, Name, control};
use ginnel_sync::authority::Left;
use std::collections::{BTreeMap, BTreeSet};
use tracing::{error, info};

/// A connection to the attach socket, or one that a guest's daemon passes on. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// Who is at the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// The member that it runs in.
    pub member: u32,
    /// Its process, in that member's count.
    pub process: Process,
    /// The program that it ran when it connected, if it is on the host and that is known.
    pub image: Option<Image>,
    /// Its user.
    pub uid: u32,
    /// Its groups.
    pub groups: Vec<u32>,
}

impl Who {
    /// Whether it runs in a VM. Doorbells are registers there, and file descriptors do not reach it from here.
    pub fn is_relayed(&self) -> bool {
        self.member != HOST_MEMBER
    }
}

/// A descriptor that goes along with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdRef {
    /// A segment's file.
    Memory(Name),
    /// The same, and it can only be read.
    ReadOnlyMemory(Name),
    /// The eventfd of a member's vector.
    Event(u32, u32),
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Make a block ready for use: zero the headers of its rings.
    Zero {
        /// The segment.
        segment: Name,
        /// Where the block lies.
        offset: u64,
        /// Data bytes of its rings.
        capacities: Capacities,
    },
    /// Write a side's state into a ring.
    Mark {
        /// The segment.
        segment: Name,
        /// Where the word lies.
        at: u64,
        /// What to write.
        state: SideState,
    },
    /// Make a page a synchronisation object: zeroes, and what the daemon says in front.
    NewSync {
        /// The segment.
        segment: Name,
        /// Where the page lies.
        offset: u64,
        /// What it becomes.
        kind: SyncKind,
        /// Most permits, or parties.
        limit: u32,
        /// Permits at first.
        initial: u32,
    },
    /// Write into a synchronisation object whose a slot is.
    Seat {
        /// The segment.
        segment: Name,
        /// Where the page lies.
        offset: u64,
        /// The user.
        user: SyncUser,
        /// Epoch of its endpoint.
        endpoint_epoch: u32,
        /// Its doorbell: member << 16 | vector.
        bell: u32,
    },
    /// Take back a slot of a synchronisation object, and ring who must go on because of it.
    Reclaim {
        /// Number of the object.
        object: u64,
        /// The segment.
        segment: Name,
        /// Where the page lies.
        offset: u64,
        /// What it is.
        kind: SyncKind,
        /// The slot.
        slot: u32,
        /// Why.
        left: Left,
    },
    /// Ring a doorbell.
    Ring {
        /// Whose.
        member: u32,
        /// Which.
        vector: u32,
    },
    /// Write a record, which has been applied, into the journal.
    Record(Box<Record>),
    /// Send a packet.
    Send {
        /// To whom.
        client: ClientId,
        /// The packet.
        packet: Vec<u8>,
        /// What goes along, for a client on the host.
        fds: Vec<FdRef>,
    },
    /// Makes a page of a segment a readiness board.
    NewBoard {
        /// The segment.
        segment: Name,
        /// Where the page lies.
        offset: u64,
    },
    /// Tells all who sleep by way of a readiness board.
    PostAll {
        /// The segment.
        segment: Name,
        /// Where the board lies.
        offset: u64,
    },
    /// Tells the sides of rings whose peer has ended by way of their boards, if they sleep there.
    Post {
        /// The segment.
        segment: Name,
        /// Where their wake words lie.
        words: [u64; 2],
        /// The boards of their endpoint.
        boards: Vec<u64>,
    },
    /// End a connection, after what was sent.
    Disconnect(ClientId),
    /// Watch an owner of an endpoint (on the host), and report its end with [`Broker::owner_ended`], or that it cannot be
    /// watched with [`Broker::owner_unwatched`].
    Watch {
        /// The endpoint.
        endpoint: u32,
        /// Its epoch.
        epoch: u32,
        /// The owner.
        process: Process,
    },
    /// Watch it no longer.
    Unwatch {
        /// The endpoint.
        endpoint: u32,
        /// The owner.
        process: Process,
    },
    /// Count the time of a hold, from now on, and report its end with [`Broker::hold_over`].
    TimeHold {
        /// The endpoint.
        endpoint: u32,
        /// Its epoch.
        epoch: u32,
        /// The token of the hold.
        token: Hex16,
        /// How long it lasts, in milliseconds.
        millis: u32,
    },
    /// A hold has ended, whatever its time.
    ForgetHold {
        /// The endpoint.
        endpoint: u32,
        /// The token of the hold.
        token: Hex16,
    },
    /// Find out whether a process still runs this program, and report with [`Broker::owner_ended`] that it does not.
    Examine {
        /// The endpoint.
        endpoint: u32,
        /// Its epoch.
        epoch: u32,
        /// The owner.
        process: Process,
        /// What it ran when it attached.
        image: Image,
    },
    /// Whatever program the process runs now, it owns the endpoint: what was to be found out does not matter any more.
    Recognize {
        /// The endpoint.
        endpoint: u32,
        /// The owner.
        process: Process,
    },
    /// Answer with a page of the state of the daemon.
    Inspect {
        /// Who asks.
        client: ClientId,
        /// Number of the request.
        request: u32,
        /// Where the page before has ended.
        from: wire::Inspect,
    },
    /// Do what an administrator asks for, and answer.
    Admin {
        /// Who asks.
        client: ClientId,
        /// Number of the request.
        request: u32,
        /// What, in JSON.
        text: String,
    },
}

/// What the journal takes just now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recording {
    /// All records.
    #[default]
    Open,
    /// None that gives somebody something ([`Record::gives`]).
    Closed,
    /// As `Closed`; and the books have something that was given and is not in the journal, which nobody may learn of, not
    /// even by asking again.
    Owing,
}

/// What the broker needs from outside to decide.
pub trait World {
    /// Whether a segment's memory is gone.
    fn is_broken(&mut self, segment: &Name) -> bool;
    /// Why it could not be opened, if that is so.
    fn why_broken(&self, _segment: &Name) -> Option<String> {
        None
    }
    /// Sixteen bytes that nobody can guess.
    fn random(&mut self) -> [u8; 16];
    /// Seconds since 1970.
    fn now(&mut self) -> u64;
}

/// One connection.
#[derive(Debug)]
pub(super) struct Client {
    pub who: Who,
    pub greeted: bool,
    pub endpoint: Option<u32>,
    /// The endpoint was there before this connection.
    pub returned: bool,
    /// Processes that have joined the endpoint over this connection, which they have inherited, and have none of their own.
    pub joined: BTreeSet<Process>,
}

/// The state machine.
#[derive(Debug, Default)]
pub struct Broker {
    /// The books. Changed only by the broker.
    pub(super) books: Books,
    pub(super) limits: Limits,
    pub(super) vectors: u32,
    /// Our own user, who may attach everywhere.
    pub(super) own_uid: u32,
    pub(super) access: BTreeMap<Name, Access>,
    pub(super) member_limits: BTreeMap<u32, MemberLimits>,
    pub(super) clients: BTreeMap<ClientId, Client>,
    /// Connections of endpoints. An endpoint may have none for a while: its program makes one when it needs something.
    pub(super) attached: BTreeMap<u32, Vec<ClientId>>,
    /// Owners whose end nobody tells.
    pub(super) unwatched: BTreeSet<(u32, Process)>,
    pub(super) revocations: Revocations,
    pub(super) relayed_bells: Relayed,
    pub(super) endings: Endings,
    pub(super) sockets: Sockets,
    recording: Recording,
    pub(super) effects: Vec<Effect>,
}

impl Broker {
    /// A broker with these books.
    pub fn new(books: Books, limits: Limits, vectors: u32, own_uid: u32) -> Self {
        let (revocations, endings) = (Revocations::of(&books), Endings::of(&books));
        let mut broker = Self { books, limits, vectors, own_uid, revocations, endings, ..Self::default() };
        broker.index_relayed();
        broker
    }

    /// The books.
    pub fn books(&self) -> &Books {
        &self.books
    }

    /// What has to be done since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Whether a segment is an RDMA device.
    pub fn is_for_verbs(&self, segment: &Name) -> bool {
        self.access.get(segment).is_some_and(|access| access.verbs)
    }

    /// Which host programs may attach to a segment.
    pub fn set_access(&mut self, segment: Name, access: Access) {
        self.access.insert(segment, access);
    }

    /// What the journal takes from now on.
    pub fn set_recording(&mut self, recording: Recording) {
        self.recording = recording;
    }

    /// Bounds of a member.
    pub fn set_limits(&mut self, member: u32, limits: MemberLimits) {
        self.member_limits.insert(member, limits);
    }

    pub(super) fn limits_of(&self, member: u32) -> MemberLimits {
        self.member_limits.get(&member).copied().unwrap_or(self.limits.member)
    }

    /// Somebody has connected.
    pub fn connected(&mut self, client: ClientId, who: Who) {
        let joined = BTreeSet::new();
        self.clients.insert(client, Client { who, greeted: false, endpoint: None, returned: false, joined });
    }

    /// Who a client is; `None` if it is not there.
    pub fn who(&self, client: ClientId) -> Option<&Who> {
        self.clients.get(&client).map(|client| &client.who)
    }

    /// Whether a client has become an endpoint.
    pub fn is_attached(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|client| client.endpoint.is_some())
    }

    /// Whether an endpoint has a connection.
    pub fn has_connection(&self, endpoint: u32) -> bool {
        self.attached.contains_key(&endpoint)
    }

    /// An endpoint loses its share in the segment.
    pub fn endpoint_ends(&mut self, endpoint: u32, epoch: u32) {
        if self.books.endpoints.get(&endpoint).is_some_and(|e| e.epoch == epoch) {
            self.die(endpoint);
        }
    }

    /// A VM, or its kernel, has ended.
    pub fn member_died(&mut self, member: u32) {
        self.forget_sockets_of(member);
        for endpoint in self.books.index.of_member(member).collect::<Vec<_>>() {
            self.die(endpoint);
        }
    }

    /// A segment goes away, and its endpoints with it.
    pub fn segment_ends(&mut self, segment: &Name) {
        for endpoint in self.books.index.of_segment(segment).collect::<Vec<_>>() {
            self.die(endpoint);
        }
        self.end_all();
    }

    /// An endpoint is no more: whoever has a channel with it is told.
    pub(super) fn die(&mut self, number: u32) {
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

    /// An endpoint has ended, and its number is free for another.
    pub(super) fn remove_endpoint(&mut self, number: u32) {
        // Known to be there, so this cannot be refused.
        let _ = self.record(Record::Dead { endpoint: number });
        self.revocations.forget(number);
    }

    /// Nobody is this endpoint any more.
    fn cut_off(&mut self, number: u32) {
        let endpoint = self.books.endpoints.get(&number);
        let (owners, holds) = endpoint.map(|e| (e.owners.clone(), e.holds.clone())).unwrap_or_default();
        for token in holds.into_keys() {
            self.effects.push(Effect::ForgetHold { endpoint: number, token });
        }
        for id in self.attached.remove(&number).unwrap_or_default() {
            if let Some(client) = self.clients.get_mut(&id) {
                client.endpoint = None;
            }
            self.effects.push(Effect::Disconnect(id));
        }
        for process in owners {
            self.unwatched.remove(&(number, process));
            self.effects.push(Effect::Unwatch { endpoint: number, process });
        }
        self.revocations.forget(number);
    }

    /// A segment's file was truncated, and is as long as before. What was cut off reads as zeros, so nobody would notice: each
    /// channel says it, and each connection.
    pub(super) fn segment_cut(&mut self, segment: &Name) {
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
    pub(super) fn send_cut(&mut self, client: ClientId) {
        self.send(client, reply::packet(Kind::SEGMENT_CUT, 0, &[]), vec![]);
    }

    /// Changes the books and the journal at a client's request. Refused if it gives somebody something and the journal does
    /// not take it.
    pub(super) fn record(&mut self, record: impl Into<Record>) -> Result<(), Refusal> {
        let record = record.into();
        if self.recording != Recording::Open && record.gives() {
            return Err(unrecorded());
        }
        self.change(record)
    }

    fn change(&mut self, record: Record) -> Result<(), Refusal> {
        self.unrelay(&record);
        if let Err(misfit) = self.books.apply(&record) {
            error!(%misfit, ?record, "a change that does not fit the books; please report this");
            return Err(Refusal::new(
                ErrorCode::INVALID,
                format!("the daemon's books refuse this: {misfit}"),
            ));
        }
        self.relay(&record);
        self.effects.push(Effect::Record(Box::new(record)));
        Ok(())
    }

    /// A change that comes from outside the attach protocol: members, segments, sessions. False if it does not fit. Whoever
    /// gives something with it asks the journal before.
    pub fn note(&mut self, record: Record) -> bool {
        self.change(record).is_ok()
    }

    pub(super) fn effect(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// A packet from the process that has opened a connection.
    pub fn packet(&mut self, world: &mut dyn World, client: ClientId, packet: &[u8]) {
        if let Some(sender) = self.who(client).map(|who| who.process) {
            self.packet_from(world, client, sender, packet);
        }
    }

    /// A packet that `sender` has sent over a connection, which it may have inherited. Whatever it contains, it is answered, or
    /// the connection ends; but `JOIN` has no answer.
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
                // Nothing was changed, so nothing follows from it.
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
                    let text = format!("kind {} is no request of version {}", kind.0, wire::VERSION);
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

    pub(super) fn send(&mut self, client: ClientId, packet: Vec<u8>, fds: Vec<FdRef>) {
        self.effects.push(Effect::Send { client, packet, fds });
    }

    /// How a program of `member` rings a vector of another.
    pub(super) fn bell(&self, member: u32, peer: u32, vector: u32) -> (BellKind, u32) {
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
        // Its QEMU could not be told of it: by way of the daemon.
        (BellKind::REGISTER, HOST_MEMBER << 16 | control::DAEMON_VECTOR)
    }

    /// The token of an endpoint, compared in a time that says nothing about it.
    pub(super) fn token_matches(ours: &Hex16, theirs: &[u8; 16]) -> bool {
        ours.0.iter().zip(theirs).fold(0, |different, (a, b)| different | (a ^ b)) == 0
    }
}

/// The journal does not take it.
pub(super) fn unrecorded() -> Refusal {
    let text = "the host's daemon cannot record this, because its journal has no room or cannot be written: make room in \
                daemon.state_dir on the host (its log says more), then try again";
    Refusal::new(ErrorCode::UNRECORDED, text)
}

#[cfg(test)]
mod tests;
