//! Completion queues.
//!
//! Completions of sends are in private memory, because the thread that posts a request also executes it. Completions of receives lie in
//! the rings of their queue pairs, where the peers write them.

use crate::lock::{Lock, Locked};
use crate::program::ProgramMemory;
use crate::queue_pair::QueuePair;
use crate::shared_receive_queue::SharedReceiveQueue;
use crate::work::{Completed, Status};
use ginnel_layout::verbs::{Armed, QpNumber};
use ginnel_shmem::SharedMemory;
use std::collections::VecDeque;
use std::sync::Arc;

/// Types that the loom model replaces.
#[cfg(loom)]
mod seen {
    pub use loom::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};
    pub use loom::sync::{Mutex as Lock, MutexGuard as Locked};

    pub fn locked<T>(lock: &Lock<T>) -> Locked<'_, T> {
        lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
#[cfg(not(loom))]
mod seen {
    pub use crate::lock::{Lock, Locked};
    pub use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};

    pub fn locked<T>(lock: &Lock<T>) -> Locked<'_, T> {
        lock.lock()
    }
}
use seen::{AtomicU32, AtomicUsize, Ordering, fence};

/// Number of polls without a result between two checks for rare events, such as the death of a peer.
const LOOKS: u32 = 256;

/// Number of polls between two attempts of requests that wait.
const PROGRESS: u32 = 64;

/// Number of bytes that one poll copies for peers before it looks for completions again. The last piece may exceed it.
const HELP: usize = 512 << 10;

/// Increments a counter that need not be exact: of two increments at the same time, one may be lost. Returns the earlier value.
#[inline]
fn count(counter: &AtomicU32) -> u32 {
    let before = counter.load(Ordering::Relaxed);
    counter.store(before.wrapping_add(1), Ordering::Relaxed);
    before
}

/// A queue pair that uses this completion queue.
struct Member<M: SharedMemory> {
    queue_pair: Arc<QueuePair<M>>,
    /// Whether its receives complete here.
    receives: bool,
}

struct Members<M: SharedMemory> {
    pairs: Vec<Member<M>>,
    /// The shared receive queues of these queue pairs, each once.
    shared: Vec<Arc<SharedReceiveQueue<M>>>,
    /// The number of offered copies when this side last had none left to help with.
    offers: u64,
}

impl<M: SharedMemory> Members<M> {
    /// Helps with the copies that peers have offered to share since the last look.
    #[inline]
    fn help(&mut self) {
        let offers = self.pairs.first().map_or(0, |member| member.queue_pair.offers());
        if offers != self.offers {
            self.help_all(offers);
        }
    }

    #[cold]
    fn help_all(&mut self, offers: u64) {
        let mut most = HELP;
        let left = self.pairs.iter().filter(|member| member.queue_pair.help(&mut most)).count();
        if left == 0 {
            self.offers = offers;
        }
    }

    fn gather_shared(&mut self) {
        self.shared.clear();
        for member in self.pairs.iter().filter(|member| member.receives) {
            if let Some(shared) = member.queue_pair.shared()
                && !self.shared.iter().any(|known| Arc::ptr_eq(known, shared))
            {
                self.shared.push(shared.clone());
            }
        }
    }
}

/// A completion queue.
pub struct CompletionQueue<M: SharedMemory> {
    capacity: AtomicUsize,
    ready: seen::Lock<VecDeque<Completed>>,
    /// Length of `ready`.
    count: AtomicUsize,
    members: Lock<Members<M>>,
    /// Number of polls that have found nothing.
    empty: AtomicU32,
    polls: AtomicU32,
    events: Option<Events>,
}

/// The notification of the program about completions for which it has armed the queue.
struct Events {
    /// The completions for which the program has requested a notification that has not been sent yet: [`NOTHING`], [`ANY`] or
    /// [`SOLICITED`].
    armed: AtomicU32,
    /// How often the program has asked.
    count: AtomicU32,
    tell: Box<dyn Fn() + Send + Sync>,
}

const NOTHING: u32 = 0;
const ANY: u32 = 1;
const SOLICITED: u32 = 2;

impl<M: SharedMemory> CompletionQueue<M> {
    /// Returns a queue for up to `capacity` completions of sends.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: AtomicUsize::new(capacity),
            ready: seen::Lock::new(VecDeque::new()),
            count: AtomicUsize::new(0),
            members: Lock::new(Members { pairs: Vec::new(), shared: Vec::new(), offers: 0 }),
            empty: AtomicU32::new(0),
            polls: AtomicU32::new(0),
            events: None,
        }
    }

    /// Returns a queue that calls `tell` once after each [`CompletionQueue::arm`], from any thread.
    pub fn with_events(capacity: usize, tell: Box<dyn Fn() + Send + Sync>) -> Self {
        let events = Events { armed: AtomicU32::new(NOTHING), count: AtomicU32::new(0), tell };
        Self { events: Some(events), ..Self::new(capacity) }
    }

    /// Returns whether the program can ask to be told of completions.
    pub fn has_events(&self) -> bool {
        self.events.is_some()
    }

    /// Asks to be told of the next completion; with `solicited_only`, of the next one that is solicited or an error. A completion may
    /// already be there for which there will be no notification, so the program must poll afterwards.
    pub fn arm(&self, solicited_only: bool) {
        let Some(events) = &self.events else { return };
        let members = self.members();
        let count = events.count.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        // A request for solicited completions does not cancel an earlier request for any completion.
        let is_any = events.armed.load(Ordering::Relaxed) == ANY || !solicited_only;
        // ORDER verbs.events: the request is visible before the program's next poll. Pairs with: `CompletionQueue::tell`.
        events.armed.store(if is_any { ANY } else { SOLICITED }, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        for member in members.pairs.iter().filter(|member| member.receives) {
            member.queue_pair.arm(Armed::new(count, !is_any));
        }
    }

    /// Tells the program of a completion that was added, if it asked for that.
    pub(crate) fn tell(&self, is_solicited: bool) {
        let Some(events) = &self.events else { return };
        // ORDER verbs.events: the added completions are visible before this load. Pairs with: `CompletionQueue::arm`.
        fence(Ordering::SeqCst);
        let armed = events.armed.load(Ordering::SeqCst);
        if armed == ANY || armed == SOLICITED && is_solicited {
            self.fire(events);
        }
    }

    fn fire(&self, events: &Events) {
        if events.armed.swap(NOTHING, Ordering::SeqCst) != NOTHING {
            (events.tell)();
        }
    }

    /// Does the work of polling while the program sleeps: tries waiting requests again, detects peers that have died, and tells the
    /// program of completions. Returns whether requests wait.
    pub fn attend(&self, program: &impl ProgramMemory<M>) -> bool {
        let mut is_waiting = false;
        let members = self.members();
        for member in &members.pairs {
            member.queue_pair.look();
            member.queue_pair.progress(program);
            is_waiting |= member.queue_pair.is_waiting();
        }
        let Some(events) = &self.events else { return is_waiting };
        for shared in &members.shared {
            shared.poll(program, usize::MAX);
        }
        let solicited_only = match events.armed.load(Ordering::SeqCst) {
            NOTHING => return is_waiting,
            armed => armed == SOLICITED,
        };
        let receivers = || members.pairs.iter().filter(|member| member.receives);
        let has_received = || receivers().any(|member| member.queue_pair.has_received(solicited_only));
        if !has_received() {
            // The program has already polled the completions for which this thread was woken. The peers still think that the program is
            // awake, so this tells them that it sleeps.
            let count = events.count.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
            receivers().for_each(|member| member.queue_pair.arm(Armed::new(count, solicited_only)));
        }
        if has_received() {
            self.fire(events);
        }
        is_waiting
    }

    /// Returns the capacity.
    pub fn capacity(&self) -> usize {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Changes the capacity. Returns false, and changes nothing, if the queue holds more completions than that.
    pub fn resize(&self, capacity: usize) -> bool {
        let ready = self.ready();
        let fits = ready.len() <= capacity;
        if fits {
            self.capacity.store(capacity, Ordering::Relaxed);
        }
        fits
    }

    /// Returns whether no queue pair uses the queue.
    pub fn is_unused(&self) -> bool {
        self.members().pairs.is_empty()
    }

    fn ready(&self) -> seen::Locked<'_, VecDeque<Completed>> {
        seen::locked(&self.ready)
    }

    fn members(&self) -> Locked<'_, Members<M>> {
        self.members.lock()
    }

    pub(crate) fn add(&self, queue_pair: &Arc<QueuePair<M>>, receives: bool) {
        let mut members = self.members();
        members.pairs.push(Member { queue_pair: queue_pair.clone(), receives });
        members.gather_shared();
        if let Some(events) = self.events.as_ref().filter(|_| receives) {
            let armed = events.armed.load(Ordering::SeqCst);
            if armed != NOTHING {
                // The program asked before this queue pair was created.
                queue_pair.arm(Armed::new(events.count.load(Ordering::Relaxed), armed == SOLICITED));
            }
        }
    }

    pub(crate) fn remove(&self, queue_pair: &Arc<QueuePair<M>>) {
        let mut members = self.members();
        members.pairs.retain(|member| !Arc::ptr_eq(&member.queue_pair, queue_pair));
        members.gather_shared();
        drop(members);
        self.purge(queue_pair.number());
    }

    /// Drops the completions of a queue pair that ends or is reset, because the program could not distinguish them from later ones.
    pub(crate) fn purge(&self, number: QpNumber) {
        let mut ready = self.ready();
        ready.retain(|completed| completed.queue_pair != number);
        self.count.store(ready.len(), Ordering::Release);
    }

    /// Returns whether there is no room for another completion of a send.
    pub(crate) fn is_full(&self) -> bool {
        self.count.load(Ordering::Relaxed) >= self.capacity()
    }

    pub(crate) fn push(&self, completed: Completed) {
        let is_error = completed.status != Status::SUCCESS;
        self.add_received(completed, is_error);
    }

    pub(crate) fn add_received(&self, completed: Completed, is_solicited: bool) {
        let is_error = completed.status != Status::SUCCESS;
        let mut ready = self.ready();
        ready.push_back(completed);
        self.count.store(ready.len(), Ordering::Release);
        drop(ready);
        self.tell(is_solicited || is_error);
    }

    /// Puts back completions that were taken last, so that they are the next ones again.
    pub fn put_back(&self, completions: impl DoubleEndedIterator<Item = Completed>) {
        let mut ready = self.ready();
        completions.rev().for_each(|completed| ready.push_front(completed));
        self.count.store(ready.len(), Ordering::Release);
    }

    /// Takes up to `most` completions, and hands each to `each`. Returns how many there were.
    pub fn poll(
        &self,
        program: &impl ProgramMemory<M>,
        most: usize,
        mut each: impl FnMut(Completed),
    ) -> usize {
        let found = self.take(program, most, &mut each);
        // `has_rested` may have let other processes run, so this looks again: a program that learns by other means that its peer has
        // ended relies on the queue being empty then.
        if found == 0 && self.has_rested() { self.take(program, most, &mut each) } else { found }
    }

    #[inline]
    fn take(&self, program: &impl ProgramMemory<M>, most: usize, mut each: impl FnMut(Completed)) -> usize {
        let mut found = self.take_ready(most, &mut each);
        if found < most {
            let mut members = self.members();
            for member in members.pairs.iter().filter(|member| member.receives) {
                while found < most
                    && let Some(completed) = member.queue_pair.poll_receive(program)
                {
                    each(completed);
                    found += 1;
                }
            }
            if !members.shared.is_empty() && found < most {
                for shared in &members.shared {
                    shared.poll(program, most - found);
                }
                found += self.take_ready(most - found, &mut each);
            }
            // This happens from time to time even if the queue is never empty.
            let is_due = count(&self.polls).is_multiple_of(PROGRESS);
            if found == 0 || is_due {
                for member in &members.pairs {
                    member.queue_pair.progress(program);
                }
                if found == 0 {
                    members.help();
                }
                drop(members);
                found += self.take_ready(most - found, &mut each);
            }
        }
        found
    }

    fn take_ready(&self, most: usize, each: &mut impl FnMut(Completed)) -> usize {
        if self.count.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut ready = self.ready();
        let found = ready.len().min(most);
        ready.drain(..found).for_each(each);
        self.count.store(ready.len(), Ordering::Release);
        found
    }

    /// Is called when nothing was found. Returns whether it has let other processes run.
    fn has_rested(&self) -> bool {
        let is_due = count(&self.empty) % LOOKS == LOOKS - 1;
        if is_due {
            self.look();
        }
        is_due
    }

    #[cold]
    fn look(&self) {
        for member in &self.members().pairs {
            member.queue_pair.look();
        }
        // If the peer shares the CPU with this thread, it would otherwise have to wait for the end of this thread's time slice.
        std::thread::yield_now();
    }
}

/// A loom model of a thread that adds completions while the program asks to be told of them.
#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::work::Opcode;
    use ginnel_layout::verbs::QpNumber;
    use ginnel_shmem::LoomMemory;
    use loom::sync::Condvar;
    use loom::thread;

    /// The memory of a program that uses none.
    struct Nothing;

    impl ProgramMemory<LoomMemory> for Nothing {
        fn copy_in(&self, _: u64, _: &LoomMemory, _: usize, _: usize, _: bool) {}
        fn copy_out(&self, _: &LoomMemory, _: usize, _: u64, _: usize) {}
        fn get(&self, _: u64, _: &mut [u8]) {}
        fn put(&self, _: u64, _: &[u8]) {}
        fn deliver(&self, _: &LoomMemory, _: usize, _: u64, _: usize) {}
        fn compare_exchange(&self, _: u64, _: u64, _: u64) -> u64 {
            0
        }
        fn fetch_add(&self, _: u64, _: u64) -> u64 {
            0
        }
        fn is_there(&self, _: u64, _: usize, _: bool) -> bool {
            true
        }
    }

    fn completed(id: u64) -> Completed {
        Completed {
            id,
            status: Status::SUCCESS,
            opcode: Opcode::SEND,
            length: 0,
            immediate: None,
            queue_pair: QpNumber(0),
            source: QpNumber(0),
            lid: 0,
        }
    }

    /// The program arms, polls, and sleeps until it is told, until it has all completions. A completion without a notification would be
    /// a deadlock.
    #[test]
    fn no_completion_is_added_without_a_notification() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(Some(3));
        builder.check(|| {
            let told = Arc::new((seen::Lock::new(false), Condvar::new()));
            let tell = {
                let told = told.clone();
                move || {
                    *told.0.lock().unwrap() = true;
                    told.1.notify_one();
                }
            };
            let queue = Arc::new(CompletionQueue::<LoomMemory>::with_events(4, Box::new(tell)));
            let adder = {
                let queue = queue.clone();
                thread::spawn(move || (0..2).for_each(|id| queue.push(completed(id))))
            };
            let mut next = 0;
            while next < 2 {
                queue.arm(false);
                let found = queue.poll(&Nothing, 2, |completed| {
                    assert_eq!(completed.id, next);
                    next += 1;
                });
                let mut is_told = told.0.lock().unwrap();
                while found == 0 && !*is_told {
                    is_told = told.1.wait(is_told).unwrap();
                }
                *is_told = false;
            }
            adder.join().unwrap();
        });
    }
}
