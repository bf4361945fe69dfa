//! Positions in a queue. Queues have any number of entries, so positions wrap with a comparison, which is faster than a division.

use crate::error::SetupError;
use ginnel_guest_memory::Area;
use ginnel_shmem::SharedMemory;

/// Returns the position behind this one.
#[inline]
pub(crate) fn next(position: u16, size: u16) -> u16 {
    if position + 1 == size { 0 } else { position + 1 }
}

/// Returns the position before this one.
#[inline]
pub(crate) fn before(position: u16, size: u16) -> u16 {
    if position == 0 { size - 1 } else { position - 1 }
}

/// Returns how many entries there are from one position up to another, 0 to `size - 1`.
#[inline]
pub(crate) fn distance(from: u16, to: u16, size: u16) -> u16 {
    if to >= from { to - from } else { size - from + to }
}

/// Checks the memory of a queue.
pub(crate) fn check<M: SharedMemory>(
    name: &'static str,
    area: &Area<M>,
    needed: usize,
    align: usize,
) -> Result<(), SetupError> {
    if !area.fits(needed, align) {
        let (address, len) = (area.guest, area.len);
        return Err(SetupError::Area { area: name, address, len, align, needed });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{before, distance, next};

    #[test]
    fn positions_wrap() {
        for size in [2, 3, 7, 1024, 32768] {
            let mut position = 0;
            for step in 0..2 * u32::from(size) {
                assert_eq!(u32::from(position), step % u32::from(size));
                assert_eq!(distance(0, position, size), position);
                assert_eq!(distance(position, 0, size), (size - position) % size);
                assert_eq!(before(next(position, size), size), position);
                position = next(position, size);
            }
        }
    }
}
