//! Requests between their beginning and their end.

use ginnel_virtqueue::Ticket;

use crate::backend::{Failure, Op};
use crate::device::Request;

/// All of a worker. A slot is used again and again, so nothing is allocated once there are enough.
#[derive(Default)]
pub(super) struct Slots {
    places: Vec<Place>,
    free: Vec<u32>,
    /// The number of the next request.
    next: u64,
    /// What the backends have done; kept for its memory.
    pub done: Vec<(u32, Result<(), Failure>)>,
}

pub(super) struct Place {
    pub request: Request,
    /// There while the slot is occupied.
    pub ticket: Option<Ticket>,
    /// Where its queue is, as a hint, and which it is.
    pub queue: usize,
    pub serial: u64,
    pub disk: u16,
    pub op: Op,
    /// When it was taken.
    pub began: u64,
    /// In which order requests were taken.
    pub number: u64,
    /// Bytes that the limits have counted.
    pub counted: u64,
    /// It is at its disk.
    pub begun: bool,
    /// Waits for others, so others do not wait for it.
    pub settles: bool,
}

impl Place {
    pub fn begin(&mut self, ticket: Ticket, queue: usize, serial: u64, disk: u16, op: Op, now: u64) {
        self.ticket = Some(ticket);
        (self.settles, self.begun, self.counted) = (false, false, 0);
        (self.queue, self.serial, self.disk, self.op, self.began) = (queue, serial, disk, op, now);
    }

    /// Bytes that it moves.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.request.bytes
    }
}

impl Slots {
    /// Makes room for that many more.
    pub fn reserve(&mut self, more: usize) {
        while self.free.len() < more {
            self.grow();
        }
    }

    fn grow(&mut self) {
        self.free.push(self.places.len() as u32);
        self.places.push(Place {
            request: Request::default(),
            ticket: None,
            queue: 0,
            serial: 0,
            disk: 0,
            op: Op::Flush,
            began: 0,
            number: 0,
            counted: 0,
            begun: false,
            settles: false,
        });
    }

    /// One that is free. It stays so until [`Slots::occupy`].
    #[inline]
    pub fn free(&mut self) -> u32 {
        if self.free.is_empty() {
            self.grow();
        }
        self.free[self.free.len() - 1]
    }

    /// Takes the one that [`Slots::free`] has told of.
    #[inline]
    pub fn occupy(&mut self, slot: u32) {
        self.places[slot as usize].number = self.next;
        self.next += 1;
        let taken = self.free.pop();
        debug_assert_eq!(taken, Some(slot));
    }

    /// Frees one.
    #[inline]
    pub fn release(&mut self, slot: u32) {
        self.free.push(slot);
    }

    #[inline]
    pub fn at(&mut self, slot: u32) -> &mut Place {
        &mut self.places[slot as usize]
    }

    /// Forgets those of one queue that have not been begun; they stay in flight. Returns how many.
    pub fn leave(&mut self, serial: u64) -> u32 {
        let mut left = 0;
        for (slot, place) in self.places.iter_mut().enumerate() {
            if place.ticket.is_some() && place.serial == serial && !place.begun {
                place.ticket = None;
                self.free.push(slot as u32);
                left += 1;
            }
        }
        left
    }

    /// Whether one is occupied.
    pub fn is_there(&self, slot: u32) -> bool {
        self.places[slot as usize].ticket.is_some()
    }

    /// The number of the next request, and that of the oldest one that is there and waits for no others.
    pub fn span(&self) -> (u64, u64) {
        let there = self.places.iter().filter(|place| place.ticket.is_some() && !place.settles);
        (self.next, there.map(|place| place.number).min().unwrap_or(self.next))
    }

    /// Those of one queue that are occupied, with their numbers.
    pub fn of_queue(&self, serial: u64) -> impl Iterator<Item = (u32, &Place)> {
        let is_its = move |(_, place): &(u32, &Place)| place.ticket.is_some() && place.serial == serial;
        (0..).zip(&self.places).filter(is_its)
    }
}
