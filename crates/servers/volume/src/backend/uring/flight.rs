//! An operation under way: the requests to the kernel, step by step.
#![allow(unsafe_code)] // Raw addresses of guest memory are reckoned with.

use super::ring::discard;
use crate::backend::{Failure, Image, Op};
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_shmem::{Mapping, SharedSlice};
use io_uring::{opcode, squeue, types};
use std::io;
use tracing::warn;

/// Length of the runs in which zeros are written where the file system cannot create them.
pub(super) const ZEROS: usize = 1 << 20;

/// The largest part of a request that is copied at a time, if its memory is not aligned. There must be a limit, because
/// the buffers of a request may overlap: the requests of a small guest may have more bytes than the host has memory.
pub(super) const COPY: usize = 64 << 10;

/// The largest number of pieces of memory of one call (`IOV_MAX`).
const PIECES: usize = 1024;

/// Errors of a write that was not begun.
const REFUSED: [i32; 5] = [libc::ENOSPC, libc::EDQUOT, libc::EFBIG, libc::EINVAL, libc::ENOMEM];

/// An operation under way.
pub(super) struct Flight {
    pub disk: u16,
    /// Whether it bypasses the page cache.
    direct: bool,
    stage: Stage,
    /// The memory that is left to transfer, in order. The first piece may be a remainder.
    pieces: Vec<libc::iovec>,
    /// Index of the first piece that is not done.
    next: usize,
    at: u64,
    left: u64,
    /// The copy, if the guest's buffers are not aligned for direct I/O.
    bounce: Option<Bounce>,
    /// Whether its last entry went to the polled ring.
    pub polled: bool,
    /// The pinned buffer that contains its only piece.
    buffer: Option<u16>,
}

struct Bounce {
    /// The memory for the copy. The operation waits until it is lent.
    memory: Option<Mapping>,
    /// The guest's own buffers, with the regions that contain them.
    guest: Vec<(Mapping, Buffer)>,
    /// Number of bytes before the part that is in the copy.
    done: u64,
    /// Total number of bytes in all buffers.
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    Read,
    Write {
        through: bool,
    },
    Sync,
    /// A discard on a block device.
    Discard {
        len: u64,
    },
    Punch {
        len: u64,
        then: AfterPunch,
    },
    Zero {
        len: u64,
        through: bool,
    },
    /// Zeros written as data; `left` of them remain.
    ZeroData {
        through: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AfterPunch {
    /// This is a discard: if it is not possible, the driver is told so.
    Nothing,
    /// The driver has asked for zeros.
    Zeros { through: bool },
}

impl Flight {
    pub fn idle() -> Self {
        Self {
            disk: 0,
            direct: false,
            stage: Stage::Idle,
            pieces: Vec::new(),
            next: 0,
            at: 0,
            left: 0,
            bounce: None,
            polled: false,
            buffer: None,
        }
    }

    /// Begins an operation. `buffer` is the pinned buffer that contains the data, if there is one.
    pub fn begin(
        &mut self,
        disk: u16,
        op: Op,
        data: &[Buffer],
        memory: &GuestMemory<Mapping>,
        image: Option<&Image>,
        buffer: Option<u16>,
    ) {
        debug_assert_eq!(self.stage, Stage::Idle);
        self.disk = disk;
        self.direct = image.is_some_and(Image::is_direct);
        self.at = op.at();
        self.pieces.clear();
        self.next = 0;
        self.left = 0;
        self.buffer = buffer;
        self.stage = match op {
            Op::Read { .. } => Stage::Read,
            Op::Write { through, .. } => Stage::Write { through },
            Op::Flush => Stage::Sync,
            Op::Discard { at, len } => match image.and_then(Image::sector) {
                // Parts of the range that do not fill sectors of the device stay as they are.
                Some(sector) => {
                    let end = (at + len) / sector * sector;
                    self.at = at.next_multiple_of(sector);
                    match end.checked_sub(self.at) {
                        // A read of no bytes, which succeeds.
                        None | Some(0) => Stage::Read,
                        Some(len) => Stage::Discard { len },
                    }
                }
                None => Stage::Punch { len, then: AfterPunch::Nothing },
            },
            Op::WriteZeroes { len, unmap: true, through, .. } => {
                Stage::Punch { len, then: AfterPunch::Zeros { through } }
            }
            Op::WriteZeroes { len, unmap: false, through, .. } => Stage::Zero { len, through },
        };
        if let Stage::Read | Stage::Write { .. } = self.stage {
            for buffer in data {
                self.pieces.push(piece(memory.slice(buffer)));
                self.left += u64::from(buffer.len);
            }
            if let Some(image) = image
                && self.direct
                && !self.pieces.iter().all(|p| image.is_aligned(p.iov_base as usize, p.iov_len))
            {
                self.bounce(data, memory);
            }
        }
    }

    /// Ends the operation. Returns the memory that it was lent.
    pub fn end(&mut self) -> Option<Mapping> {
        self.stage = Stage::Idle;
        self.bounce.take()?.memory
    }

    /// Returns whether it must be lent [`COPY`] bytes of memory before it can continue.
    #[inline]
    pub fn needs_copy(&self) -> bool {
        self.bounce.as_ref().is_some_and(|bounce| bounce.memory.is_none())
    }

    /// Lends it the memory for a copy, until [`Flight::end`].
    pub fn take_copy(&mut self, copy: Mapping) {
        if let Some(bounce) = &mut self.bounce {
            bounce.memory = Some(copy);
            self.copy_next();
        }
    }

    /// Continues without a copy, because there is no memory for one. The disk may refuse the unaligned memory.
    #[cold]
    pub fn go_without_copy(&mut self, error: &io::Error) {
        warn!("no memory to align a request of {} bytes: {error}", self.left);
        self.bounce = None;
    }

    /// Returns whether it bypasses the page cache.
    #[inline]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Returns whether a polled ring can execute its next step.
    #[inline]
    pub fn can_be_polled(&self) -> bool {
        // A durable write may end with a flush of the device, which cannot be polled.
        matches!(
            self.stage,
            Stage::Read | Stage::Write { through: false } | Stage::ZeroData { through: false }
        )
    }

    /// Returns the offset and length of the part of a block device that its next step discards, if it does.
    #[inline]
    pub fn discard(&self) -> Option<(u64, u64)> {
        match self.stage {
            Stage::Discard { len } => Some((self.at, len)),
            _ => None,
        }
    }

    /// Returns whether its next step needs zeros to write.
    pub fn needs_zeros(&self) -> bool {
        matches!(self.stage, Stage::ZeroData { .. })
    }

    /// Returns the entry for its next step; `None` if it has not begun. The addresses in the entry are those of the
    /// guest, of the flight or of `zeros`.
    #[inline]
    pub fn entry(&self, zeros: Option<&Mapping>) -> Option<squeue::Entry> {
        let file = types::Fixed(self.disk.into());
        let pieces = &self.pieces[self.next.min(self.pieces.len())..];
        let pieces = &pieces[..pieces.len().min(PIECES)];
        let at = self.at;
        Some(match (self.stage, pieces, self.buffer) {
            (Stage::Read, [one], None) => {
                opcode::Read::new(file, one.iov_base.cast(), one.iov_len as u32).offset(at).build()
            }
            (Stage::Read, [one], Some(buffer)) => {
                opcode::ReadFixed::new(file, one.iov_base.cast(), one.iov_len as u32, buffer)
                    .offset(at)
                    .build()
            }
            (Stage::Read, many, _) => {
                opcode::Readv::new(file, many.as_ptr(), many.len() as u32).offset(at).build()
            }
            (Stage::Write { through }, [one], None) => {
                opcode::Write::new(file, one.iov_base.cast_const().cast(), one.iov_len as u32)
                    .offset(at)
                    .rw_flags(self.dsync(through))
                    .build()
            }
            (Stage::Write { through }, [one], Some(buffer)) => {
                opcode::WriteFixed::new(file, one.iov_base.cast_const().cast(), one.iov_len as u32, buffer)
                    .offset(at)
                    .rw_flags(self.dsync(through))
                    .build()
            }
            (Stage::Write { through }, many, _) => {
                opcode::Writev::new(file, many.as_ptr(), many.len() as u32)
                    .offset(at)
                    .rw_flags(self.dsync(through))
                    .build()
            }
            (Stage::Sync, ..) => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
            (Stage::Discard { len }, ..) => discard(file, at, len),
            (Stage::Punch { len, .. }, ..) => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(file, len).offset(at).mode(mode).build()
            }
            (Stage::Zero { len, .. }, ..) => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(file, len).offset(at).mode(mode).build()
            }
            (Stage::ZeroData { through }, ..) => {
                let len = self.left.min(ZEROS as u64) as usize;
                let from = zeros.map(|zeros| SharedSlice::new(zeros, 0, len).as_ptr());
                let from = from.unwrap_or(std::ptr::null_mut());
                opcode::Write::new(file, from, len as u32).offset(at).rw_flags(self.dsync(through)).build()
            }
            (Stage::Idle, ..) => return None,
        })
    }

    /// Replaces the guest's buffers with an aligned copy, one part after another.
    fn bounce(&mut self, data: &[Buffer], memory: &GuestMemory<Mapping>) {
        let region = |buffer: &Buffer| memory.regions()[usize::from(buffer.region)].memory.clone();
        let guest = data.iter().map(|buffer| (region(buffer), *buffer)).collect();
        self.bounce = Some(Bounce { memory: None, guest, done: 0, bytes: self.left });
        self.buffer = None;
    }

    /// Continues with the next part that is copied. Returns false if there is none.
    fn copy_next(&mut self) -> bool {
        let Some(bounce @ Bounce { memory: Some(copy), .. }) = &self.bounce else { return false };
        let len = bounce.part();
        if let Stage::Write { .. } = self.stage {
            bounce.each(|at, region, from, n| region.copy_to(from, copy, at, n));
        }
        self.pieces.clear();
        self.pieces.push(piece(SharedSlice::new(copy, 0, len)));
        (self.next, self.left) = (0, len as u64);
        len > 0
    }

    /// Handles a completion. Returns the result if the operation has ended, and `None` if there is more to do, or
    /// something to do again.
    pub fn advance(&mut self, result: i32) -> Option<Result<(), Failure>> {
        if result < 0 {
            return self.failed(-result);
        }
        let moved = u64::from(result.unsigned_abs());
        match self.stage {
            Stage::Read | Stage::Write { .. } => {
                if moved == 0 && self.left > 0 {
                    return Some(Err(Failure::Truncated));
                }
                self.cut(moved);
                if self.left > 0 {
                    return None;
                }
                if self.bounced() {
                    return None;
                }
                self.written()
            }
            Stage::ZeroData { .. } => {
                let moved = moved.min(self.left);
                (self.at, self.left) = (self.at + moved, self.left - moved);
                match (moved, self.left) {
                    (_, 0) => self.written(),
                    (0, _) => Some(Err(Failure::Truncated)),
                    _ => None,
                }
            }
            Stage::Punch { then: AfterPunch::Zeros { through: true }, .. }
            | Stage::Zero { through: true, .. } => {
                self.stage = Stage::Sync;
                None
            }
            Stage::Discard { .. } | Stage::Punch { .. } | Stage::Zero { .. } | Stage::Sync | Stage::Idle => {
                Some(Ok(()))
            }
        }
    }

    /// Continues after the kernel has accepted all data.
    fn written(&mut self) -> Option<Result<(), Failure>> {
        match self.stage {
            Stage::Write { through: true } | Stage::ZeroData { through: true } if !self.direct => {
                self.stage = Stage::Sync;
                None
            }
            _ => Some(Ok(())),
        }
    }

    /// Returns the flags that make a write durable with one call, if that is possible. Through the page cache it takes
    /// two calls, so that a failure of this write can be distinguished from one of earlier writes.
    fn dsync(&self, through: bool) -> i32 {
        if through && self.direct { libc::RWF_DSYNC } else { 0 }
    }

    fn failed(&mut self, errno: i32) -> Option<Result<(), Failure>> {
        match (errno, self.stage) {
            // A sync is not tried again: the kernel reports lost data only once.
            (_, Stage::Sync) => Some(Err(Failure::Lost(errno))),
            (libc::EINTR | libc::EAGAIN, _) => None,
            // The failed part may have been the flush after the write.
            (_, Stage::Write { through: true } | Stage::ZeroData { through: true })
                if self.direct && !REFUSED.contains(&errno) =>
            {
                Some(Err(Failure::Lost(errno)))
            }
            (libc::EOPNOTSUPP, Stage::Discard { .. })
            | (libc::EOPNOTSUPP | libc::ENODEV, Stage::Punch { then: AfterPunch::Nothing, .. }) => {
                Some(Err(Failure::Unsupported))
            }
            // A block device accepts only whole sectors.
            (
                libc::EOPNOTSUPP | libc::ENODEV | libc::EINVAL,
                Stage::Punch { len, then: AfterPunch::Zeros { through } },
            ) => {
                self.stage = Stage::Zero { len, through };
                None
            }
            (libc::EOPNOTSUPP | libc::ENODEV | libc::EINVAL, Stage::Zero { len, through }) => {
                self.left = len;
                self.stage = Stage::ZeroData { through };
                None
            }
            _ => Some(Err(Failure::Errno(errno))),
        }
    }

    /// Removes the transferred bytes from the pieces.
    fn cut(&mut self, moved: u64) {
        let mut moved = moved.min(self.left);
        self.at += moved;
        self.left -= moved;
        while let Some(piece) = self.pieces.get_mut(self.next) {
            let here = moved.min(piece.iov_len as u64) as usize;
            moved -= here as u64;
            // SAFETY: within the piece, or one behind its end.
            piece.iov_base = unsafe { piece.iov_base.cast::<u8>().add(here) }.cast();
            piece.iov_len -= here;
            if piece.iov_len > 0 {
                return;
            }
            self.next += 1;
        }
    }

    /// Handles the end of a copied part: gives the guest the data that was read, and continues with the next part.
    /// Returns false if there is none.
    fn bounced(&mut self) -> bool {
        let Some(bounce) = &mut self.bounce else { return false };
        if self.stage == Stage::Read
            && let Some(copy) = &bounce.memory
        {
            bounce.each(|at, region, to, n| copy.copy_to(at, region, to, n));
        }
        bounce.done += bounce.part() as u64;
        self.copy_next()
    }
}

impl Bounce {
    /// Returns the length of the part that is in the copy.
    fn part(&self) -> usize {
        (self.bytes - self.done).min(COPY as u64) as usize
    }

    /// Calls `f` for each piece of that part, with its offset in the copy, its region, its offset there, and its
    /// length.
    fn each(&self, mut f: impl FnMut(usize, &Mapping, usize, usize)) {
        let (mut skip, mut at) = (self.done, 0);
        for (region, buffer) in &self.guest {
            let here = skip.min(buffer.len.into());
            skip -= here;
            let n = (buffer.len as usize - here as usize).min(self.part() - at);
            if n > 0 {
                f(at, region, buffer.at + here as usize, n);
                at += n;
            }
        }
    }
}

fn piece(slice: SharedSlice<'_, Mapping>) -> libc::iovec {
    libc::iovec { iov_base: slice.as_ptr().cast(), iov_len: slice.len() }
}
