//! Packed queues (virtio 1.2, section 2.8).

mod device;
mod driver;

use crate::device::check_area;
use crate::error::SetupError;
use crate::event::passed;
pub(crate) use device::Device;
pub(crate) use driver::Driver;
use ginnel_guest_memory::Area;
use ginnel_layout::virtio::{DESCRIPTOR, DESCRIPTOR_ALIGN, DescriptorFlags, packed};
use ginnel_shmem::SharedMemory;

/// The three areas of a queue, each long enough for the queue's size.
pub(crate) struct Areas<M> {
    descriptors: Area<M>,
    driver: Area<M>,
    device: Area<M>,
}

impl<M: SharedMemory> Areas<M> {
    fn new(size: u16, descriptors: Area<M>, driver: Area<M>, device: Area<M>) -> Result<Self, SetupError> {
        check_area("descriptor", &descriptors, DESCRIPTOR * usize::from(size), DESCRIPTOR_ALIGN)?;
        check_area("driver", &driver, packed::EVENT, packed::EVENT)?;
        check_area("device", &device, packed::EVENT, packed::EVENT)?;
        Ok(Self { descriptors, driver, device })
    }

    /// Returns whether the device has gone through the whole ring at least once. It is called for a base of 0. Such a base
    /// names the first descriptor of a lap with both wrap counters 0; but some front ends, such as the crate `virtio-driver`,
    /// also use 0 for a new ring.
    ///
    /// In every lap, the device sets USED in at least one descriptor. A driver that makes this descriptor available again in
    /// a lap with the wrap counter 0 sets USED too. In a new ring, no descriptor has USED. All descriptors must be checked,
    /// because any of them may be the one: if a chain extends beyond the end of the ring, its part at the beginning keeps the
    /// flags of the driver.
    fn is_used_up(&self, size: u16) -> bool {
        (0..usize::from(size))
            .any(|i| flags(self.descriptors.load_relaxed_u64(i * DESCRIPTOR + 8)).has(DescriptorFlags::USED))
    }
}

/// A position in the ring, and the wrap counter with which it is passed (2.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub index: u16,
    pub wrap: bool,
}

impl Position {
    /// The first position of a new ring.
    pub const START: Self = Self { index: 0, wrap: true };

    /// Decodes an index with the wrap counter in bit 15.
    pub fn from_word(word: u16) -> Self {
        Self { index: word & 0x7fff, wrap: word & 0x8000 != 0 }
    }

    /// Returns the index, with the wrap counter in bit 15.
    #[inline]
    pub fn word(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    /// Advances by `count` positions, which is at most `size`.
    #[inline]
    pub fn advance(&mut self, count: u16, size: u16) {
        self.index += count;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }

    /// Returns the offset of the descriptor's address. The second word is 8 bytes further.
    #[inline]
    pub fn at(self) -> usize {
        DESCRIPTOR * usize::from(self.index)
    }

    /// Returns whether `rest`, the second word of the descriptor at this position, marks it as available.
    #[inline]
    pub fn is_available(self, rest: u64) -> bool {
        flags(rest).state() == DescriptorFlags::available(self.wrap)
    }

    /// Returns whether `rest`, the second word of the descriptor at this position, marks it as used.
    #[inline]
    pub fn is_used(self, rest: u64) -> bool {
        flags(rest).state() == DescriptorFlags::used(self.wrap)
    }

    /// Returns the event suppression word for the other side: notify when this position is passed (with event index), or at
    /// once.
    #[inline]
    fn event(self, event_idx: bool) -> u32 {
        if event_idx { packed::event(self.word(), packed::DESC) } else { packed::event(0, packed::ENABLE) }
    }

    /// Returns whether the other side, whose event suppression word is given, wants a notification after the `passed`
    /// positions before this one have been passed (2.8.14).
    #[inline]
    fn wanted(self, event: u32, event_idx: bool, count: u16, size: u16) -> bool {
        match (event >> 16) as u16 & 3 {
            packed::DISABLE => false,
            packed::DESC if event_idx => {
                let place = Self::from_word(event as u16);
                // The position is in the previous lap.
                let back = if place.wrap == self.wrap { 0 } else { size };
                passed(place.index.wrapping_sub(back), self.index, self.index.wrapping_sub(count))
            }
            _ => true,
        }
    }
}

#[inline]
fn flags(rest: u64) -> DescriptorFlags {
    DescriptorFlags((rest >> 48) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_passed_once() {
        for size in [1, 2, 3, 8, 100, 32768] {
            for start in [0, size / 2, size - 1] {
                for count in [1, size / 2, size] {
                    for wrap in [false, true] {
                        let old = Position { index: start, wrap };
                        let mut new = old;
                        new.advance(count, size);
                        let mut place = old;
                        for i in 0..=size {
                            let wanted = new.wanted(place.event(true), true, count, size);
                            assert_eq!(wanted, i < count, "{size} {start}+{count} at {i}");
                            place.advance(1, size);
                        }
                    }
                }
            }
        }
        let here = Position::START;
        assert!(here.wanted(packed::event(0, packed::ENABLE), true, 1, 8));
        assert!(!here.wanted(packed::event(0, packed::DISABLE), true, 1, 8));
        assert!(
            here.wanted(packed::event(5, packed::DESC), false, 1, 8),
            "not negotiated, so it has no effect"
        );
        assert!(here.wanted(packed::event(0, 3), true, 1, 8), "reserved");
    }
}
