//! What lies where in the guest's memory.

use crate::memory::{DriverMemory, MemoryRange, Plan};
use crate::nvme::options::NvmeOptions;
use crate::queue::stride;
use ginnel_guest_memory::Area;
use ginnel_layout::nvme::{COMMAND, COMPLETION, PAGE};
use ginnel_shmem::{Mapping, SharedMemory as _};

/// Number of entries of the admin queues, as Linux has it.
pub(crate) const ADMIN_ENTRIES: u16 = 32;

/// A submission queue and its completion queue.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    pub submissions: MemoryRange,
    pub completions: MemoryRange,
}

impl Pair {
    fn plan(plan: &mut Plan, entries: u16) -> Self {
        let entries = usize::from(entries);
        Self { submissions: plan.pages(COMMAND * entries), completions: plan.pages(COMPLETION * entries) }
    }

    /// Makes both queues empty.
    pub fn clear(self, memory: &DriverMemory) {
        for range in [self.submissions, self.completions] {
            memory.mapping.zero(range.at, range.len);
        }
    }
}

/// The parts of one pair of I/O queues.
#[derive(Clone, Copy)]
pub(crate) struct IoQueue {
    pub pair: Pair,
    /// A page for each slot: the PRP list of its buffer.
    pub lists: MemoryRange,
    pub buffers: MemoryRange,
}

/// All parts.
pub(crate) struct Layout {
    pub admin: Pair,
    /// A page for the data of admin commands.
    pub data: MemoryRange,
    /// The pages of Doorbell Buffer Config: values and event indexes.
    pub shadows: MemoryRange,
    pub events: MemoryRange,
    pub io: Vec<IoQueue>,
}

impl Layout {
    /// Assigns the addresses. Returns also the number of bytes.
    pub fn plan(options: &NvmeOptions) -> (Self, usize) {
        let mut plan = Plan::default();
        let (page, depth) = (PAGE as usize, usize::from(options.depth));
        let admin = Pair::plan(&mut plan, ADMIN_ENTRIES);
        let [data, shadows, events] = [(); 3].map(|()| plan.pages(page));
        let io = (0..options.queues)
            .map(|_| IoQueue {
                pair: Pair::plan(&mut plan, options.entries()),
                lists: plan.pages(page * depth),
                buffers: plan.pages(stride(options.buffer) * depth),
            })
            .collect();
        (Self { admin, data, shadows, events, io }, plan.len())
    }

    /// Writes the PRP list of each slot's buffer: all its pages but the first, which a command has itself (4.3). Shorter
    /// data use the beginning of the list.
    pub fn write_lists(&self, memory: &DriverMemory, options: &NvmeOptions) {
        let page = PAGE as usize;
        for IoQueue { lists, buffers, .. } in &self.io {
            for slot in 0..usize::from(options.depth) {
                let first = buffers.guest() + (slot * stride(options.buffer)) as u64;
                let pages = (options.buffer as usize).div_ceil(page);
                for entry in 1..pages {
                    let at = lists.at + slot * page + 8 * (entry - 1);
                    memory.mapping.store_relaxed_u64(at, (first + (page * entry) as u64).to_le());
                }
            }
        }
    }
}

/// Returns a range as an area of a queue.
pub(crate) fn area(memory: &DriverMemory, range: MemoryRange) -> Area<Mapping> {
    Area { memory: memory.mapping.clone(), at: range.at, len: range.len, guest: range.guest() }
}
