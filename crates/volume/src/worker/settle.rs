//! Waiting for all that began before, on all workers (SCSI's task management).
//!
//! Who wants to know asks every worker, itself included. Each notes which of its requests began before, looks after each
//! turn whether one of them is left, and says when none is.
//!
//! A request may be held by the volume's limits for as long as they say. When the queue of who waits for it is being stopped, it goes
//! at once, as those of that queue itself do: else a queue could not be stopped before the limits allow it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::mail::{Order, Peers};

/// One who waits, for workers that have not settled.
pub struct Settling {
    left: AtomicUsize,
    /// The worker that waits.
    owner: usize,
    /// Its queue is being stopped.
    urgent: AtomicBool,
}

/// What a worker has to do with it.
#[derive(Default)]
pub(super) struct Settlements {
    /// Up to which of our requests, and who waits.
    asked: Vec<(u64, Arc<Settling>)>,
    /// Our own requests that wait.
    own: Vec<(u32, Arc<Settling>)>,
}

impl Settlements {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.asked.is_empty() && self.own.is_empty()
    }

    /// A request of worker `owner` waits from now on.
    pub fn begin(&mut self, slot: u32, owner: usize, peers: &Peers) {
        let settling = Arc::new(Settling {
            left: AtomicUsize::new(peers.count()),
            owner,
            urgent: AtomicBool::new(false),
        });
        self.own.push((slot, settling.clone()));
        peers.each(|| Order::Settle(settling.clone()));
    }

    /// Somebody waits for all our requests before number `mark`.
    pub fn ask(&mut self, mark: u64, settling: Arc<Settling>) {
        self.asked.push((mark, settling));
    }

    /// A queue of ours is being stopped, whose slots `is_of` knows.
    pub fn hurry(&self, mut is_of: impl FnMut(u32) -> bool, peers: &Peers) {
        let mut any = false;
        for (_, settling) in self.own.iter().filter(|(slot, _)| is_of(*slot)) {
            settling.urgent.store(true, Ordering::Release);
            any = true;
        }
        if any {
            peers.each(|| Order::Look);
        }
    }

    /// Whether who waits for our request of this number is in a hurry.
    #[cold]
    pub fn is_urgent(&self, number: u64) -> bool {
        self.asked.iter().any(|(mark, settling)| number < *mark && settling.urgent.load(Ordering::Acquire))
    }

    /// Our oldest request is number `oldest`. Returns one of our own that waits no more.
    pub fn look(&mut self, oldest: u64, peers: &Peers) -> Option<u32> {
        self.asked.retain(|(mark, settling)| {
            let settled = oldest >= *mark;
            if settled && settling.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                peers.wake(settling.owner);
            }
            !settled
        });
        let at = self.own.iter().position(|(_, settling)| settling.left.load(Ordering::Acquire) == 0)?;
        Some(self.own.swap_remove(at).0)
    }
}
