//! The receiving side of a queue pair: completed receives, accesses by peers, and the end of the queue pair.

use super::{QueuePair, Receives};
use crate::program::ProgramMemory;
use crate::receive::Received;
use crate::work::{Completed, Opcode, Status};
use ginnel_layout::verbs::{Executing, Key, Kind, QpNumber, QpState, qp};
use ginnel_shmem::SharedMemory;
use std::sync::Arc;
use std::time::Instant;

impl<M: SharedMemory> QueuePair<M> {
    /// Returns whether a completion has arrived for which the program should be woken.
    pub(crate) fn has_received(&self, solicited_only: bool) -> bool {
        let Some(receiver) = self.receiver() else { return false };
        receiver.has_received(solicited_only) || self.state() == QpState::ERR && !receiver.is_empty()
    }

    /// Returns the next completion of the queue pair's own receive queue.
    #[inline]
    pub(crate) fn poll_receive(&self, program: &impl ProgramMemory<M>) -> Option<Completed> {
        let mut receiver = self.receiver()?;
        if let Some(received) = receiver.poll(program, |_| Some(self.kind.prefix())) {
            drop(receiver);
            if received.status != Status::SUCCESS {
                self.fall(&mut self.sender(), None);
            }
            return Some(self.received_by(received));
        }
        if self.state() != QpState::ERR || self.are_receives_accessed() {
            return None;
        }
        // This message was complete before the peer left.
        if let Some(received) = receiver.poll(program, |_| Some(self.kind.prefix())) {
            return Some(self.received_by(received));
        }
        receiver.flush().map(|id| Completed {
            id,
            status: Status::WR_FLUSH_ERR,
            opcode: Opcode::RECV,
            length: 0,
            immediate: None,
            queue_pair: self.number(),
            source: QpNumber(0),
            lid: 0,
        })
    }

    fn received_by(&self, received: Received) -> Completed {
        Completed {
            id: received.id,
            status: received.status,
            opcode: received.opcode,
            length: received.length,
            immediate: received.immediate,
            queue_pair: self.number(),
            source: received.source,
            lid: received.lid,
        }
    }

    /// Handles a completed receive of the shared receive queue, whose message is for this queue pair.
    pub(crate) fn received(&self, received: Received) {
        let (status, is_solicited) = (received.status, received.is_solicited);
        self.completes_receives.add_received(self.received_by(received), is_solicited);
        if status != Status::SUCCESS {
            self.fall(&mut self.sender(), None);
        }
    }

    /// Returns whether a peer may be in the middle of a message. For datagrams this is settled for each receive.
    fn are_receives_accessed(&self) -> bool {
        self.kind != Kind::UD && self.is_accessed(|_| true)
    }

    /// Takes back receives from senders that have died.
    pub(super) fn revoke_claims(&self) {
        if self.kind == Kind::UD
            && let Some(receiver) = self.receiver()
            && receiver.has_claims()
        {
            receiver.revoke(|claimer| self.adapter.has_died(claimer));
        }
    }

    /// Returns whether the peer is accessing something for which `what` returns true. A peer that has ended accesses nothing, whatever
    /// its word says.
    fn is_accessed(&self, what: impl Fn(Executing) -> bool) -> bool {
        // ORDER verbs.executing: the peers' accesses have ended before anything that follows here. Pairs with: `Remote::finish`.
        let executing = Executing(self.tables.load_acquire_u64(self.at + qp::EXECUTING));
        let is_alive = || self.sender().owner.as_ref().is_none_or(|owner| !owner.is_dead());
        executing.is_of(self.incarnation()) && what(executing) && is_alive()
    }

    /// Returns whether a peer may still be accessing the region of a key that has been removed.
    pub fn is_region_accessed(&self, key: Key) -> bool {
        if self.kind != Kind::UD {
            return self.is_accessed(|executing| executing.is_region(key));
        }
        self.revoke_claims();
        self.receiver().is_some_and(|receiver| receiver.has_claims())
    }

    /// Ends the queue pair. Its rings may be reused once [`QueuePair::are_rings_accessed`] returns false.
    pub fn end(self: &Arc<Self>) {
        let mut sender = self.sender();
        self.publish(QpState::RESET);
        sender.waiting.clear();
        sender.remotes.clear();
        drop(sender);
        self.tables.store_relaxed_u32(self.at + qp::KIND, Kind::NONE.0);
        self.completes_sends.remove(self);
        self.completes_receives.remove(self);
        if let Receives::Shared(shared) = &self.receives {
            shared.remove(self);
        }
    }

    /// Frees the memory for messages and errands of a queue pair that has ended. No peer may be accessing it any more.
    pub(crate) fn release(&self) {
        if let Some(mut receiver) = self.receiver() {
            receiver.release();
        }
        if let Some(errand_server) = self.errand_server.get() {
            self.tables.store_relaxed_u32(self.at + qp::ROOM, 0);
            self.adapter.give(errand_server.bounce().clone());
        }
    }

    /// Returns whether a peer may still be accessing the rings or regions of a queue pair that has ended.
    pub fn are_rings_accessed(&self) -> bool {
        match self.kind {
            // ORDER verbs.senders: the peers' accesses have ended before anything that follows here. Pairs with:
            // `Remote::send_datagram`.
            Kind::UD => self.tables.load_acquire_u64(self.at + qp::SENDERS) != 0,
            _ => self.is_accessed(|_| true),
        }
    }

    /// Waits until no peer accesses the rings. Returns false if that takes longer than the adapter's patience.
    pub(super) fn wait_for_rings(&self) -> bool {
        let end = Instant::now() + self.adapter.patience();
        while self.are_rings_accessed() {
            self.adapter.attend();
            if Instant::now() >= end {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}
