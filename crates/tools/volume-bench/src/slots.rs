//! The slots of a queue: the places for requests, and which of them are in use.

use crate::request::{Request, Status};

/// Size of a slot without its buffer, in bytes: the part that the device reads and, from [`ANSWER`] on, the part that
/// it writes. NVMe queues have no such heads.
pub(crate) const HEAD: usize = 256;
/// Offset of the device's answer in a slot's head. It is not in the cache line that the client writes.
pub(crate) const ANSWER: usize = 128;

/// A place for one request. It is valid only for the queue from which it was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub(crate) u16);

impl Slot {
    /// Returns its number, which is less than [`Queue::slots`](crate::Queue::slots).
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// A request that the server has answered.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// The slot of the request. It stays claimed.
    pub slot: Slot,
    /// The request.
    pub request: Request,
    /// The disk's answer.
    pub status: Status,
    /// Number of bytes that the device has written, according to itself: data and answer. An NVMe controller does not
    /// say that; it is 0 then.
    pub written: u32,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Free,
    Claimed,
    Submitted(Request),
}

/// The states of all slots.
pub(crate) struct Slots {
    states: Vec<State>,
    free: Vec<u16>,
    submitted: usize,
}

impl Slots {
    pub fn new(count: u16) -> Self {
        Self { states: vec![State::Free; count.into()], free: (0..count).rev().collect(), submitted: 0 }
    }

    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Returns how many requests are in flight.
    #[inline]
    pub fn submitted(&self) -> usize {
        self.submitted
    }

    #[inline]
    pub fn claim(&mut self) -> Option<Slot> {
        let slot = self.free.pop()?;
        self.states[usize::from(slot)] = State::Claimed;
        Some(Slot(slot))
    }

    #[inline]
    pub fn release(&mut self, slot: Slot) {
        if let Some(state @ State::Claimed) = self.states.get_mut(slot.index()) {
            *state = State::Free;
            self.free.push(slot.0);
        }
    }

    #[inline]
    pub fn is_claimed(&self, slot: Slot) -> bool {
        matches!(self.states.get(slot.index()), Some(State::Claimed))
    }

    /// Records that a claimed slot's request is in flight.
    #[inline]
    pub fn submit(&mut self, slot: Slot, request: Request) {
        self.states[slot.index()] = State::Submitted(request);
        self.submitted += 1;
    }

    /// Records that a slot's request is answered, and returns it; `None` if it has none in flight.
    #[inline]
    pub fn answer(&mut self, slot: Slot) -> Option<Request> {
        let state = self.states.get_mut(slot.index())?;
        let State::Submitted(request) = *state else { return None };
        *state = State::Claimed;
        self.submitted -= 1;
        Some(request)
    }

    /// Returns the requests in flight.
    pub fn in_flight(&self) -> impl Iterator<Item = (Slot, Request)> {
        self.states.iter().zip(0..).filter_map(|(state, slot)| match state {
            State::Submitted(request) => Some((Slot(slot), *request)),
            _ => None,
        })
    }
}
