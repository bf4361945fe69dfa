//! The event loop. It passes each ready descriptor to the part that handles it, and performs what the broker decides.

use super::config::{self, Config};
use super::connections::Clients;
use super::finder::Finders;
use super::holders::Looks;
use super::holds::Timers;
use super::journal::Journal;
use super::members::Members;
use super::own_folder::Folders;
use super::pauses::Pauses;
use super::pending_segments::PendingSegments;
use super::rereading::Rereading;
use super::segments::Segments;
use super::token::Token;
use super::turns::Turns;
use super::vm::Vm;
use crate::closer::Closer;
use crate::hangup::Hangup;
use crate::keeper::{Held, Keeper};
use crate::logging;
use crate::namer::Namer;
use crate::pidwatch::ExecChecks;
use crate::poller::{Interest, Poller, Ready};
use crate::strangers::{self, Strangers, Syns};
use crate::watches::{EACH, ROOT, Watches};
use ginnel_broker::books::Books;
use ginnel_broker::broker::{Broker, ClientId, Effect, FdRef, Recording, World as _};
use ginnel_broker::declared::SegmentSpec;
use ginnel_broker::process::Process;
use ginnel_broker::programs::Programs;
use ginnel_broker::record::Record;
use ginnel_broker::reply;
use ginnel_broker::text::Text;
use ginnel_layout::wire::MAX_PACKET;
use ginnel_layout::{Name, sync, wire};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;

/// How long the loop sleeps if only clients wait whose user has no turn now.
const PAUSE: Duration = Duration::from_millis(1);
/// The events that are fetched at once: so many that a few calls find all that has happened, however much a single user does.
const EVENTS: usize = 1024;
/// How often the files of segments in use are checked, in case they were truncated.
const LOOK: Duration = Duration::from_secs(1);

/// What ends with a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Watched {
    /// An ownership of the endpoint with this number and epoch.
    Owner(u32, u32),
    /// The QEMU of a member.
    Qemu(u32),
    /// The time for which a segment is out of service, because the process has its file as that of a former member.
    Former(Name),
}

/// The running daemon.
pub struct Server {
    pub(super) config: Config,
    pub(super) broker: Broker,
    pub(super) journal: Journal,
    pub(super) segments: Segments,
    pub(super) members: Members,
    pub(super) clients: Clients,
    /// The clients that wait for their turn.
    pub(super) turns: Turns,
    /// Closes connections.
    pub(super) closer: Closer,
    /// The helpers for descriptors that clients send.
    pub(super) strangers: Strangers<ClientId>,
    pub(super) vms: BTreeMap<u32, Vm>,
    /// The programs in VMs.
    pub(super) programs: Programs,
    pub(super) poller: Poller,
    pub(super) keeper: Keeper,
    /// Makes the sockets.
    pub(super) namer: Namer,
    /// Connect to the control sockets of QEMUs.
    pub(super) finders: Finders,
    /// The descriptors that the keeper held when the daemon started, until their member or segment is declared.
    pub(super) held: Held,
    pub(super) started: Instant,
    /// A control link has more messages than one look at it handles.
    pub(super) more: bool,
    /// The broker has background work left.
    busy: bool,
    watches: Watches<Watched>,
    /// The owners of endpoints (number and epoch) that may run another program now.
    exec_checks: ExecChecks<(u32, u32, Process)>,
    /// The times at which holds of endpoints end.
    pub(super) holds: Timers,
    /// The listening sockets that rest.
    pub(super) pauses: Pauses,
    /// The journal has accepted all records of the effects that are being performed, so the following effects may depend on them.
    recorded: bool,
    /// Answers that depend on a record which the journal has not accepted.
    withheld: Vec<Effect>,
    /// A buffer for packets of clients.
    pub(super) packet: Vec<u8>,
    /// What the kernel says only once about the sockets that programs report.
    pub(super) syns: Syns,
    /// The files of segments that are being made.
    pub(super) pending_segments: PendingSegments,
    /// The configuration that is being read again.
    pub(super) rereading: Rereading,
    /// The segments whose files cannot be used and that nobody uses: the checked declaration, the declaration at run time if any,
    /// and where it was declared, for messages.
    pub(super) out_of_service: BTreeMap<Name, (config::Segment, Option<SegmentSpec>, String)>,
    /// Where in their files slices are to be that are not in service yet: offset and size.
    pub(super) places: BTreeMap<(PathBuf, Name), (u64, u64)>,
    /// The time at which to try again to serve these.
    pub(super) retry_at: Instant,
    /// The processes that have segments.
    pub(super) looks: Looks,
    /// Files of segments may have been truncated.
    restore: bool,
    next_client: u64,
    last_look: Instant,
}

impl Server {
    /// Makes the server. It does not serve anyone yet.
    pub fn new(
        config: Config,
        books: Books,
        journal: Journal,
        (keeper, held): (Keeper, Held),
        namer: Namer,
        closer: Closer,
        folders: Folders,
    ) -> io::Result<Self> {
        let poller = Poller::new()?;
        if let Some(connection) = keeper.connection() {
            poller.add(connection, Token::Keeper.into(), Interest::READ)?;
        }
        let rereading = Rereading::new(&poller)?;
        let segments = Segments::new(&poller, folders);
        if !ginnel_doorbell::is_safe() {
            warn!(
                "the system refuses asynchronous I/O (fs.aio-max-nr?): a program that fills its doorbell can delay the rings of that one"
            );
        }
        let own_uid = rustix::process::geteuid().as_raw();
        let mut broker = Broker::new(books, config.limits, config.vectors, own_uid);
        broker.set_sockets(config.sockets.enabled);
        Ok(Self {
            broker,
            config,
            journal,
            segments,
            syns: Syns::default(),
            members: Members::default(),
            clients: Clients::default(),
            turns: Turns::default(),
            closer,
            strangers: Strangers::new(|number| Token::Helper(number).into(), strangers::own_helper),
            vms: BTreeMap::new(),
            programs: Programs::default(),
            poller,
            keeper,
            namer,
            finders: Finders::new(|number| Token::Finder(number).into()),
            held,
            started: Instant::now(),
            more: true,
            busy: false,
            watches: Watches::new(|number| Token::Process(number).into()),
            exec_checks: ExecChecks::default(),
            holds: Timers::default(),
            pauses: Pauses::default(),
            recorded: true,
            withheld: Vec::new(),
            packet: vec![0; MAX_PACKET],
            out_of_service: BTreeMap::new(),
            places: BTreeMap::new(),
            pending_segments: PendingSegments::default(),
            rereading,
            retry_at: Instant::now(),
            looks: Looks::default(),
            restore: false,
            next_client: 1,
            last_look: Instant::now(),
        })
    }

    pub(super) fn new_client(&mut self) -> ClientId {
        self.next_client += 1;
        ClientId(self.next_client)
    }

    /// Serves until `signal` becomes readable. Reads the configuration again at SIGHUP.
    pub fn serve(&mut self, signal: &OwnedFd, hangup: &Hangup) -> io::Result<()> {
        self.poller.add(signal, Token::Signal.into(), Interest::READ)?;
        self.poller.add(hangup, Token::Hangup.into(), Interest::READ)?;
        let mut ready = Vec::new();
        loop {
            self.run_effects();
            self.work();
            self.poller.wait(&mut ready, EVENTS, self.timeout())?;
            for &event in &ready {
                match Token::parse(event.token) {
                    Some(Token::Signal) => return Ok(()),
                    Some(Token::Hangup) if hangup.take() => self.reread(),
                    Some(Token::Hangup) => return Ok(()),
                    Some(token) => self.handle(token, event),
                    None => {}
                }
                self.run_effects();
            }
            self.serve_clients();
            // The events of clients that wait come again at once.
            if let Some(pause) = self.turns.until_next().filter(|pause| !pause.is_zero()) {
                std::thread::sleep(pause.min(PAUSE));
            }
            if self.more {
                self.step_links();
            }
            self.look_after_segments();
            for (endpoint, epoch, process) in self.exec_checks.take_changed() {
                self.broker.owner_ended(endpoint, epoch, process);
            }
            let now = Instant::now();
            while let Some((endpoint, epoch, token)) = self.holds.take_over(now) {
                self.broker.hold_over(endpoint, epoch, token);
            }
            self.step_strangers();
            self.broker.settle_sockets(&mut self.segments);
            self.retry();
            while let Some(token) = self.pauses.take_over() {
                self.set_listening(token, true);
            }
            self.beat();
            self.find_monitors();
            self.handle_resets();
            self.give_up_stopping();
            self.end_look();
            logging::tell_left_out();
        }
    }

    fn handle(&mut self, token: Token, ready: Ready) {
        match token {
            Token::Listener => self.accept_clients(),
            Token::Client(id) => self.client_ready(id, ready),
            Token::Process(watch) => {
                let Some((process, things)) = self.watches.take_ended(&self.poller, watch) else { return };
                for thing in things {
                    match thing {
                        Watched::Owner(endpoint, epoch) => self.broker.owner_ended(endpoint, epoch, process),
                        Watched::Qemu(member) => self.vm_gone(member),
                        Watched::Former(_) => self.retry_at = Instant::now(),
                    }
                }
            }
            Token::VmListener(member) => self.accept_vm(member),
            Token::VmConnection(member) => self.serve_vm(member, ready),
            Token::VmMonitor(member) => self.serve_monitor(member),
            Token::HostVector => self.host_rung(),
            Token::Keeper => self.serve_keeper(),
            Token::Files => {
                self.segments.check_modified();
                self.restore = true;
            }
            Token::FileWork(number) => {
                let restored = self.segments.file_work(number);
                restored.iter().for_each(|segment| self.tell_cut(segment));
                if self.segments.take_removed() {
                    self.retry_at = Instant::now();
                }
                self.segments_made();
            }
            Token::Helper(number) => {
                let clients = &self.clients;
                self.strangers.ready(&self.poller, number, |id| clients.fd(id));
            }
            Token::Finder(number) => {
                self.finders.ready(&self.poller, number);
                // What it has found is there before anybody asks for it again.
                self.find_monitors();
            }
            Token::Reread => self.reread_done(),
            Token::Look(number) => self.looks.ready(&self.poller, number),
            Token::Signal | Token::Hangup => {}
        }
    }

    /// Returns how long the loop may sleep without events. `None` means without limit: nobody uses memory that may be truncated,
    /// no guest must be asked for a sign of life, no QEMU has been told to stop its VM, and nothing is to be tried again.
    fn timeout(&self) -> Option<Duration> {
        if self.more || self.busy {
            return Some(Duration::ZERO);
        }
        let used = self.broker.books().is_memory_used();
        let look = used.then(|| LOOK.saturating_sub(self.last_look.elapsed()));
        let retry = [self.journal.until_retry(), self.until_retry()].into_iter().flatten().min();
        let sockets = self.broker.sockets_settle_at();
        let sockets = sockets.map(|at| at.saturating_sub(self.segments.elapsed()));
        let helpers = self.strangers.until_stuck();
        let turns = self.turns.until_next();
        let owners = [self.exec_checks.until_next(), self.holds.until_next(), sockets, helpers, turns];
        let rest = [
            look,
            self.until_beat(),
            self.until_given_up(),
            self.until_reset(),
            self.finders.until_next(),
            retry,
            self.pauses.until_next(),
            self.looks.left(),
        ];
        owners.into_iter().chain(rest).flatten().min()
    }

    /// Lets a listening socket rest, where accepting has failed.
    pub(super) fn pause(&mut self, token: Token, whose: &str, why: Errno) {
        warn!(errno = %why, "{whose} cannot be accepted, and waits; raise LimitNOFILE= if this goes on");
        if self.set_listening(token, false) {
            self.pauses.begin(token);
        }
    }

    fn set_listening(&self, token: Token, listens: bool) -> bool {
        let listener: Option<BorrowedFd<'_>> = match token {
            Token::Listener => self.clients.listener(),
            Token::VmListener(member) => self.vms.get(&member).and_then(|vm| vm.listener()).map(AsFd::as_fd),
            _ => None,
        };
        let interest = Interest { read: listens, write: false };
        listener.is_some_and(|listener| self.poller.modify(listener, token.into(), interest).is_ok())
    }

    /// Does a bounded part of the background work.
    fn work(&mut self) {
        let limit = self.config.limits.queue as usize;
        let (clients, vms, programs) = (&self.clients, &self.vms, &self.programs);
        let ready = |client| match programs.place(client) {
            Some((member, _)) => vms.get(&member).is_some_and(|vm| !vm.is_backed_up(limit)),
            None => clients.has_room(client),
        };
        let (telling, ending) = (self.broker.tell_revoked(ready), self.broker.end_some());
        self.busy = telling || ending;
        self.run_effects();
    }

    fn look_after_segments(&mut self) {
        if self.last_look.elapsed() >= LOOK {
            self.last_look = Instant::now();
            for segment in self.broker.books().segments_in_use() {
                self.segments.check(&segment);
            }
            for segment in self.segments.take_to_tell() {
                self.tell_cut(&segment);
            }
            self.restore = true;
        }
        for (segment, cut) in self.segments.take_newly_broken() {
            // Sleeping programs wake up, touch the memory, and notice.
            for endpoint in self.broker.books().endpoints.values().filter(|e| e.segment == segment) {
                self.members.ring(endpoint.member, endpoint.vector);
            }
            if cut {
                // Once the file has its size again, the next daemon cannot see that anything is lost, so this is recorded first.
                self.broker.note(Record::SegmentCut { name: Text(segment), cut: true });
                self.run_effects();
                self.tell_cut(&segment);
                self.restore = true;
            }
        }
        if std::mem::take(&mut self.restore) {
            self.restore_files();
        }
    }

    /// Restores the size of truncated files if a QEMU is running that would die when it touches the missing memory. Programs
    /// survive that, and learn of the truncation when they touch the missing memory.
    fn restore_files(&mut self) {
        let books = self.broker.books();
        let runs = |member: &u32| books.members.get(member).is_some_and(|member| member.qemu.is_some());
        self.segments.restore(|name| books.segments.get(name).is_some_and(|s| s.members.iter().any(runs)));
    }

    /// Tells all users of a segment that its file was truncated and is as long as before, which nothing else would show them.
    pub(super) fn tell_cut(&mut self, segment: &Name) {
        if self.segments.begin_telling(segment) {
            self.broker.segment_cut(segment);
            self.run_effects();
        }
    }

    /// Repairs the info blocks and headers of all segments, or of those that a member shares. Every writer of a segment can
    /// damage them, and a guest's kernel and daemon rely on them when they start.
    pub(super) fn check_fronts(&mut self, member: Option<u32>) {
        let segments = self.broker.books().segments.values();
        let of_member = segments.filter(|s| member.is_none_or(|member| s.members.contains(&member)));
        for name in of_member.map(|s| s.name).collect::<Vec<_>>() {
            self.segments.check_front(&name);
        }
    }

    /// Tells the broker which records the journal accepts. Must be called before each request.
    pub(super) fn ask_journal(&mut self) {
        let recording = match self.journal.takes() {
            true => Recording::Open,
            false if self.withheld.is_empty() => Recording::Closed,
            false => Recording::Owing,
        };
        self.broker.set_recording(recording);
    }

    /// Performs the broker's effects in their order.
    pub(super) fn run_effects(&mut self) {
        loop {
            let effects = self.broker.take_effects();
            if effects.is_empty() {
                self.journal.settle(self.broker.books());
                if self.withheld.is_empty() || !self.journal.is_whole() {
                    return;
                }
                self.recorded = true;
                std::mem::take(&mut self.withheld).into_iter().for_each(|effect| self.perform(effect));
                continue;
            }
            self.recorded = true;
            effects.into_iter().for_each(|effect| self.perform(effect));
        }
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Zero { segment, offset, capacities } => self.segments.zero(&segment, offset, capacities),
            Effect::Mark { segment, at, state } => self.segments.mark(&segment, at, state),
            Effect::NewBoard { segment, offset } => self.segments.new_board(&segment, offset),
            Effect::PostAll { segment, offset } => self.segments.post_all(&segment, offset),
            Effect::Post { segment, words, boards } => self.segments.post(&segment, words, &boards),
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
            Effect::Record(record) => {
                let written = self.journal.append(&record);
                self.recorded &= written || !record.gives();
            }
            Effect::Send { .. } if !self.recorded => self.withheld.push(effect),
            Effect::Send { client, packet, fds } => self.send(client, packet, &fds),
            Effect::Disconnect(client) => {
                if !self.end_relayed(client) {
                    self.end_client(client);
                }
            }
            Effect::Watch { endpoint, epoch, process } => self.watch_owner(endpoint, epoch, process),
            Effect::Unwatch { endpoint, epoch, process } => {
                self.watches.remove(&self.poller, &process, &Watched::Owner(endpoint, epoch));
            }
            Effect::Examine { endpoint, epoch, process, image } => {
                if let Some((endpoint, epoch, process)) =
                    self.exec_checks.add(process, image, (endpoint, epoch, process))
                {
                    self.broker.owner_ended(endpoint, epoch, process);
                }
            }
            Effect::TimeHold { endpoint, epoch, token, millis } => {
                let at = Instant::now() + Duration::from_millis(millis.into());
                self.holds.set((endpoint, token), epoch, at);
            }
            Effect::ForgetHold { endpoint, token } => self.holds.forget((endpoint, token)),
            Effect::Recognize { endpoint, process } => {
                self.exec_checks.settle(&process, |(number, ..)| *number == endpoint);
            }
            // The pages for a program in a VM are sent when the VM's ring has room.
            Effect::Inspect { client, request, from } => {
                if !self.inspect_later(client, request, from) {
                    self.send_page(client, request, from);
                }
            }
            Effect::Admin { client, request, text } => self.admin(client, request, &text),
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

    /// Sends packets that belong together. A program in a VM gets no descriptors.
    pub(super) fn send_packets(&mut self, client: ClientId, packets: Vec<(Vec<u8>, Vec<Arc<OwnedFd>>)>) {
        if self.programs.place(client).is_some() {
            self.send_relayed(client, packets.into_iter().map(|(packet, _)| packet).collect());
        } else {
            self.send_client(client, packets);
        }
    }

    /// Answers a request for a page of the daemon's state.
    pub(super) fn send_page(&mut self, client: ClientId, request: u32, from: wire::Inspect) {
        let viewer = self.viewer(client);
        if from.section == 0 {
            if viewer.is_administrator() {
                self.look_for_holders();
            }
            // The client wants the present state, and may be about to start a VM with it, so the files are checked now.
            for segment in viewer.segments() {
                self.segments.check(segment);
                if viewer.is_on_host() {
                    self.segments.check_front(segment);
                }
            }
        }
        let packets = match self.inspect(&viewer, from) {
            Ok((next, text)) => reply::page(request, &next, &text),
            Err(refusal) => vec![reply::refusal(request, &refusal)],
        };
        self.send_packets(client, packets.into_iter().map(|packet| (packet, vec![])).collect());
    }

    /// Answers a request with a text.
    pub(super) fn send_text(&mut self, client: ClientId, request: u32, text: &str) {
        let packets = reply::text(request, text).into_iter().map(|packet| (packet, vec![])).collect();
        self.send_packets(client, packets);
    }

    /// Watches the QEMU of a member. Returns false if it has ended already.
    pub(super) fn watch_qemu(&mut self, member: u32, process: Process) -> io::Result<bool> {
        self.watches.add(&self.poller, process, Watched::Qemu(member), ROOT, usize::MAX)
    }

    /// Tries a segment again that is out of service when this process has ended, or at once if it has.
    pub(super) fn watch_former(&mut self, process: Process, segment: Name) {
        if process.pid == 0 {
            return; // Its end cannot be seen.
        }
        match self.watches.add(&self.poller, process, Watched::Former(segment), ROOT, usize::MAX) {
            Ok(true) => {}
            Ok(false) => self.retry_at = Instant::now(),
            // The segment is tried again from time to time.
            Err(error) => warn!(pid = process.pid, %error, "a process cannot be watched: raise LimitNOFILE="),
        }
    }

    pub(super) fn unwatch_qemu(&mut self, member: u32, process: &Process) {
        self.watches.remove(&self.poller, process, &Watched::Qemu(member));
    }

    pub(super) fn watch_owner(&mut self, endpoint: u32, epoch: u32, process: Process) {
        if process.pid == 0 {
            return; // The process is in a process namespace that is not visible from here, so only its connection counts.
        }
        let uid = self.broker.books().endpoints.get(&endpoint).map_or(ROOT, |endpoint| endpoint.uid);
        let user = self.clients.counted(uid);
        let most = if uid == ROOT { usize::MAX } else { EACH * self.config.limits.clients_per_user as usize };
        let thing = Watched::Owner(endpoint, epoch);
        match self.watches.add(&self.poller, process, thing, user, most) {
            Ok(true) => {}
            Ok(false) => self.broker.owner_ended(endpoint, epoch, process),
            Err(error) => {
                warn!(endpoint, pid = process.pid, uid, %error, "its process cannot be watched, so the end of its connection will count as its end: raise LimitNOFILE= or clients_per_user");
                self.broker.owner_unwatched(endpoint, epoch, process);
            }
        }
    }
}
