//! The receive queue of a queue pair, as its owner uses it: posted receives, and messages that have arrived.

use crate::program::ProgramMemory;
use crate::queue_pair::Adapter;
use crate::shadow::Bounce;
use crate::work::{Element, Opcode, Status};
use ginnel_layout::verbs::{Access, Claimer, Completion, Key, QpNumber, completion, qp, receive};
use ginnel_shmem::SharedMemory;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A receive queue.
pub struct ReceiveQueue<M: SharedMemory> {
    tables: M,
    /// Offset of the queue pair in the tables.
    at: usize,
    ring: (M, usize),
    completions: (M, usize),
    shape: Shape,
    /// Number of entries posted so far.
    tail: u64,
    /// Number of entries whose completion has been taken so far.
    head: u64,
    /// The posted entries, by their slot in the ring.
    posted: Vec<Posted>,
    elements: Vec<Element>,
    /// Length of the shortest receive that is posted.
    shortest: u32,
    /// Whether several senders may use it, so that each must claim the entry that it uses.
    is_shared: bool,
    owner: Owner<M>,
    /// Memory for messages to buffers in shadow regions, by the slot of the entry.
    bounces: BTreeMap<usize, Bounce<M>>,
}

/// The owner of the receives.
pub struct Owner<M: SharedMemory> {
    /// The device.
    pub adapter: Arc<dyn Adapter<M>>,
    /// The protection domain.
    pub domain: u32,
}

/// The size of a receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of entries; a power of two.
    pub entries: usize,
    /// Maximum number of elements of an entry.
    pub elements: usize,
}

impl Shape {
    /// Returns the length of an entry of the receive ring, in bytes.
    pub fn stride(self) -> usize {
        receive::stride(self.elements)
    }

    /// Returns the length of both rings together, in bytes. The receive ring comes first.
    pub fn bytes(self) -> usize {
        self.entries * (self.stride() + completion::ENTRY)
    }
}

#[derive(Clone, Copy, Default)]
struct Posted {
    id: u64,
    count: usize,
    length: u32,
    /// Whether a buffer lies in a shadow region, so that messages go to other memory first.
    is_bounced: bool,
}

/// The reason why a receive was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotPosted {
    /// The queue is full, or there is no memory for messages to a shadow region.
    Full,
    /// The receive has too many elements for the queue, or more bytes than a message may have.
    Invalid,
}

/// A receive that has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The work request identifier (`wr_id`), which the program chose.
    pub id: u64,
    /// The result.
    pub status: Status,
    /// The operation of the peer that consumed the receive.
    pub opcode: Opcode,
    /// Number of bytes received.
    pub length: u32,
    /// Immediate data that came with the message.
    pub immediate: Option<u32>,
    /// Whether the peer requested a solicited event.
    pub is_solicited: bool,
    /// The queue pair to which the message was sent. Undefined unless the receive queue is shared.
    pub target: QpNumber,
    /// The sender's queue pair. Undefined unless the receive queue is shared.
    pub source: QpNumber,
    /// The local identifier (LID) of the sender's port. Undefined unless the receive queue is shared.
    pub lid: u16,
}

impl<M: SharedMemory> ReceiveQueue<M> {
    /// Returns an empty queue with its rings at these offsets, which no one else uses yet.
    pub fn new(
        tables: M,
        at: usize,
        shape: Shape,
        ring: (M, usize),
        completions: (M, usize),
        is_shared: bool,
        owner: Owner<M>,
    ) -> Self {
        let queue = Self {
            tables,
            at,
            ring,
            completions,
            shape,
            tail: 0,
            head: 0,
            posted: vec![Posted::default(); shape.entries],
            elements: vec![Element::default(); shape.entries * shape.elements],
            shortest: u32::MAX,
            is_shared,
            owner,
            bounces: BTreeMap::new(),
        };
        queue.clear();
        queue
    }

    /// Empties the queue. No peer may be using it.
    pub fn reset(&mut self) {
        self.release();
        (self.tail, self.head, self.shortest) = (0, 0, u32::MAX);
        self.clear();
    }

    /// Frees the memory for messages to shadow regions. No peer may be using it any more.
    pub fn release(&mut self) {
        for (_, bounce) in std::mem::take(&mut self.bounces) {
            self.owner.adapter.give(bounce);
        }
    }

    fn clear(&self) {
        for i in 0..self.shape.entries {
            let (memory, at) = &self.completions;
            memory.store_relaxed_u64(at + i * completion::ENTRY + completion::HEADER, 0);
        }
        self.tables.store_relaxed_u64(self.at + qp::HEAD, 0);
        self.tables.store_release_u64(self.at + qp::TAIL, 0);
    }

    /// Returns the number of entries that wait for a message.
    pub fn len(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Returns whether no entry waits.
    pub fn is_empty(&self) -> bool {
        self.tail == self.head
    }

    /// Posts a receive.
    #[inline]
    pub fn post(&mut self, id: u64, elements: &[Element]) -> Result<(), NotPosted> {
        let length = self.length(elements)?;
        if elements.iter().any(|element| Key(element.key).is_shadow()) {
            return self.post_bounced(id, elements, length, None);
        }
        self.enter(Posted { id, count: elements.len(), length, is_bounced: false }, elements, elements);
        Ok(())
    }

    /// Returns the total length of an entry in bytes, if it can be posted.
    #[inline]
    fn length(&self, elements: &[Element]) -> Result<u32, NotPosted> {
        if elements.len() > self.shape.elements {
            return Err(NotPosted::Invalid);
        }
        let length = crate::work::total(elements).ok_or(NotPosted::Invalid)?;
        if self.len() == self.shape.entries {
            return Err(NotPosted::Full);
        }
        Ok(length)
    }

    /// Posts an entry that has been checked. Peers see the elements `seen`.
    #[inline]
    fn enter(&mut self, posted: Posted, elements: &[Element], seen: &[Element]) {
        let slot = self.slot(self.tail);
        let length = posted.length;
        self.posted[slot] = posted;
        self.elements[slot * self.shape.elements..][..elements.len()].copy_from_slice(elements);

        let (memory, ring) = &self.ring;
        let at = ring + slot * self.shape.stride();
        memory.store_relaxed_u64(at + receive::LENGTH, u64::from(length) | (seen.len() as u64) << 32);
        for (i, element) in seen.iter().enumerate() {
            let at = at + receive::ELEMENTS + i * receive::ELEMENT;
            memory.store_relaxed_u64(at, element.address);
            memory.store_relaxed_u64(at + 8, u64::from(element.length) | u64::from(element.key) << 32);
        }
        // A poster that sees this entry must see a value of `SHORTEST` that is not greater than the length of any posted entry.
        self.shortest = if self.is_empty() { length } else { self.shortest.min(length) };
        self.tables.store_relaxed_u32(self.at + qp::SHORTEST, self.shortest);
        self.tail += 1;
        // ORDER verbs.receive: the entry is visible before the tail. Pairs with: `Remote::look_for_entries`.
        self.tables.store_release_u64(self.at + qp::TAIL, self.tail);
    }

    /// Posts an entry with a buffer in a shadow region. Peers see memory of its length in an arena instead. `kept` is such memory from
    /// an earlier post.
    #[cold]
    fn post_bounced(
        &mut self,
        id: u64,
        elements: &[Element],
        length: u32,
        kept: Option<Bounce<M>>,
    ) -> Result<(), NotPosted> {
        let posted = Posted { id, count: elements.len(), length, is_bounced: true };
        if length == 0 {
            self.enter(posted, elements, &[]);
            return Ok(());
        }
        let taken = kept.or_else(|| self.owner.adapter.take(length as usize));
        let bounce = taken.ok_or(NotPosted::Full)?;
        let seen = Element { address: bounce.place.0, length, key: Key::PLACE.0 };
        self.bounces.insert(self.slot(self.tail), bounce);
        self.enter(posted, elements, &[seen]);
        Ok(())
    }

    /// Frees the memory for messages to an entry.
    #[cold]
    fn give_bounce(&mut self, slot: usize) {
        if let Some(bounce) = self.bounces.remove(&slot) {
            self.owner.adapter.give(bounce);
        }
    }

    /// Copies a message from where its sender has put it to the buffers of an entry. Returns false if a buffer is not in a region that
    /// allows it.
    #[cold]
    fn fetch(&self, program: &impl ProgramMemory<M>, slot: usize, len: usize, prefix: usize) -> bool {
        let Some(Bounce { memory, at, .. }) = self.bounces.get(&slot) else { return len == 0 };
        let mut skipped = prefix;
        let (mut from, mut left) = (at + prefix, len);
        for element in &self.elements[slot * self.shape.elements..][..self.posted[slot].count] {
            let skip = skipped.min(element.length as usize);
            skipped -= skip;
            let n = left.min(element.length as usize - skip);
            if n == 0 {
                continue;
            }
            let mut is_fetched = false;
            self.owner.adapter.with_region(Key(element.key), &mut |region| {
                let to = element.address.wrapping_add(skip as u64);
                is_fetched = region.allows(element, Access::LOCAL_WRITE, self.owner.domain)
                    && program.is_there(to, n, true);
                if is_fetched {
                    program.copy_out(memory, from, to, n);
                }
            });
            if !is_fetched {
                return false;
            }
            (from, left) = (from + n, left - n);
        }
        true
    }

    /// Returns whether the first entry has completed.
    #[inline]
    pub fn is_ready(&self) -> bool {
        let header = self.header(self.head);
        header.is_of(self.head) && header.claimer().is_none() && !self.is_empty()
    }

    /// Returns whether a completion has arrived for which the program should be woken.
    pub fn has_received(&self, solicited_only: bool) -> bool {
        for index in self.head..self.tail {
            let header = self.header(index);
            if !header.is_of(index) || header.claimer().is_some() {
                return false;
            }
            if header.kind() != Completion::VOID && (!solicited_only || header.is_solicited()) {
                return true;
            }
        }
        false
    }

    #[inline]
    fn header_at(&self, index: u64) -> usize {
        self.completions.1 + self.slot(index) * completion::ENTRY + completion::HEADER
    }

    #[inline]
    fn header(&self, index: u64) -> Completion {
        // ORDER verbs.completion: the header is loaded before the rest of the entry, and before the received bytes. Pairs with:
        // `Remote::complete`.
        Completion(self.completions.0.load_acquire_u64(self.header_at(index)))
    }

    /// Returns the next completed receive, in the order of posting. `prefix` returns how many bytes precede a message to a queue pair,
    /// or `None` if the queue pair may not use these receives.
    pub fn poll(
        &mut self,
        program: &impl ProgramMemory<M>,
        prefix: impl Fn(QpNumber) -> Option<usize>,
    ) -> Option<Received> {
        // The loop is bounded, whatever other processes write into the headers meanwhile.
        for _ in 0..self.shape.entries {
            let header = self.header(self.head);
            if !header.is_of(self.head) || self.is_empty() {
                return None;
            }
            if self.is_shared {
                if header.claimer().is_some() {
                    return None;
                }
                if header.kind() == Completion::VOID {
                    self.post_again();
                    continue;
                }
            }
            let slot = self.slot(self.head);
            let at = self.completions.1 + slot * completion::ENTRY;
            let target = match self.is_shared {
                true => QpNumber(self.completions.0.load_relaxed_u32(at + completion::TARGET)),
                false => QpNumber(0),
            };
            let Some(prefix) = prefix(target) else {
                // The message is for a queue pair that has ended meanwhile, or never existed.
                self.post_again();
                continue;
            };
            let received = self.take(program, header, slot, at, target, prefix);
            if !self.bounces.is_empty() {
                self.give_bounce(slot);
            }
            self.head += 1;
            return Some(received);
        }
        None
    }

    fn take(
        &self,
        program: &impl ProgramMemory<M>,
        header: Completion,
        slot: usize,
        at: usize,
        target: QpNumber,
        prefix: usize,
    ) -> Received {
        let posted = self.posted[slot];
        let memory = &self.completions.0;
        let length = memory.load_relaxed_u32(at + completion::LENGTH);
        let has = |flag| header.flags() & flag != 0;
        let immediate =
            has(Completion::HAS_IMMEDIATE).then(|| memory.load_relaxed_u32(at + completion::IMMEDIATE));
        let mut received = Received {
            id: posted.id,
            status: Status::SUCCESS,
            opcode: Opcode::RECV,
            length: length.saturating_add(prefix as u32),
            immediate,
            is_solicited: has(Completion::SOLICITED),
            target,
            source: QpNumber(0),
            lid: 0,
        };
        if self.is_shared {
            received.source = QpNumber(memory.load_relaxed_u32(at + completion::SOURCE) & QpNumber::MASK);
            received.lid = memory.load_relaxed_u16(at + completion::LID);
        }
        match header.kind() {
            Completion::RECEIVE if has(Completion::IN_ENTRY) => {
                let len = length as usize;
                if len > completion::INLINE || received.length > posted.length {
                    received.status = Status::BAD_RESP_ERR;
                } else {
                    let mut payload = [0; completion::INLINE];
                    memory.read(at + completion::PAYLOAD, &mut payload);
                    let elements = &self.elements[slot * self.shape.elements..][..posted.count];
                    scatter(program, &payload[..len], elements, prefix);
                }
            }
            Completion::RECEIVE if received.length <= posted.length => {
                if posted.is_bounced && !self.fetch(program, slot, length as usize, prefix) {
                    received.status = Status::LOC_PROT_ERR;
                }
            }
            Completion::WRITE_WITH_IMMEDIATE if immediate.is_some() => {
                received.opcode = Opcode::RECV_RDMA_WITH_IMM;
            }
            Completion::TOO_LONG => received.status = Status::LOC_LEN_ERR,
            Completion::PROTECTION => received.status = Status::LOC_PROT_ERR,
            _ => received.status = Status::BAD_RESP_ERR,
        }
        received
    }

    /// Posts the first entry again as the last one, because no message arrived for it.
    #[cold]
    fn post_again(&mut self) {
        let slot = self.slot(self.head);
        let Posted { id, count, length, .. } = self.posted[slot];
        let bounce = self.bounces.remove(&slot);
        let elements = self.elements[slot * self.shape.elements..][..count].to_vec();
        self.head += 1;
        let posted = match bounce {
            Some(_) => self.post_bounced(id, &elements, length, bounce),
            None => self.post(id, &elements),
        };
        debug_assert_eq!(posted, Ok(()), "it was posted before, and its place is free");
    }

    /// Takes back the first entry, for which no message can arrive any more. Returns `None` if there is no entry, or if a sender has
    /// claimed the first one.
    pub fn flush(&mut self) -> Option<u64> {
        if self.is_empty() {
            return None;
        }
        if self.is_shared && !self.take_back() {
            return None;
        }
        let slot = self.slot(self.head);
        let id = self.posted[slot].id;
        self.give_bounce(slot);
        self.head += 1;
        Some(id)
    }

    /// Claims the first entry for the owner.
    fn take_back(&self) -> bool {
        let header = self.header(self.head);
        if header.is_of(self.head) {
            return header.kind() == Completion::VOID;
        }
        let void = Completion::new(self.head, Completion::VOID, 0);
        let (memory, at) = (&self.completions.0, self.header_at(self.head));
        memory.compare_exchange_u64(at, header.0, void.0).is_ok()
    }

    /// Returns the sender that has claimed the first entry and not completed it.
    pub fn claimer(&self) -> Option<Claimer> {
        let header = self.header(self.head);
        if !self.is_shared || self.is_empty() || !header.is_of(self.head) {
            return None;
        }
        header.claimer()
    }

    /// Takes back entries from claimers that have died.
    pub fn revoke(&self, has_died: impl Fn(Claimer) -> bool) {
        for index in self.head..self.tail {
            let header = self.header(index);
            if header.is_of(index)
                && let Some(claimer) = header.claimer()
                && has_died(claimer)
            {
                let void = Completion::new(index, Completion::VOID, 0);
                // If the exchange fails, the claimer has completed the entry after all, which is fine.
                let _ = self.completions.0.compare_exchange_u64(self.header_at(index), header.0, void.0);
            }
        }
    }

    /// Returns whether a sender has claimed an entry, and so may be about to access the memory that it names. The caller has already
    /// taken that memory away, and executed a full fence.
    pub fn has_claims(&self) -> bool {
        self.is_shared
            && (self.head..self.tail).any(|index| {
                let header = self.header(index);
                header.is_of(index) && header.claimer().is_some()
            })
    }

    fn slot(&self, index: u64) -> usize {
        index as usize & (self.shape.entries - 1)
    }
}

/// Copies received bytes into the buffers of an entry, behind the first `prefix` bytes.
fn scatter<M: SharedMemory>(
    program: &impl ProgramMemory<M>,
    mut bytes: &[u8],
    elements: &[Element],
    mut prefix: usize,
) {
    for element in elements {
        let skipped = prefix.min(element.length as usize);
        prefix -= skipped;
        let (part, rest) = bytes.split_at(bytes.len().min(element.length as usize - skipped));
        program.put(element.address + skipped as u64, part);
        bytes = rest;
    }
}
