//! The device's side of a packed queue.

use super::{Areas, Position};
use crate::Kind;
use crate::chain::Chain;
use crate::device::{DeviceState, Setup, Ticket};
use crate::error::{Corrupt, SetupError};
use crate::inflight::{self, Again};
use crate::log::DirtyLog;
use ginnel_guest_memory::GuestMemory;
use ginnel_layout::virtio::{DESCRIPTOR, DescriptorFlags, PackedDescriptor, packed};
use ginnel_shmem::SharedMemory;

pub(crate) struct Device<M: SharedMemory> {
    areas: Areas<M>,
    size: u16,
    event_idx: bool,
    max_segments: u16,
    /// Next descriptor to take.
    next: Position,
    /// Position of the next used descriptor, as the driver expects it.
    used: Position,
    /// Number of descriptors that the driver has made available and not got back.
    outstanding: u16,
    /// Number of requests taken and not given back.
    requests: u16,
    /// Number of descriptors taken since the beginning; does not wrap.
    total: u64,
    armed: bool,
    /// Whether the next publish must call, because a previous device process may have died between its publish and its call.
    call_due: bool,
    /// Requests given back and not published: the ticket of each, and the bytes written.
    pending: Vec<(Ticket, u32)>,
    /// Requests to take again, with the first one at the end.
    resubmit: Vec<Again>,
    inflight: Option<inflight::Packed<M>>,
    /// The descriptors of the request that is being taken, for the in-flight region.
    taken: Vec<PackedDescriptor>,
    log: Option<DirtyLog<M>>,
}

impl<M: SharedMemory> Device<M> {
    pub fn new(setup: Setup<M>) -> Result<Self, SetupError> {
        let Setup { size, event_idx, base, max_segments, .. } = setup;
        let areas = Areas::new(size, setup.descriptors, setup.driver, setup.device)?;
        let (mut next, mut used) =
            (Position::from_word(base as u16), Position::from_word((base >> 16) as u16));
        if base == 0 && !areas.is_used_up(size) {
            (next, used) = (Position::START, Position::START);
        }
        if next.index >= size || used.index >= size {
            return Err(SetupError::Base { base, size });
        }
        let mut resubmit = Vec::new();
        let mut inflight = None;
        if let Some(region) = setup.inflight {
            let (tracker, recovered) = inflight::Packed::new(region, size, used, &areas.descriptors)?;
            if let Some(recovered) = recovered {
                (used, next) = (recovered.used, recovered.next);
                resubmit = recovered.again;
            }
            inflight = Some(tracker);
        }
        let ahead = i32::from(next.index) - i32::from(used.index)
            + if next.wrap == used.wrap { 0 } else { i32::from(size) };
        let outstanding = u16::try_from(ahead).ok().filter(|ahead| *ahead <= size);
        let Some(outstanding) = outstanding else { return Err(SetupError::Base { base, size }) };
        Ok(Self {
            areas,
            size,
            event_idx,
            max_segments,
            next,
            used,
            outstanding,
            requests: 0,
            total: 0,
            armed: true,
            call_due: true,
            pending: Vec::with_capacity(size.into()),
            resubmit,
            inflight,
            taken: Vec::new(),
            log: None,
        })
    }

    #[inline]
    pub fn pop(&mut self, memory: &GuestMemory<M>, chain: &mut Chain) -> Result<Option<Ticket>, Corrupt> {
        if !self.resubmit.is_empty() {
            return self.pop_again(memory, chain);
        }
        // ORDER packed.available: the rest of the chain, and the content of the buffers, are seen. Pairs with: the driver's
        // publish.
        let rest = self.areas.descriptors.load_acquire_u64(self.next.at() + 8);
        if !self.next.is_available(rest) {
            return Ok(None);
        }
        let (id, count) = self.walk(rest, memory, chain)?;
        let slot = match &mut self.inflight {
            Some(inflight) => inflight.taken(&self.taken),
            None => 0,
        };
        self.next.advance(count, self.size);
        self.total += u64::from(count);
        self.outstanding += count;
        self.requests += 1;
        Ok(Some(Ticket { id, count, slot }))
    }

    /// Follows the chain that begins with the next descriptor, whose second word is `rest`. Returns the chain's id and its
    /// number of descriptors.
    #[inline]
    fn walk(
        &mut self,
        mut rest: u64,
        memory: &GuestMemory<M>,
        chain: &mut Chain,
    ) -> Result<(u16, u16), Corrupt> {
        chain.clear();
        self.taken.clear();
        let limit = self.size - self.outstanding;
        let (mut position, mut count) = (self.next, 0);
        loop {
            count += 1;
            if count > limit {
                return Err(Corrupt::ChainLength { limit: limit.into() });
            }
            let address = self.areas.descriptors.load_relaxed_u64(position.at());
            let descriptor = PackedDescriptor::from_words(address, rest);
            add(&descriptor, count == 1, memory, chain, self.max_segments)?;
            if self.inflight.is_some() {
                self.taken.push(descriptor);
            }
            if !descriptor.flags.has(DescriptorFlags::NEXT) {
                return Ok((descriptor.id, count));
            }
            position.advance(1, self.size);
            rest = self.areas.descriptors.load_relaxed_u64(position.at() + 8);
        }
    }

    #[cold]
    fn pop_again(&mut self, memory: &GuestMemory<M>, chain: &mut Chain) -> Result<Option<Ticket>, Corrupt> {
        let Some(again) = self.resubmit.last() else { return Ok(None) };
        chain.clear();
        for (i, descriptor) in again.descriptors.iter().enumerate() {
            add(descriptor, i == 0, memory, chain, self.max_segments)?;
        }
        let id = again.descriptors.last().map_or(0, |descriptor| descriptor.id);
        let ticket = Ticket { id, count: again.descriptors.len() as u16, slot: again.slot };
        self.resubmit.pop();
        self.total += 1;
        self.requests += 1;
        Ok(Some(ticket))
    }

    #[inline]
    pub fn push(&mut self, ticket: Ticket, written: u32) {
        self.pending.push((ticket, written));
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        let Some((first, _)) = self.pending.first() else { return std::mem::take(&mut self.call_due) };
        let mut end = self.used;
        end.advance(first.count, self.size);
        let mut count = first.count;
        // The driver finds none of these before it has found the first.
        for i in 1..self.pending.len() {
            let (ticket, written) = &self.pending[i];
            let at = end.at() + 8;
            self.areas.descriptors.store_relaxed_u64(at, used(end, ticket, *written));
            self.mark_descriptor(at);
            count += ticket.count;
            end.advance(ticket.count, self.size);
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.publishing(self.pending.iter().map(|(ticket, _)| ticket.slot), end);
        }
        let at = self.used.at() + 8;
        let (first, written) = &self.pending[0];
        // ORDER packed.used: the other used descriptors of the batch, and what the device wrote to the buffers, are visible
        // before this one. Pairs with: the driver's look at this one.
        self.areas.descriptors.store_release_u64(at, used(self.used, first, *written));
        self.mark_descriptor(at);
        if let Some(inflight) = &mut self.inflight {
            inflight.published(self.pending.iter().map(|(ticket, _)| ticket.slot));
        }
        self.used = end;
        self.outstanding = self.outstanding.wrapping_sub(count);
        self.requests = self.requests.wrapping_sub(self.pending.len() as u16);
        self.pending.clear();
        // This fence is between the store of our descriptor and the load of the driver's notification setting. The driver
        // has a fence between the store of that setting and its second look at the ring.
        self.areas.device.memory.full_fence();
        let event = self.areas.driver.load_relaxed_u32(0);
        std::mem::take(&mut self.call_due) | end.wanted(event, self.event_idx, count, self.size)
    }

    pub fn arm(&mut self) -> bool {
        self.armed = true;
        self.set_event(self.next.event(self.event_idx));
        // This fence is between the store of our notification setting and our second look at the ring. The driver has a fence
        // between the store of its descriptor and the load of our setting.
        self.areas.device.memory.full_fence();
        !self.is_empty()
    }

    fn is_available(&self, position: Position) -> bool {
        position.is_available(self.areas.descriptors.load_relaxed_u64(position.at() + 8))
    }

    pub fn taken(&self) -> u64 {
        self.total
    }

    pub fn visible(&self) -> u64 {
        let (mut position, mut there) = (self.next, 0);
        // The driver gets the other descriptors only when they are given back, so they cannot be available.
        while there < self.size - self.outstanding && self.is_available(position) {
            position.advance(1, self.size);
            there += 1;
        }
        u64::from(there) + self.resubmit.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.resubmit.is_empty() && !self.is_available(self.next)
    }

    #[inline]
    pub fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.set_event(packed::event(0, packed::DISABLE));
        }
    }

    fn set_event(&self, event: u32) {
        self.areas.device.store_relaxed_u32(0, event);
        if let Some(log) = &self.log {
            log.mark(self.areas.device.guest, packed::EVENT as u64);
        }
    }

    #[inline]
    fn mark_descriptor(&self, at: usize) {
        if let Some(log) = &self.log {
            log.mark(self.areas.descriptors.guest + at as u64, DESCRIPTOR as u64 / 2);
        }
    }

    pub fn base(&self) -> u32 {
        u32::from(self.next.word()) | u32::from(self.used.word()) << 16
    }

    pub fn outstanding(&self) -> u16 {
        self.requests.saturating_sub(self.pending.len() as u16)
    }

    pub fn set_log(&mut self, log: Option<DirtyLog<M>>) {
        self.log = log;
    }

    pub fn state(&self) -> DeviceState {
        DeviceState {
            kind: Kind::Packed,
            size: self.size,
            available: self.next.word(),
            driver_index: None,
            used: self.used.word(),
            outstanding: self.outstanding(),
            resubmit: self.resubmit.len() as u16,
            armed: self.armed,
        }
    }
}

/// Adds the buffer of a descriptor of the ring. Only a descriptor that is alone in its chain may be indirect.
#[inline]
fn add<M: SharedMemory>(
    descriptor: &PackedDescriptor,
    first: bool,
    memory: &GuestMemory<M>,
    chain: &mut Chain,
    max_segments: u16,
) -> Result<(), Corrupt> {
    let &PackedDescriptor { address, len, flags, .. } = descriptor;
    if flags.has(DescriptorFlags::INDIRECT) {
        if !first || flags.has(DescriptorFlags::NEXT) {
            return Err(Corrupt::IndirectPlace);
        }
        return chain.add_packed_table(memory, address, len, max_segments);
    }
    chain.add(memory, address, len, flags.has(DescriptorFlags::WRITE), max_segments)
}

/// Returns the second word of a used descriptor.
#[inline]
fn used(at: Position, ticket: &Ticket, written: u32) -> u64 {
    let wrote = if written > 0 { DescriptorFlags::WRITE } else { DescriptorFlags(0) };
    let flags = DescriptorFlags::used(at.wrap).with(wrote);
    PackedDescriptor { address: 0, len: written, id: ticket.id, flags }.rest()
}
