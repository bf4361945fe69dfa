//! The driver's side of a packed queue.

use super::{Areas, Position};
use crate::driver::{DriverSetup, IndirectTables, Segment};
use crate::error::{AddError, Corrupt, SetupError};
use ginnel_layout::virtio::{DESCRIPTOR, DescriptorFlags, PackedDescriptor, packed};
use ginnel_shmem::SharedMemory;

pub(crate) struct Driver<M: SharedMemory> {
    areas: Areas<M>,
    tables: Option<IndirectTables<M>>,
    size: u16,
    event_idx: bool,
    /// Next descriptor to write.
    next: Position,
    /// Next used descriptor to take.
    used: Position,
    /// Number of descriptors that the device does not have.
    free: u16,
    /// Number of descriptors added and not published.
    added: u16,
    /// Position of the first of them, and its second word, which makes it and all others available.
    first: Option<(Position, u64)>,
    armed: bool,
    /// Free ids, with the next one at the end.
    ids: Vec<u16>,
    /// The outstanding chains, indexed by id.
    chains: Vec<Chain>,
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
        let areas = Areas::new(size, setup.descriptors, setup.driver, setup.device)?;
        for at in (0..DESCRIPTOR * usize::from(size)).step_by(8) {
            areas.descriptors.store_relaxed_u64(at, 0);
        }
        areas.driver.store_relaxed_u32(0, 0);
        areas.device.store_relaxed_u32(0, 0);
        Ok(Self {
            areas,
            tables: setup.tables,
            size,
            event_idx,
            next: Position::START,
            used: Position::START,
            free: size,
            added: 0,
            first: None,
            armed: true,
            ids: (0..size).rev().collect(),
            chains: vec![Chain::default(); size.into()],
        })
    }

    #[inline]
    pub fn add(&mut self, segments: &[Segment], indirect: bool) -> Result<u16, AddError> {
        let tables = self.tables.as_ref().filter(|_| indirect);
        let limit = tables.map_or(self.size, |tables| tables.entries);
        if segments.is_empty() || segments.len() > usize::from(limit) {
            return Err(AddError::Count { count: segments.len(), limit: limit.into() });
        }
        let count = if tables.is_some() { 1 } else { segments.len() as u16 };
        if count > self.free {
            return Err(AddError::Full);
        }
        // There are as many ids as descriptors.
        let Some(id) = self.ids.pop() else { return Err(AddError::Full) };
        let room = segments.iter().fold(0u32, |sum, segment| sum.saturating_add(segment.room()));
        if let Some(tables) = tables {
            for (i, segment) in segments.iter().enumerate() {
                let Segment { address, len, .. } = *segment;
                let entry = PackedDescriptor { address, len, id: 0, flags: segment.flags() };
                tables.store(id, i, [entry.address, entry.rest()]);
            }
            let (address, len) = (tables.address(id), (DESCRIPTOR * segments.len()) as u32);
            self.store(PackedDescriptor { address, len, id, flags: DescriptorFlags::INDIRECT }, true);
        } else {
            for (i, segment) in segments.iter().enumerate() {
                let Segment { address, len, .. } = *segment;
                let last = i + 1 == segments.len();
                let link = if last { DescriptorFlags(0) } else { DescriptorFlags::NEXT };
                let flags = segment.flags().with(link);
                self.store(PackedDescriptor { address, len, id, flags }, i == 0);
            }
        }
        self.free -= count;
        self.added += count;
        self.chains[usize::from(id)] = Chain { count, room };
        Ok(id)
    }

    /// Writes the next descriptor. The second word of the first one since the last publish is held back, so that the device
    /// does not find any of the others before it.
    #[inline]
    fn store(&mut self, mut descriptor: PackedDescriptor, head: bool) {
        descriptor.flags = descriptor.flags.with(DescriptorFlags::available(self.next.wrap));
        self.areas.descriptors.store_relaxed_u64(self.next.at(), descriptor.address);
        if head && self.first.is_none() {
            self.first = Some((self.next, descriptor.rest()));
        } else {
            self.areas.descriptors.store_relaxed_u64(self.next.at() + 8, descriptor.rest());
        }
        self.next.advance(1, self.size);
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        let Some((position, rest)) = self.first.take() else { return false };
        // ORDER packed.available: the other descriptors, and the content of the buffers, are visible before this one. Pairs
        // with: the device's look at this one.
        self.areas.descriptors.store_release_u64(position.at() + 8, rest);
        let added = std::mem::take(&mut self.added);
        // This fence is between the store of our descriptor and the load of the device's notification setting. The device
        // has a fence between the store of that setting and its second look at the ring.
        self.areas.driver.memory.full_fence();
        let event = self.areas.device.load_relaxed_u32(0);
        self.next.wanted(event, self.event_idx, added, self.size)
    }

    #[inline]
    pub fn poll(&mut self) -> Result<Option<(u16, u32)>, Corrupt> {
        // ORDER packed.used: what the device wrote is seen. Pairs with: the device's publish.
        let rest = self.areas.descriptors.load_acquire_u64(self.used.at() + 8);
        if !self.used.is_used(rest) {
            return Ok(None);
        }
        let PackedDescriptor { id, len: written, .. } = PackedDescriptor::from_words(0, rest);
        let chain = self.chains.get_mut(usize::from(id)).filter(|chain| chain.count != 0);
        let Some(chain) = chain else { return Err(Corrupt::UsedId(id.into())) };
        let Chain { count, room } = *chain;
        if written > room {
            return Err(Corrupt::UsedLength { written, room });
        }
        chain.count = 0;
        self.ids.push(id);
        self.free += count;
        self.used.advance(count, self.size);
        Ok(Some((id, written)))
    }

    pub fn arm(&mut self) -> bool {
        self.armed = true;
        self.areas.driver.store_relaxed_u32(0, self.used.event(self.event_idx));
        // This fence is between the store of our notification setting and our second look at the ring. The device has a fence
        // between the store of its descriptor and the load of our setting.
        self.areas.driver.memory.full_fence();
        self.used.is_used(self.areas.descriptors.load_relaxed_u64(self.used.at() + 8))
    }

    #[inline]
    pub fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.areas.driver.store_relaxed_u32(0, packed::event(0, packed::DISABLE));
        }
    }

    pub fn outstanding(&self) -> u16 {
        self.size - self.ids.len() as u16
    }

    pub fn base(&self) -> u32 {
        u32::from(self.used.word()) * 0x1_0001
    }
}
