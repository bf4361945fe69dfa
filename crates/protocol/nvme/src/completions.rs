//! The device's side of a completion queue.

use crate::QueueSetup;
use crate::doorbell::Doorbell;
use crate::error::{Broken, SetupError};
use crate::ring::{before, check, distance, next};
use crate::state::{State, unknown};
use ginnel_guest_memory::Area;
use ginnel_layout::nvme::{COMPLETION, COMPLETION_WORD, Completion, Status};
use ginnel_layout::nvme_state::completion;
use ginnel_shmem::SharedMemory;

pub(crate) struct Completions<M: SharedMemory> {
    id: u16,
    ring: Area<M>,
    size: u16,
    doorbell: Doorbell<M>,
    /// The state, and the offset of the word in it that has `posted`.
    state: M,
    tail_at: usize,
    /// Number of completions that were ever posted, and so the position of the next one.
    posted: u64,
    /// The entry of the next completion, and its phase tag.
    tail: u16,
    phase: bool,
    /// The driver's head as last loaded.
    head: u16,
    /// Number of commands that may be taken: free entries, less the commands whose completions will need one.
    pub room: u16,
    interrupts: bool,
    /// Whether completions were posted since the last publish.
    unpublished: bool,
}

impl<M: SharedMemory> Completions<M> {
    pub fn new(state: &State<M>, setup: QueueSetup<M>) -> Result<Self, SetupError> {
        let QueueSetup { id, ring, doorbell } = setup;
        let record = state.completion(id).ok_or(unknown("completion", id))?;
        let size = record.size;
        state.check_size(id, size)?;
        check("completion queue", &ring, COMPLETION * usize::from(size), 8)?;
        let tail_at = state.completion_at(id).ok_or(unknown("completion", id))? + completion::TAIL;
        let posted = state.memory.load_relaxed_u64(tail_at);
        let mut queue = Self {
            id,
            ring,
            size,
            doorbell,
            state: state.memory.clone(),
            tail_at,
            posted,
            tail: 0,
            phase: false,
            head: 0,
            room: 0,
            interrupts: record.interrupts,
            // A predecessor may have died before it notified the driver.
            unpublished: true,
        };
        (queue.tail, queue.phase) = queue.place(posted);
        Ok(queue)
    }

    /// Returns the entry of a position, and the phase tag that a completion there has.
    fn place(&self, position: u64) -> (u16, bool) {
        let size = u64::from(self.size);
        ((position % size) as u16, (position / size).is_multiple_of(2))
    }

    fn at(&self, entry: u16) -> usize {
        COMPLETION * usize::from(entry)
    }

    /// Returns whether a predecessor has posted the completion of this command, which it was about to write at `position`. If so, it is
    /// counted.
    pub fn was_posted(&mut self, position: u64, sqid: u16, cid: u16) -> Result<bool, SetupError> {
        if position.checked_add(1) == Some(self.posted) {
            return Ok(true);
        }
        if position != self.posted {
            return Err(SetupError::State("a command was being completed at an impossible position"));
        }
        let word = self.ring.load_relaxed_u64(self.at(self.tail) + COMPLETION_WORD);
        let found = Completion::from_words(0, word);
        let posted = found.phase() == self.phase && found.sqid == sqid && found.cid == cid;
        if posted {
            self.advance();
        }
        Ok(posted)
    }

    /// Begins, when it is known what a predecessor has posted.
    pub fn begin(&mut self) -> Result<(), Broken> {
        let head = self.doorbell.load();
        if head >= self.size.into() {
            return Err(self.broken(head));
        }
        self.head = head as u16;
        self.room = self.size - 1 - distance(self.head, self.tail, self.size);
        Ok(())
    }

    /// Loads the driver's head. Returns whether there is room for the completion of one more command.
    pub fn look(&mut self) -> Result<bool, Broken> {
        let head = self.doorbell.load();
        let waiting = distance(self.head, self.tail, self.size);
        if head >= self.size.into() || distance(self.head, head as u16, self.size) > waiting {
            return Err(self.broken(head));
        }
        self.room += distance(self.head, head as u16, self.size);
        if self.head != head as u16 {
            self.head = head as u16;
            self.keep_quiet();
        }
        Ok(self.room > 0)
    }

    #[cold]
    fn broken(&self, head: u32) -> Broken {
        let posted = distance(self.head, self.tail, self.size);
        Broken::Head { queue: self.id, head, size: self.size, posted, from: self.head }
    }

    /// Returns whether the driver has moved its head, so that [`look`](Self::look) finds room.
    pub fn has_moved(&self) -> bool {
        self.doorbell.load() != self.head.into()
    }

    /// Asks the driver to notify when it moves its head.
    pub fn arm(&self) {
        self.doorbell.ask(self.head);
    }

    /// Asks the driver for no notifications. It passes this event index only after it has moved its head around the whole queue, and
    /// before that, all room is used up and the head is loaded anew.
    pub fn keep_quiet(&self) {
        self.doorbell.ask(before(self.head, self.size));
    }

    /// Orders stores of event indexes before later loads of doorbells.
    pub fn fence(&self) {
        self.ring.memory.full_fence();
    }

    /// Returns the position of the next completion.
    #[inline]
    pub fn position(&self) -> u64 {
        self.posted
    }

    /// Writes a completion into the guest's memory.
    #[inline]
    pub fn post(&mut self, sqid: u16, sqhd: u16, cid: u16, status: Status, result: u32) {
        let at = self.at(self.tail);
        self.ring.store_relaxed_u64(at, result.into());
        // ORDER nvme.phase: the first word, and what the device wrote to the buffers, are visible before the phase tag. Pairs with: the
        // driver's look at the phase tag.
        self.ring
            .store_release_u64(at + COMPLETION_WORD, Completion::word(sqhd, sqid, cid, status, self.phase));
        self.unpublished = true;
        self.advance();
    }

    #[inline]
    fn advance(&mut self) {
        self.posted = self.posted.wrapping_add(1);
        self.state.store_release_u64(self.tail_at, self.posted);
        self.tail = next(self.tail, self.size);
        self.phase ^= self.tail == 0;
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        std::mem::take(&mut self.unpublished) && self.interrupts
    }

    pub fn id(&self) -> u16 {
        self.id
    }

    pub fn state(&self) -> CompletionState {
        CompletionState {
            id: self.id,
            size: self.size,
            tail: self.tail,
            head: self.head,
            driver_head: self.doorbell.load(),
            posted: self.posted,
            room: self.room,
        }
    }
}

/// The state of a completion queue, for people who look at a guest that hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionState {
    /// Number of the queue.
    pub id: u16,
    /// Number of entries.
    pub size: u16,
    /// Next entry to write.
    pub tail: u16,
    /// The driver's head as last looked at.
    pub head: u16,
    /// The present value of the driver's doorbell.
    pub driver_head: u32,
    /// Number of completions that were ever posted.
    pub posted: u64,
    /// Number of commands that may be taken before the driver takes completions back.
    pub room: u16,
}
