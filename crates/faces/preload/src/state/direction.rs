//! One direction of a socket, and the locks under which threads and processes work on it.

use crate::process::lock::{Guard, Lock};
use crate::state::carrier::Carrier;
use crate::state::common::{Common, Position};
use crate::state::rings::Rings;
use crate::state::stash::Stash;
use ginnel::{SocketReceiver, SocketSender};
use ginnel_layout::ring::HEADER;
use ginnel_ring::{Cursor, stream};
use ginnel_shmem::SharedMemory;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Notes how long the connection took until it changed over for the first time.
pub fn note_time<R>(direction: &Direction<R>, begun: std::time::Duration) {
    if direction.changed_after.load(Ordering::Relaxed) != 0 {
        return;
    }
    let after = ginnel_clock::monotonic().saturating_sub(begun).as_micros() as u64;
    direction.changed_after.store(after.max(1), Ordering::Relaxed);
}

/// One direction of a socket.
pub struct Direction<R> {
    /// The number of threads in a system call that moves bytes in this direction.
    inside: AtomicU32,
    /// Counts the connections that the direction has had.
    epoch: AtomicU32,
    /// The number of bytes that the program has moved over TCP.
    pub native: AtomicU64,
    /// The number of bytes that the program has moved over the ring.
    pub shared: AtomicU64,
    /// The number of wake bytes that this side has sent or received in this direction.
    pub wakes: AtomicU64,
    /// The time from the beginning of the connection to the first change to a ring, in microseconds; 0 before that.
    pub changed_after: AtomicU64,
    carrier: AtomicU8,
    /// True if the kernel carries the direction again, after a ring did.
    returned: AtomicBool,
    /// The number of sleepers that the peer has to wake. While it is not 0, no thread says that this side is awake. It is written
    /// with the ring's lock held, or before there is a ring.
    pub waiting: AtomicU32,
    /// This side's ends of the direction's rings, while there are any.
    ring: Lock<Rings<R>>,
    /// The state that this process shares with its relatives, while they have the socket.
    common: AtomicPtr<Common>,
    /// The version of that state which this process knows.
    heard: AtomicU32,
    /// The number of the socket's connection in that state, of which this process knows.
    connection: AtomicU32,
    /// The bytes of the kernel's stream that `native` and `wakes` do not count: those that a ring has carried too, and those that
    /// were moved by relatives.
    others: AtomicU64,
    /// True if a relative goes on with the direction alone, or if its position is not known any more.
    is_lost: AtomicBool,
    /// What [`Common`] has of these while relatives have the socket.
    wakes_end: AtomicU64,
    stash: Stash,
}

impl<R> Direction<R> {
    pub const fn new() -> Self {
        Self {
            inside: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            native: AtomicU64::new(0),
            shared: AtomicU64::new(0),
            wakes: AtomicU64::new(0),
            changed_after: AtomicU64::new(0),
            carrier: AtomicU8::new(Carrier::Kernel as u8),
            returned: AtomicBool::new(false),
            waiting: AtomicU32::new(0),
            ring: Lock::new(Rings::new()),
            common: AtomicPtr::new(std::ptr::null_mut()),
            heard: AtomicU32::new(0),
            connection: AtomicU32::new(0),
            others: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
            wakes_end: AtomicU64::new(0),
            stash: Stash::new(),
        }
    }

    pub fn reset(&self) {
        self.inside.store(0, Ordering::Relaxed);
        self.waiting.store(0, Ordering::Relaxed);
        self.common.store(std::ptr::null_mut(), Ordering::Relaxed);
        self.renew();
    }

    /// Resets what belongs to a connection. Threads in calls, and relatives, stay.
    fn renew(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
        for count in [&self.native, &self.shared, &self.wakes, &self.changed_after, &self.others] {
            count.store(0, Ordering::Relaxed);
        }
        self.set_carrier(Carrier::Kernel);
        self.returned.store(false, Ordering::Relaxed);
        self.is_lost.store(false, Ordering::Relaxed);
        self.stash.clear();
    }

    /// Forgets the threads of the parent in the child of a fork.
    pub fn in_child(&self) {
        self.inside.store(0, Ordering::Relaxed);
        self.waiting.store(0, Ordering::Relaxed);
    }

    /// Notes one more sleeper that the peer has to wake. Returns whether it is the only one. The caller holds the ring's lock.
    pub fn add_sleeper(&self) -> bool {
        // ORDER preload.waiting: a thread that begins to sleep without knowing of the rings, and finds this one, finds the rings too. Pairs
        // with: `Unaware::begin`.
        self.waiting.fetch_add(1, Ordering::Release) == 0
    }

    /// Notes that a sleeper is awake. Returns whether it was the only one. The caller holds the ring's lock.
    pub fn remove_sleeper(&self) -> bool {
        leave(&self.waiting)
    }

    /// Returns the carrier.
    #[inline]
    pub fn carrier(&self) -> Carrier {
        // ORDER preload.carrier: acquires, with the carrier, the counts made under the carrier before it. Pairs with:
        // `Direction::set_carrier`.
        Carrier::from_byte(self.carrier.load(Ordering::Acquire))
    }

    /// Returns whether the ring carries the direction.
    pub fn is_ring(&self) -> bool {
        // ORDER preload.taker: see `Taker::begin`.
        self.carrier.load(Ordering::SeqCst) == Carrier::Ring as u8
    }

    /// Notes that the kernel is about to carry the direction again. The caller holds the ring's lock.
    pub fn begin_return(&self) {
        // ORDER preload.taker: the store comes before `is_taken` looks for a taker. Pairs with: `Taker::begin`.
        self.carrier.store(Carrier::Returning as u8, Ordering::SeqCst);
    }

    /// Returns whether the kernel carries the direction again, after a ring did.
    pub fn has_returned(&self) -> bool {
        self.returned.load(Ordering::Relaxed)
    }

    /// Sets the flag that `has_returned` returns. The caller holds the ring's lock.
    pub fn set_returned(&self, returned: bool) {
        self.returned.store(returned, Ordering::Relaxed);
    }

    /// Where wake bytes end in the kernel's stream, if the kernel carries again or is about to.
    pub fn wakes_end(&self) -> &AtomicU64 {
        self.common().map_or(&self.wakes_end, |common| &common.wakes_end)
    }

    /// Bytes of the program that were taken for wake bytes.
    pub fn stash(&self) -> &Stash {
        self.common().map_or(&self.stash, |common| &common.stash)
    }

    /// Returns how many bytes of the kernel's stream this side has sent or received: the program's bytes and wake bytes.
    pub fn kernels(&self) -> u64 {
        match self.common() {
            Some(common) => common.kernels.load(Ordering::Relaxed),
            None => {
                let counts = [&self.native, &self.wakes, &self.others];
                counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
            }
        }
    }

    /// Counts bytes of the program that have gone through the kernel.
    pub fn count_native(&self, bytes: u64) {
        self.native.fetch_add(bytes, Ordering::Relaxed);
        self.count(bytes);
    }

    /// Counts wake bytes that have gone through the kernel.
    pub fn count_wakes(&self, bytes: u64) {
        self.wakes.fetch_add(bytes, Ordering::Relaxed);
        self.count(bytes);
    }

    /// Counts bytes that have gone through the kernel and that a ring carries too, or that a killed relative has moved.
    pub fn count_others(&self, bytes: u64) {
        self.others.fetch_add(bytes, Ordering::Relaxed);
        self.count(bytes);
    }

    /// Recounts bytes that were counted as the program's as bytes that a ring carries too.
    pub fn recount_others(&self, bytes: u64) {
        // A relative may have counted them.
        let bytes = bytes.min(self.native.load(Ordering::Relaxed));
        self.native.fetch_sub(bytes, Ordering::Relaxed);
        self.others.fetch_add(bytes, Ordering::Relaxed);
    }

    fn count(&self, bytes: u64) {
        if let Some(common) = self.common() {
            common.kernels.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Returns the state shared with relatives, if there is one.
    #[inline]
    #[expect(unsafe_code, reason = "memory that is never unmapped")]
    pub fn common(&self) -> Option<&'static Common> {
        // SAFETY: the pointer is null, or comes from `share`, which takes only references that are valid for ever.
        unsafe { self.common.load(Ordering::Relaxed).as_ref() }
    }

    /// Notes that this process is about to use the ring, or waits for it. Returns false if it may not. The caller holds the lock.
    #[inline]
    pub fn uses(&self) -> bool {
        if let Some(common) = self.common() {
            common.use_it();
        }
        !self.is_lost.load(Ordering::Relaxed)
    }

    /// Returns whether this process may not use the direction any more.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Forbids this process the use of the direction from now on.
    pub fn lose(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }

    /// Returns whether a relative has disconnected the socket, so that this process knows nothing of what the kernel has now.
    #[inline]
    pub fn is_superseded(&self) -> bool {
        self.common().is_some_and(|common| common.connection() != self.connection.load(Ordering::Relaxed))
    }

    /// Sets the carrier. The caller holds the ring's lock.
    pub fn set_carrier(&self, carrier: Carrier) {
        // ORDER preload.carrier: releases everything counted before. Pairs with: `Direction::carrier`.
        self.carrier.store(carrier as u8, Ordering::Release);
    }

    /// Makes a system call if the kernel carries this direction, and returns `None` otherwise. `moved` returns the number of the
    /// program's bytes that a result stands for.
    #[inline]
    pub fn through_kernel<T>(&self, call: impl FnOnce() -> T, moved: impl FnOnce(&T) -> usize) -> Option<T> {
        let _inside = Inside::begin(&self.inside);
        if self.carrier.load(Ordering::SeqCst) != Carrier::Kernel as u8 {
            return None;
        }
        let epoch = self.epoch.load(Ordering::Relaxed);
        let result = call();
        let moved = moved(&result) as u64;
        // A call that has waited may have moved bytes of a connection that the program has ended meanwhile.
        if moved > 0 && epoch == self.epoch.load(Ordering::Relaxed) {
            self.count_native(moved);
        }
        Some(result)
    }

    /// Sends a wake byte if the ring carries this direction. Otherwise the peer would take the byte for the program's.
    pub fn wake(&self, send: impl FnOnce() -> bool) {
        let common = self.common();
        let _inside = (Inside::begin(&self.inside), common.map(|common| Inside::begin(&common.inside)));
        let is_ring = self.carrier.load(Ordering::SeqCst) == Carrier::Ring as u8
            && common.is_none_or(|common| common.is_ring() && !self.is_superseded());
        if is_ring && send() {
            self.count_wakes(1);
        }
    }

    /// Keeps other threads out of the kernel, and returns how many bytes have gone through it. Returns `None` if a thread is
    /// inside. The caller holds the ring's lock, and calls [`Direction::set_carrier`] afterwards.
    pub fn begin_change(&self) -> Option<u64> {
        let before = self.carrier();
        // ORDER preload.inside: see `Inside::begin`.
        self.carrier.store(Carrier::Changing as u8, Ordering::SeqCst);
        // ORDER preload.counted: if no thread is inside, this one sees everything that others have counted. Pairs with:
        // `Inside::drop`.
        let is_alone = self.common().is_none_or(Common::begin_change);
        if self.inside.load(Ordering::SeqCst) != 0 || !is_alone {
            self.set_carrier(before);
            return None;
        }
        Some(self.kernels())
    }
}

/// A thread in a system call that moves bytes, until it has counted them or is cancelled.
struct Inside<'a>(&'a AtomicU32);

impl<'a> Inside<'a> {
    #[inline]
    fn begin(inside: &'a AtomicU32) -> Self {
        // ORDER preload.inside: either this thread sees that the carrier changes, or the thread that changes it sees this thread,
        // because both write before they read and all four accesses are sequentially consistent. Pairs with:
        // `Direction::begin_change`.
        inside.fetch_add(1, Ordering::SeqCst);
        Self(inside)
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        // ORDER preload.counted: the count is written before this thread is outside. Pairs with: `Direction::begin_change`.
        leave(self.0);
    }
}

/// Counts a thread less. If a signal handler has forked, the child has reset the counter, and it must not go below zero. Returns whether
/// it was the last.
#[inline]
fn leave(counter: &AtomicU32) -> bool {
    let before = counter.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |n| n.checked_sub(1));
    before == Ok(1)
}

/// An end of a ring, which another process can continue to use.
pub trait Side {
    fn cursor(&self) -> Cursor;
    /// Continues where another process has stopped. Returns false if that is impossible.
    fn resume(&mut self, cursor: Cursor) -> bool;
}

impl Side for SocketSender {
    fn cursor(&self) -> Cursor {
        self.ring.cursor()
    }

    fn resume(&mut self, cursor: Cursor) -> bool {
        let memory = self.ring.memory().clone();
        let capacity = memory.len() - HEADER;
        stream::Producer::resume(memory, capacity, cursor).map(|ring| self.ring = ring).is_ok()
    }
}

impl Side for SocketReceiver {
    fn cursor(&self) -> Cursor {
        self.ring.cursor()
    }

    fn resume(&mut self, cursor: Cursor) -> bool {
        let memory = self.ring.memory().clone();
        let capacity = memory.len() - HEADER;
        stream::Consumer::resume(memory, capacity, cursor).map(|ring| self.ring = ring).is_ok()
    }
}

impl<R: Side> Direction<R> {
    /// Waits until no other thread, of this process or of a relative, works on the ring.
    #[inline]
    pub fn lock(&self) -> Held<'_, R> {
        let mut held = Held { rings: self.ring.lock(), direction: self };
        if let Some(common) = self.common() {
            common.enter();
            held.hear(common);
        }
        held
    }

    /// Shares the direction with relatives from now on.
    pub fn share(&self, common: &'static Common) {
        let mut held = self.lock();
        common.begin(self.kernels());
        common.wakes_end.store(self.wakes_end.load(Ordering::Relaxed), Ordering::Relaxed);
        common.stash.copy(&self.stash);
        self.connection.store(common.connection(), Ordering::Relaxed);
        held.record(common);
        self.common.store(std::ptr::from_ref(common).cast_mut(), Ordering::Relaxed);
        common.enter();
    }

    /// Stops sharing the direction with relatives, because none of them has it any more, or because this process closes it.
    pub fn detach(&self) {
        let held = self.lock();
        let Some(common) = self.common() else { return };
        let own = self.native.load(Ordering::Relaxed) + self.wakes.load(Ordering::Relaxed);
        self.others.store(self.kernels().wrapping_sub(own), Ordering::Relaxed);
        self.wakes_end.store(common.wakes_end.load(Ordering::Relaxed), Ordering::Relaxed);
        self.stash.copy(&common.stash);
        self.common.store(std::ptr::null_mut(), Ordering::Relaxed);
        common.leave();
        drop(held);
    }
}

/// A direction on which only this thread works.
pub struct Held<'a, R: Side> {
    rings: Guard<'a, Rings<R>>,
    direction: &'a Direction<R>,
}

impl<R: Side> Held<'_, R> {
    /// Continues where a relative has stopped.
    fn hear(&mut self, common: &Common) {
        if common.version() == self.direction.heard.load(Ordering::Relaxed) {
            return;
        }
        self.direction.heard.store(common.version(), Ordering::Relaxed);
        if self.direction.is_superseded() {
            return self.direction.lose();
        }
        let (direction, rings) = (self.direction, &mut *self.rings);
        let Some(Position { carrier, cursor, before, steps }) = common.position() else {
            return direction.lose();
        };
        let has_returned = carrier == Carrier::Kernel && direction.carrier() != Carrier::Kernel;
        if rings.is_ahead() && steps.wrapping_sub(rings.steps()) > u32::from(has_returned) {
            rings.step(before.wrapping_sub(rings.before()));
        }
        if has_returned {
            drop(rings.give_back(before.wrapping_sub(rings.before())));
            direction.set_returned(true);
        }
        direction.set_carrier(carrier);
        if (rings.before(), rings.steps()) != (before, steps)
            || rings.as_mut().is_some_and(|side| !side.resume(cursor))
        {
            direction.lose();
        }
    }

    /// Begins another connection, which the kernel carries. Relatives learn of that. Returns the rings of the connection before.
    pub fn renew(&mut self) -> impl Iterator<Item = R> + use<R> {
        let direction = self.direction;
        direction.renew();
        if let Some(common) = direction.common() {
            common.renew();
            direction.connection.store(common.connection(), Ordering::Relaxed);
        }
        self.rings.take()
    }

    /// Does the same where a relative has begun another connection.
    pub fn follow(&mut self) -> impl Iterator<Item = R> + use<R> {
        let direction = self.direction;
        direction.renew();
        if let Some(common) = direction.common() {
            direction.connection.store(common.connection(), Ordering::Relaxed);
        }
        self.rings.take()
    }

    /// Returns whether a relative has begun another connection.
    pub fn is_superseded(&self) -> bool {
        self.direction.is_superseded()
    }

    /// Records this process's position for its relatives.
    fn record(&mut self, common: &Common) {
        // What this process knows is of an earlier connection.
        if self.direction.is_superseded() {
            return;
        }
        let carrier = match self.direction.carrier() {
            // A relative that takes over finds out by itself that the ring is over.
            Carrier::Returning => Carrier::Ring,
            carrier => carrier,
        };
        let cursor = self.rings.as_ref().map_or_else(Cursor::default, Side::cursor);
        let version = common.record(Position {
            carrier,
            cursor,
            before: self.rings.before(),
            steps: self.rings.steps(),
        });
        self.direction.heard.store(version, Ordering::Relaxed);
    }
}

impl<R: Side> Drop for Held<'_, R> {
    #[inline]
    fn drop(&mut self) {
        if let Some(common) = self.direction.common() {
            self.record(common);
            common.leave();
        }
    }
}

impl<R: Side> Deref for Held<'_, R> {
    type Target = Rings<R>;
    #[inline]
    fn deref(&self) -> &Rings<R> {
        &self.rings
    }
}

impl<R: Side> DerefMut for Held<'_, R> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Rings<R> {
        &mut self.rings
    }
}
