//! What must hold after each step, and for each effect.
//!
//! | invariant | where |
//! |---|---|
//! | nobody gets memory twice, all of it lies in its segment, and what ends is given back | [`Broker::check`], [`Server::what_was_given_stays`], [`Server::everything_is_given_back`] |
//! | memory is made ready before it is given away, and nobody else's memory is written | [`Server::was_made_ready`], [`Server::writes_into_what_is_there`] |
//! | each request has one answer, which goes to the program that has asked | [`Asked::is_answered_once`] |
//! | nobody is given memory without a note of it | [`Server::is_noted`] |
//! | nobody sees anything of a segment of others, or ends an endpoint of another member | [`Server::may_see`], [`Server::endpoints_of_others`] |
//! | no limit is exceeded, and nothing grows without bound | [`Server::limits_are_kept`], [`Server::nothing_is_left_over`] |
//! | the journal makes the same books | [`Server::a_successor_knows_the_same`], [`Server::journal_makes_the_books`] |
//!
//! [`Broker::check`]: crate::broker::Broker

use super::server::{Known, SEGMENTS, Server, VMS, name};
use crate::account::Tally;
use crate::books::{Books, Endpoint, Segment};
use crate::broker::consistency::check_packet;
use crate::broker::{ClientId, Effect, FdRef, Who};
use crate::limits::MAX_BOARDS;
use crate::objects::{Change, block, board, channel, sync};
use crate::process::Process;
use crate::recipients::Recipient;
use crate::record::Record;
use ginnel_layout::channel::Capacities;
use ginnel_layout::wire::{self, Header, Kind, SocketRole};
use ginnel_layout::{HOST_MEMBER, Name, PAGE};
use std::collections::{BTreeMap, BTreeSet};
use zerocopy::FromBytes;

const PAGE_LEN: u64 = PAGE as u64;

/// A packet that a program sends, and what is known about the program before.
pub struct Asked {
    client: ClientId,
    is_relayed: bool,
    is_greeted: bool,
    packet: Vec<u8>,
}

/// Returns the kind of the packet with which a request is answered, if not with an error.
fn answer_to(kind: Kind) -> Option<Kind> {
    Some(match kind {
        Kind::HELLO => Kind::HELLO_OK,
        Kind::ATTACH => Kind::ATTACHED,
        Kind::LISTEN => Kind::LISTENING,
        Kind::CONNECT | Kind::RESUME => Kind::CHANNEL,
        Kind::SYNC_OPEN => Kind::SYNC,
        Kind::BLOCK_CREATE | Kind::BLOCK_OPEN | Kind::BLOCK_RESIZE => Kind::BLOCK,
        Kind::BELL => Kind::BELL_OK,
        Kind::BOARD_OPEN => Kind::BOARD,
        Kind::UNLISTEN
        | Kind::ACCEPTED
        | Kind::CLOSE
        | Kind::SYNC_CLOSE
        | Kind::SYNC_UNLINK
        | Kind::BLOCK_LINK
        | Kind::BLOCK_UNLINK
        | Kind::BLOCK_CLOSE
        | Kind::BLOCK_GRANT
        | Kind::BLOCK_ACK
        | Kind::DETACH
        | Kind::HOLD => Kind::OK,
        _ => return None,
    })
}

fn is_event(kind: Kind) -> bool {
    [Kind::INCOMING, Kind::BLOCK_REVOKED, Kind::SEGMENT_CUT, Kind::SOCK_MATCHED, Kind::SOCK_STAYS]
        .contains(&kind)
}

/// Returns whether an effect answers a request, or will.
pub fn is_answer(effect: &Effect) -> bool {
    match effect {
        Effect::Send { packet, .. } => !is_event(wire::split(packet).unwrap().0.kind),
        Effect::Inspect { .. } | Effect::Admin { .. } => true,
        _ => false,
    }
}

impl Asked {
    /// Returns the kind of the only possible answer, and its number. The kind is `ERROR` if the packet cannot be understood, and
    /// `None` if the answer may also be another; without an answer, nothing is returned.
    fn expected(&self) -> Option<(Option<Kind>, u32)> {
        let Some((Header { kind, request, .. }, body)) = wire::split(&self.packet) else {
            return Some((Some(Kind::ERROR), 0));
        };
        if kind != Kind::HELLO && !self.is_greeted && !self.is_relayed {
            return Some((Some(Kind::ERROR), request));
        }
        let facts = wire::body::<wire::SocketFacts>(body).map(|facts| facts.report.role);
        match kind {
            Kind::JOIN if body.is_empty() => None,
            Kind::SOCK_WITHDRAW if body.len() == size_of::<wire::SocketKey>() => None,
            Kind::SOCK_REPORT
                if self.is_relayed && matches!(facts, Some(SocketRole::CONNECTOR | SocketRole::ACCEPTOR)) =>
            {
                None
            }
            Kind::INSPECT | Kind::ADMIN => Some((None, request)),
            _ => Some((answer_to(kind).map_or(Some(Kind::ERROR), |_| None), request)),
        }
    }

    /// The request has exactly one answer, with its number, over its connection. A packet that is too short for a number ends the
    /// connection.
    pub fn is_answered_once(&self, effects: &[Effect]) {
        let answers: Vec<&Effect> = effects.iter().filter(|effect| is_answer(effect)).collect();
        let Some((kind, request)) = self.expected() else {
            assert!(answers.is_empty(), "a request that has no answer was answered: {answers:?}");
            return;
        };
        let [answer] = answers[..] else { panic!("{} answers: {answers:?}", answers.len()) };
        let mine = match answer {
            Effect::Send { client, packet, .. } => {
                let (header, _) = wire::split(packet).unwrap();
                let asked = wire::split(&self.packet).and_then(|(header, _)| answer_to(header.kind));
                assert!(
                    header.kind == Kind::ERROR || (kind.is_none() && Some(header.kind) == asked),
                    "{answer:?}"
                );
                (*client, header.request)
            }
            Effect::Inspect { client, request, .. } | Effect::Admin { client, request, .. } => {
                (*client, *request)
            }
            _ => unreachable!(),
        };
        assert_eq!(mine, (self.client, request), "the answer of somebody else");
        let is_short = self.packet.len() < size_of::<Header>();
        assert!(!is_short || effects.contains(&Effect::Disconnect(self.client)));
    }
}

/// What endpoints have, as their programs know it: what they were told, and have not given back since.
#[derive(Default)]
pub struct Given(BTreeMap<(u32, u32), BTreeMap<What, (u64, u64)>>);

/// Memory that an endpoint may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// A side of a channel: its number, and whether the side is the initiator.
    Channel(u64, bool),
    /// A handle of a block.
    Block(u64),
    /// A slot of a synchronisation object: object, slot and epoch.
    Sync(u64, u32, u32),
    /// A readiness board, by its offset.
    Board(u64),
}

impl What {
    /// Returns the place of this memory if the endpoint has it.
    fn place(self, books: &Books, endpoint: u32) -> Option<(u64, u64)> {
        match self {
            Self::Channel(number, initiator) => {
                let channel = books.channels.get(&number)?;
                let side = channel.side(initiator);
                (side.endpoint == endpoint && !side.closed).then(|| (channel.offset, channel.block_len()))
            }
            Self::Block(handle) => {
                let block = &books.blocks[books.handles.get(&handle)?];
                (block.handles.get(handle)?.endpoint == endpoint).then_some((block.offset, block.span))
            }
            Self::Sync(object, slot, epoch) => {
                let object = books.syncs.get(&object)?;
                let user = object.users.iter().find(|user| user.slot == slot)?;
                let own = user.endpoint == endpoint && u32::from(user.epoch) == epoch;
                own.then_some((object.offset, PAGE_LEN))
            }
            Self::Board(offset) => {
                let epoch = books.endpoints.get(&endpoint)?.epoch;
                books.boards.of(endpoint, epoch).contains(&offset).then_some((offset, PAGE_LEN))
            }
        }
    }
}

impl Given {
    /// A successor closes channels that wait at a listener which has ended.
    pub fn forget_unheard(&mut self, books: &Books) {
        for has in self.0.values_mut() {
            has.retain(|what, _| match what {
                What::Channel(number, false) => books.channels.get(number).is_none_or(|c| c.accepted),
                _ => true,
            });
        }
    }
}

/// Returns the place of the object that a record makes, in its segment.
fn made_by(record: &Record) -> Option<(Name, u64, u64)> {
    let Record::Object(change) = record else { return None };
    Some(match change {
        Change::Channel(channel::Change::Opened(c)) => (c.segment.0, c.offset, c.block_len()),
        Change::Sync(sync::Change::Made(s)) => (s.segment.0, s.offset, PAGE_LEN),
        Change::Block(block::Change::Made(b)) => (b.segment.0, b.offset, b.span),
        Change::Board(board::Change::Board(b)) => (b.segment.0, b.offset, PAGE_LEN),
        _ => return None,
    })
}

/// Returns whether anything in the books has a part of this memory.
fn is_taken(books: &Books, segment: Name, offset: u64, len: u64) -> bool {
    let objects = Change::dump(books).map(Record::Object);
    objects
        .filter_map(|record| made_by(&record))
        .any(|(other, at, other_len)| other == segment && at < offset + len && offset < at + other_len)
}

impl Server {
    /// Notes what a program is about to say.
    pub fn says(&mut self, client: ClientId, packet: &[u8]) -> Asked {
        self.unlearn(client, packet);
        for (segment, ..) in SEGMENTS {
            if packet.windows(segment.len()).any(|part| part == segment.as_bytes()) {
                self.named.insert((client, name(segment)));
            }
        }
        let there = &self.broker.clients[&client];
        let (is_relayed, is_greeted) = (there.who.is_relayed(), there.greeted);
        Asked { client, is_relayed, is_greeted, packet: packet.to_vec() }
    }

    /// Returns the endpoints of all members but one, and their owners. Whatever that member says, they stay the same.
    pub fn endpoints_of_others(&self, member: u32) -> BTreeMap<(u32, u32), BTreeSet<Process>> {
        let others = self.broker.books().endpoints.values().filter(|e| e.member != member);
        others.map(|e| ((e.number, e.epoch), e.owners.clone())).collect()
    }

    /// Checks everything that must hold after each step.
    pub fn check(&self) {
        self.broker.check();
        self.a_successor_knows_the_same();
        self.what_was_given_stays();
        self.limits_are_kept();
        self.nothing_is_left_over();
        self.ends_are_noticed();
    }

    /// The records, one after the other, make the books.
    fn a_successor_knows_the_same(&self) {
        assert!(self.shadow == *self.broker.books(), "the records make other books");
    }

    /// A living endpoint has what it was told that it has, at the same place, until it gives it back. Together with the books, in
    /// which nothing overlaps, this means that nobody else has it.
    fn what_was_given_stays(&self) {
        let books = self.broker.books();
        for ((number, epoch), has) in &self.given.0 {
            let lives = books.endpoints.get(number).is_some_and(|e| e.epoch == *epoch && !e.is_ending);
            for (what, (offset, len)) in has.iter().filter(|_| lives) {
                let place = what.place(books, *number);
                assert!(
                    place.is_some_and(|(at, has)| at == *offset && has >= *len),
                    "endpoint {number} has lost {what:?} at {offset:#x}: {place:?}"
                );
            }
        }
    }

    /// No account, endpoint, listener or block has more than it may have.
    fn limits_are_kept(&self) {
        let books = self.broker.books();
        for member in books.members.keys() {
            let limits = self.broker.limits_of(*member);
            for (account, tally) in books.accounts_of(*member) {
                let Tally { endpoints, channels, bytes, blocks, block_bytes, handles, holds } = *tally;
                let counts = [
                    (endpoints, limits.endpoints_per_member),
                    (channels, limits.channels_per_member),
                    (blocks, limits.blocks_per_member),
                    (handles, limits.handles_per_member),
                    (holds, limits.holds_per_member),
                ];
                let sizes = [(bytes, limits.bytes_per_member), (block_bytes, limits.block_bytes_per_member)];
                assert!(counts.iter().all(|(has, limit)| has <= limit), "{account}: {tally:?}");
                assert!(sizes.iter().all(|(has, limit)| has <= limit), "{account}: {tally:?}");
            }
        }
        for e in books.endpoints.values() {
            let limits = self.broker.limits_of(e.member);
            for (has, limit) in [
                (e.listeners.len(), limits.listeners_per_endpoint),
                (e.channels.len(), limits.channels_per_endpoint),
                (e.syncs.len() + e.handles.len(), limits.handles_per_endpoint),
                (e.blocks.len(), limits.blocks_per_endpoint),
                (books.boards.of(e.number, e.epoch).len(), MAX_BOARDS as u32),
            ] {
                assert!(has <= limit as usize, "endpoint {}: {has} of {limit}", e.number);
            }
            assert!(e.bytes <= limits.bytes_per_endpoint && e.block_bytes <= limits.block_bytes_per_endpoint);
        }
        for listener in books.listeners.values() {
            assert!(listener.waiting <= listener.backlog && listener.backlog <= self.broker.limits.backlog);
        }
        for block in books.blocks.values() {
            assert!(block.grants.len() <= self.broker.limits_of(block.member).grants_per_block as usize);
        }
    }

    /// The broker and the list of programs remember the connections that are open, and nothing else.
    fn nothing_is_left_over(&self) {
        for (id, client) in &self.broker.clients {
            match self.programs.place(*id) {
                Some((member, number)) => {
                    assert_eq!(
                        (client.who.member, self.programs.client(member, number)),
                        (member, Some(*id))
                    );
                }
                None => assert!(client.who.member == HOST_MEMBER && self.connections.contains(id)),
            }
        }
        assert_eq!(self.broker.clients.len(), self.connections.len() + self.programs.count());
        assert!(self.broker.effects.is_empty());
    }

    /// Something reports the end of each process of the host that owns an endpoint, and of each hold.
    fn ends_are_noticed(&self) {
        let books = self.broker.books();
        for e in books.endpoints.values().filter(|e| e.member == HOST_MEMBER) {
            for process in e.owners.iter().filter(|process| process.pid != 0) {
                let key = (e.number, *process);
                assert!(self.watches.contains_key(&key) || self.broker.unwatched.contains(&key));
            }
        }
        let holds = books.endpoints.values().flat_map(|e| e.holds.keys().map(|t| ((e.number, *t), e.epoch)));
        assert_eq!(self.timers, holds.collect());
    }

    /// The effects right before a record have made ready the memory, or the slot, that it gives away, and nothing else.
    pub fn was_made_ready(&mut self, record: &Record) {
        let prepared = std::mem::take(&mut self.prepared);
        let expected = match record {
            Record::Object(Change::Channel(channel::Change::Opened(c))) => {
                let capacities: Capacities = c.capacities();
                vec![Effect::Zero { segment: c.segment.0, offset: c.offset, capacities }]
            }
            Record::Object(Change::Board(board::Change::Board(b))) => {
                vec![Effect::NewBoard { segment: b.segment.0, offset: b.offset }]
            }
            Record::Object(Change::Board(board::Change::BoardTaken { .. }) | Change::Sync(_)) => {
                return self.is_seated(record, &prepared);
            }
            _ => vec![],
        };
        assert_eq!(prepared, expected, "before {record:?}");
        if let Some((segment, offset, len)) = made_by(record) {
            assert!(!is_taken(&self.shadow, segment, offset, len), "memory is given twice: {record:?}");
        }
    }

    /// The same for locks, and for boards that are taken over.
    fn is_seated(&self, record: &Record, prepared: &[Effect]) {
        let slot = |segment: Name, at: u64, user: &sync::SyncUser, effect: &Effect| {
            let (endpoint, s, o, u) = match effect {
                Effect::Seat { segment, offset, user, endpoint_epoch, .. } => {
                    (*endpoint_epoch, *segment, *offset, *user)
                }
                _ => return false,
            };
            (s, o, u) == (segment, at, *user) && self.shadow.endpoints[&user.endpoint].epoch == endpoint
        };
        let good = match (record, prepared) {
            (Record::Object(Change::Sync(sync::Change::Made(object))), [new, seat]) => {
                let (segment, offset) = (object.segment.0, object.offset);
                let fresh = matches!(new, Effect::NewSync { segment: s, offset: o, kind, limit, .. }
                    if (*s, *o, kind.0, *limit) == (segment, offset, object.kind, object.limit));
                fresh
                    && slot(segment, offset, &object.users[0], seat)
                    && !is_taken(&self.shadow, segment, offset, PAGE_LEN)
            }
            (Record::Object(Change::Sync(sync::Change::Opened { object, user })), [seat]) => {
                let object = &self.shadow.syncs[object];
                slot(object.segment.0, object.offset, user, seat)
            }
            (Record::Object(Change::Board(board::Change::BoardTaken { endpoint, epoch, .. })), [new]) => {
                matches!(new, Effect::NewBoard { offset, .. }
                    if self.shadow.boards.of(*endpoint, *epoch).contains(offset))
            }
            (
                Record::Object(Change::Sync(sync::Change::Closed { .. } | sync::Change::Unlinked { .. })),
                [],
            ) => true,
            _ => false,
        };
        assert!(good, "{prepared:?} before {record:?}");
    }

    /// Words are written only into objects that exist at that moment, and of the right kind; doorbells are rung only if they
    /// serve a segment.
    pub fn writes_into_what_is_there(&self, effect: &Effect) {
        let books = &self.shadow;
        let in_channel = |segment: &Name, at: u64| {
            let there = books.channels.values().filter(|c| c.segment.0 == *segment);
            there.map(|c| c.offset..c.offset + c.block_len()).any(|block| block.contains(&at))
        };
        let is_board = |segment: &Name, at: &u64| {
            books.boards.all().any(|board| (board.segment.0, board.offset) == (*segment, *at))
        };
        let good = match effect {
            Effect::Mark { segment, at, .. } => in_channel(segment, *at),
            Effect::Post { segment, words, boards } => {
                words.iter().all(|at| in_channel(segment, *at))
                    && boards.iter().all(|at| is_board(segment, at))
            }
            Effect::PostAll { segment, offset } => is_board(segment, offset),
            Effect::Reclaim { object, segment, offset, kind, slot, .. } => {
                books.syncs.get(object).is_some_and(|object| {
                    (object.segment.0, object.offset, object.kind) == (*segment, *offset, kind.0)
                        && object.users.iter().any(|user| user.slot == *slot)
                })
            }
            Effect::Ring { member, vector } => {
                let vectors = |s: &crate::books::Segment| s.vectors.get(member).cloned().unwrap_or_default();
                // The daemon may still ring an endpoint that is ending and whose member has no share any more.
                let ending = |e: &Endpoint| e.is_ending && (e.member, e.vector) == (*member, *vector);
                books.segments.values().any(|segment| vectors(segment).contains(vector))
                    || books.endpoints.values().any(ending)
            }
            _ => true,
        };
        assert!(good, "{effect:?}");
    }

    /// Returns whether the books say that a user was given the memory of a segment.
    fn is_noted(&self, segment: &Segment, who: &Who) -> bool {
        let is_his = |one: &Recipient| {
            one.user.is_none_or(|user| user == who.uid)
                && one.groups.iter().all(|group| who.groups.contains(group))
        };
        who.uid == 0 || segment.recipients.as_ref().is_some_and(|all| all.iter().any(is_his))
    }

    /// A program gets only what concerns its own endpoint and segment, and descriptors only if it is on the host.
    pub fn may_see(&self, client: ClientId, packet: &[u8], fds: &[FdRef]) {
        check_packet(&Effect::Send { client, packet: packet.to_vec(), fds: fds.to_vec() });
        let books = self.broker.books();
        let there = &self.broker.clients[&client];
        let (header, body) = wire::split(packet).unwrap();
        assert!(!is_event(header.kind) || (header.request, header.flags) == (0, 0));
        assert!(fds.is_empty() || !there.who.is_relayed(), "descriptors for a program in a VM");
        // The endpoint may have ended in the same moment.
        let endpoint = there.endpoint.and_then(|number| books.endpoints.get(&number));
        let shares = |segment: &Name| books.segments[segment].members.contains(&there.who.member);
        if let Some(endpoint) = endpoint {
            assert!(endpoint.member == there.who.member && shares(&endpoint.segment));
            for fd in fds {
                let segment = &books.segments[&endpoint.segment];
                let is_reader = segment.access(endpoint.member).is_read_only();
                let own = match fd {
                    FdRef::Memory(name) => *name == segment.name && !is_reader,
                    FdRef::ReadOnlyMemory(name) => *name == segment.name && is_reader,
                    FdRef::Event(member, vector) => books.vectors_of(&segment.name, *member).contains(vector),
                };
                assert!(own, "{fd:?} for a program of {}", segment.name);
                let is_memory = !matches!(fd, FdRef::Event(..));
                assert!(!is_memory || self.is_noted(segment, &there.who), "the memory without a note");
            }
        }
        match header.kind {
            Kind::HELLO_OK => {
                assert_eq!(wire::body::<wire::HelloOk>(body).unwrap().member, there.who.member);
            }
            Kind::INCOMING | Kind::CHANNEL => {
                let told: wire::Channel = wire::body(body).unwrap();
                let channel = books.channels.get(&told.channel);
                if let (Some(endpoint), Some(channel)) = (endpoint, channel) {
                    assert_eq!(channel.segment.0, endpoint.segment);
                    assert_eq!(channel.side(told.is_initiator()).endpoint, endpoint.number);
                }
            }
            Kind::BLOCK_REVOKED => {
                let told: wire::BlockRights = wire::body(body).unwrap();
                let holder = books.handles.get(&told.handle).map(|block| &books.blocks[block].handles);
                let holder =
                    holder.and_then(|handles| handles.get(told.handle)).map(|handle| handle.endpoint);
                assert!(holder.is_none() || holder == there.endpoint, "a revocation for another");
            }
            Kind::SOCK_MATCHED => {
                let told: wire::SocketMatched = wire::body(body).unwrap();
                assert!(
                    shares(&told.segment)
                        && !books.segments[&told.segment].readers.contains(&there.who.member)
                );
            }
            Kind::ERROR => self.says_nothing_of_others(client, body),
            _ => {}
        }
    }

    /// An error names no segment of others, except one that the program itself has named, and it is no error of the daemon's.
    fn says_nothing_of_others(&self, client: ClientId, body: &[u8]) {
        let member = self.broker.clients[&client].who.member;
        let (_, text) = wire::Error::read_from_prefix(body).unwrap();
        let text = std::str::from_utf8(text).expect("a text that is none");
        assert!(!text.is_empty() && !text.contains("books refuse"), "{text}");
        for (segment, ..) in SEGMENTS {
            let shares = |s: &crate::books::Segment| s.members.contains(&member);
            let own = self.broker.books().segments.get(&name(segment)).is_none_or(shares);
            assert!(
                own || self.named.contains(&(client, name(segment))) || !text.contains(segment),
                "{text}"
            );
        }
    }

    /// Remembers what a program is told.
    pub fn learn(&mut self, client: ClientId, packet: &[u8], is_late: bool) {
        let Some((header, body)) = wire::split(packet) else { return };
        let books = self.broker.books();
        let Some(number) = self.broker.clients[&client].endpoint else { return };
        let Some(endpoint) = books.endpoints.get(&number) else { return };
        let key = (number, endpoint.epoch);
        let (what, place) = match header.kind {
            Kind::ATTACHED => {
                let known = Known { segment: endpoint.segment, attached: wire::body(body).unwrap() };
                self.known.push(known);
                return;
            }
            Kind::CHANNEL | Kind::INCOMING => {
                let told: wire::Channel = wire::body(body).unwrap();
                let len = told.capacities().footprint() as u64;
                (What::Channel(told.channel, told.is_initiator()), (told.offset, len))
            }
            Kind::BLOCK => {
                let told: wire::Block = wire::body(body).unwrap();
                (What::Block(told.handle), (told.offset, told.span))
            }
            Kind::SYNC => {
                let told: wire::Sync = wire::body(body).unwrap();
                (What::Sync(told.object, told.slot, told.epoch), (told.offset, PAGE_LEN))
            }
            Kind::BOARD => {
                let told: wire::Board = wire::body(body).unwrap();
                (What::Board(told.offset), (told.offset, PAGE_LEN))
            }
            _ => return,
        };
        // An answer that was withheld may come after the program has given it back without having seen it.
        if !is_late || what.place(books, number) == Some(place) {
            self.given.0.entry(key).or_default().insert(what, place);
        }
    }

    /// Forgets what a program gives back with a packet, whether or not the daemon agrees.
    fn unlearn(&mut self, client: ClientId, packet: &[u8]) {
        let books = self.broker.books();
        let Some((header, body)) = wire::split(packet) else { return };
        let Some(number) = self.broker.clients.get(&client).and_then(|client| client.endpoint) else {
            return;
        };
        let Some(has) = self.given.0.get_mut(&(number, books.endpoints[&number].epoch)) else { return };
        match header.kind {
            Kind::CLOSE => {
                let Some(wire::ChannelRef { channel }) = wire::body(body) else { return };
                let opened = books.channels.get(&channel).map(|channel| channel.initiator);
                let initiator = opened.is_some_and(|side| side.endpoint == number && !side.closed);
                has.remove(&What::Channel(channel, initiator));
            }
            Kind::UNLISTEN => {
                let Some(wire::Listening { listener, .. }) = wire::body(body) else { return };
                let waits = |c: &channel::Channel| c.listener == listener && !c.accepted;
                has.retain(|what, _| match what {
                    What::Channel(channel, false) => !books.channels.get(channel).is_some_and(waits),
                    _ => true,
                });
            }
            Kind::SYNC_CLOSE => {
                let Some(wire::SyncRef { object, slot, epoch }) = wire::body(body) else { return };
                has.remove(&What::Sync(object, slot, epoch));
            }
            Kind::BLOCK_CLOSE | Kind::BLOCK_ACK => {
                let Some(wire::BlockRights { handle, rights, .. }) = wire::body(body) else { return };
                if header.kind == Kind::BLOCK_CLOSE || rights == wire::Rights::NONE {
                    has.remove(&What::Block(handle));
                }
            }
            Kind::BLOCK_RESIZE => {
                let Some(wire::BlockResize { handle, size }) = wire::body(body) else { return };
                if let Some((_, len)) = has.get_mut(&What::Block(handle)) {
                    *len = size.min(*len);
                }
            }
            _ => {}
        }
    }

    /// Everybody goes. Nothing stays except what is to outlive its endpoints.
    pub fn end(&mut self) {
        for vm in VMS {
            self.vm_ends(vm);
        }
        for process in self.processes.clone() {
            self.process_ends(process);
        }
        for client in self.connections.clone() {
            self.hang_up(client);
        }
        self.run_effects(None);
        for key in self.timers.keys().copied().collect::<Vec<_>>() {
            self.time_is_over(key);
        }
        // After a restart nothing reports the end of a process that the daemon cannot watch and that does not connect again. The
        // daemon keeps its endpoint, because it may live.
        let owners =
            self.broker.books().endpoints.values().flat_map(|e| e.owners.iter().map(move |p| (e, *p)));
        for (number, epoch, process) in owners.map(|(e, p)| (e.number, e.epoch, p)).collect::<Vec<_>>() {
            assert!(process.pid == 0 || self.broker.unwatched.contains(&(number, process)));
            self.broker.owner_ended(number, epoch, process);
        }
        self.broker.end_all();
        self.run_effects(None);
        self.check();
        self.everything_is_given_back();
        self.journal_makes_the_books();
    }

    fn everything_is_given_back(&self) {
        let books = self.broker.books();
        assert!(books.endpoints.is_empty() && books.channels.is_empty() && books.listeners.is_empty());
        assert!(books.syncs.values().all(|s| s.users.is_empty()));
        assert!(books.blocks.values().all(|b| b.persistent && b.handles.is_empty()));
        let locks = books.syncs.len() as u64 * PAGE_LEN;
        let stays = locks + books.blocks.values().map(|b| b.span).sum::<u64>();
        assert_eq!(books.segments.values().map(|s| s.arena.used()).sum::<u64>(), stays, "memory is lost");
        assert!(self.broker.clients.is_empty() && self.broker.attached.is_empty() && self.watches.is_empty());
        assert!(self.broker.unwatched.is_empty() && self.broker.revocations.all().is_empty());
    }
}
