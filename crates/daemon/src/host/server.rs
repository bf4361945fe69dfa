//! The event loop: what is ready is handed to its part, and what the broker decides is done.

use super::books::Books;
use super::broker::{Broker, ClientId, Effect, FdRef};
use super::clients::Clients;
use super::config::Config;
use super::journal::Journal;
use super::members::Members;
use super::reply;
use super::segments::Segments;
use super::vms::Vm;
use crate::keeper::{Held, Keeper};
use crate::pidwatch::Process;
use crate::poller::{Interest, Poller, Ready};
use ginnel_layout::{HOST_MEMBER, sync};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;

/// How often the files of segments in use are looked at, in case they were truncated.
const LOOK: Duration = Duration::from_secs(1);

/// What a descriptor in the poller belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The attach socket.
    Listener,
    /// A connection to it.
    Client(ClientId),
    /// The process of an endpoint.
    Process(u32),
    /// The socket of a VM.
    VmListener(u32),
    /// The connection to its QEMU.
    VmConnection(u32),
    /// The process of its QEMU.
    VmProcess(u32),
    /// The control socket of its QEMU.
    VmMonitor(u32),
    /// The host's daemon vector.
    HostVector,
    /// The keeper.
    Keeper,
    /// A signal has come.
    Signal,
}

const KIND_BITS: u32 = 8;

impl From<Token> for u64 {
    fn from(token: Token) -> Self {
        let (kind, number) = match token {
            Token::Listener => (0, 0),
            Token::Client(client) => (1, client.0),
            Token::Process(endpoint) => (2, endpoint.into()),
            Token::Signal => (3, 0),
            Token::VmListener(member) => (4, member.into()),
            Token::VmConnection(member) => (5, member.into()),
            Token::VmProcess(member) => (6, member.into()),
            Token::HostVector => (7, 0),
            Token::Keeper => (8, 0),
            Token::VmMonitor(member) => (9, member.into()),
        };
        number << KIND_BITS | kind
    }
}

impl Token {
    fn parse(token: u64) -> Option<Self> {
        let number = token >> KIND_BITS;
        Some(match token & ((1 << KIND_BITS) - 1) {
            0 => Self::Listener,
            1 => Self::Client(ClientId(number)),
            2 => Self::Process(u32::try_from(number).ok()?),
            3 => Self::Signal,
            4 => Self::VmListener(u32::try_from(number).ok()?),
            5 => Self::VmConnection(u32::try_from(number).ok()?),
            6 => Self::VmProcess(u32::try_from(number).ok()?),
            7 => Self::HostVector,
            8 => Self::Keeper,
            9 => Self::VmMonitor(u32::try_from(number).ok()?),
            _ => return None,
        })
    }
}

/// A process that is watched.
#[derive(Debug)]
struct Watch {
    epoch: u32,
    pidfd: OwnedFd,
}

/// The running daemon.
pub struct Server {
    pub(super) config: Config,
    pub(super) broker: Broker,
    pub(super) journal: Journal,
    pub(super) segments: Segments,
    pub(super) members: Members,
    pub(super) clients: Clients,
    pub(super) vms: BTreeMap<u32, Vm>,
    /// Programs in VMs: the VM, and the number that its daemon has given them.
    pub(super) relayed: BTreeMap<ClientId, (u32, u32)>,
    pub(super) poller: Poller,
    pub(super) keeper: Keeper,
    /// What the keeper held when the daemon started, until its owner is declared.
    pub(super) held: Held,
    pub(super) started: Instant,
    /// A link has more messages than were taken at once.
    pub(super) more: bool,
    watches: BTreeMap<u32, Watch>,
    next_client: u64,
    last_look: Instant,
}

impl Server {
    /// Puts the parts together. Nobody is served yet.
    pub fn new(
        config: Config,
        books: Books,
        journal: Journal,
        keeper: Keeper,
        held: Held,
    ) -> io::Result<Self> {
        let poller = Poller::new()?;
        if let Some(connection) = keeper.connection() {
            poller.add(connection, Token::Keeper.into(), Interest::READ)?;
        }
        let own_uid = rustix::process::geteuid().as_raw();
        Ok(Self {
            broker: Broker::new(books, config.limits, config.vectors, own_uid),
            config,
            journal,
            segments: Segments::default(),
            members: Members::default(),
            clients: Clients::default(),
            vms: BTreeMap::new(),
            relayed: BTreeMap::new(),
            poller,
            keeper,
            held,
            started: Instant::now(),
            more: true,
            watches: BTreeMap::new(),
            next_client: 1,
            last_look: Instant::now(),
        })
    }

    pub(super) fn new_client(&mut self) -> ClientId {
        self.next_client += 1;
        ClientId(self.next_client)
    }

    /// Serves until `signal` becomes readable.
    pub fn serve(&mut self, signal: &OwnedFd) -> io::Result<()> {
        self.poller.add(signal, Token::Signal.into(), Interest::READ)?;
        let mut ready = Vec::new();
        loop {
            self.run_effects();
            self.poller.wait(&mut ready, self.timeout())?;
            for &event in &ready {
                match Token::parse(event.token) {
                    Some(Token::Signal) => return Ok(()),
                    Some(token) => self.handle(token, event),
                    None => {}
                }
                self.run_effects();
            }
            if self.more {
                self.step_links();
            }
            self.look_after_segments();
            self.beat();
            self.give_up_stopping();
        }
    }

    fn handle(&mut self, token: Token, ready: Ready) {
        match token {
            Token::Listener => self.accept_clients(),
            Token::Client(id) => self.serve_client(id, ready),
            Token::Process(endpoint) => {
                if let Some(watch) = self.watches.remove(&endpoint) {
                    self.poller.remove(&watch.pidfd);
                    self.broker.endpoint_died(endpoint, watch.epoch);
                }
            }
            Token::VmListener(member) => self.accept_vm(member),
            Token::VmConnection(member) => self.serve_vm(member, ready),
            Token::VmProcess(member) => self.vm_gone(member),
            Token::VmMonitor(member) => self.serve_monitor(member),
            Token::HostVector => self.host_rung(),
            Token::Keeper => self.replace_keeper(),
            Token::Signal => {}
        }
    }

    /// How long nothing may happen. For ever, unless somebody uses memory that may be truncated, or
    /// a guest is to be asked whether it is there, or a QEMU is to stop one.
    fn timeout(&self) -> Option<Duration> {
        if self.more {
            return Some(Duration::ZERO);
        }
        let used = self.broker.books().is_memory_used();
        let look = used.then(|| LOOK.saturating_sub(self.last_look.elapsed()));
        [look, self.until_beat(), self.until_given_up()].into_iter().flatten().min()
    }

    fn look_after_segments(&mut self) {
        if self.last_look.elapsed() >= LOOK {
            self.last_look = Instant::now();
            for segment in self.broker.books().segments_in_use() {
                self.segments.check(&segment);
            }
        }
        for segment in self.segments.take_newly_broken() {
            // Those who sleep wake up, touch the memory, and see.
            for endpoint in self.broker.books().endpoints.values().filter(|e| e.segment == segment) {
                self.members.ring(endpoint.member, endpoint.vector);
            }
        }
    }

    /// Repairs what stands in front of the arenas of all segments, or of those that a member has a share in: whoever can
    /// write a segment can spoil it, and a guest's kernel and daemon go by it when they start.
    pub(super) fn check_fronts(&mut self, member: Option<u32>) {
        let segments = self.broker.books().segments.values();
        let of_member = segments.filter(|s| member.is_none_or(|member| s.members.contains(&member)));
        for name in of_member.map(|s| s.name).collect::<Vec<_>>() {
            self.segments.check_front(&name);
        }
    }

    /// Does what the broker has decided, in its order.
    pub(super) fn run_effects(&mut self) {
        loop {
            let effects = self.broker.take_effects();
            if effects.is_empty() {
                break;
            }
            for effect in effects {
                self.perform(effect);
            }
        }
        self.journal.settle(self.broker.books());
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Zero { segment, offset, capacity } => self.segments.zero(&segment, offset, capacity),
            Effect::Mark { segment, at, state } => self.segments.mark(&segment, at, state),
            Effect::NewSync { segment, offset, kind, limit, initial } => {
                self.segments.new_sync(&segment, offset, kind, limit, initial);
            }
            Effect::Seat { segment, offset, user, endpoint_epoch, bell } => {
                self.segments.seat(&segment, offset, user, endpoint_epoch, bell);
            }
            Effect::Reclaim { object, segment, offset, kind, slot, left } => {
                let look = self.segments.reclaim(&segment, offset, kind, slot, left);
                for slot in (0..sync::SLOTS as u32).filter(|slot| look & 1 << slot != 0) {
                    if let Some((member, vector)) = self.broker.books().sync_bell(object, slot) {
                        self.members.ring(member, vector);
                    }
                }
            }
            Effect::Ring { member, vector } => self.members.ring(member, vector),
            Effect::Record(record) => self.journal.append(&record),
            Effect::Send { client, packet, fds } => self.send(client, packet, &fds),
            Effect::Disconnect(client) => {
                if !self.end_relayed(client) {
                    self.end_client(client);
                }
            }
            Effect::Watch { endpoint, epoch, process } => self.watch(endpoint, epoch, process),
            Effect::Unwatch { endpoint } => {
                if let Some(watch) = self.watches.remove(&endpoint) {
                    self.poller.remove(&watch.pidfd);
                }
            }
            Effect::Inspect { client, request } => {
                // Who asks wants to know what is, not what was known.
                self.segments.check_all();
                if self.broker.who(client).is_some_and(|who| who.member == HOST_MEMBER) {
                    // Perhaps it starts a VM with it.
                    self.check_fronts(None);
                }
                let text = self.inspect(client);
                self.send_text(client, request, &text);
            }
            Effect::Admin { client, request, text } => {
                let result = self.admin(client, &text);
                // In the journal before it is answered.
                self.run_effects();
                match result {
                    Ok(answer) => self.send_text(client, request, &answer.to_string()),
                    Err(refusal) => {
                        self.send_packets(client, vec![(reply::refusal(request, &refusal), vec![])])
                    }
                }
            }
        }
    }

    fn send(&mut self, client: ClientId, packet: Vec<u8>, fds: &[FdRef]) {
        let fds: Vec<Arc<OwnedFd>> = fds
            .iter()
            .filter_map(|fd| match fd {
                FdRef::Memory(segment) => self.segments.file(segment),
                FdRef::ReadOnlyMemory(segment) => self.segments.read_only_file(segment),
                FdRef::Event(member, vector) => self.members.event(*member, *vector),
            })
            .collect();
        self.send_packets(client, vec![(packet, fds)]);
    }

    /// Sends packets that belong together, without descriptors to a program in a VM.
    fn send_packets(&mut self, client: ClientId, packets: Vec<(Vec<u8>, Vec<Arc<OwnedFd>>)>) {
        if self.relayed.contains_key(&client) {
            self.send_relayed(client, packets.into_iter().map(|(packet, _)| packet).collect());
        } else {
            self.send_client(client, packets);
        }
    }

    /// Answers a request with a text.
    pub(super) fn send_text(&mut self, client: ClientId, request: u32, text: &str) {
        let packets = reply::text(request, text).into_iter().map(|packet| (packet, vec![])).collect();
        self.send_packets(client, packets);
    }

    pub(super) fn watch(&mut self, endpoint: u32, epoch: u32, process: Process) {
        if process.pid == 0 {
            return; // In a process namespace that cannot be seen from here; its connection has to do.
        }
        match process.watch() {
            Ok(Some(pidfd)) => match self.poller.add(&pidfd, Token::Process(endpoint).into(), Interest::READ)
            {
                Ok(()) => {
                    self.watches.insert(endpoint, Watch { epoch, pidfd });
                }
                Err(error) => warn!(endpoint, %error, "its process cannot be watched"),
            },
            Ok(None) => self.broker.endpoint_died(endpoint, epoch),
            Err(errno) => warn!(endpoint, %errno, "its process cannot be watched: raise LimitNOFILE="),
        }
    }
}
