//! The memory that client and server share: one sealed memfd, as a VM's RAM would be.

use crate::error::Error;
use ginnel_shmem::{Mapping, Protection};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Guest physical address of the first byte. Like [`USER`] a label: only the server translates it, and a mix-up of the two
/// kinds of address, or of either with an offset, finds nothing.
pub(crate) const GUEST: u64 = 0x1000_0000;
/// What the server is told to be our own address of the first byte.
pub(crate) const USER: u64 = 0x5500_0000_0000;

const PAGE: usize = 4096;

/// Plans what lies where, before there is memory.
#[derive(Default)]
pub(crate) struct Plan {
    used: usize,
}

/// Where something lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub at: usize,
    pub len: usize,
}

impl Place {
    pub fn guest(self) -> u64 {
        GUEST + self.at as u64
    }
    pub fn user(self) -> u64 {
        USER + self.at as u64
    }
}

impl Plan {
    /// Room for `len` bytes at a page boundary.
    pub fn pages(&mut self, len: usize) -> Place {
        let place = Place { at: self.used, len: len.next_multiple_of(PAGE) };
        self.used += place.len;
        place
    }

    /// Bytes of all of it.
    pub fn len(&self) -> usize {
        self.used
    }
}

/// The memory.
pub(crate) struct DriverMemory {
    file: OwnedFd,
    pub mapping: Mapping,
}

impl DriverMemory {
    /// Makes and maps it, zeroed.
    pub fn new(name: &str, len: usize) -> Result<Self, Error> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(Error::io("creating shared memory"))?;
        ftruncate(&file, len as u64).map_err(Error::io("sizing shared memory"))?;
        // The server can then rely on its size, and so can we.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(Error::io("sealing shared memory"))?;
        let mapping = Mapping::of_file(&file, 0, len, Protection::ReadWrite)
            .map_err(|source| Error::Io { what: "mapping shared memory", source })?;
        Ok(Self { file, mapping })
    }

    /// One place of it. All places come from the plan it was made by.
    pub fn part(&self, place: Place) -> Result<Mapping, Error> {
        self.mapping
            .part(place.at, place.len)
            .ok_or_else(|| Error::Invalid(format!("{place:?} is outside of the shared memory")))
    }

    pub fn len(&self) -> u64 {
        ginnel_shmem::SharedMemory::len(&self.mapping) as u64
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
