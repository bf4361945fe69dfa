//! The driver's side of the queues, for benches, fuzzers and tests. It handles doorbells as Linux does.

use crate::error::{Corrupt, SetupError};
use crate::ring::{check, distance, next};
use ginnel_guest_memory::Area;
use ginnel_layout::nvme::{COMMAND, COMPLETION, COMPLETION_WORD, Command, Completion};
use ginnel_shmem::SharedMemory;
use zerocopy::IntoBytes;

/// A doorbell as the driver sees it.
#[derive(Clone)]
pub enum DriverDoorbell<M> {
    /// The word is mapped.
    Mapped(Area<M>),
    /// Each write is trapped: the caller does it.
    Trapped,
    /// The value is stored in memory, and the register is written only if the device asks for that by an event index.
    Shadow {
        /// The value.
        value: Area<M>,
        /// The event index.
        event: Area<M>,
    },
}

impl<M: SharedMemory> DriverDoorbell<M> {
    fn check(&self) -> Result<(), SetupError> {
        match self {
            Self::Mapped(word) => check("doorbell", word, 4, 4),
            Self::Trapped => Ok(()),
            Self::Shadow { value, event } => {
                check("shadow doorbell", value, 4, 4)?;
                check("event index", event, 4, 4)
            }
        }
    }

    /// Stores a value. Returns whether the caller must write it to the register.
    #[inline]
    fn ring(&self, old: u16, new: u16) -> bool {
        match self {
            // ORDER nvme.doorbell: the commands before the tail, or the loads of completions before the head, come first. Pairs with: the
            // device's load of the doorbell.
            Self::Mapped(word) => {
                word.store_release_u32(0, new.into());
                false
            }
            Self::Trapped => true,
            Self::Shadow { value, event } => {
                value.store_release_u32(0, new.into());
                // This fence is between the store of the value and the load of the event index. The device has a fence between the
                // store of the event index and its second look at the value.
                value.memory.full_fence();
                passes(event.load_relaxed_u32(0) as u16, new, old)
            }
        }
    }
}

/// Returns whether the event index is among the positions from `old` up to but not including `new` (Linux: `nvme_dbbuf_need_event`).
/// The positions wrap at the size of the queue and not at 65536, so this is also true for event indexes beyond the queue, if `new` is below
/// `old`.
#[inline]
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A submission queue as its driver sees it.
pub struct DriverSubmissions<M: SharedMemory> {
    id: u16,
    size: u16,
    ring: Area<M>,
    doorbell: DriverDoorbell<M>,
    /// Next entry to write.
    tail: u16,
    /// The tail that the device sees.
    published: u16,
    /// The device's head, by the last completion.
    head: u16,
    /// Identifiers that are free, with the next one at the end, and whether each one is outstanding.
    free: Vec<u16>,
    outstanding: Vec<bool>,
}

impl<M: SharedMemory> DriverSubmissions<M> {
    /// Makes a new queue with `size` entries, for at most `commands` commands at a time. (They may be more than the queue has entries,
    /// since the device copies them.)
    pub fn new(
        id: u16,
        size: u16,
        commands: u16,
        ring: Area<M>,
        doorbell: DriverDoorbell<M>,
    ) -> Result<Self, SetupError> {
        check_size(id, size)?;
        check("submission queue", &ring, COMMAND * usize::from(size), 8)?;
        doorbell.check()?;
        let (free, outstanding) = ((0..commands).rev().collect(), vec![false; commands.into()]);
        Ok(Self { id, size, ring, doorbell, tail: 0, published: 0, head: 0, free, outstanding })
    }

    /// Returns how many commands can be submitted now.
    #[inline]
    pub fn room(&self) -> usize {
        let entries = self.size - 1 - distance(self.head, self.tail, self.size);
        self.free.len().min(entries.into())
    }

    /// Returns the identifier that the next command gets; `None` if there is no room now.
    #[inline]
    pub fn next_id(&self) -> Option<u16> {
        if self.room() > 0 { self.free.last().copied() } else { None }
    }

    /// Writes a command, whose identifier is chosen here and returned. The device sees it after the next [`ring`](Self::ring). `None` if
    /// there is no room now.
    #[inline]
    pub fn submit(&mut self, command: Command) -> Option<u16> {
        if self.room() == 0 {
            return None;
        }
        let cid = self.free.pop()?;
        self.outstanding[usize::from(cid)] = true;
        let command = Command { cid, ..command };
        self.ring.memory.write(self.ring.at + COMMAND * usize::from(self.tail), command.as_bytes());
        self.tail = next(self.tail, self.size);
        Some(cid)
    }

    /// Shows the device what was submitted. Returns the value that the caller must write to the doorbell's register, if any.
    #[inline]
    pub fn ring(&mut self) -> Option<u32> {
        if self.tail == self.published {
            return None;
        }
        let old = std::mem::replace(&mut self.published, self.tail);
        self.doorbell.ring(old, self.tail).then_some(self.tail.into())
    }

    /// Takes a completion of one of this queue's commands into account.
    #[inline]
    pub fn completed(&mut self, completion: &Completion) -> Result<(), Corrupt> {
        let Self { id: queue, size, head, published: tail, .. } = *self;
        if completion.sqid != queue {
            return Err(Corrupt::Queue(completion.sqid));
        }
        let found = completion.sqhd;
        if found >= size || distance(head, found, size) > distance(head, tail, size) {
            return Err(Corrupt::Head { queue, head: found, from: head, tail });
        }
        let cid = completion.cid;
        match self.outstanding.get_mut(usize::from(cid)) {
            Some(outstanding @ true) => *outstanding = false,
            _ => return Err(Corrupt::Command { queue, cid }),
        }
        self.free.push(cid);
        self.head = found;
        Ok(())
    }

    /// Returns the number of the queue.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Returns the number of commands that are submitted and not completed.
    pub fn outstanding(&self) -> usize {
        self.outstanding.len() - self.free.len()
    }
}

/// A completion queue as its driver sees it.
pub struct DriverCompletions<M: SharedMemory> {
    size: u16,
    ring: Area<M>,
    doorbell: DriverDoorbell<M>,
    /// Next entry to read, and the phase tag that a completion there has.
    head: u16,
    phase: bool,
    /// The head that the device sees.
    published: u16,
}

impl<M: SharedMemory> DriverCompletions<M> {
    /// Makes a new queue with `size` entries. The ring must contain zeros.
    pub fn new(id: u16, size: u16, ring: Area<M>, doorbell: DriverDoorbell<M>) -> Result<Self, SetupError> {
        check_size(id, size)?;
        check("completion queue", &ring, COMPLETION * usize::from(size), 8)?;
        doorbell.check()?;
        Ok(Self { size, ring, doorbell, head: 0, phase: true, published: 0 })
    }

    /// Takes the next completion, if there is one. The caller passes it to its queue's [`DriverSubmissions::completed`].
    #[inline]
    pub fn reap(&mut self) -> Option<Completion> {
        let at = COMPLETION * usize::from(self.head);
        // ORDER nvme.phase: the first word, and the data in the buffers, are seen. Pairs with: the device's post.
        let second = self.ring.load_acquire_u64(at + COMPLETION_WORD);
        let completion = Completion::from_words(self.ring.load_relaxed_u64(at), second);
        if completion.phase() != self.phase {
            return None;
        }
        self.head = next(self.head, self.size);
        self.phase ^= self.head == 0;
        Some(completion)
    }

    /// Gives the entries of all completions that were taken back to the device. Returns the value that the caller must write to the
    /// doorbell's register, if any.
    #[inline]
    pub fn ring(&mut self) -> Option<u32> {
        if self.head == self.published {
            return None;
        }
        let old = std::mem::replace(&mut self.published, self.head);
        self.doorbell.ring(old, self.head).then_some(self.head.into())
    }
}

fn check_size(queue: u16, size: u16) -> Result<(), SetupError> {
    let most = ginnel_layout::nvme_state::MAX_SIZE;
    if size < 2 || size > most {
        return Err(SetupError::Size { queue, size: size.into(), most });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::passes;

    /// A driver goes around queues of any size, by steps of any length. Only an event index that it passes makes it ring.
    #[test]
    fn an_event_index_is_passed_once_around() {
        for size in [2u16, 3, 5, 64, 1000] {
            for old in 0..size.min(70) {
                for step in 1..size.min(70) {
                    let new = (old + step) % size;
                    for event in 0..size.min(140) {
                        let passed = (event + size - old) % size < step;
                        assert_eq!(passes(event, new, old), passed, "{event} from {old} to {new} of {size}");
                    }
                }
            }
        }
    }
}
