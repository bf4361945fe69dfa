//! The slots of a submission queue: the record of its commands in flight (see [`ginnel_layout::nvme_state`]).

use crate::state::State;
use ginnel_layout::nvme::{COMMAND, Command};
use ginnel_layout::nvme_state::{SLOT, slot};
use ginnel_shmem::SharedMemory;
use zerocopy::FromBytes;

/// Bytes of a command before, and offset of those behind, the two words of a slot.
const HEAD: usize = slot::TAKEN;
const REST: usize = slot::COMPLETING + 8;

pub(crate) struct Slots<M> {
    memory: M,
    /// Offset of the first slot.
    at: usize,
    /// Free slots. The one that was freed last is used next, because its cache line is near.
    free: Vec<u16>,
    /// Number of the next command.
    next: u64,
}

/// A command that a previous process had in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InFlight {
    pub slot: u16,
    pub number: u64,
    /// The position at which its completion was being written.
    pub completing: Option<u64>,
}

impl<M: SharedMemory> Slots<M> {
    /// Takes over the slots of a queue. Returns also the commands in flight, in their order. Stores nothing.
    pub fn new(state: &State<M>, queue: u16) -> (Self, Vec<InFlight>) {
        let mut slots =
            Self { memory: state.memory.clone(), at: state.slots_at(queue), free: Vec::new(), next: 1 };
        slots.free.reserve_exact(state.slots().into());
        let mut in_flight = Vec::new();
        // The first slot is at the end of the list, and is used first.
        for slot in (0..state.slots()).rev() {
            let taken = slots.memory.load_relaxed_u64(slots.word(slot, slot::TAKEN));
            let number = taken >> 1;
            slots.next = slots.next.max(number + 1);
            if taken & 1 == 0 {
                slots.free.push(slot);
            } else {
                let completing = slots.memory.load_relaxed_u64(slots.word(slot, slot::COMPLETING));
                in_flight.push(InFlight { slot, number, completing: completing.checked_sub(1) });
            }
        }
        in_flight.sort_unstable_by_key(|command| command.number);
        (slots, in_flight)
    }

    fn word(&self, slot: u16, word: usize) -> usize {
        self.at + SLOT * usize::from(slot) + word
    }

    /// Returns the number of the next command.
    pub fn next(&self) -> u64 {
        self.next
    }

    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns how many slots are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Records that a command is in flight. Returns its slot and number; `None` if no slot is free.
    #[inline]
    pub fn take(&mut self, command: &[u8; COMMAND]) -> Option<(u16, u64)> {
        let slot = self.free.pop()?;
        let number = self.next;
        self.next += 1;
        let at = self.word(slot, 0);
        self.memory.write(at, &command[..HEAD]);
        self.memory.write(at + REST, &command[REST..]);
        self.memory.store_release_u64(at + slot::COMPLETING, 0);
        self.memory.store_release_u64(at + slot::TAKEN, number << 1 | 1);
        Some((slot, number))
    }

    /// Returns the command in a slot.
    pub fn command(&self, slot: u16) -> Command {
        let mut bytes = [0; COMMAND];
        self.memory.read(self.word(slot, 0), &mut bytes);
        command(&bytes)
    }

    /// Records that the completion of a command is about to be written at a position.
    #[inline]
    pub fn completing(&self, slot: u16, position: u64) {
        self.memory.store_release_u64(self.word(slot, slot::COMPLETING), position.wrapping_add(1));
    }

    /// Records that no completion is being written.
    pub fn not_completing(&self, slot: u16) {
        self.memory.store_release_u64(self.word(slot, slot::COMPLETING), 0);
    }

    /// Frees the slot of a command whose completion has been written.
    #[inline]
    pub fn completed(&mut self, slot: u16, number: u64) {
        self.memory.store_release_u64(self.word(slot, slot::TAKEN), number << 1);
        self.free.push(slot);
    }
}

/// Returns a command from the bytes of an entry or of a slot. The words that a slot uses for itself are zero.
#[inline]
pub(crate) fn command(bytes: &[u8; COMMAND]) -> Command {
    // The bytes are as many as the structure's.
    let command = Command::read_from_bytes(bytes).unwrap_or_else(|_| unreachable!());
    Command { cdw2: 0, cdw3: 0, mptr: 0, ..command }
}
