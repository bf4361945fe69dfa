//! One direction of a socket, and who works on it.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

use ginnel::{SocketReceiver, SocketSender};
use ginnel_layout::ring::HEADER;
use ginnel_ring::{Cursor, stream};
use ginnel_shmem::SharedMemory;

use crate::family::{Common, Place};
use crate::lock::{Guard, Lock};
use crate::rings::Rings;

/// What carries a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Carrier {
    /// The kernel.
    Kernel,
    /// Somebody looks whether it can change over, or is about to.
    Changing,
    /// Receiving: the kernel, up to the byte that the sender will name.
    Counted,
    /// The ring.
    Ring,
    /// Receiving: the kernel again, once what is left of the wake bytes has been dropped.
    Returning,
}

impl Carrier {
    pub fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Kernel,
            1 => Self::Changing,
            2 => Self::Counted,
            3 => Self::Ring,
            _ => Self::Returning,
        }
    }
}

/// One direction.
pub struct Direction<R> {
    /// Threads that are in a call of the kernel that moves bytes in this direction.
    inside: AtomicU32,
    /// Bytes that the program has moved over TCP.
    pub native: AtomicU64,
    /// Bytes that it has moved over the ring.
    pub shared: AtomicU64,
    /// Wake bytes that this side has sent in this direction, or received.
    pub wakes: AtomicU64,
    /// Microseconds from the begin of the connection to the change.
    pub changed_after: AtomicU64,
    carrier: AtomicU8,
    /// The kernel carries it again, after a ring did.
    returned: AtomicBool,
    /// Sleepers that the peer has to wake: while there are some, nobody says that this side is awake. Written with the ring's lock held.
    pub waiting: AtomicU32,
    /// The end of the ring, while there is one.
    ring: Lock<Rings<R>>,
    /// What this process's relatives have to know too, while they have the socket.
    common: AtomicPtr<Common>,
    /// The last that is known of what stands there.
    heard: AtomicU32,
    /// Bytes of the kernel's stream that are neither: those that a ring has carried too, and those that relatives have moved which do not
    /// have the socket any more.
    others: AtomicU64,
    /// A relative goes on with it, or nobody knows where it is.
    is_lost: AtomicBool,
}

impl<R> Direction<R> {
    pub const fn new() -> Self {
        Self {
            inside: AtomicU32::new(0),
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
            others: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
        }
    }

    pub fn reset(&self) {
        self.inside.store(0, Ordering::Relaxed);
        self.waiting.store(0, Ordering::Relaxed);
        for count in [&self.native, &self.shared, &self.wakes, &self.changed_after, &self.others] {
            count.store(0, Ordering::Relaxed);
        }
        self.set_carrier(Carrier::Kernel);
        self.returned.store(false, Ordering::Relaxed);
        self.common.store(std::ptr::null_mut(), Ordering::Relaxed);
        self.is_lost.store(false, Ordering::Relaxed);
    }

    /// What carries it.
    #[inline]
    pub fn carrier(&self) -> Carrier {
        // ORDER preload.carrier: with the carrier, the counts of the one before. Pairs with: `Direction::set_carrier`.
        Carrier::from_byte(self.carrier.load(Ordering::Acquire))
    }

    /// Whether the ring carries it.
    pub fn is_ring(&self) -> bool {
        // ORDER preload.taker: see `Taker::begin`.
        self.carrier.load(Ordering::SeqCst) == Carrier::Ring as u8
    }

    /// The kernel is about to carry it again. To be called with the ring's lock held.
    pub fn begin_return(&self) {
        // ORDER preload.taker: before `is_taken` looks who takes. Pairs with: `Taker::begin`.
        self.carrier.store(Carrier::Returning as u8, Ordering::SeqCst);
    }

    /// Whether the kernel carries it again, after a ring did.
    pub fn has_returned(&self) -> bool {
        self.returned.load(Ordering::Relaxed)
    }

    /// To be called with the ring's lock held.
    pub fn set_returned(&self, returned: bool) {
        self.returned.store(returned, Ordering::Relaxed);
    }

    /// Bytes of the kernel's stream that this side has sent or received: of the program, and such that wake.
    pub fn kernels(&self) -> u64 {
        match self.common() {
            Some(common) => common.kernels.load(Ordering::Relaxed),
            None => {
                let counts = [&self.native, &self.wakes, &self.others];
                counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
            }
        }
    }

    /// Bytes of the program have gone through the kernel.
    pub fn count_native(&self, bytes: u64) {
        self.native.fetch_add(bytes, Ordering::Relaxed);
        self.count(bytes);
    }

    /// Wake bytes have.
    pub fn count_wakes(&self, bytes: u64) {
        self.wakes.fetch_add(bytes, Ordering::Relaxed);
        self.count(bytes);
    }

    /// Bytes have that a ring carries too.
    pub fn count_others(&self, bytes: u64) {
        self.others.fetch_add(bytes, Ordering::Relaxed);
        self.count(bytes);
    }

    /// The same of bytes that were counted as the program's.
    pub fn recount_others(&self, bytes: u64) {
        self.native.fetch_sub(bytes, Ordering::Relaxed);
        self.others.fetch_add(bytes, Ordering::Relaxed);
    }

    fn count(&self, bytes: u64) {
        if let Some(common) = self.common() {
            common.kernels.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// What relatives have to know too.
    #[inline]
    #[expect(unsafe_code, reason = "memory that is never unmapped")]
    pub fn common(&self) -> Option<&'static Common> {
        // SAFETY: null, or from `share`, which takes only references that are valid for ever.
        unsafe { self.common.load(Ordering::Relaxed).as_ref() }
    }

    /// This process is about to use the ring, or waits for it. False if it cannot. To be called with the lock held.
    #[inline]
    pub fn uses(&self) -> bool {
        if let Some(common) = self.common() {
            common.use_it();
        }
        !self.is_lost.load(Ordering::Relaxed)
    }

    /// It may not any more.
    pub fn lose(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }

    /// To be called with the ring's lock held.
    pub fn set_carrier(&self, carrier: Carrier) {
        // ORDER preload.carrier: what was counted before. Pairs with: `Direction::carrier`.
        self.carrier.store(carrier as u8, Ordering::Release);
    }

    /// Calls the kernel while it carries this direction; `None` if it does not. `moved` says how many bytes of the program's
    /// a result stands for.
    #[inline]
    pub fn through_kernel<T>(&self, call: impl FnOnce() -> T, moved: impl FnOnce(&T) -> usize) -> Option<T> {
        // ORDER preload.inside: either this thread sees that the carrier changes, or the changer sees this thread, because
        // both write before they read and all four are sequentially consistent. Pairs with: `Direction::begin_change`.
        self.inside.fetch_add(1, Ordering::SeqCst);
        if self.carrier.load(Ordering::SeqCst) != Carrier::Kernel as u8 {
            self.inside.fetch_sub(1, Ordering::SeqCst);
            return None;
        }
        let result = call();
        let moved = moved(&result) as u64;
        if moved > 0 {
            self.count_native(moved);
        }
        // ORDER preload.counted: the count before this thread is outside. Pairs with: `Direction::begin_change`.
        self.inside.fetch_sub(1, Ordering::SeqCst);
        Some(result)
    }

    /// Sends a wake byte, unless the ring does not carry this direction: then it would be taken for the program's.
    pub fn wake(&self, send: impl FnOnce() -> bool) {
        // ORDER preload.inside: see `Direction::through_kernel`.
        self.inside.fetch_add(1, Ordering::SeqCst);
        if self.carrier.load(Ordering::SeqCst) == Carrier::Ring as u8 && send() {
            self.count_wakes(1);
        }
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    /// Keeps others out of the kernel, and says how many bytes have gone through it; `None` if somebody is inside. To be
    /// called with the ring's lock held, and followed by [`Direction::set_carrier`].
    pub fn begin_change(&self) -> Option<u64> {
        let before = self.carrier();
        // ORDER preload.inside: see `Direction::through_kernel`.
        self.carrier.store(Carrier::Changing as u8, Ordering::SeqCst);
        // ORDER preload.counted: with nobody inside, what all have counted. Pairs with: `Direction::through_kernel`.
        if self.inside.load(Ordering::SeqCst) != 0 {
            self.set_carrier(before);
            return None;
        }
        Some(self.kernels())
    }
}

/// An end of a ring, of which another process can go on.
pub trait Side {
    fn cursor(&self) -> Cursor;
    /// Goes on where another process has stopped. False if that cannot be.
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

    /// From now on relatives have it too.
    pub fn share(&self, common: &'static Common) {
        let mut held = self.lock();
        common.begin(self.kernels());
        held.say(common);
        self.common.store(std::ptr::from_ref(common).cast_mut(), Ordering::Relaxed);
        common.enter();
    }

    /// No relative has it any more, or this process closes it: what is done from now on is not for relatives.
    pub fn detach(&self) {
        let held = self.lock();
        let Some(common) = self.common() else { return };
        let own = self.native.load(Ordering::Relaxed) + self.wakes.load(Ordering::Relaxed);
        self.others.store(self.kernels().wrapping_sub(own), Ordering::Relaxed);
        self.common.store(std::ptr::null_mut(), Ordering::Relaxed);
        common.leave();
        drop(held);
    }
}

/// A direction on which this thread alone works.
pub struct Held<'a, R: Side> {
    rings: Guard<'a, Rings<R>>,
    direction: &'a Direction<R>,
}

impl<R: Side> Held<'_, R> {
    /// Goes on where a relative has stopped.
    fn hear(&mut self, common: &Common) {
        if common.version() == self.direction.heard.load(Ordering::Relaxed) {
            return;
        }
        self.direction.heard.store(common.version(), Ordering::Relaxed);
        let (direction, rings) = (self.direction, &mut *self.rings);
        let Some(Place { carrier, cursor, before }) = common.place() else { return direction.lose() };
        if rings.is_ahead() && before != rings.before() {
            rings.step(before.wrapping_sub(rings.before()));
        }
        if carrier == Carrier::Kernel && direction.carrier() != Carrier::Kernel {
            drop(rings.give_back(before.wrapping_sub(rings.before())));
            direction.set_returned(true);
        }
        direction.set_carrier(carrier);
        if rings.before() != before || rings.as_mut().is_some_and(|side| !side.resume(cursor)) {
            direction.lose();
        }
    }

    /// Says where it is.
    fn say(&mut self, common: &Common) {
        let carrier = match self.direction.carrier() {
            // Whoever comes sees for itself that it is over.
            Carrier::Returning => Carrier::Ring,
            carrier => carrier,
        };
        let cursor = self.rings.as_ref().map_or_else(Cursor::default, Side::cursor);
        let version = common.say(Place { carrier, cursor, before: self.rings.before() });
        self.direction.heard.store(version, Ordering::Relaxed);
    }
}

impl<R: Side> Drop for Held<'_, R> {
    #[inline]
    fn drop(&mut self) {
        if let Some(common) = self.direction.common() {
            self.say(common);
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
