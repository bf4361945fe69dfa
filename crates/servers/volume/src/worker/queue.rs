//! A queue that a worker serves.

use super::hold::OnHold;
use super::mailbox::ring;
use super::slots::Slots;
use super::source::{Source, Start};
use crate::limit::{Limiter, QueueLimit};
use crate::stats::QueueCounters;
use ginnel_guest_memory::GuestMemory;
use ginnel_layout::virtio_scsi::Event;
use ginnel_shmem::Mapping;
use ginnel_volume_control::{InFlight, QueueState};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use tracing::{error, warn};

/// The state of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Running,
    /// Takes only the requests that it must take; ends when all are given back.
    Stopping,
    /// Takes no more requests; ends when those at a disk are given back.
    Suspending,
    /// The driver has broken a rule. The queue's requests end, and are not given back.
    Broken,
}

pub(super) struct Queue<S> {
    pub index: u16,
    /// Unique among all starts of all queues.
    pub serial: u64,
    pub source: S,
    pub memory: Arc<GuestMemory<Mapping>>,
    pub kicks: Vec<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    error: Option<Arc<OwnedFd>>,
    pub counters: Arc<QueueCounters>,
    pub limit: QueueLimit,
    /// The slot of a request that waits for the limits, and the time until which it waits.
    pub held: Option<u32>,
    pub ready_at: u64,
    /// Number of its requests in slots.
    pub slots: u32,
    pub state: State,
    pub stop: Option<SyncSender<u32>>,
    /// The number of requests that it must have taken before it ends ([`Source::taken`]).
    until: u64,
    /// Whether requests were given back that the driver has not been shown yet.
    unpublished: bool,
    /// Whether its buffers are kept for events.
    pub is_event: bool,
    /// Whether an event was lost for lack of a buffer, and the driver has not been told.
    pub missed: bool,
    reason: String,
}

static SERIAL: AtomicU64 = AtomicU64::new(0);

impl<S: Source> Queue<S> {
    /// Returns `None` if the queue is of another kind.
    pub fn new(
        start: Start,
        counters: Arc<QueueCounters>,
        limiter: Arc<Limiter>,
        is_event: bool,
    ) -> Option<Self> {
        let mut source = S::of(start.requests)?;
        source.disarm();
        Some(Self {
            index: start.index,
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            source,
            memory: start.memory,
            kicks: start.kicks,
            call: start.call,
            error: start.error,
            counters,
            limit: QueueLimit::new(limiter),
            held: None,
            ready_at: 0,
            slots: 0,
            state: State::Running,
            stop: None,
            until: 0,
            // A predecessor may have died before it called the driver.
            unpublished: true,
            is_event,
            missed: false,
            reason: String::new(),
        })
    }

    /// Gives a request back. The driver sees it after the next [`publish`](Self::publish) at the latest.
    #[inline]
    pub fn give_back(&mut self, ticket: S::Ticket, answer: S::Answer) {
        if self.state == State::Broken {
            return;
        }
        self.source.give_back(ticket, answer);
        self.unpublished = true;
    }

    /// Shows the driver the requests that were given back, and calls it if it wants that.
    #[inline]
    pub fn publish(&mut self) {
        if !self.unpublished || self.state == State::Broken {
            return;
        }
        self.unpublished = false;
        if self.source.publish() {
            self.counters.calls.add(1);
            if let Some(call) = &self.call {
                ring(call);
            }
        } else {
            self.counters.calls_saved.add(1);
        }
    }

    pub fn set_call(&mut self, call: Option<Arc<OwnedFd>>) {
        self.call = call;
        // A call on the old descriptor may have been lost during the exchange.
        if let Some(call) = &self.call {
            ring(call);
        }
    }

    /// Enables kicks. Returns true if there are requests already.
    pub fn arm(&mut self) -> bool {
        self.wants_buffers() && self.held.is_none() && self.source.arm()
    }

    pub fn disarm(&mut self) {
        if self.wants_buffers() {
            self.source.disarm();
        }
    }

    /// Returns whether the driver cannot notify the device of new requests.
    pub fn must_poll(&self) -> bool {
        self.kicks.is_empty() && self.wants_buffers()
    }

    /// Returns whether buffers are taken as soon as the driver makes them available. Buffers for events stay in the
    /// queue until there is an event.
    fn wants_buffers(&self) -> bool {
        self.state == State::Running && (!self.is_event || self.missed)
    }

    pub fn memory_is_gone(&self) -> bool {
        self.state == State::Running && self.memory.is_broken()
    }

    /// Marks the queue as broken, because the driver has broken a rule or its memory has disappeared. The queue is not
    /// used any more.
    #[cold]
    pub fn broken(&mut self, why: &str) {
        error!("queue {} is broken: {why}; the driver must reset the device", self.index);
        self.state = State::Broken;
        self.reason = why.to_owned();
        self.counters.malformed.add(1);
        if let Some(error) = &self.error {
            ring(error);
        }
    }

    pub fn begin_stop(&mut self, suspend: bool, answer: SyncSender<u32>) {
        if self.state == State::Running {
            self.state = if suspend { State::Suspending } else { State::Stopping };
            // The requests of a predecessor are no longer in the ring: the base of this queue lies behind them.
            self.until = self.until.max(self.source.taken() + self.source.resubmit());
        }
        self.stop = Some(answer);
    }

    /// Returns whether requests are to be taken out of the queue.
    #[inline]
    pub fn takes(&self) -> bool {
        !self.is_event
            && match self.state {
                State::Running => true,
                State::Stopping => self.is_behind(self.until),
                State::Suspending | State::Broken => false,
            }
    }

    /// Makes sure that all requests that are in the queue now are taken, even if it is being stopped. Returns the
    /// number of requests that will have been taken then, or `None` if they were all taken.
    pub fn must_take_all(&mut self) -> Option<u64> {
        let until = self.source.taken() + self.source.visible();
        if self.is_event || !self.is_behind(until) {
            return None;
        }
        self.until = self.until.max(until);
        Some(until)
    }

    /// Returns whether requests are left of those up to number `until` that must be taken. There are none if the driver
    /// has withdrawn them or has broken the queue, or if a successor will take them.
    pub fn is_behind(&self, until: u64) -> bool {
        let takes = matches!(self.state, State::Running | State::Stopping);
        takes && self.source.taken() < until && !self.source.is_empty()
    }

    /// Returns whether the queue is stopped and has no requests left.
    pub fn has_ended(&self) -> bool {
        self.stop.is_some() && self.state != State::Running && self.slots == 0 && !self.takes()
    }

    /// Answers the stop order. All requests have been given back.
    pub fn answer_stop(&mut self) {
        if let Some(answer) = self.stop.take() {
            // The caller may have given up.
            let _ = answer.send(self.source.base());
        }
    }

    /// Puts an event into the driver's next buffer. Returns whether there was one. If there was none, the event is
    /// lost, and that is reported with the next event, as section 5.6.6.3 requires, or by
    /// [`tell_missed`](Self::tell_missed).
    #[cold]
    pub fn tell(&mut self, mut event: Event, found: &mut S::Found) -> bool {
        if self.state != State::Running {
            self.missed = true;
            return false;
        }
        if self.missed {
            event.event |= Event::MISSED;
        }
        match self.source.tell(&self.memory, event, found) {
            Ok(true) => {
                self.missed = false;
                self.unpublished = true;
                self.publish();
                true
            }
            Ok(false) => {
                if !std::mem::replace(&mut self.missed, true) {
                    warn!(
                        "queue {}: the driver has no buffer for an event; the loss is reported when it has one",
                        self.index
                    );
                }
                false
            }
            Err(why) => {
                self.broken(&why.to_string());
                false
            }
        }
    }

    /// Reports that events were lost, if some were and there is a buffer now.
    #[inline]
    pub fn tell_missed(&mut self, found: &mut S::Found) -> bool {
        self.missed
            && self.wants_buffers()
            && self.tell(Event { event: Event::NONE, lun: [0; 8], reason: 0 }, found)
    }

    /// Returns its state, or the states of all queues of which it consists.
    pub fn dump(&self, thread: usize, slots: &Slots<S>, on_hold: &OnHold, now: u64) -> Vec<QueueState> {
        let mut states = self.source.states(self.index);
        for state in &mut states {
            state.thread = thread;
            state.state = match self.state {
                State::Running if state.state.is_empty() => "running".into(),
                State::Running => format!("running: {}", state.state),
                State::Stopping | State::Suspending => "stopping".into(),
                State::Broken => format!("broken: {}", self.reason),
            };
            state.kicks = self.counters.kicks.get();
            state.calls = self.counters.calls.get();
            state.throttled_ns = if self.held.is_some() { self.ready_at.saturating_sub(now) } else { 0 };
        }
        let failed = |slot| on_hold.iter().find(|(held, _)| *held == slot).map(|(_, failure)| failure);
        for (slot, entry) in slots.of_queue(self.serial) {
            let Some(ticket) = &entry.ticket else { continue };
            let (queue, head) = self.source.place(self.index, ticket);
            let Some(state) = states.iter_mut().find(|state| state.queue == queue) else { continue };
            state.in_flight.push(InFlight {
                head,
                operation: entry.op.word().into(),
                disk: entry.disk.into(),
                offset: entry.op.at(),
                length: entry.bytes(),
                age_ns: now.saturating_sub(entry.began),
                waits_for: match failed(slot) {
                    Some(_) => "operator",
                    None if self.held == Some(slot) => "limit",
                    None if entry.is_barrier => "others",
                    None => "disk",
                }
                .into(),
                error: failed(slot).map(ToString::to_string).unwrap_or_default(),
            });
        }
        for state in &mut states {
            state.in_flight.sort_by_key(|request| std::cmp::Reverse(request.age_ns));
        }
        states
    }
}
