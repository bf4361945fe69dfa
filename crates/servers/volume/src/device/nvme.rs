//! The I/O commands of an NVMe controller (NVM Express 1.4, section 6): which operation a command asks for, and with which
//! status it ends.
//!
//! The controller has one namespace, number 1, whose data is that of one disk. PRPs say where the data of a command lies,
//! and there is no metadata.

use super::Begin;
use crate::backend::{Failure, Op};
use crate::disk::Disk;
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::nvme::{ALL_NAMESPACES, Command, Opcode, PAGE, Range, Status};
use ginnel_nvme::identify::NSID;
use ginnel_nvme::prp;
use ginnel_shmem::Mapping;
use std::sync::Arc;

/// The longest part of a range that is deallocated at once: 1 GiB, so that no operation delays the stop of a queue for
/// long. A range may have 16 TiB.
const MAX_PART: u64 = 1 << 30;

/// Bytes of a range in memory.
const RANGE: u64 = size_of::<Range>() as u64;

/// The data of a command may have this many pieces more than pages: a page may lie in two regions of memory.
const PIECES: usize = 16;

/// A namespace: a disk, as an NVMe driver sees it.
#[derive(Debug)]
pub struct Namespace {
    disk: Arc<Disk>,
    /// The most bytes that a command transfers.
    max_transfer: u64,
    /// Whether the driver may deallocate blocks and write zeroes, which gives space back.
    discard: bool,
}

/// The state of a command between its beginning and its end. The worker keeps it and uses it again.
#[derive(Debug)]
pub struct Request {
    /// The buffers that the operation reads into or writes from.
    pub data: Vec<Buffer>,
    /// Total length of `data`, in bytes.
    pub bytes: u64,
    ranges: Ranges,
    /// The status of the command if its operations succeed.
    status: Status,
}

/// The ranges of a Dataset Management command that are not deallocated yet. The list stays in the guest's memory, and each
/// range is read when its turn comes.
#[derive(Debug, Default)]
struct Ranges {
    list: Vec<Buffer>,
    /// The number of the next range, and the number of all ranges.
    next: u16,
    count: u16,
    /// The rest of the current range, in bytes.
    at: u64,
    left: u64,
}

/// What a command asks for.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    /// An operation without data.
    Op(Op),
    /// An operation that transfers so many bytes.
    Transfer { op: Op, bytes: u64 },
    /// Deallocates so many ranges.
    Deallocate { ranges: u16 },
    /// Nothing.
    Nothing,
}

impl Default for Request {
    fn default() -> Self {
        Self { data: Vec::new(), bytes: 0, ranges: Ranges::default(), status: Status::SUCCESS }
    }
}

impl Request {
    /// Removes the previous command.
    #[inline]
    fn clear(&mut self) {
        self.data.clear();
        self.bytes = 0;
        self.status = Status::SUCCESS;
        (self.ranges.next, self.ranges.count, self.ranges.left) = (0, 0, 0);
    }

    /// Returns whether [`Namespace::next`] may have another operation.
    #[inline]
    pub fn has_more(&self) -> bool {
        self.ranges.left > 0 || self.ranges.next < self.ranges.count
    }
}

impl Namespace {
    /// Returns the namespace of a disk. A command transfers at most `max_transfer` bytes (MDTS in Identify Controller).
    /// Without `discard`, there is neither Dataset Management nor Write Zeroes (ONCS there).
    pub fn new(disk: Arc<Disk>, max_transfer: u32, discard: bool) -> Self {
        Self { disk, max_transfer: max_transfer.into(), discard }
    }

    /// Returns the disk.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Begins a command. Overwrites all of `request`.
    #[inline]
    pub fn begin(
        &self,
        memory: &GuestMemory<Mapping>,
        command: &Command,
        request: &mut Request,
    ) -> Begin<Status> {
        request.clear();
        let begun = self.plan(command).and_then(|plan| match plan {
            Plan::Op(op) => Ok(Some(op)),
            Plan::Transfer { op, bytes } => {
                self.find(memory, command, bytes, &mut request.data)?;
                request.bytes = bytes;
                Ok(Some(op))
            }
            Plan::Deallocate { ranges } => self.first_part(memory, command, ranges, &mut request.ranges),
            Plan::Nothing => Ok(None),
        });
        match begun {
            Ok(Some(op)) => Begin::Do { disk: 0, op },
            Ok(None) => Begin::Done(Status::SUCCESS),
            // No failure is one that another attempt would not meet.
            Err(status) => Begin::Done(status.for_good()),
        }
    }

    /// Returns the operation with which a command continues whose operations have succeeded so far. `None` if it is complete.
    #[cold]
    pub fn next(&self, memory: &GuestMemory<Mapping>, request: &mut Request) -> Option<Op> {
        self.next_part(memory, &mut request.ranges).unwrap_or_else(|status| {
            request.status = status.for_good();
            None
        })
    }

    /// Returns the status of a command whose last operation was `op`.
    #[inline]
    pub fn finish(&self, request: &Request, op: Op, result: Result<(), Failure>) -> Status {
        match result {
            Ok(()) => request.status,
            // Linux repeats a command without this bit at once, several times. A flush must not be repeated: the next one
            // may succeed although data is lost.
            Err(failure) => status(op, failure).for_good(),
        }
    }

    /// Finds the buffers of a command's data.
    #[inline]
    fn find(
        &self,
        memory: &GuestMemory<Mapping>,
        command: &Command,
        bytes: u64,
        data: &mut Vec<Buffer>,
    ) -> Result<(), Status> {
        let pieces = (self.max_transfer / PAGE) as usize + PIECES;
        prp::buffers(memory, command.prp1, command.prp2, bytes as u32, pieces, data)
    }

    #[cold]
    fn first_part(
        &self,
        memory: &GuestMemory<Mapping>,
        command: &Command,
        count: u16,
        ranges: &mut Ranges,
    ) -> Result<Option<Op>, Status> {
        ranges.list.clear();
        self.find(memory, command, u64::from(count) * RANGE, &mut ranges.list)?;
        ranges.count = count;
        self.next_part(memory, ranges)
    }

    /// Returns the operation for the next part of the ranges. `None` if there is no part left.
    fn next_part(&self, memory: &GuestMemory<Mapping>, ranges: &mut Ranges) -> Result<Option<Op>, Status> {
        while ranges.left == 0 {
            if ranges.next >= ranges.count {
                return Ok(None);
            }
            let mut bytes = [0; RANGE as usize];
            memory.read(&ranges.list, u64::from(ranges.next) * RANGE, &mut bytes);
            ranges.next += 1;
            let Range { slba, blocks, .. } = zerocopy::transmute!(bytes);
            (ranges.at, ranges.left) = self.inside(slba, blocks)?;
        }
        let (at, len) = (ranges.at, ranges.left.min(MAX_PART));
        (ranges.at, ranges.left) = (at + len, ranges.left - len);
        Ok(Some(Op::Discard { at, len }))
    }

    /// Returns what a command asks for, or the status with which it fails.
    #[inline]
    fn plan(&self, command: &Command) -> Result<Plan, Status> {
        let disk = &*self.disk;
        let through = || command.cdw12 & Command::FUA != 0 || !disk.write_back();
        Ok(match command.opcode {
            Opcode::READ => {
                let (at, bytes) = self.transfer(command)?;
                // The data that is read is on the medium or will be, so FUA has no effect here: it matters only for caches
                // that are not coherent.
                Plan::Transfer { op: Op::Read { at }, bytes }
            }
            Opcode::WRITE => {
                let (at, bytes) = self.transfer(command)?;
                self.writable()?;
                Plan::Transfer { op: Op::Write { at, through: through() }, bytes }
            }
            Opcode::FLUSH => {
                check(command, command.nsid == NSID || command.nsid == ALL_NAMESPACES)?;
                Plan::Op(Op::Flush)
            }
            Opcode::WRITE_ZEROES if self.discard => {
                check(command, command.nsid == NSID)?;
                let (at, len) = self.inside(command.slba(), command.blocks())?;
                self.writable()?;
                let unmap = command.cdw12 & Command::DEAC != 0;
                Plan::Op(Op::WriteZeroes { at, len, unmap, through: through() })
            }
            Opcode::DATASET_MANAGEMENT if self.discard => {
                check(command, command.nsid == NSID)?;
                if command.cdw11 & Command::AD == 0 {
                    // Hints about future access.
                    return Ok(Plan::Nothing);
                }
                self.writable()?;
                // 0's based.
                Plan::Deallocate { ranges: (command.cdw10 & 0xff) as u16 + 1 }
            }
            _ => return Err(Status::INVALID_OPCODE),
        })
    }

    /// Returns the range on the disk of a command with data, in bytes.
    #[inline]
    fn transfer(&self, command: &Command) -> Result<(u64, u64), Status> {
        check(command, command.nsid == NSID)?;
        let (at, len) = self.inside(command.slba(), command.blocks())?;
        if len > self.max_transfer {
            return Err(Status::INVALID_FIELD);
        }
        Ok((at, len))
    }

    /// Returns a range of blocks in bytes, if it is inside the disk.
    #[inline]
    fn inside(&self, slba: u64, blocks: u32) -> Result<(u64, u64), Status> {
        let block = u64::from(self.disk.block_size);
        let len = u64::from(blocks) * block;
        match slba.checked_mul(block) {
            Some(at) if self.disk.holds(at, len) => Ok((at, len)),
            _ => Err(Status::LBA_RANGE),
        }
    }

    #[inline]
    fn writable(&self) -> Result<(), Status> {
        if self.disk.read_only { Err(Status::WRITE_PROTECTED) } else { Ok(()) }
    }
}

/// Checks the fields that all commands have.
#[inline]
fn check(command: &Command, there: bool) -> Result<(), Status> {
    if !there {
        return Err(Status::INVALID_NAMESPACE);
    }
    if command.flags & (Command::FUSE | Command::PSDT) != 0 {
        return Err(Status::INVALID_FIELD);
    }
    Ok(())
}

/// Returns the status of a command whose operation has failed. It is never one of success.
#[cold]
fn status(op: Op, failure: Failure) -> Status {
    match failure {
        Failure::Unsupported => Status::INVALID_OPCODE,
        Failure::Errno(libc::ENOSPC | libc::EDQUOT) => Status::CAPACITY_EXCEEDED,
        _ if matches!(op, Op::Read { .. }) => Status::READ_ERROR,
        // A flush that has failed, and whatever is lost.
        _ => Status::WRITE_FAULT,
    }
}

#[cfg(test)]
mod tests;
