//! The mailboxes of workers: orders to a worker, and events from it.

use super::barrier::Barrier;
use super::source::{Nvme, Source, Start, Target, Virtqueue};
use super::{Plan, Worker};
use ginnel_layout::virtio_scsi;
use ginnel_volume_control::QueueState;
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tracing::error;

/// How long a worker may take to stop a queue. Its disk may be slow; after this time it counts as stuck.
const PATIENCE: Duration = Duration::from_secs(60);

/// An order to a worker.
pub enum Order {
    /// Serve a queue.
    Start(Box<Start>),
    /// Stop serving a queue. The answer is its base, and comes after all requests that were taken are given back.
    Stop {
        /// Number of the queue.
        index: u16,
        /// Leave requests that have not been begun in the in-flight region.
        suspend: bool,
        /// The channel for the answer.
        answer: SyncSender<u32>,
    },
    /// Use another call descriptor for a queue.
    Call {
        /// Number of the queue.
        index: u16,
        /// The descriptor; without one, the driver is not called.
        call: Option<Arc<OwnedFd>>,
    },
    /// Report an event to the driver.
    Tell {
        /// Number of the event queue.
        index: u16,
        /// The event to report.
        event: virtio_scsi::Event,
    },
    /// Look at the queues again: the limits have changed, or a barrier may be complete.
    Wake,
    /// Report when all earlier requests have ended.
    Barrier(Arc<Barrier>),
    /// Retry the held requests, or make them fail.
    Resume {
        /// Whether the requests fail instead of being retried.
        fail: bool,
    },
    /// Report the state of the queues.
    Dump {
        /// The channel for the answer.
        answer: SyncSender<Vec<QueueState>>,
    },
    /// End the thread. All queues have been stopped.
    End,
}

/// An event that a worker reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The memory of the front end has disappeared.
    MemoryGone,
    /// A worker has ended without an order.
    Failed,
}

/// A worker, as other threads see it.
pub struct Handle {
    orders: Sender<Order>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
    /// The reason why a queue could not be stopped in time, once that has happened.
    stuck: OnceLock<String>,
}

pub(super) struct Bell {
    has_orders: AtomicBool,
    wake: OwnedFd,
}

/// The workers as they reach each other. Empty until all are started.
#[derive(Clone, Default)]
pub struct Peers(Arc<OnceLock<Vec<Peer>>>);

type Peer = (Sender<Order>, Arc<Bell>);

impl Peers {
    /// Sets the list of all workers, in the order of their numbers. Called once.
    pub fn introduce(&self, workers: &[Handle]) {
        let all = workers.iter().map(|worker| (worker.orders.clone(), worker.bell.clone())).collect();
        // The list is set only once, so this cannot fail.
        let _ = self.0.set(all);
    }

    pub(super) fn count(&self) -> usize {
        self.0.get().map_or(0, Vec::len)
    }

    pub(super) fn each(&self, order: impl Fn() -> Order) {
        for (orders, bell) in self.0.get().into_iter().flatten() {
            post(orders, bell, order());
        }
    }

    pub(super) fn wake(&self, number: usize) {
        if let Some((orders, bell)) = self.0.get().and_then(|all| all.get(number)) {
            post(orders, bell, Order::Wake);
        }
    }
}

fn post(orders: &Sender<Order>, bell: &Bell, order: Order) {
    // Fails only if the worker has ended, which it has reported.
    let _ = orders.send(order);
    bell.has_orders.store(true, Ordering::SeqCst);
    ring(&bell.wake);
}

/// The receiving end of events: a channel, and a descriptor that is readable when there are events.
pub struct Events {
    receiver: Receiver<Event>,
    sender: Sender<Event>,
    wake: Arc<OwnedFd>,
}

impl Events {
    /// Creates the channel and its descriptor.
    pub fn new() -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        Ok(Self { receiver, sender, wake: Arc::new(new_eventfd()?) })
    }

    /// Returns the next event, if there is one.
    pub fn next(&self) -> Option<Event> {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        self.receiver.try_recv().ok()
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// The worker's end of its mailbox.
pub(super) struct Inbox {
    orders: Receiver<Order>,
    bell: Arc<Bell>,
    events: Sender<Event>,
    events_wake: Arc<OwnedFd>,
}

impl Inbox {
    #[inline]
    pub fn has_orders(&self) -> bool {
        self.bell.has_orders.load(Ordering::Acquire)
    }

    pub fn next(&self) -> Option<Order> {
        // Cleared before the channel is read, so that an order that arrives afterwards is seen the next time.
        self.bell.has_orders.store(false, Ordering::SeqCst);
        self.orders.try_recv().ok()
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.wake.as_fd()
    }

    pub fn tell(&self, event: Event) {
        // Nobody receives events while the process ends.
        let _ = self.events.send(event);
        ring(&self.events_wake);
    }
}

impl Handle {
    /// Starts a worker, bound to `cpu` if that is given, and waits until it is ready.
    pub fn start(plan: Plan, cpu: Option<usize>, events: &Events) -> io::Result<Self> {
        let (orders, inbox) = mpsc::channel();
        let bell = Arc::new(Bell { has_orders: AtomicBool::new(false), wake: new_eventfd()? });
        let inbox = Inbox {
            orders: inbox,
            bell: bell.clone(),
            events: events.sender.clone(),
            events_wake: events.wake.clone(),
        };
        let (ready, is_ready) = mpsc::sync_channel(1);
        let name = format!("volume-{}", plan.number);
        let thread = thread::Builder::new().name(name).spawn(move || match plan.target.clone() {
            Target::Virtio(device) => work::<Virtqueue>(device, plan, cpu, inbox, &ready),
            Target::Nvme(namespace) => work::<Nvme>(namespace, plan, cpu, inbox, &ready),
        })?;
        is_ready.recv().map_err(|_| io::Error::other("a worker has ended before it began"))??;
        Ok(Self { orders, bell, thread: Some(thread), stuck: OnceLock::new() })
    }

    /// Sends an order, and wakes the worker.
    pub fn send(&self, order: Order) {
        post(&self.orders, &self.bell, order);
    }

    /// Stops a queue, and returns its base. Blocks for at most a minute. A worker that has once exceeded that time is
    /// not waited for again.
    pub fn stop(&self, index: u16, suspend: bool) -> Result<u32, String> {
        self.stop_within(PATIENCE, index, suspend)
    }

    fn stop_within(&self, patience: Duration, index: u16, suspend: bool) -> Result<u32, String> {
        if let Some(why) = self.stuck.get() {
            return Err(why.clone());
        }
        let (answer, base) = mpsc::sync_channel(1);
        self.send(Order::Stop { index, suspend, answer });
        base.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                let seconds = patience.as_secs();
                let why = format!(
                    "queue {index} has requests that the disk has not answered for {seconds} seconds"
                );
                self.stuck.get_or_init(|| why).clone()
            }
            RecvTimeoutError::Disconnected => format!("the worker of queue {index} has failed"),
        })
    }

    /// Returns the state of its queues, or nothing if it does not answer within five seconds.
    pub fn dump(&self) -> Vec<QueueState> {
        let (answer, states) = mpsc::sync_channel(1);
        self.send(Order::Dump { answer });
        states.recv_timeout(Duration::from_secs(5)).unwrap_or_default()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.send(Order::End);
        if let Some(thread) = self.thread.take() {
            // A panic was reported where it happened.
            let _ = thread.join();
        }
    }
}

/// Reports that a worker has ended without an order, for whatever reason.
struct FailureNotice {
    events: Sender<Event>,
    wake: Arc<OwnedFd>,
    /// Whether there is nothing to report: the worker was ordered to end, or has returned the error of its start.
    told: bool,
}

impl Drop for FailureNotice {
    fn drop(&mut self) {
        if !self.told {
            let _ = self.events.send(Event::Failed);
            ring(&self.wake);
        }
    }
}

/// A worker's thread, from its beginning to its end.
fn work<S: Source>(
    device: S::Device,
    plan: Plan,
    cpu: Option<usize>,
    inbox: Inbox,
    ready: &SyncSender<io::Result<()>>,
) {
    let number = plan.number;
    let (events, wake) = (inbox.events.clone(), inbox.events_wake.clone());
    let mut failed = FailureNotice { events, wake, told: false };
    let worker = pin(cpu).and_then(|()| Worker::<S>::new(device, plan, inbox));
    let mut worker = match worker {
        Ok(worker) => {
            let _ = ready.send(Ok(()));
            worker
        }
        Err(error) => {
            let _ = ready.send(Err(error));
            failed.told = true;
            return;
        }
    };
    match worker.run() {
        Ok(()) => failed.told = true,
        Err(error) => error!("worker {number} cannot go on: {error}"),
    }
}

fn pin(cpu: Option<usize>) -> io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::other(format!("there is no CPU {cpu}; see cpus")));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
        .map_err(|e| io::Error::other(format!("a thread cannot be bound to CPU {cpu}: {e}; see cpus")))
}

fn new_eventfd() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes an eventfd readable. Fails only if its counter is full, and then it is readable already.
pub(crate) fn ring(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stuck_worker_is_waited_for_only_once() {
        let (orders, inbox) = mpsc::channel();
        let bell = Arc::new(Bell { has_orders: AtomicBool::new(false), wake: new_eventfd().unwrap() });
        let worker = Handle { orders, bell, thread: None, stuck: OnceLock::new() };
        let why = worker.stop_within(Duration::ZERO, 3, false).unwrap_err();
        assert!(why.contains("queue 3"), "{why}");
        assert_eq!(worker.stop(4, false), Err(why));
        assert_eq!(inbox.try_iter().count(), 1, "it was told twice");
    }
}
