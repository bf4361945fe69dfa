//! Shared receive queues: one receive queue for several queue pairs.

use crate::lock::{Lock, Locked};
use crate::program::ProgramMemory;
use crate::queue_pair::{Adapter, Event, EventCallback, Location, QueuePair, Refused, Rings};
use crate::receive::{Owner, ReceiveQueue, Shape};
use crate::work::Element;
use ginnel_layout::verbs::{Executor, Kind, QpNumber, QpState, qp};
use ginnel_shmem::SharedMemory;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A receive queue for several queue pairs. It has an entry in the table of queue pairs, for the words that peers use.
pub struct SharedReceiveQueue<M: SharedMemory> {
    location: Location<M>,
    shape: Shape,
    tables: M,
    at: usize,
    adapter: Arc<dyn Adapter<M>>,
    receiver: Lock<ReceiveQueue<M>>,
    /// The queue pairs that use it, until they end.
    members: Lock<BTreeMap<QpNumber, Arc<QueuePair<M>>>>,
    are_rings_kept: AtomicBool,
    /// The number of receives below which the program wants an event; 0 if it wants none.
    limit: AtomicU32,
    tell: EventCallback,
}

impl<M: SharedMemory> SharedReceiveQueue<M> {
    /// Returns an empty queue for buffers in this protection domain. Returns `None` if its number has no place in the tables, or if it
    /// has no rings.
    pub fn new(
        tables: M,
        location: Location<M>,
        domain: u32,
        shape: Shape,
        adapter: Arc<dyn Adapter<M>>,
        tell: EventCallback,
    ) -> Option<Arc<Self>> {
        let at = location.number.at()?;
        let rings = location.rings.as_ref()?;
        publish_rings(&tables, at, Kind::SHARED, location.number, rings, shape);
        tables.store_relaxed_u32(at + qp::DOMAIN, domain);
        let (ring, completions) = (rings.receives.1.clone(), rings.completions.1.clone());
        let owner = Owner { adapter: adapter.clone(), domain };
        let receiver = ReceiveQueue::new(tables.clone(), at, shape, ring, completions, true, owner);
        // No peer connects to the queue, so this state is only for readers of the tables, such as `inspect`.
        let word = u64::from(adapter.next_incarnation()) << 32 | u64::from(QpState::RTR.0);
        tables.store_release_u64(at + qp::STATE, word);
        let (receiver, members) = (Lock::new(receiver), Lock::default());
        let are_rings_kept = AtomicBool::new(false);
        let limit = AtomicU32::new(0);
        Some(Arc::new(Self {
            location,
            shape,
            tables,
            at,
            adapter,
            receiver,
            members,
            are_rings_kept,
            limit,
            tell,
        }))
    }

    /// Returns the number of the queue, which no queue pair has.
    pub fn number(&self) -> QpNumber {
        self.location.number
    }

    /// Returns the size of the queue.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the location of the rings.
    pub fn location(&self) -> &Location<M> {
        &self.location
    }

    fn receiver(&self) -> Locked<'_, ReceiveQueue<M>> {
        self.receiver.lock()
    }

    fn members(&self) -> Locked<'_, BTreeMap<QpNumber, Arc<QueuePair<M>>>> {
        self.members.lock()
    }

    pub(crate) fn add(&self, queue_pair: &Arc<QueuePair<M>>) {
        self.members().insert(queue_pair.number(), queue_pair.clone());
    }

    pub(crate) fn remove(&self, queue_pair: &QueuePair<M>) {
        self.members().remove(&queue_pair.number());
    }

    /// Returns whether no queue pair uses the queue.
    pub fn is_unused(&self) -> bool {
        self.members().is_empty()
    }

    /// Ends the queue. No queue pair may be using it any more.
    pub fn end(&self) {
        self.tables.store_release_u64(self.at + qp::STATE, u64::from(QpState::RESET.0));
        self.tables.store_relaxed_u32(self.at + qp::KIND, Kind::NONE.0);
    }

    /// Sets the number of receives below which the program gets one event; 0 means never.
    pub fn set_limit(&self, limit: u32) {
        self.limit.store(limit, Ordering::Relaxed);
        self.look_at_limit(self.len());
    }

    /// Returns the number of receives below which the program gets an event; 0 if there will be none.
    pub fn limit(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    fn look_at_limit(&self, len: usize) {
        let limit = self.limit();
        let is_below = len < limit as usize;
        if is_below && self.limit.compare_exchange(limit, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            (self.tell)(Event::SRQ_LIMIT_REACHED);
        }
    }

    /// Frees the memory for messages to shadow regions. No sender may be using it any more.
    pub(crate) fn release(&self) {
        self.receiver().release();
    }

    /// Records that a sender has stopped in the middle of an access, so that the rings must not be reused.
    pub fn keep_rings(&self) {
        self.are_rings_kept.store(true, Ordering::Relaxed);
    }

    /// Returns whether the rings must not be reused.
    pub fn are_rings_kept(&self) -> bool {
        self.are_rings_kept.load(Ordering::Relaxed)
    }

    /// Posts a receive.
    pub fn post_receive(&self, id: u64, elements: &[Element]) -> Result<(), Refused> {
        self.receiver().post(id, elements).map_err(Refused::from)
    }

    /// Returns the number of receives that wait for a message.
    pub fn len(&self) -> usize {
        self.receiver().len()
    }

    /// Returns whether no receive waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Delivers up to `most` completed receives, each to the completion queue of its queue pair.
    pub(crate) fn poll(&self, program: &impl ProgramMemory<M>, most: usize) {
        let mut receiver = self.receiver();
        if !receiver.is_ready() {
            return;
        }
        let members = self.members();
        for _ in 0..most.min(self.shape.entries) {
            let prefix = |target| Some(members.get(&target)?.kind().prefix());
            let Some(received) = receiver.poll(program, prefix) else { break };
            if let Some(member) = members.get(&received.target) {
                member.received(received);
            }
        }
        let len = receiver.len();
        drop((members, receiver));
        self.look_at_limit(len);
    }

    /// Checks whether a sender that blocks all others has died.
    #[cold]
    pub(crate) fn look(&self) {
        let receiver = self.receiver();
        if receiver.claimer().is_some() {
            receiver.revoke(|claimer| self.adapter.has_died(claimer));
        }
    }
}

/// Writes what peers must know about the rings into the tables.
pub(crate) fn publish_rings<M: SharedMemory>(
    tables: &M,
    at: usize,
    kind: Kind,
    number: QpNumber,
    rings: &Rings<M>,
    shape: Shape,
) {
    tables.store_relaxed_u64(at + qp::RING, rings.receives.0.0);
    tables.store_relaxed_u64(at + qp::COMPLETIONS, rings.completions.0.0);
    tables.store_relaxed_u32(at + qp::ENTRIES, shape.entries as u32);
    tables.store_relaxed_u32(at + qp::STRIDE, shape.stride() as u32);
    tables.store_relaxed_u32(at + qp::EXECUTOR, Executor::POSTER.0);
    tables.store_relaxed_u32(at + qp::KIND, kind.0);
    tables.store_relaxed_u32(at + qp::QUEUE, number.index() as u32);
}
