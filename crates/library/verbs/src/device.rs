//! A segment as an RDMA device of this process.
//!
//! The process attaches to the segment as an endpoint of its own. It publishes its tables as a block named after the endpoint, and
//! allocates memory for rings and registered pages from further blocks, the arenas. For each peer it opens a channel, by which it learns
//! of the peer's death, and holds the peer's blocks. So the memory of a peer that dies is not given to anyone else while this process
//! may still be storing into it.

use crate::completion_queue::CompletionQueue;
use crate::notifier::{Notifier, Waker};
use crate::peer::{Arenas, Peer};
use crate::program::ProgramMemory;
use crate::queue_pair::{Adapter, EventCallback, Location, QueuePair, QueuePairOptions, Rings};
use crate::range_allocator::RangeAllocator;
use crate::receive::Shape;
use crate::regions::{Full, Region, Regions};
use crate::shadow::{self, Bounce};
use crate::shared_receive_queue::SharedReceiveQueue;
use ginnel::{
    AttachOptions, Block, BlockOptions, ChannelOptions, Daemon, Endpoint, Error, ErrorCode, Listener,
    Mapping, MessageChannel, MessageReceiver, MessageSender, ReadySet, Rights, SharedMemory,
};
use ginnel_layout::verbs::{self, Access, CHUNK, Chunk, Claimer, Key, Place, QPS, QpNumber};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The size of the smallest arena, and of the largest that is allocated unless a single request needs more; in bytes.
const SMALLEST: u64 = 8 << 20;
const LARGEST: u64 = 64 << 20;
/// Room in bytes that is kept for queues and for what they need, when the program's memory is moved to arenas.
const FOR_QUEUES: u64 = 1 << 20;
/// Time between two checks whether peers have died, and between two attempts to reach a peer that is missing.
pub(crate) const LOOK: Duration = Duration::from_millis(10);
/// How long a thread that others wait for waits for the daemon.
const SOON: Duration = Duration::from_millis(10);

/// Returns the names of the segments that are RDMA devices of this member and visible to this user, in the daemon's order. Asks the
/// daemon.
pub fn list(socket: &Path) -> Result<Vec<String>, Error> {
    let mut daemon = Daemon::connect_to(socket)?;
    let (text, member) = (daemon.inspect()?, daemon.member_name().to_owned());
    let Ok(inspect) = serde_json::from_str::<ginnel_status::Inspect>(&text) else { return Ok(Vec::new()) };
    let is_device = |segment: &ginnel_status::Segment| {
        segment.verbs && !segment.broken && segment.members.contains(&member)
    };
    Ok(inspect.segments.into_iter().filter(is_device).map(|segment| segment.name).collect())
}

/// An error of the device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The library or the daemon reports an error.
    #[error(transparent)]
    Ginnel(#[from] Error),
    /// The endpoint's number is too high for queue pair numbers.
    #[error(
        "endpoint {0} has a number that is too high for queue pairs, which only the first 4,095 of a segment can have"
    )]
    Number(u32),
    /// There is no room for another object of this kind.
    #[error("the device has no room for another {0}")]
    Full(&'static str),
    /// A peer has stopped in the middle of an access.
    #[error("a peer has stopped in the middle of an access")]
    Busy,
}

impl From<Full> for DeviceError {
    fn from(_: Full) -> Self {
        Self::Full("memory region")
    }
}

/// The means by which a poster wakes an endpoint for which it has written completions.
enum Doorbell {
    /// The endpoint is this one.
    Own(Arc<OnceLock<Waker>>),
    /// The endpoint reads the other end of this channel.
    Channel(Box<Mutex<MessageSender>>),
}

/// The blocks of an endpoint's arenas. Each is opened when it is first needed.
struct Blocks {
    endpoint: Endpoint,
    owner: u32,
    open: Mutex<BTreeMap<u16, (Block, Mapping)>>,
    doorbell: Doorbell,
    /// The tables of another endpoint. Like its arenas, they are held for as long as this process may access them.
    _tables: Option<Block>,
}

impl Blocks {
    fn arena_by(
        &self,
        number: u16,
        open_block: impl FnOnce(&str) -> Result<Block, Error>,
    ) -> Option<Mapping> {
        let mut open = locked(&self.open);
        if let Some((_, mapping)) = open.get(&number) {
            return Some(mapping.clone());
        }
        let block = open_block(&format!("verbs.{}.{number}", self.owner)).ok()?;
        let mapping = block.memory().ok()?;
        open.insert(number, (block, mapping.clone()));
        Some(mapping)
    }
}

impl Arenas<Mapping> for Blocks {
    fn arena(&self, number: u16) -> Option<Mapping> {
        self.arena_by(number, |name| self.endpoint.open_block(name, Rights::READ_WRITE))
    }

    fn arena_soon(&self, number: u16) -> Option<Mapping> {
        self.arena_by(number, |name| self.endpoint.open_block_soon(name, Rights::READ_WRITE, SOON))
    }

    fn ring(&self) {
        match &self.doorbell {
            Doorbell::Own(waker) => waker.get().into_iter().for_each(Waker::wake),
            // If the channel is full, the reader has been woken and has not read yet.
            Doorbell::Channel(sender) => drop(locked(sender).send(&[0])),
        }
    }
}

/// An arena of this endpoint.
struct Arena {
    block: Block,
    memory: Mapping,
    free: RangeAllocator,
}

/// The connection to another endpoint.
struct Link {
    number: u32,
    peer: Arc<Peer<Mapping>>,
    epoch: u32,
    /// Reports the end of the other endpoint.
    channel: ReceivingHalf,
}

/// The receiving half of a channel from another endpoint, which reports that the other endpoint has written completions, and that it has
/// ended.
struct ReceivingHalf {
    receiver: MessageReceiver,
    /// Of a channel that a peer has opened, the sending half is kept but not used.
    _sender: Option<MessageSender>,
    /// Whether the notifier's ready set contains it.
    is_registered: bool,
    /// Whether the channel may contain more messages, for which there will be no further wake-up.
    is_pending: bool,
}

impl ReceivingHalf {
    fn new(mut receiver: MessageReceiver, sender: Option<MessageSender>) -> Self {
        receiver.set_nonblocking(true);
        Self { receiver, _sender: sender, is_registered: false, is_pending: false }
    }

    /// Reads the messages that have arrived. Returns whether the endpoint at the other end has ended.
    fn has_ended(&mut self) -> bool {
        self.is_pending = false;
        // These are more messages than the channel holds, so the loop reaches the end behind all messages that were sent before it.
        for _ in 0..CHANNEL.capacity / 8 {
            match self.receiver.recv_into(&mut [0; 8]) {
                Ok(_) => {}
                Err(Error::WouldBlock) => return false,
                Err(_) => return true,
            }
        }
        // The loop is bounded, so a peer that sends without end cannot keep this thread busy.
        self.is_pending = true;
        false
    }

    /// Adds it to the notifier's ready set, unless it is there already.
    fn register(&mut self, set: &ReadySet, key: u64) {
        if !self.is_registered {
            // If the set is full, the notifier polls from time to time.
            self.is_registered = self.receiver.register(set, key).is_ok();
        }
    }
}

#[derive(Default)]
struct Links {
    links: HashMap<u32, Link>,
    /// Channels that peers have opened to detect the end of this endpoint, by a key that this process chooses.
    incoming: BTreeMap<u64, ReceivingHalf>,
    last_incoming: u64,
    /// When each endpoint that could not be reached was last tried.
    tried: HashMap<u32, Instant>,
    /// When the daemon was last asked whether an endpoint that has claimed a receive is alive.
    asked: HashMap<u32, Instant>,
    looked: Option<Instant>,
}

struct Slots {
    free: Vec<usize>,
    used: BTreeMap<QpNumber, Arc<QueuePair<Mapping>>>,
}

/// Up to this number of queue pairs, each gets a large bounce area; further ones get a small one.
const FEW: usize = 64;

impl Slots {
    /// Returns the maximum length of an errand, in bytes.
    fn most_of_errand(&self) -> usize {
        if self.used.len() <= FEW { shadow::MOST } else { shadow::LEAST }
    }
}

/// The part of a device that its queue pairs need.
pub(crate) struct Shared {
    endpoint: Endpoint,
    number: u32,
    tables: Mapping,
    own: Arc<Peer<Mapping>>,
    regions: RwLock<Regions<Mapping>>,
    removals: AtomicU64,
    incarnations: AtomicU32,
    links: Mutex<Links>,
    listener: Listener<MessageChannel>,
    queues: Mutex<Vec<Weak<CompletionQueue<Mapping>>>>,
    /// Set once there is a notifier.
    waker: Arc<OnceLock<Waker>>,
    arenas: Mutex<Vec<Arena>>,
    /// Starts the notifier when it is first needed.
    starter: OnceLock<Starter>,
    is_started: AtomicBool,
    /// Whether the device is lost for good, and the callback for that.
    is_lost: AtomicBool,
    tell_lost: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Starts a notifier that the program has not asked for.
type Starter = Box<dyn Fn() -> Result<(), DeviceError> + Send + Sync>;

/// A segment as an RDMA device of this process. It can be used from several threads.
pub struct Device {
    shared: Arc<Shared>,
    /// The block of the tables. It also gives access to the segment's file, for mapping its pages at the program's addresses.
    tables: Block,
    slots: Mutex<Slots>,
    /// Set once there has been a shadow region that peers may access.
    has_shadows: AtomicBool,
    notifier: Mutex<Option<Notifier>>,
    /// Keys of regions that have been removed while a peer was in the middle of an access, which had not ended at the last check.
    ending: Mutex<BTreeSet<u32>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    /// Attaches to a segment. Asks the daemon, and waits for it as [`Endpoint::attach_with`] does.
    pub fn open(segment: &str, options: &AttachOptions) -> Result<Self, DeviceError> {
        let endpoint = Endpoint::attach_with(segment, options)?;
        let (number, epoch) = endpoint.number();
        if number >= verbs::ENDPOINTS {
            return Err(DeviceError::Number(number));
        }
        let name = format!("verbs.{number}");
        // The name is free: the last endpoint with this number has ended. Peers may still hold its block, but that block has no name any
        // more.
        let block = endpoint.create_block(&name, verbs::TABLES, &BlockOptions::default())?;
        let tables = block.memory()?;
        let listener = endpoint.listen(&name)?;
        tables.store_relaxed_u32(verbs::ENDPOINT, number);
        tables.store_relaxed_u32(verbs::EPOCH, epoch);
        tables.store_relaxed_u32(verbs::MEMBER, endpoint.member());
        // ORDER verbs.ready: the header is visible before the word that says that it is complete. Pairs with: `Shared::link`.
        tables.store_release_u64(verbs::MAGIC, verbs::READY);
        let waker = Arc::<OnceLock<Waker>>::default();
        let doorbell = Doorbell::Own(waker.clone());
        let (open, _tables) = (Mutex::default(), None);
        let arenas = Blocks { endpoint: endpoint.clone(), owner: number, open, doorbell, _tables };
        let shared = Shared {
            endpoint,
            number,
            own: Arc::new(Peer::new(tables.clone(), Box::new(arenas))),
            regions: RwLock::new(Regions::new(tables.clone())),
            removals: AtomicU64::new(0),
            incarnations: AtomicU32::new(0),
            links: Mutex::default(),
            listener,
            queues: Mutex::default(),
            waker,
            tables,
            arenas: Mutex::default(),
            starter: OnceLock::new(),
            is_started: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            tell_lost: OnceLock::new(),
        };
        let slots = Slots {
            // Index 0 is not used, so that no queue pair number equals one of the special numbers.
            free: (1..QPS).rev().collect(),
            used: BTreeMap::new(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            tables: block,
            slots: Mutex::new(slots),
            has_shadows: AtomicBool::new(false),
            notifier: Mutex::default(),
            ending: Mutex::default(),
        })
    }

    /// Starts the notifier by calling `spawn`, unless there is one already. The notifier is a thread that handles completion queues
    /// while the program sleeps.
    pub fn start_notifier(
        &self,
        program: impl ProgramMemory<Mapping> + Send + 'static,
        spawn: impl FnOnce(Box<dyn FnOnce() + Send>) -> std::io::Result<JoinHandle<()>>,
    ) -> Result<(), DeviceError> {
        let mut notifier = locked(&self.notifier);
        if notifier.is_none() {
            // This keeps the thread itself from starting another one.
            self.shared.is_started.store(true, Ordering::Relaxed);
            let started = Notifier::start(self.shared.clone(), program, spawn);
            self.shared.is_started.store(started.is_ok(), Ordering::Relaxed);
            *notifier = Some(started?);
        }
        Ok(())
    }

    /// Sets how a notifier is started when a shadow region first needs one.
    pub fn start_notifier_by(&self, start: impl Fn() -> Result<(), DeviceError> + Send + Sync + 'static) {
        let _ = self.shared.starter.set(Box::new(start));
    }

    /// Sets the callback that is called once when the device is lost for good: its segment is not declared any more, or the memory of
    /// the segment is gone.
    pub fn when_lost(&self, tell: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.tell_lost.set(Box::new(tell));
    }

    /// Returns whether the device is lost for good.
    pub fn is_lost(&self) -> bool {
        self.shared.is_lost.load(Ordering::Relaxed)
    }

    /// Returns the number of the member that this process belongs to.
    pub fn member(&self) -> u32 {
        self.shared.endpoint.member()
    }

    /// Returns the endpoint of this process in the segment.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.shared.endpoint
    }

    /// Returns a descriptor of the segment's file.
    pub fn file(&self) -> std::io::Result<OwnedFd> {
        self.tables.file().0.as_fd().try_clone_to_owned()
    }

    /// Allocates memory from the arenas, which peers can reach. Returns its place, the mapping that contains it, and its offset there.
    /// The memory is not cleared.
    pub fn take(&self, len: usize, align: usize) -> Result<(Place, Mapping, usize), DeviceError> {
        self.shared.take(len, align)
    }

    /// Frees memory that was allocated with `take`.
    pub fn give(&self, place: Place, len: usize) {
        self.shared.give(place, len);
    }

    /// Allocates chunks of arenas for pages of the program. Returns for each the chunk, the mapping that contains it, and the offset in
    /// the segment's file at which it begins. Allocates all `count` chunks or none; if it fails, it also gives back the arenas that it
    /// created.
    pub fn take_chunks(&self, count: usize) -> Result<Vec<(Chunk, Mapping, u64)>, DeviceError> {
        let mut arenas = locked(&self.shared.arenas);
        let before = arenas.len();
        let mut taken = Vec::new();
        let mut take = || {
            for _ in 0..count {
                let (place, memory, at) = self.shared.take_of(&mut arenas, CHUNK, CHUNK)?;
                let file_at = arenas[usize::from(place.arena())].block.file().1 + at as u64;
                taken.push((Chunk::new(place.arena(), (at / CHUNK) as u32), memory, file_at));
            }
            self.shared.keep_room_for_queues(&mut arenas)
        };
        if let Err(error) = take() {
            for (chunk, ..) in taken {
                let place: Place = chunk.place();
                arenas[usize::from(place.arena())].free.give(place.offset(), CHUNK as u64);
            }
            // Peers do not know the new arenas yet. A block lives for as long as it has a name.
            for i in before..arenas.len() {
                let _ = self.shared.endpoint.unlink_block(&self.shared.arena_name(i));
            }
            arenas.truncate(before);
            self.shared.tables.store_relaxed_u32(verbs::ARENAS, before as u32);
            return Err(error);
        }
        Ok(taken)
    }

    /// Frees a chunk.
    pub fn give_chunk(&self, chunk: Chunk) {
        self.give(chunk.place(), CHUNK);
    }

    /// Registers a region, which peers access through these chunks.
    pub fn register(&self, region: Region, chunks: &[Chunk]) -> Result<Key, DeviceError> {
        let mut regions = self.shared.regions.write().unwrap_or_else(PoisonError::into_inner);
        Ok(regions.add(region, chunks)?)
    }

    /// Registers a region whose memory peers cannot reach. A thread of this process, which is started now if necessary, accesses it for
    /// them.
    pub fn register_shadow(&self, region: Region) -> Result<Key, DeviceError> {
        const REMOTE: u32 = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        if region.access.0 & REMOTE != 0 {
            self.shared.start_notifier()?;
            let slots = locked(&self.slots);
            self.has_shadows.store(true, Ordering::Relaxed);
            let most = slots.most_of_errand();
            if !slots.used.values().all(|queue_pair| queue_pair.offer_errands(most)) {
                return Err(DeviceError::Full("shadow region"));
            }
        }
        let mut regions = self.shared.regions.write().unwrap_or_else(PoisonError::into_inner);
        Ok(regions.add_shadow(region)?)
    }

    /// Removes a region, so that no peer can begin another access. Waits for peers that are in the middle of an access, for at most a
    /// second; then it returns [`DeviceError::Busy`], and the caller may call it again. Returns false if there is no such region.
    pub fn deregister(&self, key: Key) -> Result<bool, DeviceError> {
        let mut regions = self.shared.regions.write().unwrap_or_else(PoisonError::into_inner);
        if !regions.remove(key) && !locked(&self.ending).contains(&key.0) {
            return Ok(false);
        }
        drop(regions);
        self.shared.removals.fetch_add(1, Ordering::Release);
        if key.is_shadow() {
            // Peers never access a shadow region themselves, and this process has finished what it did for them.
            return Ok(true);
        }
        let used: Vec<_> = locked(&self.slots).used.values().cloned().collect();
        let is_accessed = || used.iter().any(|queue_pair| queue_pair.is_region_accessed(key));
        match self.wait_while(is_accessed) {
            Ok(()) => {
                locked(&self.ending).remove(&key.0);
                Ok(true)
            }
            Err(busy) => {
                locked(&self.ending).insert(key.0);
                Err(busy)
            }
        }
    }

    /// Waits until `is_accessed` returns false, for at most the device's patience, and notices peers that die meanwhile.
    fn wait_while(&self, mut is_accessed: impl FnMut() -> bool) -> Result<(), DeviceError> {
        let end = Instant::now() + self.shared.patience();
        while is_accessed() {
            if Instant::now() >= end {
                return Err(DeviceError::Busy);
            }
            self.shared.attend();
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Allocates an entry in the table of queue pairs, and memory for rings of this shape, if one is given.
    fn locate(&self, shape: Option<Shape>) -> Result<Location<Mapping>, DeviceError> {
        let rings = match shape {
            Some(shape) => {
                let (place, memory, at) = self.take(shape.bytes(), 64)?;
                let ring = shape.entries * shape.stride();
                let behind = Place::new(place.arena(), place.offset() + ring as u64);
                Some(Rings {
                    receives: (place, (memory.clone(), at)),
                    completions: (behind, (memory, at + ring)),
                })
            }
            None => None,
        };
        let mut slots = locked(&self.slots);
        let number = slots.free.last().and_then(|index| QpNumber::new(self.shared.number, *index));
        let Some(number) = number else {
            drop(slots);
            if let (Some(rings), Some(shape)) = (rings, shape) {
                self.give(rings.receives.0, shape.bytes());
            }
            return Err(DeviceError::Full("queue pair"));
        };
        slots.free.pop();
        Ok(Location { number, rings })
    }

    /// Frees what `locate` has allocated.
    fn vacate(&self, location: &Location<Mapping>, shape: Shape) {
        locked(&self.slots).free.push(location.number.index());
        if let Some(rings) = &location.rings {
            self.give(rings.receives.0, shape.bytes());
        }
    }

    /// Creates a queue pair in the state RESET.
    pub fn create_queue_pair(
        &self,
        wanted: QueuePairOptions<Mapping>,
    ) -> Result<Arc<QueuePair<Mapping>>, DeviceError> {
        let shape = wanted.shared.is_none().then_some(wanted.capacity.receives);
        let location = self.locate(shape)?;
        let number = location.number;
        self.shared.attend_to([&wanted.completes.0, &wanted.completes.1]);
        let adapter: Arc<dyn Adapter<Mapping>> = self.shared.clone();
        let tables = self.shared.tables.clone();
        let queue_pair =
            QueuePair::new(tables, location, wanted, adapter).ok_or(DeviceError::Full("queue pair"))?;
        let mut slots = locked(&self.slots);
        slots.used.insert(number, queue_pair.clone());
        // A thread that registers the first shadow region looks at this list afterwards, so one of the two sees the other.
        let has_shadows = self.has_shadows.load(Ordering::Relaxed);
        let most = slots.most_of_errand();
        drop(slots);
        if has_shadows && !queue_pair.offer_errands(most) {
            self.destroy_queue_pair(&queue_pair);
            return Err(DeviceError::Full("queue pair"));
        }
        Ok(queue_pair)
    }

    /// Destroys a queue pair. If its peer has stopped in the middle of an access, its number and its rings are not used again.
    pub fn destroy_queue_pair(&self, queue_pair: &Arc<QueuePair<Mapping>>) {
        queue_pair.end();
        let waited = self.wait_while(|| queue_pair.are_rings_accessed());
        if waited.is_err() {
            // The queue pair stays in the list, so that `deregister` waits for its peer, too.
            if let Some(shared) = queue_pair.shared() {
                shared.keep_rings();
            }
            return;
        }
        if locked(&self.slots).used.remove(&queue_pair.number()).is_some() {
            queue_pair.release();
            self.vacate(queue_pair.location(), queue_pair.capacity().receives);
        }
    }

    /// Creates a shared receive queue.
    pub fn create_shared_receive_queue(
        &self,
        domain: u32,
        shape: Shape,
        tell: EventCallback,
    ) -> Result<Arc<SharedReceiveQueue<Mapping>>, DeviceError> {
        let location = self.locate(Some(shape))?;
        let adapter: Arc<dyn Adapter<Mapping>> = self.shared.clone();
        let tables = self.shared.tables.clone();
        SharedReceiveQueue::new(tables, location, domain, shape, adapter, tell)
            .ok_or(DeviceError::Full("shared receive queue"))
    }

    /// Destroys a shared receive queue. Returns false if a queue pair still uses it.
    pub fn destroy_shared_receive_queue(&self, shared: &SharedReceiveQueue<Mapping>) -> bool {
        if !shared.is_unused() {
            return false;
        }
        shared.end();
        if !shared.are_rings_kept() {
            shared.release();
            self.vacate(shared.location(), shared.shape());
        }
        true
    }
}

/// Returns whether the daemon might grant a smaller block.
fn is_too_large(error: &Error) -> bool {
    matches!(error.code(), Some(ErrorCode::NO_MEMORY | ErrorCode::QUOTA))
}

/// The channel between two endpoints carries one byte for each wake-up.
const CHANNEL: ChannelOptions =
    ChannelOptions { capacity: 4096, input_capacity: 4096, patience: Duration::ZERO, backlog: 0 };

impl Shared {
    /// Allocates memory from the arenas, which peers can reach. Returns its place, the mapping that contains it, and its offset there.
    /// The memory is not cleared.
    fn take(&self, len: usize, align: usize) -> Result<(Place, Mapping, usize), DeviceError> {
        self.take_of(&mut locked(&self.arenas), len, align)
    }

    fn take_of(
        &self,
        arenas: &mut Vec<Arena>,
        len: usize,
        align: usize,
    ) -> Result<(Place, Mapping, usize), DeviceError> {
        let (len, align) = ((len as u64).next_multiple_of(64), align as u64);
        let found =
            arenas.iter_mut().enumerate().find_map(|(i, arena)| Some((i, arena.free.take(len, align)?)));
        let (i, at) = match found {
            Some(found) => found,
            None => {
                let i = self.add_arena(arenas, len)?;
                (i, arenas[i].free.take(len, align).ok_or(DeviceError::Full("arena"))?)
            }
        };
        Ok((Place::new(i as u16, at), arenas[i].memory.clone(), at as usize))
    }

    /// Keeps some room for queues, so that the program's memory does not use up the segment or the quota: the program's memory can stay
    /// where it is, but what queue pairs need must lie in the segment.
    fn keep_room_for_queues(&self, arenas: &mut Vec<Arena>) -> Result<(), DeviceError> {
        if !arenas.iter().any(|arena| arena.free.has(FOR_QUEUES)) {
            self.add_arena(arenas, FOR_QUEUES)?;
        }
        Ok(())
    }

    fn arena_name(&self, i: usize) -> String {
        format!("verbs.{}.{i}", self.number)
    }

    fn add_arena(&self, arenas: &mut Vec<Arena>, len: u64) -> Result<usize, DeviceError> {
        let i =
            u16::try_from(arenas.len()).ok().filter(|i| *i < 1 << 12).ok_or(DeviceError::Full("arena"))?;
        let usual = (SMALLEST << i.min(16)).min(LARGEST);
        let name = self.arena_name(i.into());
        let options = BlockOptions { align: CHUNK, zero: false, ..BlockOptions::default() };
        // A small arena may still fit where a large one does not.
        let mut size = usual.max(len).next_multiple_of(CHUNK as u64);
        let least = len.next_multiple_of(CHUNK as u64);
        let block = loop {
            match self.endpoint.create_block(&name, size as usize, &options) {
                Err(error) if size > least && is_too_large(&error) => {
                    size = (size / 2).next_multiple_of(CHUNK as u64).max(least);
                }
                other => break other?,
            }
        };
        let memory = block.memory()?;
        arenas.push(Arena { block, memory, free: RangeAllocator::new(size) });
        self.tables.store_relaxed_u32(verbs::ARENAS, arenas.len() as u32);
        Ok(arenas.len() - 1)
    }

    /// Frees memory that was allocated with `take`.
    fn give(&self, place: Place, len: usize) {
        if let Some(arena) = locked(&self.arenas).get_mut(usize::from(place.arena())) {
            arena.free.give(place.offset(), (len as u64).next_multiple_of(64));
        }
    }

    /// Starts the notifier, if a way to start it is known and it is not running.
    fn start_notifier(&self) -> Result<(), DeviceError> {
        if self.waker.get().is_some() || self.is_started.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let started = self.starter.get().map_or(Ok(()), |start| start());
        if started.is_err() {
            self.is_started.store(false, Ordering::Relaxed);
        }
        started
    }

    /// Connects to another endpoint.
    fn link(&self, number: u32) -> Option<Link> {
        let name = format!("verbs.{number}");
        let channel: MessageChannel = self.endpoint.connect_with(&name, &CHANNEL).ok()?;
        let block = self.endpoint.open_block(&name, Rights::READ_WRITE).ok()?;
        let tables = block.memory().ok().filter(|_| block.len() >= verbs::COUNTER_TABLE)?;
        // ORDER verbs.ready: see `Device::open`.
        let is_ready = tables.load_acquire_u64(verbs::MAGIC) == verbs::READY;
        let owner = (tables.load_relaxed_u32(verbs::ENDPOINT), tables.load_relaxed_u32(verbs::EPOCH));
        let peer = channel.info().peer.clone();
        if !is_ready || owner != (peer.endpoint, peer.epoch) || peer.endpoint != number {
            return None;
        }
        let (mut sender, receiver) = channel.split();
        sender.set_nonblocking(true);
        let doorbell = Doorbell::Channel(Box::new(Mutex::new(sender)));
        let (endpoint, open) = (self.endpoint.clone(), Mutex::default());
        let arenas = Blocks { endpoint, owner: number, open, doorbell, _tables: Some(block) };
        let (epoch, peer) = (peer.epoch, Arc::new(Peer::new(tables, Box::new(arenas))));
        if let Some(waker) = self.waker.get() {
            // The notifier does not know the new channel yet.
            waker.wake();
        }
        Some(Link { number, peer, epoch, channel: ReceivingHalf::new(receiver, None) })
    }

    /// Adds these queues to those that the notifier handles.
    fn attend_to(&self, queues: [&Arc<CompletionQueue<Mapping>>; 2]) {
        let mut known = locked(&self.queues);
        known.retain(|queue| queue.strong_count() > 0);
        for queue in queues {
            if !known.iter().any(|known| known.as_ptr() == Arc::as_ptr(queue)) {
                known.push(Arc::downgrade(queue));
            }
        }
    }

    /// The listener at which peers open their channels. The notifier waits for it too.
    pub(crate) fn listener(&self) -> &Listener<MessageChannel> {
        &self.listener
    }

    pub(crate) fn waker(&self) -> &OnceLock<Waker> {
        &self.waker
    }

    /// Reads the messages of all channels, and adds new channels to the notifier's ready set. Returns how long the notifier may sleep as
    /// far as the channels are concerned; `None` means without limit.
    pub(crate) fn hear(&self, set: &ReadySet, keys: &[u64]) -> Option<Duration> {
        let mut links = locked(&self.links);
        let links = &mut *links;
        while let Ok(channel) = self.listener.try_accept() {
            links.accept(channel);
        }
        for link in links.links.values_mut() {
            link.channel.register(set, u64::from(link.number));
        }
        for (key, half) in &mut links.incoming {
            half.register(set, INCOMING | key);
        }
        let is_due =
            |half: &ReceivingHalf, key| !half.is_registered || half.is_pending || keys.contains(&key);
        for link in links.links.values_mut().filter(|link| !link.peer.is_dead()) {
            if is_due(&link.channel, u64::from(link.number)) && link.channel.has_ended() {
                link.peer.set_dead();
            }
        }
        links.incoming.retain(|key, half| !(is_due(half, INCOMING | key) && half.has_ended()));
        links.bury();
        let of_peers = links.links.values().filter(|link| !link.peer.is_dead()).map(|link| &link.channel);
        let wait = |half: &ReceivingHalf| match half {
            ReceivingHalf { is_pending: true, .. } => Some(Duration::ZERO),
            ReceivingHalf { is_registered: false, .. } => Some(LOOK),
            _ => None,
        };
        of_peers.chain(links.incoming.values()).filter_map(wait).min()
    }

    /// Checks whether the device is lost for good. If so, it stays lost, and the program is told once.
    pub(crate) fn is_lost(&self) -> bool {
        if self.is_lost.load(Ordering::Relaxed) {
            return true;
        }
        // Other errors may be temporary: for example, the daemon has too many clients at the moment.
        let is_lost = match self.endpoint.check() {
            Err(Error::Broken) => true,
            Err(Error::Refused { code, .. }) => matches!(
                code,
                ErrorCode::STALE
                    | ErrorCode::BROKEN
                    | ErrorCode::NO_SEGMENT
                    | ErrorCode::NOT_FOUND
                    | ErrorCode::DENIED
            ),
            // If the file was truncated during an access, this mapping may be the only sign of it.
            _ => self.tables.is_broken(),
        };
        if is_lost && !self.is_lost.swap(true, Ordering::Relaxed) {
            self.tell_lost.get().into_iter().for_each(|tell| tell());
        }
        is_lost
    }

    /// Handles all completion queues. Returns whether requests wait.
    pub(crate) fn attend_queues(&self, program: &impl ProgramMemory<Mapping>) -> bool {
        let queues: Vec<_> = locked(&self.queues).iter().filter_map(Weak::upgrade).collect();
        // `count` visits every queue, even if an earlier one has waiting requests.
        queues.iter().filter(|queue| queue.attend(program)).count() > 0
    }
}

/// Keys of channels that peers have opened have this bit.
const INCOMING: u64 = 1 << 63;

impl Links {
    fn accept(&mut self, channel: MessageChannel) {
        let (sender, receiver) = channel.split();
        self.last_incoming += 1;
        self.incoming.insert(self.last_incoming, ReceivingHalf::new(receiver, Some(sender)));
    }

    /// Drops the links to dead endpoints, and so their blocks, once no thread of this process can be storing into them.
    fn bury(&mut self) {
        self.links.retain(|_, link| !link.peer.is_dead() || Arc::strong_count(&link.peer) > 1);
    }
}

impl Shared {
    /// Returns whether the endpoint at the other end of a link has ended. This is for threads other than the notifier. A message that
    /// such a thread reads may be a wake-up that the notifier has not seen; the notifier would sleep on while completions wait, so this
    /// wakes it.
    fn has_ended(&self, link: &mut Link) -> bool {
        let has_ended = link.channel.has_ended();
        self.has_to_wait();
        has_ended
    }

    /// Returns whether the claimer has ended: no endpoint has its number, or another one does. Returns false if that cannot be
    /// determined.
    fn is_gone(&self, claimer: Claimer) -> bool {
        let number = claimer.endpoint();
        let mut links = locked(&self.links);
        if let Some(link) = links.links.get_mut(&number) {
            if link.peer.is_dead() || self.has_ended(link) {
                link.peer.set_dead();
                if claimer.is_of(link.epoch) {
                    return true;
                }
            } else {
                return !claimer.is_of(link.epoch);
            }
        }
        // `tried` is not consulted or changed here, because a datagram to an endpoint in that list is dropped.
        if links.asked.get(&number).is_some_and(|asked| asked.elapsed() < LOOK) {
            return false;
        }
        links.asked.insert(number, Instant::now());
        drop(links);
        match self.endpoint.connect_with::<MessageChannel>(&format!("verbs.{number}"), &CHANNEL) {
            Ok(channel) => {
                !(channel.info().peer.endpoint == number && claimer.is_of(channel.info().peer.epoch))
            }
            // Nobody listens there.
            Err(error) => matches!(error.code(), Some(ErrorCode::REFUSED | ErrorCode::NOT_FOUND)),
        }
    }
}

impl Adapter<Mapping> for Shared {
    fn peer(&self, endpoint: u32) -> Option<Arc<Peer<Mapping>>> {
        if endpoint == self.number {
            return Some(self.own.clone());
        }
        let mut links = locked(&self.links);
        // The known endpoint may have died, and another one may already have its number, before the notifier has noticed. A program that
        // connects with librdmacm can learn of the new endpoint from that endpoint itself.
        if let Some(link) = links.links.get_mut(&endpoint).filter(|link| !link.peer.is_dead()) {
            if !self.has_ended(link) {
                return Some(link.peer.clone());
            }
            link.peer.set_dead();
        }
        let tried = links.tried.get(&endpoint).is_some_and(|tried| tried.elapsed() < LOOK);
        if tried || endpoint == 0 {
            return None;
        }
        match self.link(endpoint) {
            Some(link) => {
                let peer = link.peer.clone();
                links.tried.remove(&endpoint);
                // An earlier endpoint with this number is dead. Queue pairs that still have requests for it keep their own reference.
                links.links.insert(endpoint, link);
                Some(peer)
            }
            None => {
                links.tried.insert(endpoint, Instant::now());
                None
            }
        }
    }

    fn region(&self, key: Key) -> Option<Region> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner).region(key)
    }

    fn with_region(&self, key: Key, then: &mut dyn FnMut(&Region)) {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        regions.region(key).iter().for_each(then);
    }

    fn take(&self, len: usize) -> Option<Bounce<Mapping>> {
        let (place, memory, at) = self.take(len, 64).ok()?;
        Some(Bounce { place, memory, at, len })
    }

    fn give(&self, bounce: Bounce<Mapping>) {
        self.give(bounce.place, bounce.len);
    }

    fn has_asked(&self) {
        // If the notifier cannot be started, threads that poll do its work.
        let _ = self.start_notifier();
    }

    fn removals(&self) -> &AtomicU64 {
        &self.removals
    }

    fn claimer(&self) -> Claimer {
        Claimer::new(self.number, self.endpoint.number().1)
    }

    fn member(&self) -> u32 {
        self.endpoint.member()
    }

    fn has_died(&self, claimer: Claimer) -> bool {
        claimer.endpoint() != self.number && self.is_gone(claimer)
    }

    fn next_incarnation(&self) -> u32 {
        // In the word that says what is being accessed, an incarnation has 30 bits.
        (self.incarnations.fetch_add(1, Ordering::Relaxed) & (u32::MAX >> 2)) + 1
    }

    fn has_to_wait(&self) {
        self.waker.get().into_iter().for_each(Waker::wake);
    }

    fn attend(&self) {
        // If there is a notifier, only it reads from the channels.
        if self.waker.get().is_some() {
            return;
        }
        let Ok(mut links) = self.links.try_lock() else { return };
        if links.looked.is_some_and(|looked| looked.elapsed() < LOOK) {
            return;
        }
        links.looked = Some(Instant::now());
        self.is_lost();
        while let Ok(channel) = self.listener.try_accept() {
            links.accept(channel);
        }
        for link in links.links.values_mut() {
            if !link.peer.is_dead() && link.channel.has_ended() {
                link.peer.set_dead();
            }
        }
        links.bury();
        links.incoming.retain(|_, half| !half.has_ended());
    }
}
