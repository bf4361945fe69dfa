//! How a worker is told what to do, and tells what has happened.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ginnel_layout::virtio_scsi;
use ginnel_volume_control::QueueState;
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, sched_setaffinity};
use tracing::error;

use super::settle::Settling;
use super::{Plan, Worker};
use crate::session::Start;

/// How long a worker may take for what it is asked. Its disk may be slow; beyond this it is taken to be stuck.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a worker is told.
pub enum Order {
    /// Serve a queue.
    Start(Box<Start>),
    /// Serve a queue no more; the answer is its base, once all that was taken is given back.
    Stop {
        /// Which.
        index: u16,
        /// What has not been begun stays in the in-flight region.
        suspend: bool,
        /// Where the answer goes.
        answer: SyncSender<u32>,
    },
    /// Call the driver by another descriptor.
    Call {
        /// Which queue.
        index: u16,
        /// The descriptor.
        call: Option<Arc<OwnedFd>>,
    },
    /// Tell the driver on its event queue.
    Tell {
        /// The event queue.
        index: u16,
        /// The event.
        event: virtio_scsi::Event,
    },
    /// The limits have changed, or what a request waits for has happened.
    Look,
    /// Tell when all requests that have begun have ended.
    Settle(Arc<Settling>),
    /// Try requests that are held because their disk has failed again, or let them fail.
    Resume {
        /// Let them fail.
        fail: bool,
    },
    /// Tell how the queues stand.
    Dump {
        /// Where the answer goes.
        answer: SyncSender<Vec<QueueState>>,
    },
    /// End. All queues have been stopped.
    End,
}

/// What workers tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The memory of the front end has gone away.
    MemoryGone,
    /// A worker has ended by itself.
    Failed,
}

/// A worker, from outside.
pub struct Handle {
    orders: Sender<Order>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
    /// Why a queue could not be stopped in time.
    stuck: OnceLock<String>,
}

pub(super) struct Bell {
    mail: AtomicBool,
    wake: OwnedFd,
}

/// The workers, as they know each other. Filled once all are there.
#[derive(Clone, Default)]
pub struct Peers(Arc<OnceLock<Vec<Peer>>>);

type Peer = (Sender<Order>, Arc<Bell>);

impl Peers {
    /// All workers, in the order of their numbers.
    pub fn introduce(&self, workers: &[Handle]) {
        let all = workers.iter().map(|worker| (worker.orders.clone(), worker.bell.clone())).collect();
        // Done once.
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
            post(orders, bell, Order::Look);
        }
    }
}

fn post(orders: &Sender<Order>, bell: &Bell, order: Order) {
    // It has ended only if it has failed, which it has told.
    let _ = orders.send(order);
    bell.mail.store(true, Ordering::SeqCst);
    ring(&bell.wake);
}

/// Where events arrive: a channel, and a descriptor that is readable when there are some.
pub struct Events {
    receiver: Receiver<Event>,
    sender: Sender<Event>,
    wake: Arc<OwnedFd>,
}

impl Events {
    /// None yet.
    pub fn new() -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        Ok(Self { receiver, sender, wake: Arc::new(new_eventfd()?) })
    }

    /// The next, if there is one.
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

/// The worker's end.
pub(super) struct Inbox {
    orders: Receiver<Order>,
    bell: Arc<Bell>,
    events: Sender<Event>,
    events_wake: Arc<OwnedFd>,
}

impl Inbox {
    #[inline]
    pub fn has_mail(&self) -> bool {
        self.bell.mail.load(Ordering::Acquire)
    }

    pub fn next(&self) -> Option<Order> {
        // Before the look, so that what comes behind it is seen the next time.
        self.bell.mail.store(false, Ordering::SeqCst);
        self.orders.try_recv().ok()
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.wake.as_fd()
    }

    pub fn tell(&self, event: Event) {
        // Nobody listens only while the process ends.
        let _ = self.events.send(event);
        ring(&self.events_wake);
    }
}

impl Handle {
    /// Starts a worker, on a CPU of its own if one is given, and waits until it is ready.
    pub fn start(plan: Plan, cpu: Option<usize>, events: &Events) -> io::Result<Self> {
        let (orders, inbox) = mpsc::channel();
        let bell = Arc::new(Bell { mail: AtomicBool::new(false), wake: new_eventfd()? });
        let inbox = Inbox {
            orders: inbox,
            bell: bell.clone(),
            events: events.sender.clone(),
            events_wake: events.wake.clone(),
        };
        let (ready, is_ready) = mpsc::sync_channel(1);
        let number = plan.number;
        let thread = thread::Builder::new().name(format!("volume-{number}")).spawn(move || {
            let (events, wake) = (inbox.events.clone(), inbox.events_wake.clone());
            let mut failed = Failed { events, wake, told: false };
            let worker = pin(cpu).and_then(|()| Worker::new(plan, inbox));
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
        })?;
        is_ready.recv().map_err(|_| io::Error::other("a worker has ended before it began"))??;
        Ok(Self { orders, bell, thread: Some(thread), stuck: OnceLock::new() })
    }

    /// Tells it something.
    pub fn send(&self, order: Order) {
        post(&self.orders, &self.bell, order);
    }

    /// Stops a queue; returns its base. Who has once not been done in time is not waited for again.
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

    /// How its queues stand; nothing if it does not answer.
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
            // A panic has been reported where it was.
            let _ = thread.join();
        }
    }
}

/// Tells that a worker has ended without being told to, however it did.
struct Failed {
    events: Sender<Event>,
    wake: Arc<OwnedFd>,
    /// It was told to, or has said why it cannot begin.
    told: bool,
}

impl Drop for Failed {
    fn drop(&mut self) {
        if !self.told {
            let _ = self.events.send(Event::Failed);
            ring(&self.wake);
        }
    }
}

fn pin(cpu: Option<usize>) -> io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::other(format!("there is no processor {cpu}; see cpus")));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
        .map_err(|e| io::Error::other(format!("a thread cannot be bound to processor {cpu}: {e}; see cpus")))
}

fn new_eventfd() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes an eventfd readable. One that is full is readable already.
pub(super) fn ring(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_stuck_is_waited_for_once() {
        let (orders, inbox) = mpsc::channel();
        let bell = Arc::new(Bell { mail: AtomicBool::new(false), wake: new_eventfd().unwrap() });
        let worker = Handle { orders, bell, thread: None, stuck: OnceLock::new() };
        let why = worker.stop_within(Duration::ZERO, 3, false).unwrap_err();
        assert!(why.contains("queue 3"), "{why}");
        assert_eq!(worker.stop(4, false), Err(why));
        assert_eq!(inbox.try_iter().count(), 1, "it was told twice");
    }
}
