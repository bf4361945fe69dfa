//! A pair of queues: submissions, and the completions of these.

use super::dma::{Dma, Pages};
use super::prps::{COPY, Form, Prps};
use super::registers::Registers;
use crate::backend::commands::Flight;
use ginnel_guest_memory::Area;
use ginnel_layout::nvme::{
    COMMAND, COMPLETION, Command, Completion, Opcode, PAGE, completion_doorbell, submission_doorbell,
};
use ginnel_nvme::{Corrupt, DriverCompletions, DriverDoorbell, DriverSubmissions, SetupError};
use ginnel_shmem::{Mapping, SharedMemory};
use std::io;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// The entries of a pair of I/O queues, if the controller has so many.
pub const ENTRIES: u16 = 256;

/// Most commands of a pair at a time.
const COMMANDS: u16 = 128;

/// A pair of queues, with memory for each command.
pub struct Pair {
    submissions: DriverSubmissions<Mapping>,
    completions: DriverCompletions<Mapping>,
    /// How many completions were taken that the device does not know of.
    taken: u16,
    /// It learns of so many at once.
    batch: u16,
    pages: Pages,
    /// Where each part of the memory begins: the completions, a page of zeros, and for each command a page with a list and the memory for
    /// copies.
    layout: Layout,
}

#[derive(Clone, Copy)]
struct Layout {
    completions: usize,
    zeros: usize,
    slots: usize,
    commands: u16,
}

const SLOT: usize = PAGE as usize + COPY;

impl Layout {
    fn new(entries: u16) -> Self {
        let page = |bytes: usize| bytes.next_multiple_of(PAGE as usize);
        let completions = page(COMMAND * usize::from(entries));
        let zeros = completions + page(COMPLETION * usize::from(entries));
        Self { completions, zeros, slots: zeros + PAGE as usize, commands: COMMANDS.min(entries - 1) }
    }

    fn len(&self) -> usize {
        self.slots + SLOT * usize::from(self.commands)
    }
}

impl Pair {
    /// Makes the driver's side of the queues with this number: 0 is the pair for admin commands.
    pub fn new(dma: &Arc<Dma>, registers: &Registers, id: u16, entries: u16) -> anyhow::Result<Self> {
        let pages = Pages::new(dma, Layout::new(entries).len())?;
        let stride = registers.stride();
        let doorbells = [submission_doorbell(id, stride), completion_doorbell(id, stride)];
        let made = Self::in_pages(pages, id, entries, doorbells.map(|at| registers.doorbell(at)));
        made.map_err(|error| anyhow::anyhow!("queue {id} cannot be: {error}"))
    }

    /// Makes it in this memory, which contains zeros, with the doorbells of the submissions and of the completions.
    fn in_pages(
        pages: Pages,
        id: u16,
        entries: u16,
        [submit, complete]: [DriverDoorbell<Mapping>; 2],
    ) -> Result<Self, SetupError> {
        let layout = Layout::new(entries);
        let area =
            |at: usize, len: usize| Area { memory: pages.memory.clone(), at, len, guest: pages.iova(at) };
        let ring = area(0, layout.completions);
        let submissions = DriverSubmissions::new(id, entries, layout.commands, ring, submit)?;
        let ring = area(layout.completions, layout.zeros - layout.completions);
        let completions = DriverCompletions::new(id, entries, ring, complete)?;
        // As long as that many and all commands fit, the device always has room for completions. Each write to a doorbell crosses the bus.
        let batch = ((entries - layout.commands) / 2).max(1);
        Ok(Self { submissions, completions, taken: 0, batch, pages, layout })
    }

    /// Returns the device's addresses of both queues.
    pub fn addresses(&self) -> [u64; 2] {
        [self.pages.iova(0), self.pages.iova(self.layout.completions)]
    }

    /// Returns the page that a command of its own may use for data, and its address. No operation's command may be under way.
    pub fn data(&self) -> (&Mapping, usize, u64) {
        let at = self.layout.slots;
        (&self.pages.memory, at, self.pages.iova(at))
    }

    /// Returns whether another command can be submitted.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.submissions.room() > 0
    }

    /// Returns the number of commands that are not complete.
    #[inline]
    pub fn outstanding(&self) -> usize {
        self.submissions.outstanding()
    }

    /// Writes a command without memory, or with memory that it names already. Returns its identifier; `None` if there is no room.
    pub fn submit(&mut self, command: Command) -> Option<u16> {
        self.submissions.submit(command)
    }

    /// Writes the command of an operation. Returns its identifier. There must be room.
    #[inline]
    pub(super) fn submit_for(&mut self, flight: &Flight<Prps>, mut command: Command) -> Option<u16> {
        let slot = self.submissions.next_id()?;
        if flight.transfer.form() != Form::Named {
            self.place(slot, &flight.transfer, &mut command);
        }
        self.submissions.submit(command)
    }

    /// Lets a command name memory of its slot.
    fn place(&self, slot: u16, prps: &Prps, command: &mut Command) {
        let list = self.layout.slots + SLOT * usize::from(slot);
        let copy = list + PAGE as usize;
        let memory = &self.pages.memory;
        match prps.form() {
            Form::Named => {}
            Form::List => {
                for (n, entry) in prps.list().iter().enumerate() {
                    memory.store_relaxed_u64(list + 8 * n, entry.to_le());
                }
                command.prp2 = self.pages.iova(list);
            }
            Form::Copy(bytes) => {
                if command.opcode == Opcode::WRITE {
                    prps.copy_to(memory, copy, bytes);
                }
                self.name_pages(command, bytes as u64, |n| self.pages.iova(copy + n * PAGE as usize), list);
            }
            // One page of zeros is there as often as it is needed.
            Form::Zeros(bytes) => {
                self.name_pages(command, bytes, |_| self.pages.iova(self.layout.zeros), list);
            }
            Form::Range(range) => {
                memory.write(list, range.as_bytes());
                command.prp1 = self.pages.iova(list);
            }
        }
    }

    /// Lets a command name whole pages for so many bytes, with a list at this offset if that is necessary.
    fn name_pages(&self, command: &mut Command, bytes: u64, page: impl Fn(usize) -> u64, list: usize) {
        command.prp1 = page(0);
        match bytes.div_ceil(PAGE) as usize {
            0 | 1 => {}
            2 => command.prp2 = page(1),
            pages => {
                for n in 1..pages {
                    self.pages.memory.store_relaxed_u64(list + 8 * (n - 1), page(n).to_le());
                }
                command.prp2 = self.pages.iova(list);
            }
        }
    }

    /// Handles the memory of a command that is complete. What the device has read from the disk, if it has, is in the guest's memory then.
    #[inline]
    pub(super) fn take_back(&self, slot: u16, flight: &Flight<Prps>, has_read: bool) {
        if let Form::Copy(bytes) = flight.transfer.form()
            && has_read
        {
            let copy = self.layout.slots + SLOT * usize::from(slot) + PAGE as usize;
            flight.transfer.copy_from(&self.pages.memory, copy, bytes);
        }
    }

    /// Takes the next completion.
    #[inline]
    pub fn reap(&mut self) -> Result<Option<Completion>, Corrupt> {
        let Some(completion) = self.completions.reap() else { return Ok(None) };
        self.submissions.completed(&completion)?;
        self.taken += 1;
        Ok(Some(completion))
    }

    /// Shows the device what was submitted, and from time to time what was taken.
    #[inline]
    pub fn ring(&mut self) {
        // The doorbells are mapped, so there is nothing left to write.
        if self.taken >= self.batch {
            self.taken = 0;
            // Before the device may execute more.
            let _ = self.completions.ring();
        }
        let _ = self.submissions.ring();
    }

    /// Executes a command without others, and waits until it is complete, at most so long.
    pub fn call(&mut self, command: Command, patience: std::time::Duration) -> io::Result<Completion> {
        let cid = self.submit(command).ok_or_else(|| io::Error::other("the queue is full"))?;
        self.ring();
        let begin = std::time::Instant::now();
        loop {
            let found = self.reap().map_err(|corrupt| io::Error::other(corrupt.to_string()))?;
            if let Some(completion) = found {
                self.ring();
                if completion.cid == cid {
                    return Ok(completion);
                }
                continue;
            }
            if begin.elapsed() > patience {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("it has not answered for {patience:?}"),
                ));
            }
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests;
