//! NVMe namespaces by passthrough (`backend = "uring-cmd"`): a worker's requests go as NVMe commands through an io_uring to the kernel's
//! driver, past its block layer and page cache.
#![allow(unsafe_code)] // The kernel is handed raw addresses of guest memory.

mod iovecs;
mod namespace;

use super::commands::{Flight, ZEROS, command};
use super::uring::ring::{COMMANDS, Ring};
use super::{Failure, Op};
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::nvme::{Command, Opcode};
use ginnel_shmem::{Mapping, SharedSlice};
use io_uring::{cqueue, opcode, squeue, types};
use iovecs::Iovecs;
pub use namespace::Namespace;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use tracing::warn;
use zerocopy::IntoBytes;

/// The command names one run of memory (linux/nvme_ioctl.h).
const NVME_URING_CMD_IO: u32 = 0xc048_4e80;
/// The command names an array of `iovec`.
const NVME_URING_CMD_IO_VEC: u32 = 0xc048_4e81;

/// The number of the entries that look whether the kernel takes commands.
const PROBE: u64 = u64::MAX;

/// The kernel takes NVMe commands in entries of 128 bytes only, and completes them in entries of 32.
type LargeRing = Ring<squeue::Entry128, cqueue::Entry32>;

/// A worker's way to all namespaces of the volume.
pub(super) struct Passthrough {
    // Dropped, and drained, before the memory that the kernel may still use.
    ring: LargeRing,
    /// A second ring, whose completions are polled from the devices, if there are disks that ask for that. It reads and writes.
    polled: Option<LargeRing>,
    /// What was read to find out whether the kernel takes commands.
    probe: Mapping,
    /// For each disk of the volume, its namespace, if it is one.
    namespaces: Vec<Option<Arc<Namespace>>>,
    flights: Vec<Flight<Iovecs>>,
    pending: u32,
    zeros: Option<Mapping>,
    /// For each disk, whether zeros are written as data, because the device cannot make them.
    writes_zeros: Vec<bool>,
}

// SAFETY: the raw addresses in `flights` are of guest memory and of mappings that live until the operation has ended; they belong to no
// thread.
unsafe impl Send for Passthrough {}

impl Passthrough {
    /// Creates the rings. They do nothing before [`Passthrough::enable`]. The kernel holds `held` open until all requests have ended. It
    /// writes to `bell` when one has ended, while notifications are enabled ([`Passthrough::arm`]).
    pub fn new(
        namespaces: Vec<Option<Arc<Namespace>>>,
        held: Option<BorrowedFd<'_>>,
        bell: BorrowedFd<'_>,
    ) -> io::Result<Self> {
        let present = || namespaces.iter().flatten();
        // Entries name the device by the number of the disk. The other files only stay open with the ring: a killed volume keeps its
        // locks until the kernel has ended all requests.
        let devices = namespaces.iter().map(|n| n.as_ref().map_or(-1, |n| n.device().as_raw_fd()));
        let kept = present().flat_map(|n| n.kept()).chain(held).map(|file| file.as_raw_fd());
        let fds: Vec<RawFd> = devices.chain(kept).collect();
        let old = |error: io::Error| match error.kind() {
            io::ErrorKind::InvalidInput => {
                io::Error::new(error.kind(), format!("uring-cmd needs Linux 5.19 or later: {error}"))
            }
            _ => error,
        };
        let ring = Ring::new(&COMMANDS, &fds, Some(bell)).map_err(old)?;
        let polled = match present().any(|n| n.is_polled()) {
            true => Some(Ring::new(&COMMANDS, &fds, None).map_err(old)?),
            false => None,
        };
        let writes_zeros = namespaces.iter().map(|n| n.as_ref().is_some_and(|n| !n.makes_zeroes())).collect();
        let longest = present().map(|n| n.block()).max().unwrap_or(1);
        let probe = Mapping::anonymous(longest as usize)?;
        let flights = Vec::new();
        Ok(Self { ring, polled, probe, namespaces, flights, pending: 0, zeros: None, writes_zeros })
    }

    /// Enables the rings for the calling thread, and reads a block of each namespace, and flushes it: only that shows whether the kernel
    /// lets this process do it, and whether the device agrees. Blocks for as long as the devices take.
    pub fn enable(&mut self) -> io::Result<()> {
        self.ring.enable()?;
        if let Some(ring) = &self.polled {
            ring.enable()?;
        }
        for disk in 0..self.namespaces.len() {
            let Some(namespace) = self.namespaces[disk].clone() else { continue };
            let len = namespace.block();
            let to = SharedSlice::new(&self.probe, 0, len as usize).as_ptr() as u64;
            let read = Command { prp1: to, prp2: len << 32, ..command(namespace.nsid(), Opcode::READ) };
            let read = entry(disk as u16, &read, false, PROBE);
            namespace.judge("read its first block", ask(&mut self.ring, &read)?)?;
            if namespace.answer(Op::Flush).is_none() {
                let flush = command(namespace.nsid(), Opcode::FLUSH);
                let flush = entry(disk as u16, &flush, false, PROBE);
                namespace.judge("flush it", ask(&mut self.ring, &flush)?)?;
            }
            if namespace.is_polled()
                && let Some(ring) = &mut self.polled
            {
                match ask(ring, &read)? {
                    // Linux before 6.1 polls for files only.
                    result if result == -libc::EOPNOTSUPP => {
                        warn!(image = %namespace.path().display(), "this kernel does not poll for NVMe commands: continuing without iopoll");
                        self.polled = None;
                    }
                    result => namespace.judge("read its first block, polled,", result)?,
                }
            }
        }
        Ok(())
    }

    #[inline]
    pub fn pending(&self) -> u32 {
        self.pending
    }

    /// Returns whether there are requests whose completions must be polled.
    pub fn must_poll(&self) -> bool {
        self.polled.as_ref().is_some_and(|ring| ring.pending() > 0)
    }

    /// Enables notifications. Returns true if a request has ended already, in which case the caller must not sleep.
    pub fn arm(&mut self) -> bool {
        self.ring.arm()
    }

    /// Disables notifications.
    pub fn disarm(&mut self) {
        self.ring.disarm();
    }

    /// Begins an operation. Returns its result if it has ended already.
    pub fn start(
        &mut self,
        id: u32,
        disk: u16,
        op: Op,
        data: &[Buffer],
        memory: &GuestMemory<Mapping>,
    ) -> Option<Result<(), Failure>> {
        let Some(namespace) = self.namespaces.get(usize::from(disk)).and_then(Option::as_deref) else {
            return Some(Err(Failure::Errno(libc::ENODEV)));
        };
        if let Some(result) = namespace.answer(op) {
            return Some(result);
        }
        // A device that refused to make zeroes is not asked again.
        let mut limits = namespace.limits();
        if self.writes_zeros[usize::from(disk)] {
            limits.zeroes = 0;
        }
        let index = id as usize;
        if self.flights.len() <= index {
            self.flights.resize_with(index + 1, || Flight::idle(Iovecs::new()));
        }
        self.flights[index].begin(disk, op, data, memory, limits);
        self.pending += 1;
        match self.push(index) {
            Ok(()) => None,
            Err(failure) => Some(Err(self.end(index, failure))),
        }
    }

    /// Queues the next command of an operation.
    fn push(&mut self, index: usize) -> Result<(), Failure> {
        let flight = &mut self.flights[index];
        if flight.needs_zeros() {
            self.writes_zeros[usize::from(flight.disk)] = true;
            if self.zeros.is_none() {
                let zeros = Mapping::anonymous(ZEROS);
                self.zeros = Some(zeros.map_err(|e| Failure::Errno(e.raw_os_error().unwrap_or(libc::EIO)))?);
            }
        }
        let Some(namespace) = self.namespaces.get(usize::from(flight.disk)).and_then(Option::as_deref) else {
            return Err(Failure::Errno(libc::ENODEV));
        };
        if let Some(zeros) = &self.zeros {
            flight.transfer.zeros = SharedSlice::new(zeros, 0, ZEROS).as_ptr() as u64;
        }
        let command = flight.step(namespace.nsid())?;
        let entry = entry(flight.disk, &command, flight.transfer.is_vectored, index as u64);
        let ring = match &mut self.polled {
            Some(ring) if namespace.is_polled() && flight.moves_data() => ring,
            _ => &mut self.ring,
        };
        // SAFETY: the addresses in the command stay valid until its completion: guest memory because the worker keeps it until its queues
        // are drained; the list of pieces and the range because they lie on the heap, wherever `flights` is moved to, and no function of
        // this flight is called before its completion was taken; zeros because they are ours. The rings are dropped, and drained, before
        // all of them.
        unsafe { ring.push(&entry) };
        Ok(())
    }

    /// Submits the queued entries, and lets the kernel process completions.
    #[inline]
    pub fn submit(&mut self) -> io::Result<()> {
        self.ring.submit()?;
        match &mut self.polled {
            Some(ring) => ring.submit(),
            None => Ok(()),
        }
    }

    #[inline]
    pub fn reap(&mut self, mut done: impl FnMut(u32, Result<(), Failure>)) {
        while let Some((index, result)) = self.take() {
            let Some(flight) = self.flights.get_mut(index) else { continue };
            let result = match flight.advance(result) {
                Some(result) => result,
                None => match self.push(index) {
                    Ok(()) => continue,
                    Err(failure) => Err(failure),
                },
            };
            self.pending -= 1;
            self.flights[index].end();
            done(index as u32, result);
        }
    }

    #[inline]
    fn take(&mut self) -> Option<(usize, i32)> {
        self.ring.take().or_else(|| self.polled.as_mut()?.take())
    }

    /// Ends an operation that could not begin.
    #[cold]
    fn end(&mut self, index: usize, failure: Failure) -> Failure {
        self.pending -= 1;
        self.flights[index].end();
        failure
    }

    /// Returns whether zeros have to be written to a disk as data.
    pub fn writes_zeros(&self, disk: u16) -> bool {
        self.writes_zeros.get(usize::from(disk)) == Some(&true)
    }
}

/// Sends one command, and returns its result. Nothing else may be under way in the ring.
fn ask(ring: &mut LargeRing, entry: &squeue::Entry128) -> io::Result<i32> {
    // SAFETY: the only address in such an entry is that of `Passthrough::probe`, which is dropped after the rings, and these are drained
    // then.
    unsafe { ring.push(entry) };
    loop {
        ring.wait()?;
        if let Some((_, result)) = ring.take() {
            return Ok(result);
        }
    }
}

/// Returns the entry with a command.
fn entry(disk: u16, command: &Command, is_vectored: bool, number: u64) -> squeue::Entry128 {
    // The kernel's structure (struct nvme_uring_cmd) is a command, in which the address and the length of the memory are in place of
    // the PRP entries, and a timeout follows; 0 is the driver's own.
    let mut bytes = [0; 80];
    bytes[..size_of::<Command>()].copy_from_slice(command.as_bytes());
    let kind = if is_vectored { NVME_URING_CMD_IO_VEC } else { NVME_URING_CMD_IO };
    opcode::UringCmd80::new(types::Fixed(disk.into()), kind).cmd(bytes).build().user_data(number)
}
