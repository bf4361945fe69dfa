//! An operation under way: the NVMe commands for it, one after another.

use crate::backend::{Failure, Op};
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::nvme::{Command, Opcode, Range, Status};
use ginnel_shmem::Mapping;
use zerocopy::FromZeros;

/// Length of the runs in which zeros are written where the device cannot make them.
pub(super) const ZEROS: usize = 1 << 20;

/// The largest number of pieces of memory of one command (`UIO_MAXIOV`).
const PIECES: usize = 1024;

/// The smallest page of a kernel.
pub(super) const PAGE: u64 = 4096;

/// How often a command is sent again that the device, or a reset of it, has not executed for a passing reason. The kernel's driver does
/// the same for its own commands.
const RETRIES: u8 = 5;

/// The type of a status that says that there was no way to the device.
const PATH_RELATED: u16 = 3;

/// "Do not retry", in the status field as the kernel returns it.
const DNR: u16 = 1 << 14;

/// How much one command can do, in bytes where nothing else is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommandLimits {
    /// The length of a logical block.
    pub block: u64,
    /// Data of one command.
    pub data: u64,
    /// The number of segments of memory of one command. (A number, not bytes.)
    pub segments: u64,
    /// A discard; 0 if the device has none.
    pub discard: u64,
    /// A Write Zeroes command; 0 if the device has none.
    pub zeroes: u64,
}

/// A command for the kernel, with the address of its memory in place of the first PRP entry, and the length in the upper half of the
/// second one.
pub(super) struct Step {
    pub command: Command,
    /// Whether the address is that of an array of `iovec`, and the length the number of them.
    pub vectored: bool,
}

/// Returns a command to a namespace, of which only the opcode is set.
pub(super) fn command(nsid: u32, opcode: Opcode) -> Command {
    Command { opcode, nsid, ..Command::new_zeroed() }
}

/// An operation under way.
pub(super) struct Flight {
    pub disk: u16,
    stage: Stage,
    limits: CommandLimits,
    /// The memory that is left to transfer, in order. The first piece may be a remainder.
    pieces: Vec<libc::iovec>,
    /// Index of the first piece that is not done.
    next: usize,
    /// The pieces of the command under way.
    these: Vec<libc::iovec>,
    /// The range of a discard under way.
    range: Box<Range>,
    at: u64,
    left: u64,
    /// The number of bytes of the command under way.
    now: u64,
    retries: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    Read,
    Write {
        through: bool,
    },
    Flush,
    Discard,
    Zero {
        unmap: bool,
        through: bool,
    },
    /// Zeros written as data.
    ZeroData {
        through: bool,
    },
}

impl Flight {
    pub fn idle() -> Self {
        Self {
            disk: 0,
            stage: Stage::Idle,
            limits: CommandLimits { block: 1, data: 1, segments: 3, discard: 0, zeroes: 0 },
            pieces: Vec::new(),
            next: 0,
            these: Vec::new(),
            range: Box::new(Range { attributes: 0, blocks: 0, slba: 0 }),
            at: 0,
            left: 0,
            now: 0,
            retries: 0,
        }
    }

    pub fn begin(
        &mut self,
        disk: u16,
        op: Op,
        data: &[Buffer],
        memory: &GuestMemory<Mapping>,
        limits: CommandLimits,
    ) {
        debug_assert_eq!(self.stage, Stage::Idle);
        (self.disk, self.limits) = (disk, limits);
        (self.at, self.left, self.retries) = (op.at(), op.span().unwrap_or(0), RETRIES);
        self.pieces.clear();
        self.next = 0;
        self.stage = match op {
            Op::Read { .. } => Stage::Read,
            Op::Write { through, .. } => Stage::Write { through },
            Op::Flush => Stage::Flush,
            Op::Discard { .. } => Stage::Discard,
            Op::WriteZeroes { through, .. } if limits.zeroes == 0 => Stage::ZeroData { through },
            Op::WriteZeroes { unmap, through, .. } => Stage::Zero { unmap, through },
        };
        if let Stage::Read | Stage::Write { .. } = self.stage {
            for buffer in data {
                let slice = memory.slice(buffer);
                self.pieces.push(libc::iovec { iov_base: slice.as_ptr().cast(), iov_len: slice.len() });
                self.left += u64::from(buffer.len);
            }
        }
    }

    /// Ends the operation.
    pub fn end(&mut self) {
        self.stage = Stage::Idle;
    }

    /// Returns whether its next command needs zeros to write.
    pub fn needs_zeros(&self) -> bool {
        matches!(self.stage, Stage::ZeroData { .. })
    }

    /// Returns whether its next command reads or writes data.
    #[inline]
    pub fn moves_data(&self) -> bool {
        matches!(self.stage, Stage::Read | Stage::Write { .. } | Stage::ZeroData { .. })
    }

    /// Returns the next command. `zeros` is the address of [`ZEROS`] bytes of zeros. What the command names stays in place until the
    /// next call of any function of this flight.
    #[inline]
    pub fn step(&mut self, nsid: u32, zeros: Option<u64>) -> Result<Step, Failure> {
        let block = self.limits.block;
        let command = |opcode| command(nsid, opcode);
        let fua = |through: bool| if through { Command::FUA } else { 0 };
        let mut step = match self.stage {
            Stage::Read | Stage::Write { .. } => {
                let (opcode, cdw12) = match self.stage {
                    Stage::Write { through } => (Opcode::WRITE, fua(through)),
                    _ => (Opcode::READ, 0),
                };
                self.now = self.gather();
                if self.now == 0 {
                    return Err(Failure::Errno(libc::EINVAL));
                }
                let (address, len) = match &self.these[..] {
                    [one] => (one.iov_base as u64, one.iov_len as u64),
                    many => (many.as_ptr() as u64, many.len() as u64),
                };
                let command = Command { cdw12, prp1: address, prp2: len << 32, ..command(opcode) };
                Step { command, vectored: self.these.len() != 1 }
            }
            Stage::ZeroData { through } => {
                self.now = self.left.min(self.limits.data).min(ZEROS as u64);
                let (prp1, prp2) = (zeros.unwrap_or(0), self.now << 32);
                let command = Command { cdw12: fua(through), prp1, prp2, ..command(Opcode::WRITE) };
                Step { command, vectored: false }
            }
            Stage::Zero { unmap, through } => {
                self.now = self.left.min(self.limits.zeroes);
                let deallocate = if unmap { Command::DEAC } else { 0 };
                let command = Command { cdw12: fua(through) | deallocate, ..command(Opcode::WRITE_ZEROES) };
                Step { command, vectored: false }
            }
            Stage::Discard => {
                self.now = self.left.min(self.limits.discard);
                *self.range =
                    Range { attributes: 0, blocks: (self.now / block) as u32, slba: self.at / block };
                let command = Command {
                    cdw11: Command::AD,
                    prp1: &raw const *self.range as u64,
                    prp2: (size_of::<Range>() as u64) << 32,
                    ..command(Opcode::DATASET_MANAGEMENT)
                };
                return Ok(Step { command, vectored: false });
            }
            Stage::Flush | Stage::Idle => {
                self.now = 0;
                return Ok(Step { command: command(Opcode::FLUSH), vectored: false });
            }
        };
        let (slba, blocks) = (self.at / block, self.now / block);
        (step.command.cdw10, step.command.cdw11) = (slba as u32, (slba >> 32) as u32);
        // The number of blocks is 0's based.
        step.command.cdw12 |= blocks as u32 - 1;
        Ok(step)
    }

    /// Collects the pieces of the next command. Returns how many bytes they have: whole blocks, as many as one command can transfer.
    fn gather(&mut self) -> u64 {
        let most = self.left.min(self.limits.data);
        self.these.clear();
        let (mut bytes, mut segments) = (0, self.limits.segments);
        for piece in self.pieces[self.next.min(self.pieces.len())..].iter().take(PIECES) {
            // Each page may be a segment, and a piece may begin and end within one. (A single block is left to the kernel, which can copy.)
            if segments < 3 && bytes >= self.limits.block {
                break;
            }
            let pages = segments.saturating_sub(2).max(1);
            let len = (piece.iov_len as u64).min(most - bytes).min(pages * PAGE);
            if len == 0 {
                break;
            }
            segments = segments.saturating_sub(len / PAGE + 2);
            self.these.push(libc::iovec { iov_base: piece.iov_base, iov_len: len as usize });
            bytes += len;
        }
        // Very many short pieces may end within a block.
        let mut more = bytes % self.limits.block;
        bytes -= more;
        while more > 0
            && let Some(last) = self.these.last_mut()
        {
            let cut = last.iov_len.min(more as usize);
            last.iov_len -= cut;
            more -= cut as u64;
            if last.iov_len == 0 {
                self.these.pop();
            }
        }
        bytes
    }

    /// Handles a completion: a negative error number, or the status of the device. Returns the result if the operation has ended, and
    /// `None` if there is another command to send.
    pub fn advance(&mut self, result: i32) -> Option<Result<(), Failure>> {
        if result != 0 {
            return self.failed(result);
        }
        self.retries = RETRIES;
        self.at += self.now;
        self.left -= self.now.min(self.left);
        if let Stage::Read | Stage::Write { .. } = self.stage {
            self.cut(self.now as usize);
        }
        (self.left == 0).then_some(Ok(()))
    }

    fn failed(&mut self, result: i32) -> Option<Result<(), Failure>> {
        // The device had no room in a queue that is polled.
        if result == -libc::EAGAIN {
            return None;
        }
        let status = Status(result as u16 & 0x7ff);
        // An error number is not the device's, and neither is a status of the kind "path related" (NVMe 2.0, 4.2.4.4): there was no way to
        // the device, or a reset of the controller has taken the command away.
        let is_of_device = result > 0 && status.0 >> 8 != PATH_RELATED;
        let is_transient = match is_of_device {
            false => result > 0 || result == -libc::EINTR,
            // A flush is not sent again: the device may report lost data only once.
            true => result as u16 & DNR == 0 && self.stage != Stage::Flush && !is_final(status),
        };
        if is_transient && self.retries > 0 {
            self.retries -= 1;
            return None;
        }
        // The device does not know the command, or the kernel does not let this process send it.
        let is_refused = match result {
            ..0 => [-libc::EACCES, -libc::EPERM].contains(&result),
            _ => [Status::INVALID_OPCODE, Status::INVALID_FIELD].contains(&status),
        };
        match self.stage {
            Stage::Zero { through, .. } if is_refused => {
                self.stage = Stage::ZeroData { through };
                return None;
            }
            Stage::Discard if is_refused => return Some(Err(Failure::Unsupported)),
            _ => {}
        }
        let errno = match (result, status) {
            // While no path is there, a device with several answers EINVAL to everything.
            (..0, _) if ![-libc::EINTR, -libc::EINVAL].contains(&result) => -result,
            (_, Status::LBA_RANGE) if self.stage != Stage::Flush => return Some(Err(Failure::Truncated)),
            (_, Status::CAPACITY_EXCEEDED) => libc::ENOSPC,
            (_, Status::WRITE_PROTECTED) => libc::EROFS,
            _ => libc::EIO,
        };
        Some(Err(match self.stage {
            Stage::Flush if is_of_device => Failure::Lost(errno),
            _ => Failure::Errno(errno),
        }))
    }

    /// Removes the transferred bytes from the pieces.
    fn cut(&mut self, mut moved: usize) {
        while let Some(piece) = self.pieces.get_mut(self.next) {
            if moved < piece.iov_len {
                // Nobody reads through this address here; the kernel checks it.
                piece.iov_base = piece.iov_base.cast::<u8>().wrapping_add(moved).cast();
                piece.iov_len -= moved;
                break;
            }
            moved -= piece.iov_len;
            self.next += 1;
        }
    }
}

/// Returns whether the device would answer the same again.
fn is_final(status: Status) -> bool {
    [
        Status::INVALID_OPCODE,
        Status::INVALID_FIELD,
        Status::INVALID_NAMESPACE,
        Status::WRITE_PROTECTED,
        Status::LBA_RANGE,
        Status::CAPACITY_EXCEEDED,
    ]
    .contains(&status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_guest_memory::Region;
    use proptest::prelude::*;
    use std::ops::Range as Span;

    const REGION: usize = 1 << 20;
    const ZERO_PAGE: u64 = 0x1000;

    /// What the commands of an operation have done: (opcode, word 12 without the number of blocks, first byte, bytes, memory).
    type Done = (Opcode, u32, u64, u64, Vec<Span<u64>>);

    fn memory() -> GuestMemory<Mapping> {
        let region = Region { guest: 0, user: 0, memory: Mapping::anonymous(REGION).unwrap() };
        GuestMemory::new(vec![region]).unwrap()
    }

    fn limits(block: u64) -> CommandLimits {
        CommandLimits { block, data: 64 << 10, segments: 18, discard: 128 << 10, zeroes: 32 << 10 }
    }

    /// Executes the next command as a device would read it.
    fn execute(flight: &mut Flight, limits: CommandLimits) -> Result<Done, Failure> {
        let Step { command, vectored } = flight.step(7, Some(ZERO_PAGE))?;
        assert_eq!((command.nsid, command.flags, command.cid, command.mptr), (7, 0, 0, 0));
        let (address, len) = (command.prp1, command.prp2 >> 32);
        assert_eq!(command.prp2 as u32, 0, "metadata");
        let slba = u64::from(command.cdw10) | u64::from(command.cdw11) << 32;
        let blocks = u64::from(command.cdw12 & 0xffff) + 1;
        let flags = command.cdw12 & !0xffff;
        let whole = |memory| (command.opcode, flags, slba * limits.block, blocks * limits.block, memory);
        Ok(match command.opcode {
            Opcode::READ | Opcode::WRITE => {
                let pieces: Vec<Span<u64>> = if vectored {
                    assert!(len as usize <= PIECES && len > 1);
                    // As the kernel reads them.
                    flight
                        .these
                        .iter()
                        .map(|p| p.iov_base as u64..p.iov_base as u64 + p.iov_len as u64)
                        .collect()
                } else {
                    std::iter::once(address..address + len).collect()
                };
                assert!(!vectored || address == flight.these.as_ptr() as u64);
                let bytes: u64 = pieces.iter().map(|p| p.end - p.start).sum();
                assert_eq!(bytes, blocks * limits.block, "the device would transfer something else");
                assert!(bytes <= limits.data);
                let pages: u64 = pieces.iter().map(|p| (p.end - p.start) / PAGE + 2).sum();
                assert!(blocks == 1 || pages <= limits.segments, "{pages} pages");
                whole(pieces)
            }
            Opcode::WRITE_ZEROES => {
                assert!(len == 0 && blocks * limits.block <= limits.zeroes);
                whole(Vec::new())
            }
            Opcode::DATASET_MANAGEMENT => {
                assert_eq!((command.cdw10, command.cdw11, len), (0, Command::AD, 16));
                assert_eq!(address, &raw const *flight.range as u64);
                let bytes = u64::from(flight.range.blocks) * limits.block;
                assert!(bytes <= limits.discard);
                (command.opcode, 0, flight.range.slba * limits.block, bytes, Vec::new())
            }
            Opcode::FLUSH => (command.opcode, 0, 0, 0, Vec::new()),
            other => panic!("{other:?}"),
        })
    }

    fn run(flight: &mut Flight, limits: CommandLimits) -> (Vec<Done>, Result<(), Failure>) {
        let mut done = Vec::new();
        loop {
            match execute(flight, limits) {
                Ok(one) => done.push(one),
                Err(failure) => return (done, Err(failure)),
            }
            if let Some(result) = flight.advance(0) {
                flight.end();
                return (done, result);
            }
        }
    }

    fn begin(op: Op, data: &[Buffer], memory: &GuestMemory<Mapping>, limits: CommandLimits) -> Flight {
        let mut flight = Flight::idle();
        flight.begin(3, op, data, memory, limits);
        flight
    }

    prop_compose! {
        /// Buffers of whole blocks in all, cut anywhere.
        fn buffers(block: u64)(
            blocks in 1..120_u64,
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) -> Vec<Buffer> {
            let bytes = (blocks * block).min(REGION as u64 / 2) as usize;
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes)).collect();
            ends.push(bytes);
            ends.sort_unstable();
            let mut from = 0;
            let mut buffers = Vec::new();
            for to in ends {
                if to > from {
                    // A hole after each, so that no two are one run.
                    buffers.push(Buffer { region: 0, at: from + 16 * buffers.len(), len: (to - from) as u32 });
                }
                from = to;
            }
            buffers
        }
    }

    proptest! {
        /// The commands cover the data in order, once, in memory and on the disk.
        #[test]
        fn transfers_are_whole((block, data) in prop_oneof![Just(512_u64), Just(4096)].prop_flat_map(|block| (Just(block), buffers(block))),
                               first in 0..1_u64 << 40, write: bool, through: bool) {
            let (memory, limits, at) = (memory(), limits(block), first * block);
            let op = if write { Op::Write { at, through } } else { Op::Read { at } };
            let mut flight = begin(op, &data, &memory, limits);
            let (done, result) = run(&mut flight, limits);
            prop_assert_eq!(result, Ok(()));
            let mut next = at;
            let mut bytes = Vec::new();
            for (opcode, flags, from, len, pieces) in done {
                prop_assert_eq!(opcode, if write { Opcode::WRITE } else { Opcode::READ });
                prop_assert_eq!(flags, if write && through { Command::FUA } else { 0 });
                prop_assert_eq!(from, next);
                next += len;
                bytes.extend(pieces.into_iter().flatten());
            }
            let wanted: Vec<u64> = data.iter().flat_map(|buffer| {
                let slice = memory.slice(buffer);
                let start = slice.as_ptr() as u64;
                start..start + u64::from(buffer.len)
            }).collect();
            prop_assert_eq!(next - at, wanted.len() as u64);
            prop_assert!(bytes == wanted, "other memory");
        }

        /// So do commands without data.
        #[test]
        fn ranges_are_whole(first in 0..1_u64 << 40, blocks in 1..4000_u64, kind in 0..4_u8, through: bool) {
            let (memory, mut limits) = (memory(), limits(512));
            let (at, len) = (first * 512, blocks * 512);
            if kind == 3 { limits.zeroes = 0; }
            let op = match kind {
                0 => Op::Discard { at, len },
                kind => Op::WriteZeroes { at, len, unmap: kind == 1, through },
            };
            let mut flight = begin(op, &[], &memory, limits);
            let (done, result) = run(&mut flight, limits);
            prop_assert_eq!(result, Ok(()));
            let mut next = at;
            let fua = if through { Command::FUA } else { 0 };
            for (opcode, flags, from, len, pieces) in done {
                let wanted = match kind {
                    0 => (Opcode::DATASET_MANAGEMENT, 0),
                    1 => (Opcode::WRITE_ZEROES, fua | Command::DEAC),
                    2 => (Opcode::WRITE_ZEROES, fua),
                    _ => (Opcode::WRITE, fua),
                };
                prop_assert_eq!((opcode, flags), wanted);
                prop_assert!(kind != 3 || pieces[0].start == ZERO_PAGE);
                prop_assert_eq!(from, next);
                next += len;
            }
            prop_assert_eq!(next, at + len);
        }
    }

    #[test]
    fn very_many_short_pieces_are_cut_at_blocks() {
        let (memory, limits) = (memory(), limits(512));
        let data: Vec<_> = (0..4096).map(|n| Buffer { region: 0, at: n * 8, len: 3 }).collect();
        let (done, result) = run(&mut begin(Op::Read { at: 0 }, &data, &memory, limits), limits);
        assert_eq!(result, Ok(()));
        assert_eq!(done.iter().map(|done| done.3).sum::<u64>(), 3 * 4096);
        // A command cannot transfer a part of a block.
        let data: Vec<_> = (0..4096).map(|n| Buffer { region: 0, at: n * 8, len: 1 }).collect();
        let limits = CommandLimits { block: 4096, ..limits };
        let (_, result) = run(&mut begin(Op::Read { at: 0 }, &data, &memory, limits), limits);
        assert_eq!(result, Err(Failure::Errno(libc::EINVAL)));
    }

    #[test]
    fn failures_are_those_of_the_device() {
        let (memory, limits) = (memory(), limits(512));
        let data = [Buffer { region: 0, at: 0, len: 4096 }];
        let failed = |op: Op, result: i32| {
            let data: &[Buffer] = if op.span().is_some() || op == Op::Flush { &[] } else { &data };
            let mut flight = begin(op, data, &memory, limits);
            for sent in 1.. {
                execute(&mut flight, limits).unwrap();
                if let Some(result) = flight.advance(result) {
                    return (sent, result.unwrap_err());
                }
                assert!(sent < 100, "{op:?} never ends");
            }
            unreachable!()
        };
        let (read, write) = (Op::Read { at: 0 }, Op::Write { at: 0, through: true });
        let discard = Op::Discard { at: 0, len: 4096 };
        let eio = Failure::Errno(libc::EIO);
        let status = |status: Status| i32::from(status.0);
        // An unrecovered read error (0x281), which the device may and may not want to see again.
        assert_eq!(failed(read, 0x281), (1 + usize::from(RETRIES), eio));
        assert_eq!(failed(read, 0x281 | i32::from(DNR)), (1, eio));
        assert_eq!(failed(write, status(Status::CAPACITY_EXCEEDED)), (1, Failure::Errno(libc::ENOSPC)));
        assert_eq!(failed(write, status(Status::WRITE_PROTECTED)), (1, Failure::Errno(libc::EROFS)));
        assert_eq!(failed(read, status(Status::LBA_RANGE)), (1, Failure::Truncated));
        assert_eq!(failed(discard, status(Status::INVALID_OPCODE)), (1, Failure::Unsupported));
        assert_eq!(failed(discard, -libc::EACCES), (1, Failure::Unsupported));
        assert_eq!(failed(read, -libc::EACCES), (1, Failure::Errno(libc::EACCES)));
        assert_eq!(failed(read, -libc::ENODEV), (1, Failure::Errno(libc::ENODEV)));
        // Whether data was lost is said once.
        assert_eq!(failed(Op::Flush, status(Status::INTERNAL)), (1, Failure::Lost(libc::EIO)));
        // A reset of the controller is no answer, not even to a flush.
        assert_eq!(failed(Op::Flush, -libc::EINTR), (1 + usize::from(RETRIES), eio));
        assert_eq!(failed(Op::Flush, 0x370), (1 + usize::from(RETRIES), eio), "no path");
        assert_eq!(failed(read, -libc::EINVAL), (1, eio));
        // Zeros that the device cannot make are written.
        let mut flight =
            begin(Op::WriteZeroes { at: 0, len: 4096, unmap: true, through: false }, &[], &memory, limits);
        execute(&mut flight, limits).unwrap();
        assert_eq!(flight.advance(status(Status::INVALID_OPCODE) | i32::from(DNR)), None);
        assert!(flight.needs_zeros());
        assert_eq!(execute(&mut flight, limits).unwrap().0, Opcode::WRITE);
        assert_eq!(flight.advance(0), Some(Ok(())));
        // A queue that is full is no failure, however often.
        let mut flight = begin(read, &data, &memory, limits);
        for _ in 0..1000 {
            execute(&mut flight, limits).unwrap();
            assert_eq!(flight.advance(-libc::EAGAIN), None);
        }
    }
}
