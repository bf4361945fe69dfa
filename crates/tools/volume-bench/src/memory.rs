//! The memory that client and server share: one sealed memfd, like a VM's RAM.

use crate::error::Error;
use ginnel_shmem::{Mapping, Protection};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Guest physical address of the first byte. Only the server translates this address and [`USER`]. The values are
/// chosen so that using one instead of the other, or an offset, does not lead to valid memory.
pub(crate) const GUEST: u64 = 0x1000_0000;
/// The address of the first byte in the front end's address space, as the server is told.
pub(crate) const USER: u64 = 0x5500_0000_0000;

const PAGE: usize = 4096;

/// Assigns offsets in the shared memory before it exists.
#[derive(Default)]
pub(crate) struct Plan {
    used: usize,
}

/// A range of the shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryRange {
    pub at: usize,
    pub len: usize,
}

impl MemoryRange {
    pub fn guest(self) -> u64 {
        GUEST + self.at as u64
    }
    pub fn user(self) -> u64 {
        USER + self.at as u64
    }
}

impl Plan {
    /// Reserves `len` bytes at a page boundary.
    pub fn pages(&mut self, len: usize) -> MemoryRange {
        let range = MemoryRange { at: self.used, len: len.next_multiple_of(PAGE) };
        self.used += range.len;
        range
    }

    /// Returns the total length in bytes.
    pub fn len(&self) -> usize {
        self.used
    }
}

/// Memory that the client shares with the server.
pub(crate) struct DriverMemory {
    file: OwnedFd,
    pub mapping: Mapping,
}

impl DriverMemory {
    /// Creates and maps the memory, filled with zeros.
    pub fn new(name: &str, len: usize) -> Result<Self, Error> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(Error::io("creating shared memory"))?;
        ftruncate(&file, len as u64).map_err(Error::io("sizing shared memory"))?;
        // Afterwards both sides can rely on its size.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(Error::io("sealing shared memory"))?;
        let mapping = Mapping::of_file(&file, 0, len, Protection::ReadWrite)
            .map_err(|source| Error::Io { what: "mapping shared memory", source })?;
        Ok(Self { file, mapping })
    }

    /// Returns the mapping of one range, which must come from the plan of this memory.
    pub fn part(&self, range: MemoryRange) -> Result<Mapping, Error> {
        self.mapping
            .part(range.at, range.len)
            .ok_or_else(|| Error::Invalid(format!("{range:?} is outside of the shared memory")))
    }

    pub fn len(&self) -> u64 {
        ginnel_shmem::SharedMemory::len(&self.mapping) as u64
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
