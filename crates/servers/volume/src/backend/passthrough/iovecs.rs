//! The memory of an operation, as the kernel's passthrough commands name it: by addresses of this process.

use crate::backend::commands::{CommandLimits, Transfer};
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::nvme::{Command, Range};
use ginnel_shmem::Mapping;

/// The largest number of pieces of memory of one command (`UIO_MAXIOV`).
const PIECES: usize = 1024;

/// The smallest page of a kernel.
pub(super) const PAGE: u64 = 4096;

/// The memory of an operation. In a command for the kernel, the address is in place of the first PRP entry, and the length in the upper
/// half of the second one.
pub(super) struct Iovecs {
    /// The memory that is left to transfer, in order. The first piece may be a remainder.
    pieces: Vec<libc::iovec>,
    /// Index of the first piece that is not done.
    next: usize,
    /// The pieces of the command under way.
    these: Vec<libc::iovec>,
    /// The range of a discard under way.
    range: Box<Range>,
    /// The address of [`ZEROS`](crate::backend::commands::ZEROS) bytes of zeros, once they are needed.
    pub zeros: u64,
    /// Whether the address in the command under way is that of an array of `iovec`, and the length the number of them.
    pub is_vectored: bool,
}

impl Iovecs {
    pub fn new() -> Self {
        let range = Box::new(Range { attributes: 0, blocks: 0, slba: 0 });
        Self { pieces: Vec::new(), next: 0, these: Vec::new(), range, zeros: 0, is_vectored: false }
    }

    fn name(&mut self, command: &mut Command, address: u64, len: u64) {
        self.is_vectored = false;
        (command.prp1, command.prp2) = (address, len << 32);
    }
}

impl Transfer for Iovecs {
    fn begin(&mut self, data: &[Buffer], memory: &GuestMemory<Mapping>) {
        self.pieces.clear();
        (self.next, self.is_vectored) = (0, false);
        for buffer in data {
            let slice = memory.slice(buffer);
            self.pieces.push(libc::iovec { iov_base: slice.as_ptr().cast(), iov_len: slice.len() });
        }
    }

    fn gather(&mut self, most: u64, limits: &CommandLimits) -> u64 {
        self.these.clear();
        let (mut bytes, mut segments) = (0, limits.segments);
        for piece in self.pieces[self.next.min(self.pieces.len())..].iter().take(PIECES) {
            // Each page may be a segment, and a piece may begin and end within one. (A single block is left to the kernel, which can copy.)
            if segments < 3 && bytes >= limits.block {
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
        let mut more = bytes % limits.block;
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

    fn name_data(&mut self, command: &mut Command) {
        if let [one] = &self.these[..] {
            let (address, len) = (one.iov_base as u64, one.iov_len as u64);
            return self.name(command, address, len);
        }
        let (address, pieces) = (self.these.as_ptr() as u64, self.these.len() as u64);
        self.name(command, address, pieces);
        self.is_vectored = true;
    }

    fn name_zeros(&mut self, bytes: u64, command: &mut Command) {
        self.name(command, self.zeros, bytes);
    }

    fn name_range(&mut self, range: Range, command: &mut Command) {
        *self.range = range;
        let address = &raw const *self.range as u64;
        self.name(command, address, size_of::<Range>() as u64);
    }

    fn transferred(&mut self, bytes: u64) {
        let mut moved = bytes as usize;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::commands::{DNR, Flight, RETRIES};
    use crate::backend::{Failure, Op};
    use ginnel_guest_memory::Region;
    use ginnel_layout::nvme::{Opcode, Status};
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
    fn execute(flight: &mut Flight<Iovecs>, limits: CommandLimits) -> Result<Done, Failure> {
        let command = flight.step(7)?;
        let vectored = flight.transfer.is_vectored;
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
                        .transfer
                        .these
                        .iter()
                        .map(|p| p.iov_base as u64..p.iov_base as u64 + p.iov_len as u64)
                        .collect()
                } else {
                    std::iter::once(address..address + len).collect()
                };
                assert!(!vectored || address == flight.transfer.these.as_ptr() as u64);
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
                assert_eq!(address, &raw const *flight.transfer.range as u64);
                let bytes = u64::from(flight.transfer.range.blocks) * limits.block;
                assert!(bytes <= limits.discard);
                (command.opcode, 0, flight.transfer.range.slba * limits.block, bytes, Vec::new())
            }
            Opcode::FLUSH => (command.opcode, 0, 0, 0, Vec::new()),
            other => panic!("{other:?}"),
        })
    }

    fn run(flight: &mut Flight<Iovecs>, limits: CommandLimits) -> (Vec<Done>, Result<(), Failure>) {
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

    fn begin(
        op: Op,
        data: &[Buffer],
        memory: &GuestMemory<Mapping>,
        limits: CommandLimits,
    ) -> Flight<Iovecs> {
        let mut flight = Flight::idle(Iovecs { zeros: ZERO_PAGE, ..Iovecs::new() });
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
    fn a_command_without_data_names_none_of_an_earlier_one() {
        let (memory, limits) = (memory(), limits(512));
        let data: Vec<_> = (0..2).map(|n| Buffer { region: 0, at: n * 4096, len: 512 }).collect();
        let mut flight = begin(Op::Read { at: 0 }, &data, &memory, limits);
        let (done, result) = run(&mut flight, limits);
        assert!(flight.transfer.is_vectored && done.len() == 1 && result == Ok(()));
        flight.begin(3, Op::Flush, &[], &memory, limits);
        let flush = flight.step(7).unwrap();
        assert_eq!((flush.prp1, flush.prp2, flight.transfer.is_vectored), (0, 0, false));
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
