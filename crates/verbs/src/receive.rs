//! A queue pair's receive queue, by its owner: entries for messages to come, and what has come.

use ginnel_layout::verbs::{Completion, completion, qp, receive};
use ginnel_shmem::Memory;

use crate::program::Program;
use crate::work::{Element, Opcode, Status};

/// A receive queue.
pub struct ReceiveQueue<M> {
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
}

/// Why a receive was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotPosted {
    /// The queue is full.
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
}

impl<M: Memory> ReceiveQueue<M> {
    /// A queue with rings at these places, which nobody else uses yet.
    pub fn new(tables: M, at: usize, shape: Shape, ring: (M, usize), completions: (M, usize)) -> Self {
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
        };
        queue.clear();
        queue
    }

    /// Empties it. No peer uses it.
    pub fn reset(&mut self) {
        (self.tail, self.head, self.shortest) = (0, 0, u32::MAX);
        self.clear();
    }

    fn clear(&self) {
        for i in 0..self.shape.entries {
            let (memory, at) = &self.completions;
            memory.store_relaxed_u64(at + i * completion::ENTRY + completion::HEADER, 0);
        }
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
    pub fn post(&mut self, id: u64, elements: &[Element]) -> Result<(), NotPosted> {
        if elements.len() > self.shape.elements {
            return Err(NotPosted::Invalid);
        }
        let length = crate::work::total(elements).ok_or(NotPosted::Invalid)?;
        if self.len() == self.shape.entries {
            return Err(NotPosted::Full);
        }
        let slot = self.slot(self.tail);
        self.posted[slot] = Posted { id, count: elements.len(), length };
        self.elements[slot * self.shape.elements..][..elements.len()].copy_from_slice(elements);

        let (memory, ring) = &self.ring;
        let at = ring + slot * self.shape.stride();
        memory.store_relaxed_u64(at + receive::LENGTH, u64::from(length) | (elements.len() as u64) << 32);
        for (i, element) in elements.iter().enumerate() {
            let at = at + receive::ELEMENTS + i * receive::ELEMENT;
            memory.store_relaxed_u64(at, element.address);
            memory.store_relaxed_u64(at + 8, u64::from(element.length) | u64::from(element.key) << 32);
        }
        // A poster that sees this entry must not take a message for shorter than all entries that there are.
        self.shortest = if self.is_empty() { length } else { self.shortest.min(length) };
        self.tables.store_relaxed_u32(self.at + qp::SHORTEST, self.shortest);
        self.tail += 1;
        // ORDER verbs.receive: the entry before the tail. Pairs with: `Remote::entry`.
        self.tables.store_release_u64(self.at + qp::TAIL, self.tail);
        Ok(())
    }

    /// Whether something has come.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.header().is_of(self.head) && !self.is_empty()
    }

    #[inline]
    fn header(&self) -> Completion {
        let (memory, at) = &self.completions;
        let at = at + self.slot(self.head) * completion::ENTRY;
        // ORDER verbs.completion: the header before the rest, and before the bytes received. Pairs with: `Remote::complete`.
        Completion(memory.load_acquire_u64(at + completion::HEADER))
    }

    /// The next receive that has ended, in their order.
    pub fn poll(&mut self, program: &impl Program<M>) -> Option<Received> {
        let header = self.header();
        if !header.is_of(self.head) || self.is_empty() {
            return None;
        }
        let slot = self.slot(self.head);
        let posted = self.posted[slot];
        let (memory, at) = &self.completions;
        let at = at + slot * completion::ENTRY;
        let length = memory.load_relaxed_u32(at + completion::LENGTH);
        let has = |flag| header.flags() & flag != 0;
        let immediate =
            has(Completion::HAS_IMMEDIATE).then(|| memory.load_relaxed_u32(at + completion::IMMEDIATE));
        let mut received = Received {
            id: posted.id,
            status: Status::SUCCESS,
            opcode: Opcode::RECV,
            length,
            immediate,
            is_solicited: has(Completion::SOLICITED),
        };
        match header.kind() {
            Completion::RECEIVE if has(Completion::IN_ENTRY) => {
                let len = length as usize;
                if len > completion::INLINE || length > posted.length {
                    received.status = Status::BAD_RESP_ERR;
                } else {
                    let mut payload = [0; completion::INLINE];
                    memory.read(at + completion::PAYLOAD, &mut payload);
                    let elements = &self.elements[slot * self.shape.elements..][..posted.count];
                    scatter(program, &payload[..len], elements);
                }
            }
            Completion::RECEIVE if length <= posted.length => {}
            Completion::WRITE_WITH_IMMEDIATE if immediate.is_some() => {
                received.opcode = Opcode::RECV_RDMA_WITH_IMM;
            }
            Completion::TOO_LONG => received.status = Status::LOC_LEN_ERR,
            Completion::PROTECTION => received.status = Status::LOC_PROT_ERR,
            _ => received.status = Status::BAD_RESP_ERR,
        }
        self.head += 1;
        Some(received)
    }

    /// Takes an entry back that nothing has come for, since nothing will.
    pub fn flush(&mut self) -> Option<u64> {
        if self.is_empty() {
            return None;
        }
        let id = self.posted[self.slot(self.head)].id;
        self.head += 1;
        Some(id)
    }

    fn slot(&self, index: u64) -> usize {
        index as usize & (self.shape.entries - 1)
    }
}

/// Puts bytes into the buffers of an entry, one after the other.
fn scatter<M: Memory>(program: &impl Program<M>, mut bytes: &[u8], elements: &[Element]) {
    for element in elements {
        let (part, rest) = bytes.split_at(bytes.len().min(element.length as usize));
        program.put(element.address, part);
        bytes = rest;
    }
}
