//! The device's side of a split queue.

use super::Areas;
use crate::chain::Chain;
use crate::device::{DeviceState, Setup, Ticket};
use crate::error::{Corrupt, SetupError};
use crate::event::passed;
use crate::log::DirtyLog;
use crate::{Kind, inflight};
use ginnel_guest_memory::GuestMemory;
use ginnel_layout::virtio::{DESCRIPTOR, Descriptor, DescriptorFlags, split};
use ginnel_shmem::SharedMemory;

/// How many requests ahead a descriptor is prefetched, and (`NEAR`) the request header to which it leads.
const FAR: u16 = 4;
const NEAR: u16 = 2;

pub(crate) struct Device<M: SharedMemory> {
    areas: Areas<M>,
    size: u16,
    event_idx: bool,
    max_segments: u16,
    /// Next available entry to take.
    next: u16,
    /// The driver's index as last loaded.
    seen: u16,
    /// Next used entry to write.
    used: u16,
    /// The used index that the driver sees.
    published: u16,
    /// Number of chains that the driver has made available and not got back: taken ones, and those to take again.
    outstanding: u16,
    /// Number of entries taken since the beginning; does not wrap.
    total: u64,
    armed: bool,
    /// Whether the next publish must call, because a previous device process may have died between its publish and its call.
    call_due: bool,
    /// Heads to take again, with the first one at the end.
    resubmit: Vec<u16>,
    inflight: Option<inflight::Split<M>>,
    log: Option<DirtyLog<M>>,
}

impl<M: SharedMemory> Device<M> {
    pub fn new(setup: Setup<M>) -> Result<Self, SetupError> {
        let Setup { size, event_idx, base, max_segments, .. } = setup;
        let areas = Areas::new(size, event_idx, setup.descriptors, setup.driver, setup.device)?;
        let mut next = u16::try_from(base).map_err(|_| SetupError::Base { base, size })?;
        // This index is the device's own: only a driver that breaks its own queue writes it too.
        let used = areas.device.load_relaxed_u16(split::INDEX);
        let mut resubmit = Vec::new();
        let mut inflight = None;
        if let Some(region) = setup.inflight {
            let (tracker, recovered) = inflight::Split::new(region, size, used)?;
            if let Some(heads) = recovered {
                // Each chain that was ever taken is either used or in flight.
                next = used.wrapping_add(heads.len() as u16);
                resubmit = heads;
            }
            inflight = Some(tracker);
        }
        Ok(Self {
            areas,
            size,
            event_idx,
            max_segments,
            next,
            seen: next,
            used,
            published: used,
            outstanding: resubmit.len() as u16,
            total: 0,
            armed: true,
            call_due: true,
            resubmit,
            inflight,
            log: None,
        })
    }

    fn slot(&self, index: u16) -> u16 {
        index & (self.size - 1)
    }

    #[inline]
    pub fn pop(&mut self, memory: &GuestMemory<M>, chain: &mut Chain) -> Result<Option<Ticket>, Corrupt> {
        if let Some(&head) = self.resubmit.last() {
            self.walk(memory, head, chain)?;
            self.resubmit.pop();
            self.total += 1;
            return Ok(Some(Ticket { id: head, count: 1, slot: 0 }));
        }
        if self.next == self.seen && !self.look()? {
            return Ok(None);
        }
        let head = self.areas.driver.load_relaxed_u16(split::available(self.slot(self.next)));
        self.fetch_ahead(memory, chain.hint());
        self.walk(memory, head, chain)?;
        if let Some(inflight) = &mut self.inflight {
            inflight.taken(head);
        }
        self.next = self.next.wrapping_add(1);
        self.total += 1;
        self.outstanding += 1;
        Ok(Some(Ticket { id: head, count: 1, slot: 0 }))
    }

    /// Prefetches the memory that the next requests need first. It lies in the cache of the driver's CPU, from which loads are
    /// slow. The values that are read here only choose what to prefetch, and are read again when the request is taken.
    #[inline]
    fn fetch_ahead(&self, memory: &GuestMemory<M>, region: u16) {
        let head = |ahead: u16| {
            let entry = self.next.wrapping_add(ahead);
            let there = self.seen.wrapping_sub(self.next) > ahead;
            let head = || self.areas.driver.load_relaxed_u16(split::available(self.slot(entry)));
            there.then(head).filter(|head| *head < self.size)
        };
        if let Some(head) = head(FAR) {
            self.areas.descriptors.prefetch(DESCRIPTOR * usize::from(head));
        }
        if let Some(head) = head(NEAR) {
            // The descriptor has arrived by now.
            let address = self.areas.descriptors.load_relaxed_u64(DESCRIPTOR * usize::from(head));
            memory.prefetch(address, region);
        }
    }

    /// Returns whether the driver has made more entries available.
    #[inline]
    fn look(&mut self) -> Result<bool, Corrupt> {
        // ORDER split.available: the entries and descriptors before the index are seen. Pairs with: the driver's publish.
        let index = self.areas.driver.load_acquire_u16(split::INDEX);
        let ahead = index.wrapping_sub(self.next);
        if ahead > self.size - self.outstanding {
            let Self { outstanding, size, .. } = *self;
            return Err(Corrupt::AvailableIndex { index, ahead, outstanding, size });
        }
        self.seen = index;
        Ok(ahead != 0)
    }

    /// Follows a chain (2.7.5), and adds its buffers.
    #[inline]
    fn walk(&self, memory: &GuestMemory<M>, head: u16, chain: &mut Chain) -> Result<(), Corrupt> {
        chain.clear();
        let (mut index, mut left) = (head, self.size);
        loop {
            if index >= self.size {
                return Err(Corrupt::Descriptor { index: index.into(), size: self.size.into() });
            }
            let at = DESCRIPTOR * usize::from(index);
            let descriptor = Descriptor::from_words(
                self.areas.descriptors.load_relaxed_u64(at),
                self.areas.descriptors.load_relaxed_u64(at + 8),
            );
            let Descriptor { address, len, flags, next } = descriptor;
            if flags.has(DescriptorFlags::INDIRECT) {
                if flags.has(DescriptorFlags::NEXT) {
                    return Err(Corrupt::IndirectPlace);
                }
                return chain.add_split_table(memory, address, len, self.max_segments);
            }
            chain.add(memory, address, len, flags.has(DescriptorFlags::WRITE), self.max_segments)?;
            if !flags.has(DescriptorFlags::NEXT) {
                return Ok(());
            }
            left -= 1;
            if left == 0 {
                return Err(Corrupt::ChainLength { limit: self.size.into() });
            }
            index = next;
        }
    }

    #[inline]
    pub fn push(&mut self, ticket: Ticket, written: u32) {
        let at = split::used(self.slot(self.used));
        self.areas.device.store_relaxed_u32(at, ticket.id.into());
        self.areas.device.store_relaxed_u32(at + 4, written);
        self.mark(at, 8);
        if let Some(inflight) = &mut self.inflight {
            inflight.done(ticket.id);
        }
        self.used = self.used.wrapping_add(1);
        self.outstanding = self.outstanding.wrapping_sub(1);
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.used == self.published {
            return std::mem::take(&mut self.call_due);
        }
        // ORDER split.used: the elements written above, and what the device wrote to the buffers, are visible before the
        // index. Pairs with: the driver's look at this index.
        self.areas.device.store_release_u16(split::INDEX, self.used);
        self.mark(split::INDEX, 2);
        let before = std::mem::replace(&mut self.published, self.used);
        if let Some(inflight) = &mut self.inflight {
            inflight.published(self.used);
        }
        // This fence is between the store of our index and the load of the driver's notification setting. The driver has a
        // fence between the store of that setting and its second look at the ring.
        self.areas.device.memory.full_fence();
        let wanted = if self.event_idx {
            passed(self.areas.driver.load_relaxed_u16(split::used_event(self.size)), self.used, before)
        } else {
            self.areas.driver.load_relaxed_u16(split::FLAGS) & split::NO_INTERRUPT == 0
        };
        std::mem::take(&mut self.call_due) | wanted
    }

    pub fn arm(&mut self) -> bool {
        self.armed = true;
        if self.event_idx {
            let at = split::avail_event(self.size);
            self.areas.device.store_relaxed_u16(at, self.next);
            self.mark(at, 2);
        } else {
            self.set_flags(0);
        }
        // This fence is between the store of our notification setting and our second look at the ring. The driver has a fence
        // between the store of its index and the load of our setting.
        self.areas.device.memory.full_fence();
        !self.is_empty()
    }

    /// Returns how many entries the driver has made available, according to its present index, that are not taken.
    fn ahead(&self) -> u16 {
        self.areas.driver.load_relaxed_u16(split::INDEX).wrapping_sub(self.next)
    }

    pub fn taken(&self) -> u64 {
        self.total
    }

    pub fn visible(&self) -> u64 {
        let there = usize::from(self.ahead()) + self.resubmit.len();
        there.min(self.size.into()) as u64
    }

    pub fn is_empty(&self) -> bool {
        self.resubmit.is_empty() && self.ahead() == 0
    }

    #[inline]
    pub fn disarm(&mut self) {
        // With event index, nothing has to be written: the old event is not passed again until the index has gone around
        // completely.
        if std::mem::take(&mut self.armed) && !self.event_idx {
            self.set_flags(split::NO_NOTIFY);
        }
    }

    fn set_flags(&self, flags: u16) {
        self.areas.device.store_relaxed_u16(split::FLAGS, flags);
        self.mark(split::FLAGS, 2);
    }

    #[inline]
    fn mark(&self, at: usize, len: u64) {
        if let Some(log) = &self.log {
            log.mark(self.areas.device.guest + at as u64, len);
        }
    }

    pub fn base(&self) -> u32 {
        self.next.into()
    }

    pub fn outstanding(&self) -> u16 {
        self.outstanding.saturating_sub(self.resubmit.len() as u16)
    }

    pub fn set_log(&mut self, log: Option<DirtyLog<M>>) {
        self.log = log;
    }

    pub fn state(&self) -> DeviceState {
        DeviceState {
            kind: Kind::Split,
            size: self.size,
            available: self.next,
            driver_index: Some(self.areas.driver.load_relaxed_u16(split::INDEX)),
            used: self.used,
            outstanding: self.outstanding(),
            resubmit: self.resubmit.len() as u16,
            armed: self.armed,
        }
    }
}
