//! A queue in the hands of its worker.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

use ginnel_layout::virtio_scsi::Event;
use ginnel_shmem::Mapping;
use ginnel_virtqueue::{Chain, DeviceQueue, DirtyLog, GuestMemory, Kind, Ticket};
use ginnel_volume_control::{InFlight, QueueState};
use tracing::{error, warn};
use zerocopy::IntoBytes;

use super::hold::OnHold;
use super::mail::ring;
use super::slots::Slots;
use crate::limit::{Limiter, QueueLimit};
use crate::session::Start;
use crate::stats::QueueCounters;

/// Where a queue stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Running,
    /// Takes only what it must; ends when all is given back.
    Stopping,
    /// Takes nothing more; ends when that is given back which is at a disk.
    Suspending,
    /// The driver has broken a rule. Its requests end, and are not given back.
    Broken,
}

pub(super) struct Queue {
    pub index: u16,
    /// No other start of any queue has the same.
    pub serial: u64,
    pub ring: DeviceQueue<Mapping>,
    pub memory: Arc<GuestMemory<Mapping>>,
    pub kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    error: Option<Arc<OwnedFd>>,
    pub log: Option<DirtyLog<Mapping>>,
    event_idx: bool,
    pub counters: Arc<QueueCounters>,
    pub limit: QueueLimit,
    /// A request that waits for the limits, and until when.
    pub held: Option<u32>,
    pub ready_at: u64,
    /// Requests in slots.
    pub slots: u32,
    pub state: State,
    pub stop: Option<SyncSender<u32>>,
    /// Does not end before it has taken so much ([`DeviceQueue::taken`]).
    until: u64,
    /// Something was given back and not shown yet.
    unpublished: bool,
    /// Its buffers are kept for events.
    pub is_event: bool,
    /// An event was lost for want of a buffer, and the driver has not been told.
    pub missed: bool,
    reason: String,
}

static SERIAL: AtomicU64 = AtomicU64::new(0);

impl Queue {
    pub fn new(
        start: Start,
        counters: Arc<QueueCounters>,
        limiter: Arc<Limiter>,
        event_queue: Option<u16>,
    ) -> Self {
        let mut ring = start.queue;
        ring.disarm();
        Self {
            index: start.index,
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            ring,
            memory: start.memory,
            kick: start.kick,
            call: start.call,
            error: start.error,
            log: start.log,
            event_idx: start.event_idx,
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
            is_event: event_queue == Some(start.index),
            missed: false,
            reason: String::new(),
        }
    }

    /// Gives a request back; shown with the next publish.
    #[inline]
    pub fn give_back(&mut self, ticket: Ticket, written: u32) {
        if self.state == State::Broken {
            return;
        }
        self.ring.push(ticket, written);
        self.unpublished = true;
    }

    /// Shows the driver what was given back, and calls it if it wants that.
    #[inline]
    pub fn publish(&mut self) {
        if !self.unpublished || self.state == State::Broken {
            return;
        }
        self.unpublished = false;
        if self.ring.publish() {
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
        // What was said by the old one may have been lost between the two.
        if let Some(call) = &self.call {
            ring(call);
        }
    }

    /// Asks for kicks; true if there is something already.
    pub fn arm(&mut self) -> bool {
        self.wants_buffers() && self.held.is_none() && self.ring.arm()
    }

    pub fn disarm(&mut self) {
        if self.wants_buffers() {
            self.ring.disarm();
        }
    }

    /// Whether nobody will tell when there is something.
    pub fn must_poll(&self) -> bool {
        self.kick.is_none() && self.wants_buffers()
    }

    /// Whether what the driver gives is taken at once. Buffers for events lie until there is one.
    fn wants_buffers(&self) -> bool {
        self.state == State::Running && (!self.is_event || self.missed)
    }

    pub fn memory_is_gone(&self) -> bool {
        self.state == State::Running && self.memory.is_broken()
    }

    /// The driver has broken a rule, or its memory is gone: the queue is not used any more.
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
            // What a predecessor had taken is in no ring any more: the base that we answer is behind it.
            self.until = self.until.max(self.ring.taken() + u64::from(self.ring.state().resubmit));
        }
        self.stop = Some(answer);
    }

    /// Whether the next request is to be taken out of it.
    #[inline]
    pub fn takes(&self) -> bool {
        !self.is_event
            && match self.state {
                State::Running => true,
                State::Stopping => self.is_behind(self.until),
                State::Suspending | State::Broken => false,
            }
    }

    /// All that is in it now must be taken, also if it is being stopped. Returns how much will have been taken then, or
    /// nothing if that is so already.
    pub fn must_take_all(&mut self) -> Option<u64> {
        let until = self.ring.taken() + self.ring.visible();
        if self.is_event || !self.is_behind(until) {
            return None;
        }
        self.until = self.until.max(until);
        Some(until)
    }

    /// Whether there is something left of what was to be taken until then. Not if the driver has taken it back or has broken
    /// the queue, or if it is a successor's to take.
    pub fn is_behind(&self, until: u64) -> bool {
        let takes = matches!(self.state, State::Running | State::Stopping);
        takes && self.ring.taken() < until && !self.ring.is_empty()
    }

    /// Whether it is stopped, and has nothing left.
    pub fn has_ended(&self) -> bool {
        self.stop.is_some() && self.state != State::Running && self.slots == 0 && !self.takes()
    }

    /// All has been given back.
    pub fn answer_stop(&mut self) {
        if let Some(answer) = self.stop.take() {
            // Who asked may have given up.
            let _ = answer.send(self.ring.base());
        }
    }

    /// Puts an event into the driver's next buffer; says whether there was one. An event that is lost without is told of with
    /// the next, as 5.6.6.3 asks for, or by [`tell_missed`](Self::tell_missed).
    #[cold]
    pub fn tell(&mut self, mut event: Event, chain: &mut Chain) -> bool {
        if self.state != State::Running {
            self.missed = true;
            return false;
        }
        match self.ring.pop(&self.memory, chain) {
            Ok(Some(ticket)) => {
                if std::mem::take(&mut self.missed) {
                    event.event |= Event::MISSED;
                }
                let written = self.memory.write(chain.writable(), 0, event.as_bytes());
                if let Some(log) = &self.log {
                    log.mark_buffers(&self.memory, chain.writable(), written as u64);
                }
                self.give_back(ticket, written as u32);
                self.publish();
                true
            }
            Ok(None) => {
                if !std::mem::replace(&mut self.missed, true) {
                    warn!(
                        "queue {}: the driver has no buffer for an event; it is told when it has one",
                        self.index
                    );
                }
                false
            }
            Err(corrupt) => {
                self.broken(&corrupt.to_string());
                false
            }
        }
    }

    /// Tells that events were lost, if they were and there is a buffer by now.
    #[inline]
    pub fn tell_missed(&mut self, chain: &mut Chain) -> bool {
        self.missed
            && self.wants_buffers()
            && self.tell(Event { event: Event::NONE, lun: [0; 8], reason: 0 }, chain)
    }

    pub fn dump(&self, thread: usize, slots: &Slots, on_hold: &OnHold, now: u64) -> QueueState {
        let state = self.ring.state();
        let failed = |slot| on_hold.iter().find(|(held, _)| *held == slot).map(|(_, failure)| failure);
        let mut in_flight: Vec<_> = slots
            .of_queue(self.serial)
            .map(|(slot, place)| InFlight {
                head: place.ticket.as_ref().map_or(0, Ticket::id),
                operation: place.op.word().into(),
                disk: place.disk.into(),
                offset: place.op.at(),
                length: place.bytes(),
                age_ns: now.saturating_sub(place.began),
                waits_for: match failed(slot) {
                    Some(_) => "operator",
                    None if self.held == Some(slot) => "limit",
                    None if place.settles => "others",
                    None => "disk",
                }
                .into(),
                error: failed(slot).map(ToString::to_string).unwrap_or_default(),
            })
            .collect();
        in_flight.sort_by_key(|request| std::cmp::Reverse(request.age_ns));
        QueueState {
            queue: self.index,
            thread,
            state: match self.state {
                State::Running => "running".into(),
                State::Stopping | State::Suspending => "stopping".into(),
                State::Broken => format!("broken: {}", self.reason),
            },
            format: if state.kind == Kind::Packed { "packed" } else { "split" }.into(),
            size: state.size,
            event_index: self.event_idx,
            driver_index: state.driver_index.unwrap_or(0),
            taken_index: state.available,
            used_index: state.used,
            armed: state.armed,
            kicks: self.counters.kicks.get(),
            calls: self.counters.calls.get(),
            throttled_ns: if self.held.is_some() { self.ready_at.saturating_sub(now) } else { 0 },
            in_flight,
        }
    }
}
