//! The in-flight part of a split queue.

use super::InflightQueue;
use crate::Kind;
use crate::error::SetupError;
use ginnel_guest_memory::Area;
use ginnel_layout::inflight::split::{ENTRY, ENTRY_NEXT, HEADER, LAST_BATCH_HEAD, USED_IDX};
use ginnel_layout::inflight::{DESC_NUM, ENTRY_COUNTER, ENTRY_INFLIGHT, FEATURES, VERSION, VERSION_AT};
use ginnel_shmem::SharedMemory;

pub(crate) struct Split<M> {
    area: Area<M>,
    /// The global counter of requests.
    counter: u64,
    last_batch_head: u16,
    /// Heads that are given back and not published yet.
    batch: Vec<u16>,
}

/// Heads to take again, with the first one at the end; `None` if the region was not in use.
type Recovered = Option<Vec<u16>>;

const fn entry(head: u16) -> usize {
    HEADER + ENTRY * head as usize
}

impl<M: SharedMemory> Split<M> {
    /// Takes over the region of a queue of size `size` whose used index is `used`.
    pub fn new(region: InflightQueue<M>, size: u16, used: u16) -> Result<(Self, Recovered), SetupError> {
        let InflightQueue { area, size: entries, kind } = region;
        if kind != Kind::Split || entries < size {
            return Err(SetupError::Inflight("it was made for another kind of queue, or a shorter one"));
        }
        let mut tracker =
            Self { area, counter: 0, last_batch_head: 0, batch: Vec::with_capacity(size.into()) };
        let recovered = match tracker.area.load_acquire_u16(VERSION_AT) {
            0 => {
                tracker.begin(entries, used);
                None
            }
            VERSION => Some(tracker.recover(entries, size, used)?),
            _ => return Err(SetupError::Inflight("its version is not 1")),
        };
        Ok((tracker, recovered))
    }

    fn begin(&mut self, entries: u16, used: u16) {
        for head in 0..entries {
            self.area.store_relaxed_u16(entry(head) + ENTRY_INFLIGHT, 0);
        }
        self.area.store_relaxed_u64(FEATURES, 0);
        self.area.store_relaxed_u16(DESC_NUM, entries);
        self.area.store_relaxed_u16(LAST_BATCH_HEAD, 0);
        self.area.store_relaxed_u16(USED_IDX, used);
        self.area.store_release_u16(VERSION_AT, VERSION);
    }

    fn recover(&mut self, entries: u16, size: u16, used: u16) -> Result<Vec<u16>, SetupError> {
        if self.area.load_relaxed_u16(DESC_NUM) != entries {
            return Err(SetupError::Inflight("its number of entries is not that of the queue"));
        }
        self.last_batch_head = self.area.load_relaxed_u16(LAST_BATCH_HEAD);
        // A batch may have been published although its entries still say that they are in flight.
        let batch = used.wrapping_sub(self.area.load_relaxed_u16(USED_IDX));
        if batch > size {
            return Err(SetupError::Inflight("its used index is outside this ring"));
        }
        let mut head = self.last_batch_head;
        for _ in 0..batch {
            if head >= size {
                return Err(SetupError::Inflight("its last batch leaves the queue"));
            }
            self.area.store_release_u16(entry(head) + ENTRY_INFLIGHT, 0);
            head = self.area.load_relaxed_u16(entry(head) + ENTRY_NEXT);
        }
        self.area.store_release_u16(USED_IDX, used);
        let mut heads = Vec::new();
        for head in 0..entries {
            // The upper byte is padding.
            if self.area.load_relaxed_u16(entry(head) + ENTRY_INFLIGHT) as u8 != 0 {
                if head >= size {
                    return Err(SetupError::Inflight("a request beyond the queue is in flight"));
                }
                heads.push((self.area.load_relaxed_u64(entry(head) + ENTRY_COUNTER), head));
            }
        }
        heads.sort_unstable_by(|a, b| b.cmp(a));
        self.counter = heads.first().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(heads.into_iter().map(|(_, head)| head).collect())
    }

    /// Does the steps "When receiving available buffers from the driver".
    #[inline]
    pub fn taken(&mut self, head: u16) {
        self.area.store_release_u64(entry(head) + ENTRY_COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.area.store_release_u16(entry(head) + ENTRY_INFLIGHT, 1);
    }

    /// Does the steps 1 to 3 of "When supplying used buffers to the driver".
    #[inline]
    pub fn done(&mut self, head: u16) {
        self.area.store_release_u16(entry(head) + ENTRY_NEXT, self.last_batch_head);
        self.area.store_release_u16(LAST_BATCH_HEAD, head);
        self.last_batch_head = head;
        self.batch.push(head);
    }

    /// Does the last two steps, after the used index has been written.
    #[inline]
    pub fn published(&mut self, used: u16) {
        for &head in &self.batch {
            self.area.store_release_u16(entry(head) + ENTRY_INFLIGHT, 0);
        }
        self.batch.clear();
        self.area.store_release_u16(USED_IDX, used);
    }
}
