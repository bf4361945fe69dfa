//! Waiting for all that the driver had asked for before, on all workers (SCSI's task management).
//!
//! A driver that has asked for an abort completes all commands on the answer, and uses their memory for something else. It
//! means all that it has made available, not only what was taken: so no command may be left in a queue either.
//!
//! Who wants to know asks every worker, itself included. Each notes how far the driver has come in each of its queues, goes on
//! until it has taken all that, and then waits until what it has taken by then has ended. So a driver that feeds its queues
//! without end delays nobody. A queue that breaks has nothing left; one that is stopped takes what is missing first.
//!
//! A queue that a session stops for a while is not seen here. So while it is stopped the session keeps the queue stopped in which a driver asks for
//! all this (`session.rs`).
//!
//! A request may be held by the volume's limits for as long as they say. When the queue of who waits for it is being stopped, it goes
//! at once, as those of that queue itself do: else a queue could not be stopped before the limits allow it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::mail::{Order, Peers};
use super::queue::Queue;
use super::slots::Slots;

/// One who waits, for workers that have not settled.
pub struct Settling {
    left: AtomicUsize,
    /// The worker that waits.
    owner: usize,
    /// Its queue is being stopped.
    urgent: AtomicBool,
    /// It waits no more: a successor takes it again, and waits then.
    over: AtomicBool,
}

/// What a worker has to do with it.
#[derive(Default)]
pub(super) struct Settlements {
    asked: Vec<Asked>,
    /// Our own requests that wait.
    own: Vec<(u32, Arc<Settling>)>,
}

/// Somebody waits for us.
struct Asked {
    settling: Arc<Settling>,
    /// Queues that have not taken all that was there, and how much they will have taken then.
    queues: Vec<(u64, u64)>,
    /// The number of the first request that is not waited for, once all those before it have been taken.
    mark: Option<u64>,
}

impl Settlements {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.asked.is_empty() && self.own.is_empty()
    }

    /// A request of worker `owner` waits from now on; its queue may be being stopped (`urgent`).
    pub fn begin(&mut self, slot: u32, owner: usize, urgent: bool, peers: &Peers) {
        let settling = Arc::new(Settling {
            left: AtomicUsize::new(peers.count()),
            owner,
            urgent: AtomicBool::new(urgent),
            over: AtomicBool::new(false),
        });
        self.own.push((slot, settling.clone()));
        peers.each(|| Order::Settle(settling.clone()));
    }

    /// Somebody waits for all that is in our queues now, and for all that was taken out of them.
    pub fn ask(&mut self, queues: &mut [Queue], slots: &Slots, settling: Arc<Settling>) {
        // The driver has shown all this before it has shown the request that waits, which its worker has seen before it has
        // told us: what we read now is not older.
        let behind = queues.iter_mut().filter_map(|queue| Some((queue.serial, queue.must_take_all()?)));
        let queues: Vec<_> = behind.collect();
        let mark = queues.is_empty().then(|| slots.span().0);
        self.asked.push(Asked { settling, queues, mark });
    }

    /// Requests of ours that wait have been left to a successor.
    pub fn forget(&mut self, slots: &Slots) {
        self.own.retain(|(slot, settling)| {
            let there = slots.is_there(*slot);
            settling.over.fetch_or(!there, Ordering::Release);
            there
        });
    }

    /// Whether somebody waits for requests of ours, other than a queue whose slots `is_of` knows: none may be left to a successor
    /// then.
    pub fn anybody_waits(&self, mut is_of: impl FnMut(u32) -> bool) -> bool {
        let mut others = |asked: &Asked| {
            !self.own.iter().any(|(slot, own)| Arc::ptr_eq(own, &asked.settling) && is_of(*slot))
        };
        self.asked.iter().any(|asked| !asked.settling.over.load(Ordering::Acquire) && others(asked))
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
        let waits = |asked: &Asked| asked.mark.is_none_or(|mark| number < mark);
        self.asked.iter().any(|asked| waits(asked) && asked.settling.urgent.load(Ordering::Acquire))
    }

    /// Looks how far we are. All that has ended must have been published: who waits may answer its driver at once. Returns one
    /// of our own that waits no more.
    pub fn look(&mut self, queues: &[Queue], slots: &Slots, peers: &Peers) -> Option<u32> {
        let (next, oldest) = slots.span();
        self.asked.retain_mut(|asked| {
            let behind = |(serial, until): &(u64, u64)| {
                queues.iter().any(|queue| queue.serial == *serial && queue.is_behind(*until))
            };
            asked.queues.retain(behind);
            if asked.queues.is_empty() {
                asked.mark.get_or_insert(next);
            }
            let settled = asked.mark.is_some_and(|mark| oldest >= mark);
            if settled && asked.settling.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                peers.wake(asked.settling.owner);
            }
            !settled
        });
        let at = self.own.iter().position(|(_, settling)| settling.left.load(Ordering::Acquire) == 0)?;
        Some(self.own.swap_remove(at).0)
    }
}
