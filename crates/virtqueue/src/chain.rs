//! A request's memory, as its descriptors say.

use crate::error::Corrupt;
use crate::memory::{Buffer, GuestMemory};
use ginnel_layout::virtio::{DESCRIPTOR, Descriptor, DescriptorFlags, PackedDescriptor};
use ginnel_shmem::SharedMemory;

/// The buffers of one request: those to read from, then those to write to. Kept by the caller and filled anew by each
/// [`crate::DeviceQueue::pop`], so that nothing is allocated once it has grown to the longest request.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
    readable_len: u32,
    writable_len: u32,
    /// The region that the last buffer was in.
    hint: u16,
}

impl Chain {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// What the device reads.
    #[inline]
    pub fn readable(&self) -> &[Buffer] {
        &self.readable
    }

    /// What the device writes.
    #[inline]
    pub fn writable(&self) -> &[Buffer] {
        &self.writable
    }

    /// Bytes to read. With those to write they are less than 4 GiB.
    #[inline]
    pub fn readable_len(&self) -> u32 {
        self.readable_len
    }

    /// Bytes to write.
    #[inline]
    pub fn writable_len(&self) -> u32 {
        self.writable_len
    }

    /// The region that the next buffer is in, as a rule.
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

    /// Adds what one descriptor says. An empty buffer adds nothing.
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
        // The sum of the two is below 4 GiB already.
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

    /// Adds one piece, if there is room.
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

    /// Adds a buffer that lies in another region than the last one, or in several.
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
            // A region ends within the address space, so at worst nothing follows.
            address = address.wrapping_add(piece.len.into());
            left -= piece.len;
        }
        Ok(())
    }

    /// Adds what an indirect table of a split queue says (2.7.5.3).
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

    /// Adds what an indirect table of a packed queue says (2.8.7): all its entries, one after the other.
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
        memory.load(address, self.hint, &mut bytes)?;
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
