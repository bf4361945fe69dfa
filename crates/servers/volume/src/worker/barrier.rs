//! Barriers: requests that wait for all earlier requests of the driver, on all workers (SCSI task management).
//!
//! When a driver gets the answer to an abort, it completes all commands and uses their memory for other purposes. This
//! concerns all commands that it has made available, not only those that were taken. So no command may be left in a
//! queue either.
//!
//! The worker of the waiting request asks every worker, including itself. Each worker notes how far the driver has come
//! in each of its queues, continues until it has taken all these requests, and then waits until all that it has taken
//! by then have ended. So a driver that feeds its queues without end delays nobody. A queue that breaks has no requests
//! left; one that is stopped takes the missing ones first.
//!
//! A queue that a session has stopped for a while is not known here. While such a queue is stopped, the session
//! therefore also keeps the control queue stopped, on which drivers make these requests (`session.rs`).
//!
//! The volume's limits may hold a request for a long time. If the queue of the waiting request is being stopped, the
//! held request goes at once, like those of the stopped queue itself. Otherwise a queue could not be stopped before the
//! limits allow it.

use super::mailbox::{Order, Peers};
use super::queue::Queue;
use super::slots::Slots;
use super::source::Source;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// One waiting request, and the number of workers that it still waits for.
pub struct Barrier {
    left: AtomicUsize,
    /// The worker of the waiting request.
    owner: usize,
    /// Whether the waiting request's queue is being stopped.
    urgent: AtomicBool,
    /// Whether the request no longer waits here: a successor takes it again, and then waits.
    over: AtomicBool,
}

/// The barriers that concern a worker.
#[derive(Default)]
pub(super) struct Barriers {
    asked: Vec<Asked>,
    /// The worker's own waiting requests, with their slots.
    own: Vec<(u32, Arc<Barrier>)>,
}

/// A barrier for which this worker has been asked.
struct Asked {
    barrier: Arc<Barrier>,
    /// Queues that have not taken all requests that were in them, by serial number, and how many they will have taken
    /// then.
    queues: Vec<(u64, u64)>,
    /// The number of the first request that the barrier does not wait for, once all those before it have been taken.
    mark: Option<u64>,
}

impl Barriers {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.asked.is_empty() && self.own.is_empty()
    }

    /// Makes a request of worker `owner` wait. `urgent` says that its queue is being stopped.
    pub fn begin(&mut self, slot: u32, owner: usize, urgent: bool, peers: &Peers) {
        let barrier = Arc::new(Barrier {
            left: AtomicUsize::new(peers.count()),
            owner,
            urgent: AtomicBool::new(urgent),
            over: AtomicBool::new(false),
        });
        self.own.push((slot, barrier.clone()));
        peers.each(|| Order::Barrier(barrier.clone()));
    }

    /// Notes another worker's question: the barrier waits for all requests that are in this worker's queues now, and
    /// for all that were taken out of them.
    pub fn ask<S: Source>(&mut self, queues: &mut [Queue<S>], slots: &Slots<S>, barrier: Arc<Barrier>) {
        // The driver has published these requests before the waiting request. The other worker has seen the waiting
        // request before it asked, so the indices that this worker reads now are not older.
        let behind = queues.iter_mut().filter_map(|queue| Some((queue.serial, queue.must_take_all()?)));
        let queues: Vec<_> = behind.collect();
        let mark = queues.is_empty().then(|| slots.span().0);
        self.asked.push(Asked { barrier, queues, mark });
    }

    /// Forgets the worker's waiting requests that were left to a successor.
    pub fn forget<S: Source>(&mut self, slots: &Slots<S>) {
        self.own.retain(|(slot, barrier)| {
            let there = slots.is_there(*slot);
            barrier.over.fetch_or(!there, Ordering::Release);
            there
        });
    }

    /// Returns whether a barrier waits for requests of this worker, other than those of the queue whose slots `is_of`
    /// recognises. If so, no request may be left to a successor.
    pub fn anybody_waits(&self, mut is_of: impl FnMut(u32) -> bool) -> bool {
        let mut others = |asked: &Asked| {
            !self.own.iter().any(|(slot, own)| Arc::ptr_eq(own, &asked.barrier) && is_of(*slot))
        };
        self.asked.iter().any(|asked| !asked.barrier.over.load(Ordering::Acquire) && others(asked))
    }

    /// Makes the barriers of a queue urgent, because it is being stopped. `is_of` recognises its slots.
    pub fn hurry(&self, mut is_of: impl FnMut(u32) -> bool, peers: &Peers) {
        let mut any = false;
        for (_, barrier) in self.own.iter().filter(|(slot, _)| is_of(*slot)) {
            barrier.urgent.store(true, Ordering::Release);
            any = true;
        }
        if any {
            peers.each(|| Order::Wake);
        }
    }

    /// Returns whether an urgent barrier waits for the request of this number.
    #[cold]
    pub fn is_urgent(&self, number: u64) -> bool {
        let waits = |asked: &Asked| asked.mark.is_none_or(|mark| number < mark);
        self.asked.iter().any(|asked| waits(asked) && asked.barrier.urgent.load(Ordering::Acquire))
    }

    /// Checks the progress of all barriers. All ended requests must have been published, because the waiting request
    /// may be answered at once. Returns the slot of a request of this worker that no longer waits.
    pub fn look<S: Source>(&mut self, queues: &[Queue<S>], slots: &Slots<S>, peers: &Peers) -> Option<u32> {
        let (next, oldest) = slots.span();
        self.asked.retain_mut(|asked| {
            let behind = |(serial, until): &(u64, u64)| {
                queues.iter().any(|queue| queue.serial == *serial && queue.is_behind(*until))
            };
            asked.queues.retain(behind);
            if asked.queues.is_empty() {
                asked.mark.get_or_insert(next);
            }
            let is_done = asked.mark.is_some_and(|mark| oldest >= mark);
            if is_done && asked.barrier.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                peers.wake(asked.barrier.owner);
            }
            !is_done
        });
        let at = self.own.iter().position(|(_, barrier)| barrier.left.load(Ordering::Acquire) == 0)?;
        Some(self.own.swap_remove(at).0)
    }
}
