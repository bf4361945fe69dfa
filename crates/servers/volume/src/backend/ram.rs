//! A disk in memory, for measurements and temporary data.

use super::{Failure, ImageError, Op};
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_shmem::{Mapping, SharedMemory};

/// Allocates the memory of a disk. It contains zeros.
pub(super) fn new(bytes: u64) -> Result<Mapping, ImageError> {
    let cannot = |why: String| ImageError::Memory { bytes, why };
    let len = usize::try_from(bytes.next_multiple_of(4096)).map_err(|e| cannot(e.to_string()))?;
    let memory = Mapping::anonymous(len).map_err(|e| cannot(e.to_string()))?;
    memory.prefer_huge_pages();
    Ok(memory)
}

/// Returns the largest size that the disk can have, in bytes.
pub(super) fn room(memory: &Mapping) -> u64 {
    memory.len() as u64
}

#[inline]
pub(super) fn perform(
    disk: &Mapping,
    op: Op,
    data: &[Buffer],
    memory: &GuestMemory<Mapping>,
) -> Result<(), Failure> {
    match op {
        Op::Read { at } => each(disk, at, data, |at, buffer| {
            memory.slice(buffer).copy_from(disk, at);
        }),
        Op::Write { at, .. } => each(disk, at, data, |at, buffer| {
            memory.slice(buffer).copy_to(disk, at);
        }),
        Op::Flush => Ok(()),
        Op::Discard { at, len } | Op::WriteZeroes { at, len, .. } => {
            let (at, len) = inside(disk, at, len)?;
            disk.zero(at, len);
            Ok(())
        }
    }
}

#[inline]
fn each(
    disk: &Mapping,
    at: u64,
    data: &[Buffer],
    mut copy: impl FnMut(usize, &Buffer),
) -> Result<(), Failure> {
    let mut at = at;
    for buffer in data {
        let (here, _) = inside(disk, at, buffer.len.into())?;
        copy(here, buffer);
        at += u64::from(buffer.len);
    }
    Ok(())
}

/// Checks a range. The device has checked it against the disk's size, and a disk is never larger than its memory.
#[inline]
fn inside(disk: &Mapping, at: u64, len: u64) -> Result<(usize, usize), Failure> {
    match at.checked_add(len) {
        Some(end) if end <= disk.len() as u64 => Ok((at as usize, len as usize)),
        _ => Err(Failure::Truncated),
    }
}
