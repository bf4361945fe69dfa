//! A queue pair's receive queue, by its owner: entries for messages to come, and what has come.

use std::collections::BTreeMap;
use std::sync::Arc;

use ginnel_layout::verbs::{Access, Claimer, Completion, Key, QpNumber, completion, qp, receive};
use ginnel_shmem::SharedMemory;

use crate::program::Program;
use crate::queue_pair::Adapter;
use crate::shadow::Bounce;
use crate::work::{Element, Opcode, Status};

/// A receive queue.
pub struct ReceiveQueue<M: SharedMemory> {
    tables: M,
    /// Of the queue pair in the tables.
    at: usize,
    ring: (M, usize),
    completions: (M, usize),
    shape: Shape,
    /// Entries ever posted.
    tail: u64,
    /// Entries whose completion has been taken.
    head: u64,
    /// What was posted, entry by entry.
    posted: Vec<Posted>,
    elements: Vec<Element>,
    /// The shortest that may be posted just now.
    shortest: u32,
    /// Several senders may use it, so each claims what it uses.
    is_shared: bool,
    owner: Owner<M>,
    /// Where messages for buffers in shadow regions are put, by the entry's place in the ring.
    bounces: BTreeMap<usize, Bounce<M>>,
}

/// Whose receives they are.
pub struct Owner<M: SharedMemory> {
    /// The device.
    pub adapter: Arc<dyn Adapter<M>>,
    /// The protection domain.
    pub domain: u32,
}

/// How large a receive queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// A power of two.
    pub entries: usize,
    /// Elements of an entry, at most.
    pub elements: usize,
}

impl Shape {
    /// Bytes of an entry of the receive ring.
    pub fn stride(self) -> usize {
        receive::stride(self.elements)
    }

    /// Bytes of both rings, the receive ring first.
    pub fn bytes(self) -> usize {
        self.entries * (self.stride() + completion::ENTRY)
    }
}

#[derive(Clone, Copy, Default)]
struct Posted {
    id: u64,
    count: usize,
    length: u32,
    /// A buffer is in a shadow region, so messages are put somewhere else first.
    is_bounced: bool,
}

/// Why a receive was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotPosted {
    /// The queue is full, or there is no memory for messages to a shadow region.
    Full,
    /// It has more elements than the queue was made for, or more bytes than a message may have.
    Invalid,
}

/// A receive that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The program's own number for it.
    pub id: u64,
    /// How.
    pub status: Status,
    /// By which operation of the peer's.
    pub opcode: Opcode,
    /// Bytes received.
    pub length: u32,
    /// A value that came along.
    pub immediate: Option<u32>,
    /// The peer wishes that whoever sleeps for such a message is woken.
    pub is_solicited: bool,
    /// Which queue pair it was sent to. Means nothing unless the receive queue is shared.
    pub target: QpNumber,
    /// The sender's queue pair, likewise.
    pub source: QpNumber,
    /// The local identifier of the sender's port, likewise.
    pub lid: u16,
}

impl<M: SharedMemory> ReceiveQueue<M> {
    /// A queue with rings at these places, which nobody else uses yet.
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

    /// Empties it. No peer uses it.
    pub fn reset(&mut self) {
        self.release();
        (self.tail, self.head, self.shortest) = (0, 0, u32::MAX);
        self.clear();
    }

    /// Gives back what is kept for messages. No peer uses it any more.
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

    /// Entries that wait for a message.
    pub fn len(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.tail == self.head
    }

    /// Posts an entry.
    #[inline]
    pub fn post(&mut self, id: u64, elements: &[Element]) -> Result<(), NotPosted> {
        let length = self.length(elements)?;
        if elements.iter().any(|element| Key(element.key).is_shadow()) {
            return self.post_bounced(id, elements, length, None);
        }
        self.enter(Posted { id, count: elements.len(), length, is_bounced: false }, elements, elements);
        Ok(())
    }

    /// The bytes of an entry, if it can be posted.
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

    /// Posts an entry that can be posted, of which peers see these elements.
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
        // A poster that sees this entry must not take a message for shorter than all entries that there are.
        self.shortest = if self.is_empty() { length } else { self.shortest.min(length) };
        self.tables.store_relaxed_u32(self.at + qp::SHORTEST, self.shortest);
        self.tail += 1;
        // ORDER verbs.receive: the entry before the tail. Pairs with: `Remote::look_for_entries`.
        self.tables.store_release_u64(self.at + qp::TAIL, self.tail);
    }

    /// Posts an entry with a buffer in a shadow region: peers see memory for a message of its length instead, which there may be already.
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

    /// Gives back what was kept for messages to an entry.
    #[cold]
    fn give_bounce(&mut self, slot: usize) {
        if let Some(bounce) = self.bounces.remove(&slot) {
            self.owner.adapter.give(bounce);
        }
    }

    /// Copies a message to the buffers of an entry from where its sender has put it. False if one is not in a region that allows it.
    #[cold]
    fn fetch(&self, program: &impl Program<M>, slot: usize, len: usize, prefix: usize) -> bool {
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

    /// Whether something has come.
    #[inline]
    pub fn is_ready(&self) -> bool {
        let header = self.header(self.head);
        header.is_of(self.head) && header.claimer().is_none() && !self.is_empty()
    }

    /// Whether something has come that is worth a wake.
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
        // ORDER verbs.completion: the header before the rest, and before the bytes received. Pairs with: `Remote::complete`.
        Completion(self.completions.0.load_acquire_u64(self.header_at(index)))
    }

    /// The next receive that has ended, in their order. `prefix` says how many bytes a queue pair has in front of a message, if it may use
    /// these receives.
    pub fn poll(
        &mut self,
        program: &impl Program<M>,
        prefix: impl Fn(QpNumber) -> Option<usize>,
    ) -> Option<Received> {
        // Not for ever, whatever others do to the headers meanwhile.
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
                // It was sent to a queue pair that has ended meanwhile, or never was.
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
        program: &impl Program<M>,
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

    /// Posts the first entry again, as the last one: nothing has come for it.
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

    /// Takes an entry back that nothing has come for, since nothing will. `None` if there is none, or if a sender has claimed the first
    /// one.
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

    /// Claims the first entry for its owner.
    fn take_back(&self) -> bool {
        let header = self.header(self.head);
        if header.is_of(self.head) {
            return header.kind() == Completion::VOID;
        }
        let void = Completion::new(self.head, Completion::VOID, 0);
        let (memory, at) = (&self.completions.0, self.header_at(self.head));
        memory.compare_exchange_u64(at, header.0, void.0).is_ok()
    }

    /// Who has claimed the first entry, and has not completed it.
    pub fn claimer(&self) -> Option<Claimer> {
        let header = self.header(self.head);
        if !self.is_shared || self.is_empty() || !header.is_of(self.head) {
            return None;
        }
        header.claimer()
    }

    /// Takes entries from claimers that do not live any more.
    pub fn revoke(&self, has_died: impl Fn(Claimer) -> bool) {
        for index in self.head..self.tail {
            let header = self.header(index);
            if header.is_of(index)
                && let Some(claimer) = header.claimer()
                && has_died(claimer)
            {
                let void = Completion::new(index, Completion::VOID, 0);
                // If it is complete after all, so much the better.
                let _ = self.completions.0.compare_exchange_u64(self.header_at(index), header.0, void.0);
            }
        }
    }

    /// Whether a sender has claimed an entry, and so may be about to access what it names. The caller has taken that away before, with a
    /// full fence.
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

/// Puts bytes into the buffers of an entry, one after the other, behind so many bytes.
fn scatter<M: SharedMemory>(
    program: &impl Program<M>,
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
