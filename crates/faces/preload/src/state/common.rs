//! The state of one direction that the processes of a family share ([`super::family`]).

use crate::process::{ids, thread};
use crate::state::carrier::Carrier;
use crate::state::known::Known;
use crate::state::stash::Stash;
use crate::system::confined::is_confined;
use ginnel_ring::Cursor;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// The socket's number while no fork has happened, or when no other process has the socket any more.
pub const ALONE: u32 = 0;

/// The state of one direction that the processes share.
#[repr(C, align(64))]
pub struct Common {
    /// The thread that holds the lock, or 0.
    owner: AtomicI32,
    /// The process that was the last to use the direction; 0 if none has since the fork.
    user: AtomicI32,
    /// The thread that may take the last wake byte, or 0; see `waiting::sleep`.
    keeper: AtomicI32,
    /// The process that has threads which sleep in the kernel since before the connection got its rings, or 0; see `waiting::unaware`.
    /// There is one at most, because no connection gets rings while several processes have it.
    unaware: AtomicI32,
    /// Counts the updates of this state.
    version: AtomicU32,
    /// For sending: the number of threads that may send a wake byte. A process that was killed meanwhile counts for ever.
    pub inside: AtomicU32,
    carrier: AtomicU8,
    /// A process was killed under the lock. It may have moved bytes that nobody has counted.
    is_in_doubt: AtomicBool,
    /// For sending: what all processes know of the connection.
    pub known: Known,
    token: AtomicU32,
    rung: AtomicU32,
    position: AtomicU64,
    released: AtomicU64,
    /// The bytes that earlier rings have carried.
    before: AtomicU64,
    /// How many earlier rings there were. They may have carried nothing.
    steps: AtomicU32,
    /// The bytes of the kernel's stream that were sent or received.
    pub kernels: AtomicU64,
    /// Where wake bytes end in the kernel's stream, if the kernel carries again or is about to.
    pub wakes_end: AtomicU64,
    /// Counts the connections that the socket has had since processes share it.
    connection: AtomicU32,
    /// For receiving: bytes of the program that were taken for wake bytes.
    pub stash: Stash,
}

/// The position of a direction.
#[derive(Clone, Copy)]
pub struct Position {
    pub carrier: Carrier,
    pub cursor: Cursor,
    pub before: u64,
    pub steps: u32,
}

impl Common {
    /// Waits for the lock, which no process holds for long.
    pub fn enter(&self) {
        let me = thread::tid();
        let mut looks = 0;
        // ORDER family.lock: what the last owner said. Pairs with: `Common::leave`.
        while let Err(owner) = self.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            if owner == me {
                return;
            }
            looks += 1;
            if !is_confined() {
                std::thread::yield_now();
            }
            if looks % 1000 == 0
                && !ids::exists(owner)
                && self.owner.compare_exchange(owner, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                // The owner was killed. The next owner continues at the position where the killed call began, and
                // finds out whether the ring is still there.
                self.version.fetch_add(1, Ordering::Relaxed);
                self.is_in_doubt.store(true, Ordering::Relaxed);
                return;
            }
        }
    }

    pub fn leave(&self) {
        // ORDER family.lock: what was said under the lock. Pairs with: `Common::enter`.
        self.owner.store(0, Ordering::Release);
    }

    /// Records how far this process has come. The caller holds the lock. Returns the new version.
    pub fn record(&self, position: Position) -> u32 {
        let Position { carrier, cursor, before, steps } = position;
        self.carrier.store(carrier as u8, Ordering::Relaxed);
        self.token.store(cursor.token, Ordering::Relaxed);
        self.rung.store(cursor.rung, Ordering::Relaxed);
        self.position.store(cursor.position, Ordering::Relaxed);
        self.released.store(cursor.released, Ordering::Relaxed);
        self.before.store(before, Ordering::Relaxed);
        self.steps.store(steps, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// Returns how far the processes have come, or `None` if that is lost. The caller holds the lock.
    pub fn position(&self) -> Option<Position> {
        let cursor = Cursor {
            position: self.position.load(Ordering::Relaxed),
            pending: 0,
            released: self.released.load(Ordering::Relaxed),
            token: self.token.load(Ordering::Relaxed),
            rung: self.rung.load(Ordering::Relaxed),
        };
        let carrier = Carrier::from_byte(self.carrier.load(Ordering::Relaxed));
        let before = self.before.load(Ordering::Relaxed);
        let steps = self.steps.load(Ordering::Relaxed);
        // A process that was killed while it changed the carrier may have left the ring or not.
        let is_known = carrier != Carrier::Changing;
        is_known.then_some(Position { carrier, cursor, before, steps })
    }

    /// Keeps wake bytes out of the kernel, until the next [`Common::record`]. Returns false if a thread may be about to send one. The
    /// caller holds the lock.
    pub fn begin_change(&self) -> bool {
        // ORDER family.inside: either this thread sees one that is about to send, or that one sees the change, because both write before
        // they read. Pairs with: `Common::is_ring`.
        self.carrier.store(Carrier::Changing as u8, Ordering::SeqCst);
        self.inside.load(Ordering::SeqCst) == 0
    }

    /// Returns whether the ring carries. The caller is inside.
    pub fn is_ring(&self) -> bool {
        // ORDER family.inside: see `Common::begin_change`.
        self.carrier.load(Ordering::SeqCst) == Carrier::Ring as u8
    }

    pub fn version(&self) -> u32 {
        self.version.load(Ordering::Relaxed)
    }

    /// Begins another connection of the socket. The caller holds the lock.
    pub fn renew(&self) {
        self.kernels.store(0, Ordering::Relaxed);
        self.is_in_doubt.store(false, Ordering::Relaxed);
        self.known.reset();
        self.stash.clear();
        self.connection.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of the socket's connection. Processes compare it with the one that they know.
    #[inline]
    pub fn connection(&self) -> u32 {
        self.connection.load(Ordering::Relaxed)
    }

    /// Returns whether bytes may have been moved that nobody has counted. The caller holds the lock.
    pub fn is_in_doubt(&self) -> bool {
        self.is_in_doubt.load(Ordering::Relaxed)
    }

    /// Notes that all bytes have been counted. The caller holds the lock.
    pub fn is_certain(&self) {
        self.is_in_doubt.store(false, Ordering::Relaxed);
    }

    /// Records that this process uses the direction.
    pub fn use_it(&self) {
        self.user.store(ids::process(), Ordering::Relaxed);
    }

    /// Returns the process that was the last to use the direction; 0 if none has since the fork.
    pub fn user(&self) -> i32 {
        self.user.load(Ordering::Relaxed)
    }

    /// Replaces the keeper `from` by another one. Returns whether the other one is the keeper now.
    pub fn replace_keeper(&self, from: i32, to: i32) -> bool {
        match self.keeper.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => true,
            Err(keeper) => keeper == to,
        }
    }

    /// Removes a keeper that does not exist any more.
    pub fn bury_keeper(&self) {
        let keeper = self.keeper.load(Ordering::Relaxed);
        if keeper != 0 && !ids::exists(keeper) {
            self.replace_keeper(keeper, 0);
        }
    }

    /// Records whether this process has such threads, or no longer has them.
    pub fn set_unaware(&self, has_some: bool) {
        let (me, none) = (ids::process(), 0);
        let (from, to) = if has_some { (none, me) } else { (me, none) };
        let _ = self.unaware.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Returns whether another process has some.
    pub fn has_unaware_elsewhere(&self) -> bool {
        let process = self.unaware.load(Ordering::Relaxed);
        process != 0 && process != ids::process() && {
            let exists = ids::exists(process);
            if !exists {
                let _ = self.unaware.compare_exchange(process, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
            exists
        }
    }

    /// Resets the state for a new socket.
    pub fn begin(&self, kernels: u64) {
        self.owner.store(0, Ordering::Relaxed);
        self.keeper.store(0, Ordering::Relaxed);
        self.unaware.store(0, Ordering::Relaxed);
        self.user.store(0, Ordering::Relaxed);
        self.inside.store(0, Ordering::Relaxed);
        self.is_in_doubt.store(false, Ordering::Relaxed);
        self.kernels.store(kernels, Ordering::Relaxed);
    }
}
