//! The in-flight part of a packed queue.
//!
//! The two indices and the two wrap counters lie in one aligned 64-bit word, and are written together. The specification
//! allows writing them one by one; but a device that is killed in between would leave an index of one lap with the wrap
//! counter of another, from which recovery is impossible.

use super::InflightQueue;
use crate::Kind;
use crate::error::SetupError;
use crate::packed::Position;
use ginnel_guest_memory::Area;
use ginnel_layout::inflight::packed::{
    ENTRY, ENTRY_ADDRESS, ENTRY_LAST, ENTRY_NEXT, ENTRY_NUM, ENTRY_WORD, FREE_HEAD, HEADER, OLD_FREE_HEAD,
    USED,
};
use ginnel_layout::inflight::{DESC_NUM, ENTRY_COUNTER, ENTRY_INFLIGHT, FEATURES, VERSION, VERSION_AT};
use ginnel_layout::virtio::{DescriptorFlags, PackedDescriptor};
use ginnel_shmem::SharedMemory;

pub(crate) struct Packed<M> {
    area: Area<M>,
    /// The global counter of requests.
    counter: u64,
    /// The private copy of this value is authoritative; only the next device process reads the copy in the region.
    free_head: u16,
    used: Position,
    /// The value of `used` at the last commit.
    old_used: Position,
    /// Link of each entry, to the next one.
    next: Vec<u16>,
    /// The last entry of the chain that begins with each entry.
    last: Vec<u16>,
}

/// State from which a new device process continues.
pub(crate) struct Recovered {
    pub used: Position,
    pub next: Position,
    /// Requests to take again. The first one is at the end.
    pub again: Vec<Again>,
}

/// A request to take again.
pub(crate) struct Again {
    pub slot: u16,
    pub descriptors: Vec<PackedDescriptor>,
    counter: u64,
}

const fn entry(slot: u16) -> usize {
    HEADER + ENTRY * slot as usize
}

impl<M: SharedMemory> Packed<M> {
    /// Takes over the region of a queue of size `size`. If the region is unused, the queue's next used descriptor is at
    /// `used`. The queue's descriptors lie in `ring`.
    pub fn new(
        region: InflightQueue<M>,
        size: u16,
        used: Position,
        ring: &Area<M>,
    ) -> Result<(Self, Option<Recovered>), SetupError> {
        let InflightQueue { area, size: entries, kind } = region;
        if kind != Kind::Packed || entries < size {
            return Err(SetupError::Inflight("it was made for another kind of queue, or a shorter one"));
        }
        let mut tracker = Self {
            area,
            counter: 0,
            free_head: 0,
            used,
            old_used: used,
            next: (1..=entries).collect(),
            last: vec![0; entries.into()],
        };
        let recovered = match tracker.area.load_acquire_u16(VERSION_AT) {
            0 => {
                tracker.begin();
                None
            }
            VERSION => Some(tracker.recover(size, ring)?),
            _ => return Err(SetupError::Inflight("its version is not 1")),
        };
        Ok((tracker, recovered))
    }

    fn entries(&self) -> u16 {
        self.next.len() as u16
    }

    fn begin(&mut self) {
        for slot in 0..self.entries() {
            self.area.store_relaxed_u16(entry(slot) + ENTRY_INFLIGHT, 0);
            self.area.store_relaxed_u16(entry(slot) + ENTRY_NEXT, slot + 1);
        }
        self.area.store_relaxed_u64(FEATURES, 0);
        self.area.store_relaxed_u16(DESC_NUM, self.entries());
        self.area.store_relaxed_u16(FREE_HEAD, 0);
        self.area.store_relaxed_u16(OLD_FREE_HEAD, 0);
        self.store_used();
        self.area.store_release_u16(VERSION_AT, VERSION);
    }

    /// Stores both indices and both wrap counters at once.
    fn store_used(&self) {
        let (new, old) = (self.used, self.old_used);
        let indices = u64::from(new.index) | u64::from(old.index) << 16;
        let wraps = u64::from(new.wrap) << 32 | u64::from(old.wrap) << 40;
        self.area.store_release_u64(USED, indices | wraps);
    }

    fn recover(&mut self, size: u16, ring: &Area<M>) -> Result<Recovered, SetupError> {
        let entries = self.entries();
        if self.area.load_relaxed_u16(DESC_NUM) != entries {
            return Err(SetupError::Inflight("its number of entries is not that of the queue"));
        }
        let word = self.area.load_relaxed_u64(USED);
        self.used = Position { index: word as u16, wrap: word >> 32 & 1 != 0 };
        self.old_used = Position { index: (word >> 16) as u16, wrap: word >> 40 & 1 != 0 };
        if self.used.index >= size || self.old_used.index >= size {
            return Err(SetupError::Inflight("its used index is outside this ring"));
        }
        // A batch was being published. If its first descriptor is not as the driver made it, the device had published it, and
        // with it the rest of the batch.
        if self.used != self.old_used
            && !self.old_used.is_available(ring.load_relaxed_u64(self.old_used.at() + 8))
        {
            self.free_head = self.area.load_relaxed_u16(FREE_HEAD);
            self.area.store_release_u16(OLD_FREE_HEAD, self.free_head);
            self.old_used = self.used;
        }
        self.free_head = self.area.load_relaxed_u16(OLD_FREE_HEAD);
        self.area.store_release_u16(FREE_HEAD, self.free_head);
        self.used = self.old_used;
        self.store_used();

        for slot in 0..entries {
            self.next[usize::from(slot)] = self.area.load_relaxed_u16(entry(slot) + ENTRY_NEXT);
        }
        // Entries that are known to be free, or to belong to one request.
        let mut taken = vec![false; entries.into()];
        let mut free = self.free_head;
        while let Some(slot) = taken.get_mut(usize::from(free)) {
            if std::mem::replace(slot, true) {
                return Err(SetupError::Inflight("its list of free entries has a loop"));
            }
            self.area.store_release_u16(entry(free) + ENTRY_INFLIGHT, 0);
            free = self.next[usize::from(free)];
        }
        let mut again = Vec::new();
        let mut outstanding = 0;
        for slot in 0..entries {
            // The upper byte is padding.
            if self.area.load_relaxed_u16(entry(slot) + ENTRY_INFLIGHT) as u8 != 0 {
                let request = self.recover_request(slot, &mut taken)?;
                outstanding += request.descriptors.len();
                again.push(request);
            }
        }
        if taken.contains(&false) {
            return Err(SetupError::Inflight("an entry is neither free nor in flight"));
        }
        if outstanding > usize::from(size) {
            return Err(SetupError::Inflight("more is in flight than the queue has room for"));
        }
        again.sort_unstable_by_key(|again| std::cmp::Reverse((again.counter, again.slot)));
        self.counter = again.first().map_or(0, |newest| newest.counter.wrapping_add(1));

        // Each request that was ever taken is either used or in flight.
        let mut next = self.used;
        for _ in 0..outstanding {
            // In a batch that was being published, descriptors after the first may be marked as used. The driver has not
            // looked at them, and must not find them now.
            let rest = ring.load_relaxed_u64(next.at() + 8);
            if next.is_used(rest) {
                let flags = DescriptorFlags::available(next.wrap);
                let descriptor = PackedDescriptor { flags, ..PackedDescriptor::from_words(0, rest) };
                ring.store_release_u64(next.at() + 8, descriptor.rest());
            }
            next.advance(1, size);
        }
        Ok(Recovered { used: self.used, next, again })
    }

    fn recover_request(&mut self, slot: u16, taken: &mut [bool]) -> Result<Again, SetupError> {
        let num = self.area.load_relaxed_u16(entry(slot) + ENTRY_NUM);
        let last = self.area.load_relaxed_u16(entry(slot) + ENTRY_LAST);
        let counter = self.area.load_relaxed_u64(entry(slot) + ENTRY_COUNTER);
        let mut descriptors = Vec::new();
        let mut at = slot;
        for i in 0..num {
            match taken.get_mut(usize::from(at)) {
                Some(taken) if !*taken => *taken = true,
                _ => return Err(SetupError::Inflight("two of its requests share an entry")),
            }
            let word = self.area.load_relaxed_u64(entry(at) + ENTRY_WORD);
            descriptors.push(PackedDescriptor {
                address: self.area.load_relaxed_u64(entry(at) + ENTRY_ADDRESS),
                len: (word >> 32) as u32,
                id: word as u16,
                flags: DescriptorFlags((word >> 16) as u16),
            });
            if (i + 1 == num) != (at == last) {
                return Err(SetupError::Inflight("a request does not end with its last entry"));
            }
            at = self.next[usize::from(at)];
        }
        if descriptors.is_empty() {
            return Err(SetupError::Inflight("a request without a descriptor is in flight"));
        }
        self.last[usize::from(slot)] = last;
        Ok(Again { slot, descriptors, counter })
    }

    /// Does the steps "When receiving available buffers from the driver". Returns the request's first entry. There are as
    /// many entries as descriptors in the ring, so one is always free.
    #[inline]
    pub fn taken(&mut self, descriptors: &[PackedDescriptor]) -> u16 {
        let head = self.free_head;
        let at = entry(head);
        self.area.store_release_u16(at + ENTRY_NUM, 0);
        self.area.store_release_u64(at + ENTRY_COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.area.store_release_u16(at + ENTRY_INFLIGHT, 1);
        for (i, descriptor) in descriptors.iter().enumerate() {
            if i + 1 == descriptors.len() {
                self.last[usize::from(head)] = self.free_head;
                self.area.store_release_u16(at + ENTRY_LAST, self.free_head);
            }
            self.area.store_release_u16(at + ENTRY_NUM, i as u16 + 1);
            let &PackedDescriptor { address, len, id, flags } = descriptor;
            let word = u64::from(id) | u64::from(flags.0) << 16 | u64::from(len) << 32;
            self.area.store_release_u64(entry(self.free_head) + ENTRY_ADDRESS, address);
            self.area.store_release_u64(entry(self.free_head) + ENTRY_WORD, word);
            self.free_head = self.next[usize::from(self.free_head)];
            self.area.store_release_u16(FREE_HEAD, self.free_head);
        }
        self.area.store_release_u16(OLD_FREE_HEAD, self.free_head);
        head
    }

    /// Does the steps "When supplying used buffers to the driver", up to the one that tells the driver: the requests that
    /// begin with `slots` are given back, and the next used descriptor will be at `used`.
    #[inline]
    pub fn publishing(&mut self, slots: impl Iterator<Item = u16>, used: Position) {
        for slot in slots {
            let last = self.last[usize::from(slot)];
            self.next[usize::from(last)] = self.free_head;
            self.area.store_release_u16(entry(last) + ENTRY_NEXT, self.free_head);
            self.free_head = slot;
            self.area.store_release_u16(FREE_HEAD, slot);
        }
        self.used = used;
        self.store_used();
    }

    /// Does the remaining steps after the used descriptors were published to the driver.
    #[inline]
    pub fn published(&mut self, slots: impl Iterator<Item = u16>) {
        for slot in slots {
            self.area.store_release_u16(entry(slot) + ENTRY_INFLIGHT, 0);
        }
        self.area.store_release_u16(OLD_FREE_HEAD, self.free_head);
        self.old_used = self.used;
        self.store_used();
    }
}
