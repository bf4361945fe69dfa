//! Who sleeps for the wake bytes of a socket. [`crate::waiting::sleep`] describes the rules.

use crate::state::common::Common;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering, fence};

/// Who sleeps for the wake bytes of a socket in this process.
pub struct Sleepers {
    /// The thread that may take the last byte, or 0.
    pub keeper: AtomicI32,
    /// The number of threads that sleep at edges.
    pub at_edges: AtomicU32,
    /// The number of threads that have begun to sleep in the kernel before the connection got its rings; see `waiting::unaware`.
    pub unaware: AtomicU32,
    /// The number of epoll instances in which the threads that sleep for the socket look again by the clock; see
    /// `wakeups::probe_by_clock`.
    pub by_clock: AtomicU32,
    /// The time since which the peer is known not to have taken all bytes, in microseconds; 0 if it has.
    pub untaken_since: AtomicU64,
}

impl Sleepers {
    pub const fn new() -> Self {
        Self {
            keeper: AtomicI32::new(0),
            at_edges: AtomicU32::new(0),
            unaware: AtomicU32::new(0),
            by_clock: AtomicU32::new(0),
            untaken_since: AtomicU64::new(0),
        }
    }

    /// Forgets all of them, for another socket, or in the child of a fork, where they do not exist.
    pub fn clear(&self) {
        self.keeper.store(0, Ordering::Relaxed);
        self.at_edges.store(0, Ordering::Relaxed);
        self.unaware.store(0, Ordering::Relaxed);
        self.by_clock.store(0, Ordering::Relaxed);
        self.untaken_since.store(0, Ordering::Relaxed);
    }

    /// Tells the relatives that get the socket now whether this process has threads that do not know of the rings.
    pub fn share_unaware(&self, common: &Common) {
        // ORDER wakes.unaware: either this thread sees that the last of them is awake, or that one sees what the relatives share, because
        // both write before they read. Pairs with: `Sleepers::one_less_unaware`.
        common.set_unaware(self.unaware.load(Ordering::Relaxed) > 0);
        fence(Ordering::SeqCst);
        if self.unaware.load(Ordering::Relaxed) == 0 {
            common.set_unaware(false);
        }
    }

    /// Notes that one of them is awake. If a signal handler has forked, the child has reset the counter, and it must not go below zero.
    pub fn one_less_unaware(&self, common: impl FnOnce() -> Option<&'static Common>) {
        let _ = self.unaware.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |count| count.checked_sub(1));
        // ORDER wakes.unaware: see `Sleepers::share_unaware`.
        fence(Ordering::SeqCst);
        if self.unaware.load(Ordering::Relaxed) == 0
            && let Some(common) = common()
        {
            common.set_unaware(false);
        }
    }

    /// Tells the relatives that get the socket now who is the keeper. A keeper that comes later tells them by itself.
    pub fn share_keeper(&self, common: &Common) {
        // ORDER wakes.keeper: either this thread sees that the keeper comes or goes, or the keeper sees what the relatives share, because
        // both write before they read. Pairs with: `Keeper::begin`, `Keeper::drop`.
        fence(Ordering::SeqCst);
        let keeper = self.keeper.load(Ordering::SeqCst);
        common.replace_keeper(0, keeper);
        fence(Ordering::SeqCst);
        if self.keeper.load(Ordering::SeqCst) != keeper {
            common.replace_keeper(keeper, 0);
        }
    }
}
