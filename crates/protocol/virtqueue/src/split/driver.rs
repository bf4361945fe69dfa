//! The driver's side of a split queue.

use super::Areas;
use crate::driver::{DriverSetup, IndirectTables, Segment};
use crate::error::{AddError, Corrupt, SetupError};
use crate::event::passed;
use ginnel_layout::virtio::{DESCRIPTOR, Descriptor, DescriptorFlags, split};
use ginnel_shmem::SharedMemory;

pub(crate) struct Driver<M: SharedMemory> {
    areas: Areas<M>,
    tables: Option<IndirectTables<M>>,
    size: u16,
    event_idx: bool,
    /// Next available entry to write.
    next: u16,
    /// The available index that the device sees.
    published: u16,
    /// Next used entry to take.
    used: u16,
    /// The device's index as last loaded.
    seen: u16,
    armed: bool,
    /// Free descriptors, with the next one at the end.
    free: Vec<u16>,
    /// The chain that begins with each descriptor, if one does and is outstanding.
    chains: Vec<Chain>,
    /// The descriptor that follows each one in its chain. This private copy is authoritative: the link in shared memory is
    /// never read back.
    links: Vec<u16>,
    outstanding: u16,
}

#[derive(Clone, Copy, Default)]
struct Chain {
    /// Number of descriptors; 0 if no chain is outstanding.
    count: u16,
    /// Bytes that the device may write.
    room: u32,
}

impl<M: SharedMemory> Driver<M> {
    pub fn new(setup: DriverSetup<M>) -> Result<Self, SetupError> {
        let DriverSetup { size, event_idx, .. } = setup;
        let areas = Areas::new(size, event_idx, setup.descriptors, setup.driver, setup.device)?;
        for area in [&areas.driver, &areas.device] {
            area.store_relaxed_u16(split::FLAGS, 0);
            area.store_relaxed_u16(split::INDEX, 0);
        }
        if event_idx {
            areas.driver.store_relaxed_u16(split::used_event(size), 0);
            areas.device.store_relaxed_u16(split::avail_event(size), 0);
        }
        let entries = usize::from(size);
        Ok(Self {
            areas,
            tables: setup.tables,
            size,
            event_idx,
            next: 0,
            published: 0,
            used: 0,
            seen: 0,
            armed: true,
            free: (0..size).rev().collect(),
            chains: vec![Chain::default(); entries],
            links: vec![0; entries],
            outstanding: 0,
        })
    }

    fn slot(&self, index: u16) -> u16 {
        index & (self.size - 1)
    }

    #[inline]
    pub fn add(&mut self, segments: &[Segment], indirect: bool) -> Result<u16, AddError> {
        let tables = self.tables.as_ref().filter(|_| indirect);
        let limit = tables.map_or(self.size, |tables| tables.entries);
        if segments.is_empty() || segments.len() > usize::from(limit) {
            return Err(AddError::Count { count: segments.len(), limit: limit.into() });
        }
        let count = if tables.is_some() { 1 } else { segments.len() };
        let Some(rest) = self.free.len().checked_sub(count) else { return Err(AddError::Full) };
        let head = self.free[self.free.len() - 1];
        let store = |index: u16, descriptor: Descriptor| {
            let at = DESCRIPTOR * usize::from(index);
            self.areas.descriptors.store_relaxed_u64(at, descriptor.address);
            self.areas.descriptors.store_relaxed_u64(at + 8, descriptor.rest());
        };
        let mut room = 0u32;
        if let Some(tables) = tables {
            for (i, segment) in segments.iter().enumerate() {
                let last = i + 1 == segments.len();
                room = room.saturating_add(segment.room());
                let entry = segment.split(if last { None } else { Some(i as u16 + 1) });
                tables.store(head, i, [entry.address, entry.rest()]);
            }
            let (address, len) = (tables.address(head), (DESCRIPTOR * segments.len()) as u32);
            store(head, Descriptor { address, len, flags: DescriptorFlags::INDIRECT, next: 0 });
        } else {
            for (i, segment) in segments.iter().enumerate() {
                let index = self.free[self.free.len() - 1 - i];
                let next =
                    if i + 1 == segments.len() { None } else { Some(self.free[self.free.len() - 2 - i]) };
                self.links[usize::from(index)] = next.unwrap_or(0);
                room = room.saturating_add(segment.room());
                store(index, segment.split(next));
            }
        }
        self.free.truncate(rest);
        self.chains[usize::from(head)] = Chain { count: count as u16, room };
        self.areas.driver.store_relaxed_u16(split::available(self.slot(self.next)), head);
        self.next = self.next.wrapping_add(1);
        self.outstanding += 1;
        Ok(head)
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.next == self.published {
            return false;
        }
        // ORDER split.available: the descriptors and entries written above, and the content of the buffers, are visible
        // before the index. Pairs with: the device's look at this index.
        self.areas.driver.store_release_u16(split::INDEX, self.next);
        let before = std::mem::replace(&mut self.published, self.next);
        // This fence is between the store of our index and the load of the device's notification setting. The device has a
        // fence between the store of that setting and its second look at the ring.
        self.areas.driver.memory.full_fence();
        if self.event_idx {
            passed(self.areas.device.load_relaxed_u16(split::avail_event(self.size)), self.next, before)
        } else {
            self.areas.device.load_relaxed_u16(split::FLAGS) & split::NO_NOTIFY == 0
        }
    }

    #[inline]
    pub fn poll(&mut self) -> Result<Option<(u16, u32)>, Corrupt> {
        if self.used == self.seen && !self.look()? {
            return Ok(None);
        }
        let at = split::used(self.slot(self.used));
        let id = self.areas.device.load_relaxed_u32(at);
        let written = self.areas.device.load_relaxed_u32(at + 4);
        let chain = self.chains.get_mut(id as usize).filter(|chain| chain.count != 0);
        let Some(chain) = chain else { return Err(Corrupt::UsedId(id)) };
        let Chain { count, room } = *chain;
        if written > room {
            return Err(Corrupt::UsedLength { written, room });
        }
        chain.count = 0;
        // The descriptors go back in reverse, so that the next chain gets the same descriptors in the same order.
        let (id, first) = (id as u16, self.free.len());
        let mut index = id;
        for _ in 0..count {
            self.free.push(index);
            index = self.links[usize::from(index)];
        }
        self.free[first..].reverse();
        self.used = self.used.wrapping_add(1);
        self.outstanding -= 1;
        Ok(Some((id, written)))
    }

    /// Returns whether the device has used more entries.
    #[inline]
    fn look(&mut self) -> Result<bool, Corrupt> {
        // ORDER split.used: the elements before the index, and what the device wrote, are seen. Pairs with: the device's
        // publish.
        let index = self.areas.device.load_acquire_u16(split::INDEX);
        let ahead = index.wrapping_sub(self.used);
        if ahead > self.outstanding {
            return Err(Corrupt::UsedIndex { index, ahead, outstanding: self.outstanding });
        }
        self.seen = index;
        Ok(ahead != 0)
    }

    pub fn arm(&mut self) -> bool {
        self.armed = true;
        if self.event_idx {
            self.areas.driver.store_relaxed_u16(split::used_event(self.size), self.used);
        } else {
            self.areas.driver.store_relaxed_u16(split::FLAGS, 0);
        }
        // This fence is between the store of our notification setting and our second look at the ring. The device has a fence
        // between the store of its index and the load of our setting.
        self.areas.driver.memory.full_fence();
        self.areas.device.load_relaxed_u16(split::INDEX) != self.used
    }

    #[inline]
    pub fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) && !self.event_idx {
            self.areas.driver.store_relaxed_u16(split::FLAGS, split::NO_INTERRUPT);
        }
    }

    pub fn outstanding(&self) -> u16 {
        self.outstanding
    }

    pub fn base(&self) -> u32 {
        self.used.into()
    }
}
