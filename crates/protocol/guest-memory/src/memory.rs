//! The guest's memory: the mapping of guest addresses to this process's memory.

use crate::Area;
use ginnel_shmem::{SharedMemory, SharedSlice};
use thiserror::Error;

/// The regions of the guest's memory are invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Two regions overlap, in the guest's or in the front end's address space.
    #[error("memory regions overlap at {0:#x}")]
    Overlap(u64),
    /// A region extends beyond the end of the address space.
    #[error("the memory region at {0:#x} extends beyond the end of the address space")]
    TooLong(u64),
    /// There are more regions than can be numbered.
    #[error("{0} memory regions: at most 65535 are possible")]
    TooMany(usize),
}

/// A contiguous region of the guest's memory.
#[derive(Clone)]
pub struct Region<M> {
    /// Guest physical address of the region.
    pub guest: u64,
    /// Address in the front end's process, in which ring addresses are given (vhost-user specification, "Memory region
    /// description").
    pub user: u64,
    /// The bytes of the region, all of them.
    pub memory: M,
}

/// A contiguous piece of a request's memory, in one region. It is meaningful only for the [`GuestMemory`] that found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Index of the region.
    pub region: u16,
    /// Bytes of the piece.
    pub len: u32,
    /// Offset in the region.
    pub at: usize,
}

/// All regions of the guest. Clones refer to the same memory.
#[derive(Clone)]
pub struct GuestMemory<M: SharedMemory> {
    /// The regions, sorted by guest address.
    regions: Vec<Region<M>>,
}

impl<M: SharedMemory> GuestMemory<M> {
    /// Makes the guest's memory from regions in any order. Empty regions are ignored.
    pub fn new(mut regions: Vec<Region<M>>) -> Result<Self, MemoryError> {
        regions.retain(|region| !region.memory.is_empty());
        if regions.len() > usize::from(u16::MAX) {
            return Err(MemoryError::TooMany(regions.len()));
        }
        regions.sort_unstable_by_key(|region| region.user);
        apart(&regions, |region| region.user)?;
        regions.sort_unstable_by_key(|region| region.guest);
        apart(&regions, |region| region.guest)?;
        Ok(Self { regions })
    }

    /// Returns the regions, sorted by guest address.
    pub fn regions(&self) -> &[Region<M>] {
        &self.regions
    }

    /// Returns whether the memory of any region is gone (see [`SharedMemory::is_broken`]).
    pub fn is_broken(&self) -> bool {
        self.regions.iter().any(|region| region.memory.is_broken())
    }

    /// Returns the `len` bytes at an address of the front end. `None` if no single region has them all.
    pub fn at_user(&self, user: u64, len: usize) -> Option<Area<M>> {
        self.area(len, |region| user.checked_sub(region.user))
    }

    /// Returns the `len` bytes at a guest address. `None` if no single region has them all.
    pub fn at_guest(&self, guest: u64, len: usize) -> Option<Area<M>> {
        self.area(len, |region| guest.checked_sub(region.guest))
    }

    fn area(&self, len: usize, offset: impl Fn(&Region<M>) -> Option<u64>) -> Option<Area<M>> {
        self.regions.iter().find_map(|region| {
            let at = offset(region)?;
            if at >= region.memory.len() as u64 || len > region.memory.len() - at as usize {
                return None;
            }
            Some(Area { memory: region.memory.clone(), at: at as usize, len, guest: region.guest + at })
        })
    }

    /// Returns the bytes of a buffer. Panics if another `GuestMemory` has found the buffer and this one does not have such
    /// bytes.
    #[inline]
    pub fn slice(&self, buffer: &Buffer) -> SharedSlice<'_, M> {
        SharedSlice::new(&self.regions[usize::from(buffer.region)].memory, buffer.at, buffer.len as usize)
    }

    /// Returns the guest address of a buffer.
    #[inline]
    pub fn guest_address(&self, buffer: &Buffer) -> u64 {
        self.regions[usize::from(buffer.region)].guest + buffer.at as u64
    }

    /// Returns the `len` bytes at a guest address. `None` if this region does not have them all. The region of the last
    /// buffer usually has them.
    #[inline]
    pub fn whole(&self, address: u64, len: u32, region: u16) -> Option<Buffer> {
        let found = self.regions.get(usize::from(region))?;
        let at = address.wrapping_sub(found.guest);
        let bytes = found.memory.len() as u64;
        // The sum cannot overflow if the first comparison is true.
        (at < bytes && at + u64::from(len) <= bytes).then_some(Buffer { region, len, at: at as usize })
    }

    /// Prefetches the cache line at a guest address, if the address is in this region.
    #[inline]
    pub fn prefetch(&self, address: u64, region: u16) {
        if let Some(Buffer { at, .. }) = self.whole(address, 1, region) {
            self.regions[usize::from(region)].memory.prefetch(at);
        }
    }

    /// Returns the first piece of `len` bytes at a guest address. It has fewer bytes if a region ends within them.
    pub fn piece(&self, address: u64, len: u32) -> Option<Buffer> {
        let region = self.regions.partition_point(|region| region.guest <= address).checked_sub(1)?;
        let at = address - self.regions[region].guest;
        let room = (self.regions[region].memory.len() as u64).saturating_sub(at);
        let len = room.min(u64::from(len)) as u32;
        (room > 0).then_some(Buffer { region: region as u16, len, at: at as usize })
    }

    /// Copies bytes out of the buffers, from byte `at` on. Returns how many bytes were copied.
    pub fn read(&self, from: &[Buffer], at: u64, into: &mut [u8]) -> usize {
        let mut done = 0;
        self.pieces(from, at, into.len(), |slice| {
            let n = slice.len();
            slice.read(0, &mut into[done..done + n]);
            done += n;
        })
    }

    /// Copies bytes into the buffers, from byte `at` on. Returns how many bytes were copied.
    pub fn write(&self, to: &[Buffer], at: u64, from: &[u8]) -> usize {
        let mut done = 0;
        self.pieces(to, at, from.len(), |slice| {
            let n = slice.len();
            slice.write(0, &from[done..done + n]);
            done += n;
        })
    }

    /// Calls `f` with each piece of `len` bytes of the buffers, from byte `at` on. Returns how many bytes there were.
    pub fn pieces(
        &self,
        buffers: &[Buffer],
        mut at: u64,
        len: usize,
        mut f: impl FnMut(SharedSlice<'_, M>),
    ) -> usize {
        let mut left = len;
        for buffer in buffers {
            if left == 0 {
                break;
            }
            if at >= u64::from(buffer.len) {
                at -= u64::from(buffer.len);
                continue;
            }
            let slice = self.slice(buffer).skip(at as usize);
            at = 0;
            let n = left.min(slice.len());
            f(slice.first(n));
            left -= n;
        }
        len - left
    }

    /// Copies out the bytes at a guest address, which usually are in `region` and may be in several. Returns whether the guest
    /// has them all; otherwise, the content of `into` is undefined.
    #[inline]
    #[must_use = "if it returns false, nothing useful was copied"]
    pub fn copy_out(&self, address: u64, region: u16, into: &mut [u8]) -> bool {
        if let Some(Buffer { at, .. }) =
            u32::try_from(into.len()).ok().and_then(|len| self.whole(address, len, region))
        {
            self.regions[usize::from(region)].memory.read(at, into);
            return true;
        }
        self.copy_out_slowly(address, into)
    }

    #[cold]
    fn copy_out_slowly(&self, address: u64, into: &mut [u8]) -> bool {
        let mut done = 0;
        while done < into.len() {
            let left = u32::try_from(into.len() - done).unwrap_or(u32::MAX);
            let Some(piece) = self.piece(address.wrapping_add(done as u64), left) else { return false };
            let end = done + piece.len as usize;
            self.regions[usize::from(piece.region)].memory.read(piece.at, &mut into[done..end]);
            done = end;
        }
        true
    }
}

/// Checks that sorted regions do not overlap, and do not extend beyond the end of the address space.
fn apart<M: SharedMemory>(
    regions: &[Region<M>],
    start: impl Fn(&Region<M>) -> u64,
) -> Result<(), MemoryError> {
    let mut end = 0;
    for region in regions {
        let from = start(region);
        if from < end {
            return Err(MemoryError::Overlap(from));
        }
        end = from.checked_add(region.memory.len() as u64).ok_or(MemoryError::TooLong(from))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::Mapping;

    fn memory(regions: &[(u64, u64, usize)]) -> Result<GuestMemory<Mapping>, MemoryError> {
        let region =
            |&(guest, user, len): &_| Region { guest, user, memory: Mapping::anonymous(len).unwrap() };
        GuestMemory::new(regions.iter().map(region).collect())
    }

    #[test]
    fn bytes_are_copied_out_of_one_region_or_of_several() {
        let m = memory(&[(0x1000, 0, 0x1000), (0x2000, 0x2000, 0x1000)]).unwrap();
        let buffers = [Buffer { region: 0, at: 0xffc, len: 4 }, Buffer { region: 1, at: 0, len: 4 }];
        assert_eq!(m.write(&buffers, 0, b"abcdefgh"), 8);
        for region in [0, 1, 2, u16::MAX] {
            let mut bytes = [0; 8];
            assert!(m.copy_out(0x1ffc, region, &mut bytes) && &bytes == b"abcdefgh", "region {region}");
            assert!(m.copy_out(0x2000, region, &mut bytes[..4]) && &bytes[..4] == b"efgh");
            assert!(m.copy_out(0x2000, region, &mut []));
            for outside in [0, 0xfff, 0x2ff9, 0x3000, u64::MAX, u64::MAX - 3] {
                assert!(!m.copy_out(outside, region, &mut bytes), "{outside:#x}");
            }
        }
    }

    #[test]
    fn regions_do_not_overlap() {
        assert_eq!(memory(&[(0, 0, 0x1000), (0xff8, 0x4000, 8)]).err(), Some(MemoryError::Overlap(0xff8)));
        assert_eq!(
            memory(&[(0, 0, 0x1000), (0x4000, 0xff8, 8)]).err(),
            Some(MemoryError::Overlap(0xff8)),
            "in the front end's addresses"
        );
        assert_eq!(memory(&[(u64::MAX - 7, 0, 16)]).err(), Some(MemoryError::TooLong(u64::MAX - 7)));
    }

    #[test]
    fn an_area_lies_in_one_region() {
        let m = memory(&[(0x1000, 0x80000, 0x1000), (0x2000, 0x81000, 0x1000)]).unwrap();
        let area = m.at_user(0x81010, 0xff0).unwrap();
        assert_eq!((area.at, area.len, area.guest), (0x10, 0xff0, 0x2010));
        assert!(m.at_user(0x81010, 0xff1).is_none(), "one byte too many");
        assert!(m.at_user(0x80ff0, 0x20).is_none(), "over a border");
        assert!(
            m.at_user(0x1000, 1).is_none() && m.at_user(0x82000, 0).is_none() && m.at_user(0, 1).is_none()
        );
        assert_eq!(m.at_guest(0x1008, 8).map(|a| a.at), Some(8));
    }

    #[test]
    fn bytes_go_over_borders() {
        let m = memory(&[(0, 0, 0x1000), (0x1000, 0x2000, 0x1000)]).unwrap();
        let buffers = [
            Buffer { region: 0, at: 0xffd, len: 3 },
            Buffer { region: 1, at: 0, len: 5 },
            Buffer { region: 1, at: 64, len: 2 },
        ];
        assert_eq!(m.write(&buffers, 1, b"abcdefghijk"), 9);
        let mut back = [0; 20];
        assert_eq!(m.read(&buffers, 0, &mut back), 10);
        assert_eq!(&back[..10], b"\0abcdefghi");
        assert_eq!(m.read(&buffers, 8, &mut back[..1]), 1);
        assert_eq!(back[0], b'h');
        assert_eq!(m.read(&buffers, 10, &mut back), 0);
    }
}
