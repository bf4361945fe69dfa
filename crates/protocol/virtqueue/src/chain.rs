//! The memory of a request, as its descriptors describe it.

use crate::error::Corrupt;
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::virtio::{DESCRIPTOR, Descriptor, DescriptorFlags, PackedDescriptor};
use ginnel_shmem::SharedMemory;

/// The buffers of one request: first those that the device reads, then those that it writes. The caller keeps the value, and
/// each [`crate::DeviceQueue::pop`] fills it anew, so that nothing is allocated once it has grown to the longest request.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
    readable_len: u32,
    writable_len: u32,
    /// Index of the region that contained the last buffer.
    hint: u16,
}

impl Chain {
    /// Returns an empty chain.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the buffers that the device reads.
    #[inline]
    pub fn readable(&self) -> &[Buffer] {
        &self.readable
    }

    /// Returns the buffers that the device writes.
    #[inline]
    pub fn writable(&self) -> &[Buffer] {
        &self.writable
    }

    /// Returns the bytes to read. Bytes to read and bytes to write are together less than 4 GiB.
    #[inline]
    pub fn readable_len(&self) -> u32 {
        self.readable_len
    }

    /// Returns the bytes to write.
    #[inline]
    pub fn writable_len(&self) -> u32 {
        self.writable_len
    }

    /// Returns the index of the region that probably contains the next buffer.
    #[inline]
    pub(crate) fn hint(&self) -> u16 {
        self.hint
    }

    #[inline]
    pub(crate) fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        (self.readable_len, self.writable_len) = (0, 0);
    }

    /// Adds the buffer of one descriptor. An empty buffer adds nothing.
    #[inline]
    pub(crate) fn add<M: SharedMemory>(
        &mut self,
        memory: &GuestMemory<M>,
        address: u64,
        len: u32,
        writable: bool,
        limit: u16,
    ) -> Result<(), Corrupt> {
        if !writable && self.writable_len > 0 {
            return Err(Corrupt::Order);
        }
        // The sum of the two is already known to be below 4 GiB.
        if self.readable_len.wrapping_add(self.writable_len).checked_add(len).is_none() {
            return Err(Corrupt::TooLong);
        }
        if len == 0 {
            return Ok(());
        }
        let Some(piece) = memory.whole(address, len, self.hint) else {
            return self.add_slowly(memory, address, len, writable, limit);
        };
        self.push(piece, writable, limit)
    }

    /// Adds one piece, unless the request has too many.
    #[inline]
    fn push(&mut self, piece: Buffer, writable: bool, limit: u16) -> Result<(), Corrupt> {
        if self.readable.len() + self.writable.len() >= usize::from(limit) {
            return Err(Corrupt::Segments { limit });
        }
        let (list, sum) = if writable {
            (&mut self.writable, &mut self.writable_len)
        } else {
            (&mut self.readable, &mut self.readable_len)
        };
        *sum += piece.len;
        list.push(piece);
        Ok(())
    }

    /// Adds a buffer that lies in another region than the last one, or in several regions.
    #[cold]
    fn add_slowly<M: SharedMemory>(
        &mut self,
        memory: &GuestMemory<M>,
        mut address: u64,
        len: u32,
        writable: bool,
        limit: u16,
    ) -> Result<(), Corrupt> {
        let outside = Corrupt::Outside { address, len };
        let mut left = len;
        while left > 0 {
            let piece = memory.piece(address, left).ok_or(outside)?;
            self.hint = piece.region;
            self.push(piece, writable, limit)?;
            // A region ends within the address space, so after an overflow no piece follows.
            address = address.wrapping_add(piece.len.into());
            left -= piece.len;
        }
        Ok(())
    }

    /// Adds the buffers of an indirect table of a split queue (2.7.5.3).
    pub(crate) fn add_split_table<M: SharedMemory>(
        &mut self,
        memory: &GuestMemory<M>,
        address: u64,
        len: u32,
        limit: u16,
    ) -> Result<(), Corrupt> {
        let size = table_size(len)?;
        // A longer chain is a loop, or more than this device takes.
        let mut left = size.min(u32::from(limit) + 1);
        let mut index = 0;
        loop {
            let [address, rest] = self.load(memory, entry(address, index)?)?;
            let descriptor = Descriptor::from_words(address, rest);
            if descriptor.flags.has(DescriptorFlags::INDIRECT) {
                return Err(Corrupt::IndirectPlace);
            }
            let writable = descriptor.flags.has(DescriptorFlags::WRITE);
            self.add(memory, descriptor.address, descriptor.len, writable, limit)?;
            if !descriptor.flags.has(DescriptorFlags::NEXT) {
                return Ok(());
            }
            left -= 1;
            if left == 0 {
                return Err(Corrupt::ChainLength { limit: size.min(u32::from(limit)) });
            }
            index = u32::from(descriptor.next);
            if index >= size {
                return Err(Corrupt::Descriptor { index, size });
            }
        }
    }

    /// Adds the buffers of an indirect table of a packed queue (2.8.7): all its entries, one after the other.
    pub(crate) fn add_packed_table<M: SharedMemory>(
        &mut self,
        memory: &GuestMemory<M>,
        address: u64,
        len: u32,
        limit: u16,
    ) -> Result<(), Corrupt> {
        let size = table_size(len)?;
        if size > u32::from(limit) {
            return Err(Corrupt::Segments { limit });
        }
        for index in 0..size {
            let [address, rest] = self.load(memory, entry(address, index)?)?;
            let descriptor = PackedDescriptor::from_words(address, rest);
            if descriptor.flags.has(DescriptorFlags::INDIRECT) {
                return Err(Corrupt::IndirectPlace);
            }
            let writable = descriptor.flags.has(DescriptorFlags::WRITE);
            self.add(memory, descriptor.address, descriptor.len, writable, limit)?;
        }
        Ok(())
    }

    #[inline]
    fn load<M: SharedMemory>(&self, memory: &GuestMemory<M>, address: u64) -> Result<[u64; 2], Corrupt> {
        let mut bytes = [0; DESCRIPTOR];
        if !memory.copy_out(address, self.hint, &mut bytes) {
            return Err(Corrupt::Outside { address, len: 16 });
        }
        let word = u128::from_le_bytes(bytes);
        Ok([word as u64, (word >> 64) as u64])
    }
}

fn table_size(len: u32) -> Result<u32, Corrupt> {
    let size = len / DESCRIPTOR as u32;
    if size == 0 || !len.is_multiple_of(DESCRIPTOR as u32) {
        return Err(Corrupt::IndirectLength(len));
    }
    Ok(size)
}

fn entry(table: u64, index: u32) -> Result<u64, Corrupt> {
    let outside = Corrupt::Outside { address: table, len: DESCRIPTOR as u32 };
    table.checked_add(u64::from(index) * DESCRIPTOR as u64).ok_or(outside)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_guest_memory::{MemoryError, Region};
    use ginnel_shmem::Mapping;

    fn memory(regions: &[(u64, u64, usize)]) -> Result<GuestMemory<Mapping>, MemoryError> {
        let region =
            |&(guest, user, len): &_| Region { guest, user, memory: Mapping::anonymous(len).unwrap() };
        GuestMemory::new(regions.iter().map(region).collect())
    }

    fn find(
        memory: &GuestMemory<Mapping>,
        address: u64,
        len: u32,
    ) -> Result<Vec<(u16, usize, u32)>, Corrupt> {
        let mut chain = Chain::new();
        // The result does not depend on where the previous buffer was.
        for before in [0x1000, 0x4000, 0x9000] {
            chain.clear();
            chain.add(memory, before, 1, true, 99)?;
            chain.add(memory, address, len, true, 99)?;
        }
        Ok(chain.writable()[1..].iter().map(|b| (b.region, b.at, b.len)).collect())
    }

    #[test]
    fn a_buffer_may_span_regions_that_meet() {
        let m = memory(&[(0x4000, 0x90000, 0x1000), (0x1000, 0x80000, 0x3000), (0x9000, 0x10000, 0x1000)])
            .unwrap();
        assert_eq!(find(&m, 0x1000, 0x3000), Ok(vec![(0, 0, 0x3000)]));
        assert_eq!(find(&m, 0x3ff0, 0x20), Ok(vec![(0, 0x2ff0, 0x10), (1, 0, 0x10)]));
        assert_eq!(find(&m, 0x9008, 8), Ok(vec![(2, 8, 8)]));
        for (address, len) in [
            (0, 1),
            (0xfff, 2),
            (0x4fff, 2),
            (0x5000, 1),
            (0x8fff, 2),
            (0x9fff, 2),
            (0xa000, 1),
            (u64::MAX, 1),
            (u64::MAX - 3, 8),
            (0x1000, u32::MAX - 1),
        ] {
            assert_eq!(find(&m, address, len), Err(Corrupt::Outside { address, len }));
        }
    }
}
