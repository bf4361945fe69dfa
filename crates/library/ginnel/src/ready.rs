//! Ready sets, with which one thread waits for tens of thousands of halves of channels.
//!
//! Each half in a set has a slot on a readiness board ([`ginnel_layout::board`]). A half whose operation has returned
//! [`Error::WouldBlock`] *rests*. At first it is *hot*: the set looks at its ring directly, because a half that was
//! busy a moment ago will probably be busy again. When more than a few halves are hot, or the set goes to sleep, the
//! longest-resting ones fall *asleep*: the wake word of their ring is armed, and the peer sets their bit on the board.
//! So idle halves cost nothing, and busy ones cost no more than a half on its own.

use crate::doorbell::{BorrowedEvent, private_event};
use crate::error::Error;
use crate::fork::Opener;
use crate::inner::Inner;
use ginnel_layout::board::{self, Place};
use ginnel_ring::board::Lane;
use ginnel_ring::wait::{self, Look, Sleeper, WaitMode, Waitable, Watch};
use ginnel_shmem::Mapping;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The most hot halves, at whose rings the set looks directly.
const HOT: usize = 8;
/// How many calls of [`ReadySet::wait`] may find something without the kernel before the kernel is asked about watched
/// descriptors.
const TURNS: u32 = 64;
/// How often a set in poll mode asks the kernel about watched descriptors.
const ASK: Duration = Duration::from_micros(50);
/// Length of a nap if an endpoint has no interrupts.
const NAP: Duration = Duration::from_micros(500);
/// The most events that one system call returns.
const EVENTS: usize = 64;
/// The epoll data of a doorbell's event; that of a watched descriptor is its number.
const BELL: u64 = u64::MAX;

/// A set of many halves of channels, listeners and other descriptors for which one thread waits.
///
/// A half is added with its `register` method, under a key that the program chooses. Keys are reported like edges of an
/// edge-triggered epoll: once at the beginning, and then once after each [`Error::WouldBlock`], as soon as another
/// attempt is worthwhile. So a program must use the half of a reported key until it returns [`Error::WouldBlock`].
///
/// ```no_run
/// # fn main() -> Result<(), ginnel::Error> {
/// use ginnel::{Endpoint, Error, MessageChannel, ReadySet};
/// let listener = Endpoint::attach("web")?.listen::<MessageChannel>("echo")?;
/// let mut set = ReadySet::new()?;
/// let mut channels: Vec<MessageChannel> = Vec::new();
/// set.watch(&listener, u64::MAX)?;
/// let mut keys = Vec::new();
/// loop {
///     set.wait(&mut keys, None)?;
///     for key in &keys {
///         if *key == u64::MAX {
///             let mut channel = listener.try_accept()?;
///             channel.receiver().register(&set, channels.len() as u64)?;
///             channels.push(channel);
///             continue;
///         }
///         loop {
///             match channels[*key as usize].recv() {
///                 Ok(message) => println!("{} bytes", message.len()),
///                 Err(Error::WouldBlock) => break,
///                 Err(error) => return Err(error),
///             }
///         }
///     }
/// }
/// # }
/// ```
///
/// A set belongs to the process that created it (see [after `fork`](crate#after-fork)). It uses two file descriptors,
/// an epoll and an eventfd, however many halves it has.
pub struct ReadySet {
    core: Arc<Core>,
    mode: WaitMode,
    /// Keys of watched descriptors, by descriptor.
    watched: HashMap<RawFd, u64>,
    turns: u32,
    armed: bool,
}

/// The state that a set and its halves share.
struct Core {
    epoll: OwnedFd,
    /// An eventfd that makes the epoll readable, for a half that rests while the set sleeps.
    nudge: OwnedFd,
    state: Mutex<State>,
    opener: Arc<Opener>,
}

#[derive(Default)]
struct State {
    lanes: Vec<Slots>,
    /// The number of lanes that have existed so far.
    next: u64,
    /// Hot halves, the longest-resting first, each with the place to look at.
    hot: VecDeque<(Arc<Half>, Look<Mapping>)>,
    /// Keys to be reported by the next wait.
    due: Vec<u64>,
    /// The set sleeps or is about to, so no half may become hot.
    asleep: bool,
    /// The doorbells that the epoll watches, with the endpoints to which they belong.
    events: Vec<(Weak<Inner>, BorrowedEvent)>,
    /// An endpoint has no interrupts, so the set must wake up at intervals.
    naps: bool,
}

/// A lane of a readiness board, with the key of each of its slots.
struct Slots {
    /// Distinguishes this lane from others that were at the same place.
    id: u64,
    /// The endpoint, which lives as long as it has a half here.
    endpoint: Weak<Inner>,
    /// Offset of the lane in the segment.
    at: u64,
    lane: Lane<Mapping>,
    keys: Vec<Option<u64>>,
    free: Vec<usize>,
    /// All halves were reported because the memory is gone.
    ended: bool,
}

/// A half that is in a set.
struct Half {
    key: u64,
    rest: Mutex<Rest>,
}

/// The state of a half in a set.
enum Rest {
    /// The half is being used, or has not been used yet.
    Awake,
    /// The half is idle, and the set looks at its ring.
    Hot(Watch<Mapping>),
    /// The half is idle, and its ring's wake word is armed.
    Asleep(Watch<Mapping>),
    /// The half's key was reported, or is about to be reported.
    Told(Watch<Mapping>),
}

/// The membership of a half in a set. Dropping it removes the half from the set.
pub(crate) struct Membership {
    core: Arc<Core>,
    half: Arc<Half>,
    lane: u64,
    slot: usize,
    place: Place,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panicked while it held a lock has left no harmful half-done work: at worst there is a needless
    // attempt.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReadySet {
    /// Creates an empty set. Does not block.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if a descriptor cannot be created.
    pub fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("making an epoll"))?;
        let nudge = private_event().map_err(Error::system("making an eventfd"))?;
        epoll::add(&epoll, &nudge, epoll::EventData::new_u64(BELL), edge())
            .map_err(Error::system("watching an eventfd"))?;
        let core = Core { epoll, nudge, state: Mutex::default(), opener: Opener::current() };
        Ok(Self {
            core: Arc::new(core),
            mode: WaitMode::default(),
            watched: HashMap::new(),
            turns: 0,
            armed: false,
        })
    }

    /// Sets how [`ReadySet::wait`] waits. The default is adaptive.
    pub fn set_mode(&mut self, mode: WaitMode) {
        self.mode = mode;
    }

    /// Reports `key` as long as the descriptor is readable. It may be a listener, a socket or a timer, for example. The
    /// descriptor is watched until [`ReadySet::unwatch`] is called or it is closed. Watching it again changes its key.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the descriptor cannot be watched.
    pub fn watch(&mut self, fd: impl AsFd, key: u64) -> Result<(), Error> {
        let fd = fd.as_fd();
        let data = epoll::EventData::new_u64(fd.as_raw_fd() as u64);
        let added = match epoll::add(&self.core.epoll, fd, data, epoll::EventFlags::IN) {
            // The descriptor is watched already, and only its key changes.
            Err(Errno::EXIST) => Ok(()),
            added => added,
        };
        added.map_err(Error::system("watching a descriptor"))?;
        self.watched.insert(fd.as_raw_fd(), key);
        Ok(())
    }

    /// Stops watching a descriptor.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the descriptor is not watched.
    pub fn unwatch(&mut self, fd: impl AsFd) -> Result<(), Error> {
        let fd = fd.as_fd();
        self.watched.remove(&fd.as_raw_fd());
        epoll::delete(&self.core.epoll, fd).map_err(Error::system("removing a descriptor from an epoll"))
    }

    /// Waits until there is something to do, and replaces the contents of `keys` by the keys of all members that are
    /// worth an attempt, in no particular order. After the timeout `keys` is empty. A timeout of [`None`] waits for
    /// ever, and one of zero does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if a system call fails, or in the child of a fork whose parent lives.
    pub fn wait(&mut self, keys: &mut Vec<u64>, timeout: Option<Duration>) -> Result<(), Error> {
        keys.clear();
        self.disarm()?;
        self.turns += 1;
        let only_looks = timeout == Some(Duration::ZERO);
        if (only_looks || self.turns >= TURNS) && !self.watched.is_empty() {
            self.ask(Some(Duration::ZERO)).map_err(looking)?;
        }
        lock(&self.core.state).collect(keys);
        if only_looks || !keys.is_empty() {
            return Ok(());
        }
        // A deadline that the clock cannot represent means no deadline.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let core = self.core.clone();
        let mode = self.mode;
        let mut sleep = Sleep { set: self, naps: lock(&core.state).naps };
        let mut any = Any { core: &core, keys };
        // Poll mode never sleeps, so ask the kernel about watched descriptors at intervals.
        let asks = mode == WaitMode::Poll && !sleep.set.watched.is_empty();
        loop {
            let ask_at = if asks { Instant::now().checked_add(ASK) } else { None };
            let until = [deadline, ask_at].into_iter().flatten().min();
            // A glance may see something that turns out to be nothing.
            if wait::wait(&mut any, mode, &mut sleep, until).map_err(looking)? && any.ready() {
                return Ok(());
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(());
            }
            if asks {
                sleep.set.ask(Some(Duration::ZERO)).map_err(looking)?;
            }
        }
    }

    /// Arms the set for a program with an event loop of its own, and returns whether there is something to report
    /// already. Does not wait.
    ///
    /// After that, the set's descriptor ([`AsFd`]) becomes readable when [`ReadySet::wait`] has something to report; it
    /// may also become readable without need. In a VM without interrupts ([`crate::Endpoint::has_interrupts`]) it never
    /// does, so the program must call [`ReadySet::wait`] at intervals.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if a system call fails, or in the child of a fork whose parent lives.
    pub fn arm(&mut self) -> Result<bool, Error> {
        self.disarm()?;
        // Discards the rings of doorbells that have come so far.
        self.ask(Some(Duration::ZERO)).map_err(looking)?;
        self.core.sleep();
        let mut state = lock(&self.core.state);
        let there = state.has_any();
        if there {
            state.wake();
        }
        self.armed = !there;
        Ok(there)
    }

    /// Makes the set's descriptor readable once. Never waits. Any thread may call it.
    pub fn nudge(&self) {
        self.core.nudge();
    }

    fn disarm(&mut self) -> Result<(), Error> {
        if !self.core.opener.is_here_or_succeeded() {
            return Err(Error::System {
                what: "waiting with a set that belongs to the parent of this process, which still lives",
                source: io::ErrorKind::PermissionDenied.into(),
            });
        }
        if std::mem::take(&mut self.armed) {
            lock(&self.core.state).wake();
            // Makes the next wait ask the kernel for what has become ready meanwhile.
            self.turns = TURNS;
        }
        Ok(())
    }

    /// Asks the kernel about doorbells and watched descriptors.
    fn ask(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.turns = 0;
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let empty = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [empty; EVENTS];
        let count = match epoll::wait(&self.core.epoll, &mut events, timeout.as_ref()) {
            Err(Errno::INTR) => 0,
            count => count?,
        };
        let fds = events[..count].iter().filter_map(|event| RawFd::try_from(event.data.u64()).ok());
        lock(&self.core.state).due.extend(fds.filter_map(|fd| self.watched.get(&fd)));
        Ok(())
    }

    /// Makes a half a member of the set. Asks the daemon if another board is needed.
    pub(crate) fn enter(&self, endpoint: &Arc<Inner>, key: u64) -> Result<Membership, Error> {
        let mut state = lock(&self.core.state);
        let found = match state.vacant_slot(endpoint, key) {
            Some(found) => found,
            None => {
                // Other threads can use the set while the daemon is asked.
                drop(state);
                let at = endpoint.take_lane()?;
                state = lock(&self.core.state);
                state.add_lane(&self.core.epoll, endpoint, at).inspect_err(|_| endpoint.give_lane(at))?;
                state.vacant_slot(endpoint, key).ok_or_else(|| endpoint.protocol("a lane without slots"))?
            }
        };
        let (lane, slot, place) = found;
        let half = Arc::new(Half { key, rest: Mutex::new(Rest::Awake) });
        state.due.push(key);
        let asleep = state.asleep;
        drop(state);
        if asleep {
            self.core.nudge();
        }
        Ok(Membership { core: self.core.clone(), half, lane, slot, place })
    }
}

impl AsFd for ReadySet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.core.epoll.as_fd()
    }
}

impl Core {
    /// Lets all hot halves fall asleep and arms the lanes. The caller looks once more before it sleeps.
    fn sleep(&self) {
        let mut state = lock(&self.state);
        state.asleep = true;
        while let Some((half, _)) = state.hot.pop_front() {
            state.put_to_sleep(&half);
        }
        state.lanes.iter_mut().for_each(|slots| slots.lane.arm());
    }

    fn nudge(&self) {
        // The counter cannot be full, because no other process has the eventfd.
        let _ = rustix::io::write(&self.nudge, &1u64.to_ne_bytes());
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // In the child of a fork the lanes belong to the parent.
        if self.opener.is_here_or_succeeded() {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            for mut slots in state.lanes.drain(..) {
                slots.lane.disarm();
                if let Some(endpoint) = slots.endpoint.upgrade() {
                    endpoint.give_lane(slots.at);
                }
            }
        }
    }
}

impl State {
    /// Takes all keys that are to be reported.
    fn collect(&mut self, keys: &mut Vec<u64>) {
        keys.append(&mut self.due);
        self.hot.retain(|(half, look)| {
            if !look.has_changed() {
                return true;
            }
            let mut rest = lock(&half.rest);
            if matches!(*rest, Rest::Hot(_)) {
                keys.push(half.key);
                rest.becomes(Rest::Told);
            }
            false
        });
        for slots in &mut self.lanes {
            if slots.has_ended() {
                slots.ended = true;
                keys.extend(slots.keys.iter().flatten());
            }
            let Slots { lane, keys: known, .. } = slots;
            lane.take(|slot| keys.extend(known.get(slot).copied().flatten()));
        }
    }

    /// Returns whether there is something to report. It may return true without need, but never false when there is
    /// something.
    fn has_any(&self) -> bool {
        !self.due.is_empty() || self.glance()
    }

    fn glance(&self) -> bool {
        self.lanes.iter().any(|slots| slots.lane.has_any() || slots.has_ended())
            || self.hot.iter().any(|(_, look)| look.has_changed())
    }

    /// Stops looking at a hot half: its ring is armed, or its key becomes due.
    fn put_to_sleep(&mut self, half: &Half) {
        if !half.fall_asleep() {
            self.due.push(half.key);
        }
    }

    fn vacant_slot(&mut self, endpoint: &Arc<Inner>, key: u64) -> Option<(u64, usize, Place)> {
        let own = Arc::downgrade(endpoint);
        let mut lanes = self.lanes.iter_mut().filter(|slots| slots.endpoint.ptr_eq(&own));
        lanes.find_map(|slots| slots.take(key).map(|slot| (slots.id, slot, Place::new(slots.at, slot))))
    }

    /// Adds a lane of an endpoint.
    fn add_lane(&mut self, epoll: &OwnedFd, endpoint: &Arc<Inner>, at: u64) -> Result<(), Error> {
        // Lanes of endpoints that have ended are useless.
        self.lanes.retain(|slots| slots.endpoint.strong_count() > 0);
        self.events
            .retain(|(endpoint, event)| endpoint.strong_count() > 0 || epoll::delete(epoll, event).is_err());
        let memory = endpoint.part(at, board::LANE);
        let memory = memory.ok_or_else(|| endpoint.protocol("a readiness board outside its segment"))?;
        self.watch_doorbell(epoll, endpoint)?;
        let mut lane = Lane::new(memory);
        if self.asleep {
            lane.arm();
        }
        self.next += 1;
        let endpoint = Arc::downgrade(endpoint);
        self.lanes.push(Slots {
            id: self.next,
            endpoint,
            at,
            lane,
            keys: Vec::new(),
            free: Vec::new(),
            ended: false,
        });
        Ok(())
    }

    /// Wakes the set.
    fn wake(&mut self) {
        self.asleep = false;
        self.lanes.iter_mut().for_each(|slots| slots.lane.disarm());
    }

    /// Lets the doorbell of an endpoint wake the set.
    fn watch_doorbell(&mut self, epoll: &OwnedFd, endpoint: &Arc<Inner>) -> Result<(), Error> {
        match &endpoint.event {
            None => self.naps = true,
            Some(event) if self.events.iter().any(|(_, known)| Arc::ptr_eq(known, event)) => {}
            Some(event) => {
                epoll::add(epoll, event, epoll::EventData::new_u64(BELL), edge())
                    .map_err(Error::system("watching a doorbell"))?;
                self.events.push((Arc::downgrade(endpoint), event.clone()));
            }
        }
        Ok(())
    }
}

impl Half {
    /// Arms the half's ring if the half is hot. Returns false if something has come meanwhile; then the half does not
    /// rest.
    fn fall_asleep(&self) -> bool {
        let mut rest = lock(&self.rest);
        let Rest::Hot(watch) = &mut *rest else { return true };
        watch.arm();
        if watch.look.has_changed() {
            watch.disarm();
            rest.becomes(Rest::Told);
            return false;
        }
        rest.becomes(Rest::Asleep);
        true
    }
}

impl Slots {
    /// Returns whether the memory is gone and the resting halves have not been reported yet.
    fn has_ended(&self) -> bool {
        !self.ended && self.lane.is_broken()
    }

    fn take(&mut self, key: u64) -> Option<usize> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.keys.len() < board::SLOTS => {
                self.keys.push(None);
                self.keys.len() - 1
            }
            None => return None,
        };
        self.keys[slot] = Some(key);
        Some(slot)
    }
}

impl Rest {
    /// Changes the state of a resting half.
    fn becomes(&mut self, how: impl FnOnce(Watch<Mapping>) -> Self) {
        if let Some(watch) = self.take() {
            *self = how(watch);
        }
    }

    fn take(&mut self) -> Option<Watch<Mapping>> {
        match std::mem::replace(self, Self::Awake) {
            Self::Awake => None,
            Self::Hot(watch) | Self::Asleep(watch) | Self::Told(watch) => Some(watch),
        }
    }
}

impl Membership {
    /// Returns the place at which the half's peer marks that there is something.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Lets the half rest after an operation would have had to wait. Returns false if something has come meanwhile;
    /// then the half does not rest.
    pub fn rest(&self, watch: Watch<Mapping>) -> bool {
        let mut state = lock(&self.core.state);
        let look = watch.look.clone();
        *lock(&self.half.rest) = Rest::Hot(watch);
        if state.asleep {
            return self.half.fall_asleep();
        }
        // The half may have rested before, and have been woken by its owner.
        state.hot.retain(|(half, _)| !Arc::ptr_eq(half, &self.half));
        if state.hot.len() == HOT
            && let Some((oldest, _)) = state.hot.pop_front()
        {
            state.put_to_sleep(&oldest);
        }
        state.hot.push_back((self.half.clone(), look));
        true
    }

    /// Wakes the half. Returns the watch that it gave when it began to rest.
    pub fn wake(&self) -> Option<Watch<Mapping>> {
        let mut rest = lock(&self.half.rest);
        if let Rest::Asleep(watch) = &mut *rest {
            watch.disarm();
        }
        rest.take()
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut state = lock(&self.core.state);
        state.hot.retain(|(half, _)| !Arc::ptr_eq(half, &self.half));
        if let Some(slots) = state.lanes.iter_mut().find(|slots| slots.id == self.lane) {
            slots.keys[self.slot] = None;
            slots.free.push(self.slot);
        }
    }
}

/// Everything that a set waits for, as one [`Waitable`].
struct Any<'s> {
    core: &'s Core,
    keys: &'s mut Vec<u64>,
}

impl Waitable for Any<'_> {
    fn ready(&mut self) -> bool {
        lock(&self.core.state).collect(self.keys);
        !self.keys.is_empty()
    }
    fn glance(&self) -> bool {
        lock(&self.core.state).glance()
    }
    fn arm(&mut self) {
        self.core.sleep();
    }
    fn disarm(&mut self) {
        lock(&self.core.state).wake();
    }
}

struct Sleep<'s> {
    set: &'s mut ReadySet,
    naps: bool,
}

impl Sleeper for Sleep<'_> {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let left = if self.naps { Some(left.map_or(NAP, |left| left.min(NAP))) } else { left };
        self.set.ask(left)
    }
}

fn edge() -> epoll::EventFlags {
    epoll::EventFlags::IN | epoll::EventFlags::ET
}

fn looking(error: io::Error) -> Error {
    Error::io("waiting with a set")(error)
}
