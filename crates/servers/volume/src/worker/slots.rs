//! The requests of a worker between their beginning and their end.

use super::source::Source;
use crate::backend::{Failure, Op};

/// All requests of a worker. Slots are used again, so nothing is allocated once there are enough.
pub(super) struct Slots<S: Source> {
    entries: Vec<Entry<S>>,
    free: Vec<u32>,
    /// The number that the next request gets.
    next: u64,
    /// The results of backends in the current turn; kept so that its memory is used again.
    pub done: Vec<(u32, Result<(), Failure>)>,
}

pub(super) struct Entry<S: Source> {
    pub request: S::Request,
    /// Present while the slot is occupied.
    pub ticket: Option<S::Ticket>,
    /// The index of its queue in the worker's list, as a hint, and the queue's serial number.
    pub queue: usize,
    pub serial: u64,
    pub disk: u16,
    pub op: Op,
    /// The time at which the request was taken, in nanoseconds since the epoch.
    pub began: u64,
    /// The request's number in the order in which requests were taken.
    pub number: u64,
    /// The bytes that the limits have counted.
    pub counted: u64,
    /// Whether the request has been passed to its disk.
    pub begun: bool,
    /// Whether the request waits for other requests. No request waits for this one.
    pub is_barrier: bool,
}

impl<S: Source> Entry<S> {
    pub fn begin(&mut self, ticket: S::Ticket, queue: usize, serial: u64, disk: u16, op: Op, now: u64) {
        self.ticket = Some(ticket);
        (self.is_barrier, self.begun, self.counted) = (false, false, 0);
        (self.queue, self.serial, self.disk, self.op, self.began) = (queue, serial, disk, op, now);
    }

    /// Returns the number of bytes that it moves.
    #[inline]
    pub fn bytes(&self) -> u64 {
        S::bytes(&self.request)
    }
}

impl<S: Source> Default for Slots<S> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), next: 0, done: Vec::new() }
    }
}

impl<S: Source> Slots<S> {
    /// Makes sure that this many slots are free.
    pub fn reserve(&mut self, more: usize) {
        while self.free.len() < more {
            self.grow();
        }
    }

    fn grow(&mut self) {
        self.free.push(self.entries.len() as u32);
        self.entries.push(Entry {
            request: S::Request::default(),
            ticket: None,
            queue: 0,
            serial: 0,
            disk: 0,
            op: Op::Flush,
            began: 0,
            number: 0,
            counted: 0,
            begun: false,
            is_barrier: false,
        });
    }

    /// Returns a free slot. It stays free until [`Slots::occupy`].
    #[inline]
    pub fn free(&mut self) -> u32 {
        if self.free.is_empty() {
            self.grow();
        }
        self.free[self.free.len() - 1]
    }

    /// Occupies the slot that [`Slots::free`] has just returned.
    #[inline]
    pub fn occupy(&mut self, slot: u32) {
        self.entries[slot as usize].number = self.next;
        self.next += 1;
        let taken = self.free.pop();
        debug_assert_eq!(taken, Some(slot));
    }

    /// Frees a slot.
    #[inline]
    pub fn release(&mut self, slot: u32) {
        self.free.push(slot);
    }

    #[inline]
    pub fn at(&mut self, slot: u32) -> &mut Entry<S> {
        &mut self.entries[slot as usize]
    }

    /// Frees the slots of one queue whose requests have not been begun; the requests stay in flight. Returns how many.
    pub fn leave(&mut self, serial: u64) -> u32 {
        let mut left = 0;
        for (slot, entry) in self.entries.iter_mut().enumerate() {
            if entry.ticket.is_some() && entry.serial == serial && !entry.begun {
                entry.ticket = None;
                self.free.push(slot as u32);
                left += 1;
            }
        }
        left
    }

    /// Returns whether a slot is occupied.
    pub fn is_there(&self, slot: u32) -> bool {
        self.entries[slot as usize].ticket.is_some()
    }

    /// Returns the number of the next request, and that of the oldest current request that waits for no others.
    pub fn span(&self) -> (u64, u64) {
        let there = self.entries.iter().filter(|entry| entry.ticket.is_some() && !entry.is_barrier);
        (self.next, there.map(|entry| entry.number).min().unwrap_or(self.next))
    }

    /// Returns the occupied slots of one queue, with their numbers.
    pub fn of_queue(&self, serial: u64) -> impl Iterator<Item = (u32, &Entry<S>)> {
        let is_its = move |(_, entry): &(u32, &Entry<S>)| entry.ticket.is_some() && entry.serial == serial;
        (0..).zip(&self.entries).filter(is_its)
    }
}
