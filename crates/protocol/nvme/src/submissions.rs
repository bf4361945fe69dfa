//! The device's side of a submission queue.

use crate::QueueSetup;
use crate::doorbell::Doorbell;
use crate::error::{Broken, SetupError};
use crate::ring::{before, check, distance, next};
use crate::slots::{InFlight, Slots, command};
use crate::state::{State, unknown};
use ginnel_guest_memory::Area;
use ginnel_layout::nvme::{COMMAND, Command};
use ginnel_shmem::SharedMemory;

/// How many commands ahead an entry is prefetched. The entries lie in the cache of the driver's CPU, from which loads are slow.
const AHEAD: u16 = 4;

pub(crate) struct Submissions<M: SharedMemory> {
    id: u16,
    ring: Area<M>,
    size: u16,
    doorbell: Doorbell<M>,
    /// Next entry to take.
    head: u16,
    /// The driver's tail as last loaded.
    seen: u16,
    /// Whether the driver is asked to notify.
    armed: bool,
    /// How many entries the driver has written since the event index was put out of its way.
    passed: u16,
    pub slots: Slots<M>,
    /// Number of commands that are taken and not completed.
    pub outstanding: u32,
}

impl<M: SharedMemory> Submissions<M> {
    /// Takes over a queue. Returns also the commands in flight, in their order.
    pub fn new(
        state: &State<M>,
        setup: QueueSetup<M>,
        completion: u16,
    ) -> Result<(Self, Vec<InFlight>), SetupError> {
        let QueueSetup { id, ring, doorbell } = setup;
        let record = state.submission(id).ok_or(unknown("submission", id))?;
        if record.completion != completion {
            return Err(SetupError::Queue {
                kind: "submission",
                queue: id,
                why: "uses another completion queue",
            });
        }
        let size = record.size;
        state.check_size(id, size)?;
        check("submission queue", &ring, COMMAND * usize::from(size), 8)?;
        let (slots, in_flight) = Slots::new(state, id);
        let head = ((slots.next() - 1) % u64::from(size)) as u16;
        let queue = Self {
            id,
            ring,
            size,
            doorbell,
            head,
            seen: head,
            armed: true,
            passed: 0,
            slots,
            outstanding: 0,
        };
        Ok((queue, in_flight))
    }

    pub fn id(&self) -> u16 {
        self.id
    }

    /// Returns the entry behind the last one that was taken.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Returns whether there are entries to take that were seen by the last [`look`](Self::look).
    #[inline]
    pub fn has_next(&self) -> bool {
        self.head != self.seen
    }

    /// Returns whether the driver has submitted more commands.
    #[inline]
    pub fn look(&mut self) -> Result<bool, Broken> {
        let tail = self.doorbell.load();
        if tail >= self.size.into() {
            return Err(self.broken(tail));
        }
        let batch = distance(self.head, tail as u16, self.size);
        if batch == 0 {
            return Ok(false);
        }
        self.seen = tail as u16;
        let mut entry = self.head;
        for _ in 0..batch.min(AHEAD) {
            self.ring.prefetch(COMMAND * usize::from(entry));
            entry = next(entry, self.size);
        }
        self.keep_quiet(batch);
        Ok(true)
    }

    #[cold]
    fn broken(&self, tail: u32) -> Broken {
        Broken::Tail { queue: self.id, tail, size: self.size }
    }

    /// Takes the next entry, which must be there. Returns its slot, its number and the command; `None` if no slot is free.
    #[inline]
    pub fn take(&mut self) -> Option<(u16, u64, Command)> {
        let mut bytes = [0; COMMAND];
        self.ring.memory.read(self.ring.at + COMMAND * usize::from(self.head), &mut bytes);
        let (slot, number) = self.slots.take(&bytes)?;
        if distance(self.head, self.seen, self.size) > AHEAD {
            let entry = self.head + AHEAD;
            let entry = if entry >= self.size { entry - self.size } else { entry };
            self.ring.prefetch(COMMAND * usize::from(entry));
        }
        self.head = next(self.head, self.size);
        self.outstanding += 1;
        Some((slot, number, command(&bytes)))
    }

    /// Returns how many entries the driver has submitted, according to its present tail, that are not taken. A tail outside counts as
    /// one, so that somebody looks and finds that the queue is broken.
    pub fn ahead(&self) -> u16 {
        match self.doorbell.load() {
            tail if tail >= self.size.into() => 1,
            tail => distance(self.head, tail as u16, self.size),
        }
    }

    /// Asks the driver to notify when it submits a command.
    pub fn arm(&mut self) {
        self.armed = true;
        self.doorbell.ask(self.head);
    }

    /// Asks the driver for no notifications.
    pub fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.be_quiet();
        }
    }

    /// Puts the event index out of the driver's way again, after it has written a batch of entries. The driver passes the index when it
    /// has gone around the whole queue. To store it at each look would cost the driver a cache miss each time, so this is done when
    /// the driver has gone half of the way, or could within a few more batches like this one.
    #[inline]
    fn keep_quiet(&mut self, batch: u16) {
        if self.doorbell.has_event() && !self.armed {
            self.passed += batch;
            if u32::from(self.passed) + 4 * u32::from(batch) > u32::from(self.size / 2) {
                self.be_quiet();
            }
        }
    }

    fn be_quiet(&mut self) {
        self.passed = 0;
        self.doorbell.ask(before(self.seen, self.size));
    }

    pub fn state(&self, resubmit: usize) -> SubmissionState {
        SubmissionState {
            id: self.id,
            size: self.size,
            head: self.head,
            driver_tail: self.doorbell.load(),
            outstanding: self.outstanding,
            resubmit: resubmit as u32,
            armed: self.armed,
        }
    }
}

/// The state of a submission queue, for people who look at a guest that hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubmissionState {
    /// Number of the queue.
    pub id: u16,
    /// Number of entries.
    pub size: u16,
    /// Next entry to take.
    pub head: u16,
    /// The present value of the driver's doorbell.
    pub driver_tail: u32,
    /// Number of commands taken and not completed.
    pub outstanding: u32,
    /// Number of commands that a previous process had in flight and that are not taken again yet.
    pub resubmit: u32,
    /// Whether the driver has been asked to notify.
    pub armed: bool,
}
