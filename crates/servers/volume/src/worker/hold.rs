//! Requests that wait for an operator, because their disk is full or has failed (`on-error = "hold"`).
//!
//! Such a request stays in flight, as if the disk had not answered yet. An operator who has made room, or has repaired
//! the disk, has the requests tried again, in the order in which they were taken, or has them fail. They delay no other
//! request: all others continue, and those that fail wait too.
//!
//! Two kinds of requests cannot wait and get the error after all: those of a queue that is stopped, unless a successor
//! takes the queue over with its requests in flight, and those that the driver aborts.
//!
//! A flush never waits. The data that it could not make durable may be lost, and trying again would hide that.

use super::Worker;
use super::queue::State;
use super::source::Source;
use crate::backend::{Failure, Op};
use tracing::{info, warn};

/// The held requests of a worker, each with its slot and the failure.
pub(super) type OnHold = Vec<(u32, Failure)>;

impl Failure {
    /// Returns whether the failure may be temporary: there is no space, or the disk has an error.
    fn may_pass(self) -> bool {
        matches!(self, Self::Errno(libc::ENOSPC | libc::EDQUOT | libc::EIO))
    }
}

impl<S: Source> Worker<S> {
    /// Holds a failed request, if it should be held. Returns whether it is.
    #[cold]
    pub(super) fn hold(&mut self, slot: u32, failure: Failure) -> bool {
        let entry = self.slots.at(slot);
        let (serial, disk, op, bytes) = (entry.serial, entry.disk, entry.op, entry.bytes());
        let holds = self.holds.get(usize::from(disk)) == Some(&true);
        if !holds || op == Op::Flush || !failure.may_pass() || self.barriers.anybody_waits(|_| false) {
            return false;
        }
        let Some(queue) = self.queues.iter_mut().find(|queue| queue.serial == serial) else { return false };
        if !matches!(queue.state, State::Running | State::Suspending) {
            return false;
        }
        self.slots.at(slot).begun = false;
        if queue.state == State::Suspending {
            // A successor will try it again.
            queue.slots -= self.slots.leave(serial);
            return true;
        }
        queue.counters.held.add(1);
        if !self.on_hold.iter().any(|(held, _)| self.slots.at(*held).disk == disk) {
            let (what, at) = (op.word(), op.at());
            warn!(
                "disk {disk}: {what} of {bytes} bytes at {at} failed: {failure}; it and others that fail wait until \
                 `ginnel volume resume`"
            );
        }
        self.on_hold.push((slot, failure));
        true
    }

    /// Tries all held requests again, or has them fail.
    pub(super) fn resume(&mut self, fail: bool) {
        if fail {
            return self.fail_held(|_| true);
        }
        let mut held = std::mem::take(&mut self.on_hold);
        if held.is_empty() {
            return;
        }
        info!("trying {} held requests again", held.len());
        held.sort_by_key(|(slot, _)| self.slots.at(*slot).number);
        self.queues.iter().for_each(|queue| queue.counters.held.set(0));
        let now = self.now();
        for (slot, failure) in held {
            let serial = self.slots.at(slot).serial;
            match self.queues.iter().position(|queue| queue.serial == serial) {
                Some(at) if self.queues[at].state == State::Running => {
                    // Its time begins again, also for the check whether writes were lost since.
                    self.slots.at(slot).began = now;
                    self.dispatch(at, slot);
                }
                _ => self.end(slot, Err(failure)),
            }
        }
    }

    /// Fails the held requests of all queues for whose serial numbers `of` returns true.
    pub(super) fn fail_held(&mut self, of: impl Fn(u64) -> bool) {
        if self.on_hold.is_empty() {
            return;
        }
        for queue in self.queues.iter().filter(|queue| of(queue.serial)) {
            queue.counters.held.set(0);
        }
        let all = std::mem::take(&mut self.on_hold);
        let (fail, stay) = all.into_iter().partition(|(slot, _)| of(self.slots.at(*slot).serial));
        self.on_hold = stay;
        let fail: OnHold = fail;
        for (slot, failure) in fail {
            self.end(slot, Err(failure));
        }
    }

    /// Forgets the held requests of one queue that were left to a successor.
    pub(super) fn forget_held(&mut self, at: usize) {
        self.on_hold.retain(|(slot, _)| self.slots.is_there(*slot));
        self.queues[at].counters.held.set(0);
    }

    fn end(&mut self, slot: u32, result: Result<(), Failure>) {
        let now = self.now();
        self.finish(slot, result, now);
    }
}
