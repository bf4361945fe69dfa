//! Queue pairs: their states, and requests that wait.
//!
//! A request is executed when it is posted, and its completion exists when the call returns, unless the request has to wait. It waits
//! for a peer that is not ready to receive, that has posted no receive, or that has claimed a piece of a shared copy; or for room in the
//! completion queue. A request that waits, and all requests behind it, are tried again by each thread that polls a completion queue of
//! the queue pair.

mod help;
mod parameters;
mod receiving;

use crate::completion_queue::CompletionQueue;
use crate::counters::Counters;
use crate::lock::{Lock, Locked};
use crate::peer::{FindPlace, Peer, Windows};
use crate::program::{InlineBytes, ProgramMemory};
use crate::receive::{Owner, ReceiveQueue};
use crate::regions::Region;
use crate::remote::{self, Failure, NotConnected, Remote};
use crate::shadow::{Bounce, ErrandRequest, ErrandServer};
use crate::shared_receive_queue::{SharedReceiveQueue, publish_rings};
use crate::work::{Completed, Datagram, Element, Operation, Status, Work, total};
use ginnel_layout::verbs::{Access, Armed, Claimer, Key, Kind, MTU, QpNumber, QpState, Waits, qp};
use ginnel_shmem::SharedMemory;
pub use parameters::{
    Capacity, Change, Event, EventCallback, Location, QueuePairOptions, Refused, Rings, lid,
};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// What a queue pair needs from its device.
pub trait Adapter<M: SharedMemory>: Send + Sync {
    /// Returns another endpoint, if it has tables. May ask the daemon.
    fn peer(&self, endpoint: u32) -> Option<Arc<Peer<M>>>;

    /// Returns the region of a key.
    fn region(&self, key: Key) -> Option<Region>;

    /// Calls `then` with the region of a key, if there is one. The region cannot be removed during the call.
    fn with_region(&self, key: Key, then: &mut dyn FnMut(&Region));

    /// Allocates memory of an arena, which peers can reach. Returns `None` if there is no room.
    fn take(&self, len: usize) -> Option<Bounce<M>>;

    /// Frees such memory.
    fn give(&self, bounce: Bounce<M>);

    /// The number of regions that have been removed so far.
    fn removals(&self) -> &AtomicU64;

    /// Checks whether peers have ended. A thread that polls and finds nothing calls this from time to time.
    fn attend(&self);

    /// Returns the identity under which this endpoint claims receives of others.
    fn claimer(&self) -> Claimer;

    /// Returns the number of the member that this endpoint belongs to.
    fn member(&self) -> u32;

    /// Returns whether an endpoint that has claimed a receive has died. May ask the daemon.
    fn has_died(&self, claimer: Claimer) -> bool;

    /// Is called when a request starts to wait. If no thread polls, the notifier has to try it again.
    fn has_to_wait(&self);

    /// Is called when this process has asked the process of a peer to do something. After the answer there may be more to ask for, and that
    /// must happen even if no thread polls.
    fn has_asked(&self) {}

    /// Returns how long to wait for a peer that is in the middle of an access.
    fn patience(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// Returns an incarnation number that no queue pair of this endpoint has used yet.
    fn next_incarnation(&self) -> u32;
}

/// A send request that waits.
struct Waiting {
    id: u64,
    operation: Operation,
    datagram: Option<Datagram>,
    elements: Vec<Element>,
    /// The copied data of an inline request.
    bytes: Option<Vec<u8>>,
    is_signaled: bool,
}

struct Sender<M> {
    /// The queue pair to connect to, and the endpoint that owns it.
    peer: Option<QpNumber>,
    owner: Option<Arc<Peer<M>>>,
    remote: Option<Remote<M>>,
    /// Queue pairs to which datagrams were sent, with the local identifiers of their ports.
    remotes: HashMap<QpNumber, (u16, Remote<M>)>,
    waiting: VecDeque<Waiting>,
    timeout: Option<Duration>,
    patience: Option<Duration>,
    /// Since when the first request waits for `waits_for`.
    since: Option<Instant>,
    /// The status with which the first request fails if it waits too long.
    waits_for: Option<Status>,
    /// When this side first noticed that the peer has ended.
    ended: Option<Instant>,
    /// Requests posted since the last check whether peers are alive.
    posted: u32,
    /// The key that was checked last: the number of removals at that time, the key and its region.
    known: Option<(u64, u32, Region)>,
    /// The regions of this side, as the peer sees them: for copies that the peer shares with this side.
    own_windows: Option<Windows<M>>,
    /// When the last lookup of the regions of such a copy failed after a long wait.
    not_learned: Option<Instant>,
    counters: Counters<M>,
}

/// The result of an attempt to execute a request.
enum Attempt {
    Done,
    /// The request has to wait: the longest time, the status with which it fails after that, and the reason for waiting.
    Wait(Option<Duration>, Status, Waits),
    Failed(Status),
}

/// Where a queue pair takes its receives from.
enum Receives<M: SharedMemory> {
    Own(Box<Lock<ReceiveQueue<M>>>),
    Shared(Arc<SharedReceiveQueue<M>>),
}

/// The peer, or its queue pair, has ended.
const GONE: Attempt = Attempt::Wait(Some(GRACE), Status::RETRY_EXC_ERR, Waits::ENDED);
/// There is no peer.
const NOT_CONNECTED: Attempt = Attempt::Failed(Status::RETRY_EXC_ERR);

/// A queue pair.
pub struct QueuePair<M: SharedMemory> {
    kind: Kind,
    domain: u32,
    capacity: Capacity,
    tables: M,
    at: usize,
    location: Location<M>,
    adapter: Arc<dyn Adapter<M>>,
    state: AtomicU32,
    /// Distinguishes this queue pair from others that have had its number, and from itself before its last reset.
    incarnation: AtomicU32,
    /// The remote operations that the peer may execute.
    access: AtomicU32,
    sender: Lock<Sender<M>>,
    /// Whether requests may be waiting. A thread that polls and finds nothing looks at this first, to avoid the sender's lock.
    has_waiting: AtomicBool,
    /// The last copy that the peer has offered to share and that has no pieces left to help with ([`ended_as`]).
    ended_offer: AtomicU64,
    /// Executes the errands of the peer, if this process has shadow regions.
    errand_server: OnceLock<ErrandServer<M>>,
    receives: Receives<M>,
    completes_sends: Arc<CompletionQueue<M>>,
    completes_receives: Arc<CompletionQueue<M>>,
    tell: EventCallback,
}

/// How long after the end of its peer a queue pair fails. A real adapter would keep trying for some hundred milliseconds, and programs
/// rely on that: when two programs exchange a number of messages, the first to finish ends while the other one is still posting more
/// requests than necessary.
const GRACE: Duration = Duration::from_millis(50);

/// Number of requests that are posted between two checks whether peers are alive. A thread that polls checks only when it finds nothing,
/// and a program that only writes would never check.
const LOOKS: u32 = 256;

/// Maximum number of destinations that a datagram queue pair remembers.
const MOST_REMOTES: usize = 1024;

impl<M: SharedMemory> QueuePair<M> {
    /// Returns a queue pair in the state RESET. Returns `None` if its number has no place in the tables, or if it has neither rings nor
    /// a shared receive queue.
    pub fn new(
        tables: M,
        location: Location<M>,
        wanted: QueuePairOptions<M>,
        adapter: Arc<dyn Adapter<M>>,
    ) -> Option<Arc<Self>> {
        let QueuePairOptions { kind, domain, capacity, shared, completes, tell } = wanted;
        let (at, shape) = (location.number.at()?, capacity.receives);
        let receives = match shared {
            Some(shared) => {
                tables.store_relaxed_u32(at + qp::KIND, kind.0);
                tables.store_relaxed_u32(at + qp::QUEUE, shared.number().index() as u32);
                Receives::Shared(shared)
            }
            None => {
                let rings = location.rings.as_ref()?;
                publish_rings(&tables, at, kind, location.number, rings, shape);
                let (ring, completions) = (rings.receives.1.clone(), rings.completions.1.clone());
                let is_shared = kind == Kind::UD;
                let owner = Owner { adapter: adapter.clone(), domain };
                let queue = ReceiveQueue::new(tables.clone(), at, shape, ring, completions, is_shared, owner);
                Receives::Own(Box::new(Lock::new(queue)))
            }
        };
        tables.store_relaxed_u32(at + qp::DOMAIN, domain);
        // The count of senders stays as it is: a sender to an earlier queue pair with this number may still be about to decrement it.
        let armed = if completes.1.has_events() { Armed::IDLE } else { Armed::NEVER };
        tables.store_relaxed_u32(at + qp::ARMED, armed.0);
        let sender = Sender {
            peer: None,
            owner: None,
            remote: None,
            remotes: HashMap::new(),
            waiting: VecDeque::new(),
            timeout: None,
            patience: None,
            since: None,
            waits_for: None,
            ended: None,
            posted: 0,
            known: None,
            own_windows: None,
            not_learned: None,
            counters: Counters::new(tables.clone(), location.number.counters_at()?),
        };
        let queue_pair = Arc::new(Self {
            kind,
            domain,
            capacity,
            tables,
            at,
            location,
            incarnation: AtomicU32::new(adapter.next_incarnation()),
            adapter,
            state: AtomicU32::new(QpState::RESET.0),
            access: AtomicU32::new(0),
            ended_offer: AtomicU64::new(0),
            errand_server: OnceLock::new(),
            sender: Lock::new(sender),
            has_waiting: AtomicBool::new(false),
            receives,
            completes_sends: completes.0.clone(),
            completes_receives: completes.1.clone(),
            tell,
        });
        queue_pair.publish(QpState::RESET);
        let is_one = Arc::ptr_eq(&completes.0, &completes.1);
        completes.1.add(&queue_pair, true);
        if !is_one {
            completes.0.add(&queue_pair, false);
        }
        if let Receives::Shared(shared) = &queue_pair.receives {
            shared.add(&queue_pair);
        }
        Some(queue_pair)
    }

    /// Returns the number of the queue pair.
    pub fn number(&self) -> QpNumber {
        self.location.number
    }

    /// RC, UC or UD.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the size of the queue pair.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Returns the location of the queue pair.
    pub fn location(&self) -> &Location<M> {
        &self.location
    }

    /// Returns the shared receive queue, if the queue pair uses one.
    pub fn shared(&self) -> Option<&Arc<SharedReceiveQueue<M>>> {
        match &self.receives {
            Receives::Own(_) => None,
            Receives::Shared(shared) => Some(shared),
        }
    }

    /// Returns the current state.
    pub fn state(&self) -> QpState {
        QpState(self.state.load(Ordering::Acquire))
    }

    fn incarnation(&self) -> u32 {
        self.incarnation.load(Ordering::Relaxed)
    }

    fn publish(&self, state: QpState) {
        self.state.store(state.0, Ordering::Release);
        // ORDER verbs.state: the words that belong to the state are visible before the state. Pairs with: `Remote::connect`.
        // ORDER verbs.executing: the state is visible before the load of `executing`. Pairs with: `Remote::begin`.
        let word = u64::from(self.incarnation()) << 32 | u64::from(state.0);
        self.tables.swap_u64(self.at + qp::STATE, word);
        self.tables.full_fence();
    }

    /// Publishes whether peers have to wake this process when they complete a receive.
    pub(crate) fn arm(&self, armed: Armed) {
        self.tables.store_relaxed_u32(self.at + qp::ARMED, armed.0);
        // ORDER verbs.armed: this store is visible before the next look at completions. Pairs with: `Remote::wake`.
        self.tables.full_fence();
    }

    fn sender(&self) -> Locked<'_, Sender<M>> {
        self.sender.lock()
    }

    /// Locks the queue pair's own receive queue, if it has one.
    fn receiver(&self) -> Option<Locked<'_, ReceiveQueue<M>>> {
        match &self.receives {
            Receives::Own(receiver) => Some(receiver.lock()),
            Receives::Shared(_) => None,
        }
    }

    /// Changes the state, if the specification allows the transition (InfiniBand Architecture Specification 1.2.1, figure 124).
    pub fn modify(&self, to: QpState, change: Change) -> Result<(), Refused> {
        use QpState as State;
        let mut sender = self.sender();
        let from = self.state();
        let is_allowed = matches!(
            (from, to),
            (_, State::RESET | State::ERR)
                | (State::RESET | State::INIT, State::INIT)
                | (State::INIT, State::RTR)
                | (State::RTR | State::RTS | State::SQD, State::RTS)
                | (State::RTS, State::SQD)
        );
        let connects = to == State::RTR && self.kind != Kind::UD;
        if !is_allowed || change.peer.is_some() != connects {
            return Err(Refused::Invalid);
        }
        if let Some(qkey) = change.qkey {
            self.tables.store_relaxed_u32(self.at + qp::QKEY, qkey);
        }
        if let Some(access) = change.access {
            self.access.store(access.0, Ordering::Relaxed);
            self.tables.store_relaxed_u32(self.at + qp::ACCESS, access.0);
        }
        if let Some(timeout) = change.timeout {
            sender.timeout = timeout;
        }
        if let Some(patience) = change.patience {
            sender.patience = patience;
        }
        match to {
            State::RESET => {
                self.publish(to);
                sender.waiting.clear();
                sender.remotes.clear();
                (sender.peer, sender.remote, sender.since, sender.ended) = (None, None, None, None);
                self.ended_offer.store(0, Ordering::Relaxed);
                sender.counters.idle();
                drop(sender);
                // A later access by a peer that is still in the middle of one would be taken for something new.
                if !self.wait_for_rings() {
                    return Err(Refused::Invalid);
                }
                self.sender().owner = None;
                // Outstanding receives are dropped without completions, as the specification says.
                if let Some(mut receiver) = self.receiver() {
                    receiver.reset();
                }
                // The new incarnation ends the connection for the peer too, even if the same two queue pairs are connected again.
                let turn = self.errand_server.get().map(ErrandServer::turn);
                self.incarnation.store(self.adapter.next_incarnation(), Ordering::Relaxed);
                drop(turn);
                self.publish(to);
                self.completes_sends.purge(self.number());
                self.completes_receives.purge(self.number());
            }
            State::ERR if from == State::RESET => self.publish(to),
            State::ERR => self.fall(&mut sender, None),
            _ => {
                if let Some(peer) = change.peer {
                    for word in [qp::HEAD, qp::EXECUTING, qp::ERROR] {
                        self.tables.store_relaxed_u64(self.at + word, 0);
                    }
                    sender.peer = Some(peer);
                    self.tables.store_relaxed_u32(self.at + qp::PEER, peer.0);
                    // The peer is looked up now, when the program expects the call to take time.
                    sender.owner = self.adapter.peer(peer.endpoint());
                }
                self.publish(to);
                let waiting = sender.waiting.len();
                if to == State::SQD && waiting > 0 {
                    sender.counters.waits(waiting, Some(Waits::STOPPED));
                }
            }
        }
        Ok(())
    }

    /// Posts a receive.
    pub fn post_receive(&self, id: u64, elements: &[Element]) -> Result<(), Refused> {
        let mut receiver = self.receiver().ok_or(Refused::Invalid)?;
        if self.state() == QpState::RESET {
            return Err(Refused::Invalid);
        }
        receiver.post(id, elements)?;
        drop(receiver);
        if self.state() == QpState::ERR {
            // The receive is flushed when the program polls.
            self.completes_receives.tell(true);
        }
        Ok(())
    }

    /// Posts a send request: executes it, or queues it if it has to wait.
    #[inline]
    pub fn post(&self, program: &impl ProgramMemory<M>, work: &Work<'_>) -> Result<(), Refused> {
        let mut sender = self.sender();
        let state = self.state();
        match state {
            QpState::RTS | QpState::SQD => {}
            QpState::ERR | QpState::SQE => {
                let flushed = self.completed(work.id, &work.operation, Status::WR_FLUSH_ERR);
                self.completes_sends.push(flushed);
                return Ok(());
            }
            _ => return Err(Refused::Invalid),
        }
        let len = total(work.elements).ok_or(Refused::Invalid)?;
        if let Some(remote) = &sender.remote {
            remote.prefetch(&work.operation, len);
        }
        let len = len as usize;
        let is_too_long = work.is_inline && (len > self.capacity.inline || work.operation.fills_elements());
        let is_offered = match self.kind {
            Kind::RC => true,
            Kind::UC => !work.operation.fills_elements(),
            _ => matches!(work.operation, Operation::Send { .. }) && work.datagram.is_some() && len <= MTU,
        };
        if is_too_long || !is_offered || work.elements.len() > self.capacity.elements {
            return Err(Refused::Invalid);
        }
        if !sender.waiting.is_empty() || state == QpState::SQD {
            let waits = (state == QpState::SQD).then_some(Waits::STOPPED);
            return self.enqueue(&mut sender, program, work, waits);
        }
        let Work { id, operation, .. } = work;
        match self.attempt(&mut sender, program, work) {
            Attempt::Done => {
                sender.counters.executed(len as u32);
                if work.is_signaled {
                    self.completes_sends.push(self.completed(*id, operation, Status::SUCCESS));
                }
                Ok(())
            }
            Attempt::Wait(.., waits) => self.enqueue(&mut sender, program, work, Some(waits)),
            Attempt::Failed(status) => {
                self.fall(&mut sender, Some(self.completed(*id, operation, status)));
                Ok(())
            }
        }
    }

    /// Returns how many further requests fit, if all of them have to wait.
    pub fn room(&self) -> usize {
        self.capacity.sends.saturating_sub(self.sender().waiting.len())
    }

    #[cold]
    fn enqueue(
        &self,
        sender: &mut Sender<M>,
        program: &impl ProgramMemory<M>,
        work: &Work<'_>,
        waits: Option<Waits>,
    ) -> Result<(), Refused> {
        if sender.waiting.len() >= self.capacity.sends {
            return Err(Refused::Full);
        }
        let bytes = work.is_inline.then(|| {
            let mut bytes = vec![0; work.elements.iter().map(|element| element.length as usize).sum()];
            let mut at = 0;
            for element in work.elements {
                let end = at + element.length as usize;
                program.get(element.address, &mut bytes[at..end]);
                at = end;
            }
            bytes
        });
        let elements = match &bytes {
            Some(bytes) => vec![Element { address: 0, length: bytes.len() as u32, key: 0 }],
            None => work.elements.to_vec(),
        };
        if sender.waiting.is_empty() {
            (sender.since, sender.waits_for) = (Some(Instant::now()), None);
            self.adapter.has_to_wait();
        }
        let Work { id, operation, datagram, is_signaled, .. } = *work;
        self.has_waiting.store(true, Ordering::Relaxed);
        sender.waiting.push_back(Waiting { id, operation, datagram, elements, bytes, is_signaled });
        sender.counters.waits(sender.waiting.len(), waits);
        Ok(())
    }

    #[inline(always)]
    fn attempt(&self, sender: &mut Sender<M>, program: &impl ProgramMemory<M>, work: &Work<'_>) -> Attempt {
        let Work { ref operation, elements, is_inline, is_signaled, .. } = *work;
        if !is_inline {
            let wanted = if operation.fills_elements() { Access::LOCAL_WRITE } else { 0 };
            if !elements.iter().all(|element| self.may_use(sender, element, wanted)) {
                return Attempt::Failed(Status::LOC_PROT_ERR);
            }
        }
        if is_signaled && self.completes_sends.is_full() {
            return Attempt::Wait(None, Status::SUCCESS, Waits::COMPLETIONS);
        }
        if self.kind == Kind::UD {
            self.send_datagram(sender, program, work);
            return Attempt::Done;
        }
        if sender.remote.is_none()
            && let Err(attempt) = self.connect(sender, Peer::place)
        {
            return attempt;
        }
        sender.posted += 1;
        if sender.posted >= LOOKS {
            sender.posted = 0;
            self.adapter.attend();
        }
        let patience = sender.patience;
        let Some(remote) = sender.remote.as_mut() else { return NOT_CONNECTED };
        if remote.is_dead() {
            return if self.kind == Kind::RC { GONE } else { Attempt::Done };
        }
        match remote.execute(program, operation, elements) {
            Ok(()) => Attempt::Done,
            Err(Failure::Asked) => {
                self.adapter.has_asked();
                Attempt::Wait(None, Status::SUCCESS, Waits::ERRAND)
            }
            Err(Failure::Shared) => {
                // If the program does not poll, the notifier has to copy the part that is left to this side.
                self.adapter.has_asked();
                Attempt::Wait(None, Status::SUCCESS, Waits::COPY)
            }
            // An unreliable connection reports no error to the sender.
            Err(_) if self.kind == Kind::UC => Attempt::Done,
            Err(Failure::NotReady) => Attempt::Wait(patience, Status::RNR_RETRY_EXC_ERR, Waits::RECEIVE),
            Err(Failure::Gone) => GONE,
            Err(failure) => Attempt::Failed(failure.status()),
        }
    }

    /// Returns what peers get to know of this side.
    fn as_sender(&self) -> remote::Sender {
        let (claimer, lid) = (self.adapter.claimer(), lid(self.adapter.member()));
        remote::Sender { number: self.number(), kind: self.kind, claimer, lid }
    }

    /// Sends a datagram. A datagram that cannot be delivered is dropped.
    #[inline(never)]
    fn send_datagram(&self, sender: &mut Sender<M>, program: &impl ProgramMemory<M>, work: &Work<'_>) {
        let (Some(to), Operation::Send { immediate, solicited }) = (work.datagram, work.operation) else {
            return;
        };
        for _ in 0..2 {
            if !sender.remotes.contains_key(&to.number) {
                let Some(remote) = self.remote_for(&to) else { return };
                if sender.remotes.len() >= MOST_REMOTES {
                    sender.remotes.clear();
                }
                sender.remotes.insert(to.number, remote);
            }
            let Some((lid, remote)) = sender.remotes.get_mut(&to.number) else { return };
            if *lid != to.lid {
                return;
            }
            if remote.is_dead() {
                // There may be another endpoint with that number now.
                sender.remotes.remove(&to.number);
                continue;
            }
            match remote.send_datagram(program, work.elements, immediate, solicited, to.qkey) {
                // There may be another queue pair with that number now.
                Err(Failure::Gone) => drop(sender.remotes.remove(&to.number)),
                _ => return,
            }
        }
    }

    #[cold]
    fn remote_for(&self, to: &Datagram) -> Option<(u16, Remote<M>)> {
        let peer = self.adapter.peer(to.number.endpoint()).filter(|peer| !peer.is_dead())?;
        let lid = lid(peer.member());
        Some((lid, Remote::connect(peer, to.number, self.as_sender()).ok()?))
    }

    #[cold]
    fn connect(&self, sender: &mut Sender<M>, find: FindPlace<M>) -> Result<(), Attempt> {
        let wait = match self.kind {
            Kind::RC => Err(Attempt::Wait(sender.timeout, Status::RETRY_EXC_ERR, Waits::PEER)),
            _ => Err(Attempt::Done),
        };
        let Some(number) = sender.peer else { return wait };
        if sender.owner.is_none() {
            sender.owner = self.adapter.peer(number.endpoint());
        }
        let Some(peer) = sender.owner.clone() else { return wait };
        let is_dead = peer.is_dead();
        match Remote::connect_by(find, peer, number, self.as_sender()) {
            Ok(remote) => sender.remote = Some(remote),
            Err(NotConnected::NotYet) if !is_dead => return wait,
            Err(_) if self.kind == Kind::UC => return wait,
            Err(NotConnected::NotYet) => return Err(GONE),
            Err(NotConnected::Corrupt) => return Err(Attempt::Failed(Status::RETRY_EXC_ERR)),
        }
        Ok(())
    }

    /// Returns whether a request may access this range of the program's memory.
    #[inline(always)]
    fn may_use(&self, sender: &mut Sender<M>, element: &Element, wanted: u32) -> bool {
        if element.length == 0 {
            return true;
        }
        let removals = self.adapter.removals().load(Ordering::Acquire);
        if let Some((then, key, region)) = &sender.known
            && (*then, *key) == (removals, element.key)
        {
            return region.allows(element, wanted, self.domain);
        }
        let Some(region) = self.adapter.region(Key(element.key)) else { return false };
        sender.known = Some((removals, element.key, region));
        region.allows(element, wanted, self.domain)
    }

    fn completed(&self, id: u64, operation: &Operation, status: Status) -> Completed {
        let length = match operation {
            Operation::CompareAndSwap { .. } | Operation::FetchAndAdd { .. } => 8,
            _ => 0,
        };
        let (opcode, queue_pair) = (operation.done(), self.number());
        Completed { id, status, opcode, length, immediate: None, queue_pair, source: QpNumber(0), lid: 0 }
    }

    /// Tries waiting requests again, and executes the errands of the peer. Must be called from time to time.
    pub fn progress(&self, program: &impl ProgramMemory<M>) {
        if let Some(errand_server) = self.errand_server.get() {
            self.serve(program, errand_server);
        }
        if self.has_waiting.load(Ordering::Relaxed) {
            self.try_again(program);
        }
    }

    fn try_again(&self, program: &impl ProgramMemory<M>) {
        let mut sender = self.sender();
        self.has_waiting.store(!sender.waiting.is_empty(), Ordering::Relaxed);
        if sender.waiting.is_empty() || self.state() != QpState::RTS {
            return;
        }
        while let Some(first) = sender.waiting.pop_front() {
            let Waiting { id, ref operation, datagram, ref elements, ref bytes, is_signaled } = first;
            let is_inline = bytes.is_some();
            let work = Work { id, operation: *operation, datagram, elements, is_inline, is_signaled };
            let attempt = match bytes {
                Some(bytes) => self.attempt(&mut sender, &InlineBytes(bytes), &work),
                None => self.attempt(&mut sender, program, &work),
            };
            match attempt {
                Attempt::Done => {
                    sender.counters.executed(total(elements).unwrap_or(0));
                    sender.counters.resumed();
                    (sender.since, sender.waits_for) = (Some(Instant::now()), None);
                    if is_signaled {
                        self.completes_sends.push(self.completed(id, operation, Status::SUCCESS));
                    }
                }
                Attempt::Wait(patience, status, waits) => {
                    // Time that the request spent waiting for something else does not count.
                    if sender.waits_for != Some(status) {
                        sender.waits_for = Some(status);
                        sender.since = Some(Instant::now());
                    }
                    let waited = sender.since.map_or(Duration::ZERO, |since| since.elapsed());
                    if patience.is_none_or(|patience| waited < patience) {
                        sender.waiting.push_front(first);
                        let waiting = sender.waiting.len();
                        sender.counters.waits(waiting, Some(waits));
                        return;
                    }
                    let failed = self.completed(id, operation, status);
                    return self.fall(&mut sender, Some(failed));
                }
                Attempt::Failed(status) => {
                    let failed = self.completed(id, operation, status);
                    return self.fall(&mut sender, Some(failed));
                }
            }
        }
        sender.since = None;
        sender.counters.idle();
    }

    /// Allows the peer to request operations on shadow regions from now on, in units of up to `most` bytes, or fewer if there is little
    /// room. Returns false if there is no room at all.
    pub fn offer_errands(&self, most: usize) -> bool {
        if self.kind == Kind::UD || self.errand_server.get().is_some() {
            return true;
        }
        let Some(errand_server) = ErrandServer::new(most, |len| self.adapter.take(len)) else { return false };
        match self.errand_server.set(errand_server) {
            Ok(()) => self
                .errand_server
                .get()
                .into_iter()
                .for_each(|errand_server| errand_server.publish(&self.tables, self.at)),
            // Another thread has published one first.
            Err(errand_server) => self.adapter.give(errand_server.into_bounce()),
        }
        true
    }

    /// Executes what the peer has requested.
    #[cold]
    fn serve(&self, program: &impl ProgramMemory<M>, errand_server: &ErrandServer<M>) {
        let mut done = errand_server.turn();
        if !self.state().receives() {
            return;
        }
        let Some((number, asked)) = errand_server.asked(&self.tables, self.at, self.incarnation(), *done)
        else {
            return;
        };
        *done = number;
        let status = self.execute(program, errand_server.bounce(), &asked);
        errand_server.answer(&self.tables, self.at, number, status);
    }

    fn execute(&self, program: &impl ProgramMemory<M>, bounce: &Bounce<M>, asked: &ErrandRequest) -> Status {
        let Some(wanted) = asked.wanted(bounce.len) else { return Status::REM_INV_REQ_ERR };
        let mut status = Status::REM_ACCESS_ERR;
        if asked.key.is_shadow() && Access(self.access.load(Ordering::Relaxed)).allows(wanted) {
            self.adapter.with_region(asked.key, &mut |region| {
                status = asked.execute(program, bounce, region, wanted, self.domain);
            });
        }
        status
    }

    /// Returns whether requests wait, or the peer has ended and this queue pair is about to fail.
    pub fn is_waiting(&self) -> bool {
        let sender = self.sender();
        !sender.waiting.is_empty() || sender.ended.is_some() && self.state().receives()
    }

    /// Checks whether the peer has ended, or has reported an error.
    #[cold]
    pub fn look(&self) {
        if !self.state().receives() {
            return;
        }
        self.adapter.attend();
        match &self.receives {
            Receives::Own(_) => self.revoke_claims(),
            Receives::Shared(shared) => shared.look(),
        }
        let error = self.tables.load_acquire_u64(self.at + qp::ERROR);
        let error =
            if (error >> 32) as u32 == self.incarnation() { Status(error as u32) } else { Status::SUCCESS };
        let mut sender = self.sender();
        let is_dead = sender.owner.as_ref().is_some_and(|owner| owner.is_dead());
        if is_dead {
            if sender.ended.get_or_insert_with(Instant::now).elapsed() < GRACE {
                return;
            }
            let first = sender.waiting.pop_front();
            let failed = first.map(|first| self.completed(first.id, &first.operation, Status::RETRY_EXC_ERR));
            self.fall(&mut sender, failed);
        } else if error != Status::SUCCESS && self.state().receives() {
            self.fall(&mut sender, None);
            drop(sender);
            (self.tell)(match error {
                Status::REM_ACCESS_ERR => Event::QP_ACCESS_ERR,
                Status::REM_INV_REQ_ERR => Event::QP_REQ_ERR,
                _ => Event::QP_FATAL,
            });
        }
    }

    /// Goes to the error state after a failed request. Waiting requests are flushed now, receives when the program polls. The caller
    /// holds the sender's lock, so no other thread posts meanwhile, and later requests complete later.
    #[cold]
    fn fall(&self, sender: &mut Sender<M>, failed: Option<Completed>) {
        if self.state() == QpState::RESET {
            return;
        }
        let was_good = self.state() != QpState::ERR;
        self.publish(QpState::ERR);
        self.wait_for_helper(sender);
        if let Some(failed) = failed {
            self.completes_sends.push(failed);
        }
        for waiting in sender.waiting.drain(..) {
            let flushed = self.completed(waiting.id, &waiting.operation, Status::WR_FLUSH_ERR);
            self.completes_sends.push(flushed);
        }
        sender.since = None;
        sender.counters.idle();
        match &self.receives {
            // The posted receives are flushed when the program polls.
            Receives::Own(_) => self.completes_receives.tell(true),
            Receives::Shared(_) if was_good => (self.tell)(Event::QP_LAST_WQE_REACHED),
            Receives::Shared(_) => {}
        }
    }
}
