//! A worker: one thread and the queues that it serves.
//!
//! In each turn, a worker takes the requests of each queue, hands them to the backends, collects the backends' results,
//! gives the finished requests back, and notifies the driver once for each queue. Nothing in a turn waits, takes a lock
//! or allocates. After a turn without work the thread polls again (poll), sleeps at once (interrupt), or polls for its
//! budget and then sleeps (adaptive).
//!
//! While the thread is awake it suppresses kicks. Before it sleeps it enables them and looks at the queues once more.
//! Only then does it wait, for a kick, for an order, or for a completion.

mod barrier;
mod hold;
mod mailbox;
mod orders;
mod parts;
mod queue;
mod sleep;
mod slots;
mod source;

use crate::backend::{Failure, Op, Stores};
use crate::device::Begin;
use crate::disk::Disk;
use crate::hush::Hush;
use crate::limit::{Limiter, NotBefore};
use crate::stats::{Counters, Kind, ThreadCounters};
pub use barrier::Barrier;
use barrier::Barriers;
use ginnel_volume_control::config::Wait;
use hold::OnHold;
use mailbox::Inbox;
pub(crate) use mailbox::ring;
pub use mailbox::{Event, Events, Handle, Order, Peers};
use queue::{Queue, State};
use sleep::Sleep;
use slots::Slots;
use source::Source;
pub use source::{Nvme, Requests, Start, Target, Virtqueue};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{error, warn};

/// The largest number of requests that are taken from a queue in one turn.
const BATCH: usize = 32;

/// How many bytes this thread itself copies, for a disk in memory, for one queue in one turn, give or take one request.
/// With a larger limit, a guest could delay the orders for as long as it likes, such as one that stops a queue: a
/// request may have 4 GiB.
const COPY_LIMIT: u64 = 4 << 20;

/// How long memory stays pinned after the last queue has stopped. A change that concerns all queues stops them only for
/// a moment.
const PINNED: Duration = Duration::from_millis(500);

/// The parts of which a worker is made.
pub struct Plan {
    /// The worker's number.
    pub number: usize,
    /// The device whose requests it serves.
    pub target: Target,
    /// The way to the disks. The worker enables it.
    pub stores: Stores,
    /// How it waits for requests.
    pub wait: Wait,
    /// How long an adaptive worker polls before it sleeps.
    pub budget: Duration,
    /// Whether it pins the guest's memory.
    pub pin_memory: bool,
    /// All counters; the worker writes its own.
    pub counters: Arc<Counters>,
    /// The limits of the volume.
    pub limiter: Arc<Limiter>,
    /// All workers of the volume.
    pub peers: Peers,
    /// The start of the clock for limits and latencies.
    pub epoch: Instant,
}

/// A worker, on its own thread.
struct Worker<S: Source> {
    device: S::Device,
    disks: Vec<Arc<Disk>>,
    // Dropped before the queues, because the kernel may still use the queues' memory.
    stores: Stores,
    queues: Vec<Queue<S>>,
    /// The queue from which a request is taken next when there are limits.
    next: usize,
    slots: Slots<S>,
    found: S::Found,
    /// Bytes copied so far of the current [`COPY_LIMIT`].
    copied: u64,
    inbox: Inbox,
    sleep: Sleep,
    wait: Wait,
    budget: Duration,
    epoch: Instant,
    counters: Arc<Counters>,
    limiter: Arc<Limiter>,
    peers: Peers,
    barriers: Barriers,
    /// The slots of requests that go on with another operation.
    parts: VecDeque<u32>,
    /// For each disk, whether requests that it fails wait for an operator.
    holds: Vec<bool>,
    on_hold: OnHold,
    complaints: Vec<Hush>,
    /// Whether an event was lost while the event queue does not run. The next event reports that.
    missed: bool,
    /// Whether the guest's memory is to be pinned.
    pins: bool,
    number: usize,
    over: bool,
    /// When the current turn began to work, if it has, and when it answered its finished requests (0: not yet).
    began: Option<u64>,
    ended: u64,
}

impl<S: Source> Worker<S> {
    /// `device` is that of `plan`.
    fn new(device: S::Device, mut plan: Plan, inbox: Inbox) -> io::Result<Self> {
        plan.stores.enable()?;
        let sleep = Sleep::new(inbox.fd(), plan.stores.fd())?;
        let disks = S::disks(&device);
        let pins = plan.pin_memory || plan.stores.must_pin();
        Ok(Self {
            complaints: vec![Hush::default(); disks.len()],
            holds: disks.iter().map(|disk| disk.holds_errors).collect(),
            device,
            disks,
            stores: plan.stores,
            queues: Vec::new(),
            next: 0,
            slots: Slots::default(),
            found: S::Found::default(),
            copied: 0,
            inbox,
            sleep,
            wait: plan.wait,
            budget: plan.budget,
            epoch: plan.epoch,
            counters: plan.counters,
            limiter: plan.limiter,
            peers: plan.peers,
            barriers: Barriers::default(),
            parts: VecDeque::new(),
            on_hold: OnHold::new(),
            missed: false,
            pins,
            number: plan.number,
            over: false,
            began: None,
            ended: 0,
        })
    }

    /// Serves its queues until it is ordered to end.
    pub fn run(&mut self) -> io::Result<()> {
        let counters = self.counters.threads.get(self.number).cloned().unwrap_or_default();
        let mut idle_since = None;
        while !self.over {
            self.began = None;
            let worked = self.turn()?;
            counters.turns.add(1);
            if worked {
                counters.busy_turns.add(1);
                let ended = if self.ended == 0 { self.now() } else { self.ended };
                counters.longest_turn.raise(ended.saturating_sub(self.began.unwrap_or(ended)));
                idle_since = None;
                continue;
            }
            if self.queues.iter().any(Queue::memory_is_gone) {
                self.memory_gone();
            }
            if self.may_sleep(|worker| {
                let now = worker.now();
                now - *idle_since.get_or_insert(now)
            }) {
                self.sleep(&counters)?;
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    /// Returns the time since the epoch, in nanoseconds.
    #[inline]
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// Returns the time at which the current turn began to work. The clock is read once for all requests of a turn, and
    /// not at all in a turn without requests: reading it costs as much as a request that does nothing.
    #[inline]
    fn began(&mut self) -> u64 {
        if let Some(began) = self.began {
            return began;
        }
        let now = self.now();
        self.began = Some(now);
        now
    }

    /// Does one turn. Returns whether there was any work.
    #[inline]
    fn turn(&mut self) -> io::Result<bool> {
        let mut worked = false;
        self.ended = 0;
        if self.inbox.has_orders() {
            self.began();
            self.execute_orders();
            worked = true;
        }
        if !self.parts.is_empty() {
            self.began();
            self.go_on();
            worked = true;
        }
        if self.limiter.limits() {
            worked |= self.take_in_turns();
        } else {
            for at in 0..self.queues.len() {
                worked |= self.take(at, BATCH);
                if self.copied >= COPY_LIMIT && self.inbox.has_orders() {
                    break;
                }
            }
        }
        self.stores.submit()?;
        worked |= self.reap();
        if !self.barriers.is_empty() {
            worked |= self.check_barriers();
        }
        if worked {
            for queue in &mut self.queues {
                queue.publish();
            }
            self.answer_stops();
        }
        Ok(worked)
    }

    /// Takes requests as [`take`](Self::take) does, but one request from each queue at a time, starting behind the last
    /// queue that had one. Otherwise the first queue would get all of the allowance that accumulates while this thread
    /// does not run.
    fn take_in_turns(&mut self) -> bool {
        let count = self.queues.len();
        let (mut worked, mut refused) = (false, 0);
        for _ in 0..count * BATCH {
            if refused == count || (self.copied >= COPY_LIMIT && self.inbox.has_orders()) {
                break;
            }
            let at = self.next % count;
            self.next = at + 1;
            if self.take(at, 1) {
                (worked, refused) = (true, 0);
            } else {
                refused += 1;
            }
        }
        worked
    }

    /// Takes at most `batch` requests from a queue and begins them. Returns whether there was any work.
    #[inline]
    fn take(&mut self, at: usize, batch: usize) -> bool {
        let mut taken = 0;
        self.copied = 0;
        while taken < batch && self.copied < COPY_LIMIT {
            let queue = &mut self.queues[at];
            if let Some(slot) = queue.held.take() {
                let now = self.began();
                if !self.pass(at, slot, now) {
                    return taken > 0;
                }
                taken += 1;
                self.dispatch(at, slot);
                continue;
            }
            if !queue.takes() {
                return taken > 0 || queue.tell_missed(&mut self.found);
            }
            let ticket = match queue.source.take(&queue.memory, &mut self.found) {
                Ok(Some(ticket)) => ticket,
                Ok(None) => return taken > 0,
                Err(why) => {
                    queue.broken(&why.to_string());
                    return true;
                }
            };
            taken += 1;
            let now = self.began();
            let queue = &mut self.queues[at];
            queue.counters.taken.add(1);
            let slot = self.slots.free();
            let entry = self.slots.at(slot);
            let (source, request) = (&queue.source, &mut entry.request);
            match source.begin(&self.device, queue.index, &queue.memory, &self.found, request) {
                Begin::Done(answer) => {
                    queue.counters.done(Kind::Other, 0, self.epoch.elapsed().as_nanos() as u64 - now, true);
                    queue.give_back(ticket, answer);
                }
                Begin::Do { disk, op } => {
                    entry.begin(ticket, at, queue.serial, disk, op, now);
                    self.slots.occupy(slot);
                    queue.slots += 1;
                    if !self.pass(at, slot, now) {
                        self.queues[at].counters.throttled.add(1);
                        return true;
                    }
                    self.dispatch(at, slot);
                }
                Begin::Barrier => {
                    entry.begin(ticket, at, queue.serial, 0, Op::Flush, now);
                    entry.is_barrier = true;
                    self.slots.occupy(slot);
                    queue.slots += 1;
                    let urgent = queue.state != State::Running;
                    self.barriers.begin(slot, self.number, urgent, &self.peers);
                }
            }
        }
        true
    }

    /// Checks which barriers are complete. Returns whether one of this worker's own requests was.
    #[cold]
    fn check_barriers(&mut self) -> bool {
        let mut done = false;
        self.queues.iter_mut().for_each(Queue::publish);
        while let Some(slot) = self.barriers.look(&self.queues, &self.slots, &self.peers) {
            let now = self.now();
            self.complete(slot, Ok(()), now);
            done = true;
        }
        done
    }

    /// Returns whether the volume's limits let a request go now; if not, the queue holds it. A request that a stop
    /// waits for goes at once, and its cost is charged afterwards.
    #[inline]
    fn pass(&mut self, at: usize, slot: u32, now: u64) -> bool {
        !self.limiter.limits() || self.pass_limited(at, slot, now)
    }

    fn pass_limited(&mut self, at: usize, slot: u32, now: u64) -> bool {
        let queue = &mut self.queues[at];
        let entry = self.slots.at(slot);
        let bytes = entry.bytes() + self.stores.zeros_written(entry.disk, entry.op);
        entry.counted = bytes;
        let number = entry.number;
        match queue.limit.pass(now, bytes) {
            Ok(()) => true,
            Err(NotBefore(_)) if queue.state != State::Running || self.barriers.is_urgent(number) => {
                queue.limit.owe(now, 1, bytes);
                true
            }
            Err(NotBefore(then)) => {
                queue.held = Some(slot);
                queue.ready_at = then;
                false
            }
        }
    }

    /// Hands a request to its backend.
    #[inline]
    fn dispatch(&mut self, at: usize, slot: u32) {
        let queue = &self.queues[at];
        let entry = self.slots.at(slot);
        entry.begun = true;
        let (disk, op) = (entry.disk, entry.op);
        let bytes = op.span().unwrap_or(entry.bytes());
        if let Some(result) = self.stores.start(slot, disk, op, S::data(&entry.request), &queue.memory) {
            self.copied = self.copied.saturating_add(bytes);
            // The driver sees it at the end of the turn together with all others, so it is also answered then.
            self.slots.done.push((slot, result));
        }
    }

    /// Answers the requests that have finished in this turn, with one reading of the clock for all.
    #[inline]
    fn reap(&mut self) -> bool {
        if self.stores.pending() == 0 && self.slots.done.is_empty() {
            return false;
        }
        let mut done = std::mem::take(&mut self.slots.done);
        self.stores.reap(|slot, result| done.push((slot, result)));
        let worked = !done.is_empty();
        if worked {
            let now = self.now();
            self.ended = now;
            for (slot, result) in done.drain(..) {
                self.complete(slot, result, now);
            }
        }
        self.slots.done = done;
        worked
    }

    /// Handles the disk's result for a request.
    #[inline]
    fn complete(&mut self, slot: u32, result: Result<(), Failure>, now: u64) {
        let stays = match result {
            Ok(()) => S::has_more(&self.slots.at(slot).request) && self.goes_on(slot),
            Err(failure) => self.hold(slot, failure),
        };
        if stays {
            return;
        }
        self.finish(slot, result, now);
    }

    /// Answers a request and gives it back to the driver.
    #[inline]
    fn finish(&mut self, slot: u32, result: Result<(), Failure>, now: u64) {
        let entry = self.slots.at(slot);
        let Some(ticket) = entry.ticket.take() else { return };
        let (at, serial, disk, op) = (entry.queue, entry.serial, entry.disk, entry.op);
        let (bytes, began, counted) = (entry.bytes(), entry.began, entry.counted);
        let result = if op.is_durable() { self.judge(disk, began, result) } else { result };
        if let Err(failure) = result {
            self.complain(disk, op.word(), op.at(), bytes, failure);
        }
        let entry = self.slots.at(slot);
        // A queue's index in the list changes when another queue ends.
        let queue = match self.queues.get_mut(at) {
            Some(queue) if queue.serial == serial => queue,
            _ => match self.queues.iter_mut().find(|queue| queue.serial == serial) {
                Some(queue) => queue,
                None => return self.slots.release(slot),
            },
        };
        // For the first zeros, it is known only now that the disk had to write them.
        let zeros = self.stores.zeros_written(disk, op);
        if zeros > counted {
            queue.limit.owe(now, 0, zeros - counted);
        }
        let answer = queue.source.finish(&self.device, &queue.memory, &entry.request, op, result);
        queue.counters.done(kind(op), bytes, now.saturating_sub(began), result.is_ok());
        queue.slots -= 1;
        queue.give_back(ticket, answer);
        self.slots.release(slot);
    }

    /// Returns the result that the driver gets for an operation that had to make data durable.
    fn judge(&self, disk: u16, began: u64, result: Result<(), Failure>) -> Result<(), Failure> {
        let Some(state) = self.disks.get(usize::from(disk)) else { return result };
        match result {
            Err(Failure::Lost(_)) => {
                let lost = self.stores.that_share_its_cache(disk);
                lost.filter_map(|disk| self.disks.get(disk)).for_each(|disk| disk.lose());
                result
            }
            Ok(()) if !state.makes_durable(began) => Err(Failure::LostEarlier),
            _ => result,
        }
    }

    /// Logs the first failure of a disk, and later at intervals one with the number of failures since.
    #[cold]
    fn complain(&mut self, disk: u16, what: &str, at: u64, bytes: u64, failure: Failure) {
        let Some(complaint) = self.complaints.get_mut(usize::from(disk)) else { return };
        let Some(before) = complaint.allows(Instant::now()) else { return };
        let more = if before > 0 {
            format!(", after {before} other failures since the last message")
        } else {
            String::new()
        };
        warn!("disk {disk}: {what} of {bytes} bytes at {at} failed: {failure}{more}");
    }

    #[inline]
    fn may_sleep(&self, idle: impl FnOnce(&Self) -> u64) -> bool {
        let patient = match self.wait {
            Wait::Poll => return self.queues.is_empty(),
            Wait::Interrupt => true,
            Wait::Adaptive => {
                self.queues.is_empty() || has_looked_enough(idle(self), self.budget, self.stores.pending())
            }
        };
        patient && !self.stores.must_poll() && !self.queues.iter().any(Queue::must_poll)
    }

    fn sleep(&mut self, counters: &ThreadCounters) -> io::Result<()> {
        // All queues are armed, even if an earlier one has work already: all of them are disarmed below.
        let mut work = self.stores.arm();
        for queue in &mut self.queues {
            work |= queue.arm();
        }
        let until = self.queues.iter().filter(|q| q.held.is_some()).map(|q| q.ready_at).min();
        let now = self.now();
        if !work && !self.inbox.has_orders() && until.is_none_or(|then| then > now) {
            counters.sleeps.add(1);
            let unused = self.queues.is_empty() && self.stores.is_pinned();
            let until = until.map(|then| Duration::from_nanos(then - now));
            self.sleep.sleep(until.or(unused.then_some(PINNED)), &self.queues)?;
            if unused && !self.inbox.has_orders() {
                self.stores.pin(None);
            }
        }
        self.stores.disarm();
        for queue in &mut self.queues {
            queue.disarm();
        }
        Ok(())
    }

    #[cold]
    fn memory_gone(&mut self) {
        for queue in &mut self.queues {
            if queue.memory_is_gone() && queue.state == State::Running {
                queue.broken("the front end's memory has disappeared: its file was truncated");
            }
        }
        self.inbox.tell(Event::MemoryGone);
    }
}

impl<S: Source> Drop for Worker<S> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            error!(
                "a worker has failed; the volume ends, and its front end may connect to the volume's next process"
            );
        }
    }
}

/// Returns whether an adaptive thread that has found nothing for `idle` nanoseconds should sleep. The requests at the
/// disks share the budget: while the thread wakes up for one of them, the disks continue with the others, so the more
/// requests there are, the less the wake-up costs.
#[inline]
fn has_looked_enough(idle: u64, budget: Duration, at_disks: u32) -> bool {
    u128::from(idle) * u128::from(at_disks.max(1)) >= budget.as_nanos()
}

/// Returns the kind as which an operation is counted.
fn kind(op: Op) -> Kind {
    match op {
        Op::Read { .. } => Kind::Read,
        Op::Write { .. } => Kind::Write,
        Op::Flush => Kind::Flush,
        Op::Discard { .. } => Kind::Discard,
        Op::WriteZeroes { .. } => Kind::WriteZeroes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_is_at_the_disks_the_sooner_a_thread_sleeps() {
        let budget = Duration::from_micros(50);
        for (idle, at_disks, enough) in [
            (49_999, 0, false),
            (50_000, 0, true),
            (49_999, 1, false),
            (50_000, 1, true),
            (12_500, 4, true),
            (12_499, 4, false),
            (1_562, 32, false),
            (1_563, 32, true),
        ] {
            assert_eq!(has_looked_enough(idle, budget, at_disks), enough, "{idle} ns, {at_disks}");
        }
        assert!(has_looked_enough(0, Duration::ZERO, 0));
        assert!(has_looked_enough(u64::MAX, Duration::MAX, u32::MAX));
    }
}
