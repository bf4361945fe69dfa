//! Images through io_uring, one for each worker.
#![allow(unsafe_code)] // The kernel is handed raw addresses of guest memory, and io_uring's interface is unsafe for that.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use ginnel_shmem::{Mapping, SharedSlice};
use ginnel_virtqueue::{Buffer, GuestMemory};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};
use tracing::warn;

use super::{Failure, Image, Op};

/// Entries of the submission queue. What does not fit is handed over in several calls.
const ENTRIES: u32 = 256;

/// Zeros are written in runs of this length where the file system cannot make them.
const ZEROS: usize = 1 << 20;

/// The most pieces of memory of one call (`IOV_MAX`).
const PIECES: usize = 1024;

pub(super) struct Uring {
    ring: IoUring,
    /// Written to by the kernel when there is something to take, while it is asked to ([`Uring::arm`]). The ring's own
    /// descriptor will not do: nobody who polls it is woken by a completion that waits for its thread (seen with Linux 6.18).
    bell: OwnedFd,
    files: Vec<Option<Arc<Image>>>,
    flights: Vec<Flight>,
    pending: u32,
    zeros: Option<Mapping>,
    iopoll: bool,
}

/// An operation on its way.
struct Flight {
    disk: u16,
    stage: Stage,
    /// What is left to transfer, in order; the first may have been cut.
    pieces: Vec<libc::iovec>,
    /// The first piece that is not done.
    next: usize,
    at: u64,
    left: u64,
    /// A copy, where the guest's buffers are not aligned for direct I/O.
    bounce: Option<Bounce>,
}

struct Bounce {
    memory: Mapping,
    /// The guest's own buffers, and the regions that they are in.
    guest: Vec<(Mapping, Buffer)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    Read,
    Write {
        through: bool,
    },
    Sync,
    Punch {
        len: u64,
        then: AfterPunch,
    },
    Zero {
        len: u64,
        through: bool,
    },
    /// Zeros written as data, `left` of them.
    ZeroData {
        through: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AfterPunch {
    /// A discard that the file system cannot do is no error: it is a hint.
    Nothing,
    /// Zeros were asked for.
    Zeros { through: bool },
}

// SAFETY: the raw addresses in `flights` are of guest memory and of mappings that live until the operation has ended; they
// belong to no thread.
unsafe impl Send for Uring {}

impl Uring {
    /// For the calling thread: only it may submit.
    pub fn new(files: Vec<Option<Arc<Image>>>) -> io::Result<Self> {
        let iopoll = files.iter().flatten().all(|image| image.is_iopoll());
        let build = |modern: bool| {
            let mut builder = IoUring::builder();
            builder.setup_clamp().setup_cqsize(4 * ENTRIES);
            if modern {
                // Completions are processed by this thread, when it looks: no interrupt of its work by others.
                builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
            }
            if iopoll {
                builder.setup_iopoll();
            }
            builder.build(ENTRIES)
        };
        // Kernels before 6.1 do not know these flags.
        let ring = build(true).or_else(|_| build(false)).map_err(|e| {
            let fix = "see the sysctl kernel.io_uring_disabled, and RLIMIT_MEMLOCK on kernels before 5.12";
            io::Error::new(e.kind(), format!("no io_uring: {e}; {fix}"))
        })?;
        let fds: Vec<_> = files.iter().map(|f| f.as_ref().map_or(-1, |f| f.as_fd().as_raw_fd())).collect();
        ring.submitter().register_files(&fds)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        ring.submitter().register_eventfd(bell.as_raw_fd())?;
        let mut uring = Self { ring, files, flights: Vec::new(), pending: 0, zeros: None, iopoll, bell };
        uring.disarm();
        Ok(uring)
    }

    #[inline]
    pub fn pending(&self) -> u32 {
        self.pending
    }

    pub fn is_iopoll(&self) -> bool {
        self.iopoll
    }

    /// An edge here says that something has ended, if that was asked for.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Asks to be told. `true`: something has ended already, do not sleep.
    pub fn arm(&mut self) -> bool {
        self.ring.completion().enable_eventfd();
        // ORDER uring.arm: the flag is down before the look. Pairs with: the kernel, which publishes, then looks at the flag.
        fence(Ordering::SeqCst);
        let queue = self.ring.submission();
        // An operation that goes on may have been queued after this turn's submission.
        let due = queue.taskrun() || !queue.is_empty();
        drop(queue);
        due || !self.ring.completion().is_empty()
    }

    /// Asks to be told nothing.
    pub fn disarm(&mut self) {
        self.ring.completion().disable_eventfd();
    }

    pub fn start(&mut self, id: u32, disk: u16, op: Op, data: &[Buffer], memory: &GuestMemory<Mapping>) {
        let index = id as usize;
        if self.flights.len() <= index {
            self.flights.resize_with(index + 1, Flight::idle);
        }
        let flight = &mut self.flights[index];
        debug_assert_eq!(flight.stage, Stage::Idle);
        flight.disk = disk;
        flight.at = op.at();
        flight.pieces.clear();
        flight.next = 0;
        flight.left = 0;
        flight.stage = match op {
            Op::Read { .. } => Stage::Read,
            Op::Write { through, .. } => Stage::Write { through },
            Op::Flush => Stage::Sync,
            Op::Discard { len, .. } => Stage::Punch { len, then: AfterPunch::Nothing },
            Op::WriteZeroes { len, unmap: true, through, .. } => {
                Stage::Punch { len, then: AfterPunch::Zeros { through } }
            }
            Op::WriteZeroes { len, unmap: false, through, .. } => Stage::Zero { len, through },
        };
        if let Stage::Read | Stage::Write { .. } = flight.stage {
            for buffer in data {
                flight.pieces.push(piece(memory.slice(buffer)));
                flight.left += u64::from(buffer.len);
            }
            if let Some(Some(image)) = self.files.get(usize::from(disk))
                && image.is_direct()
                && !flight.pieces.iter().all(|p| image.is_aligned(p.iov_base as usize, p.iov_len))
                && let Err(error) = flight.bounce(data, memory)
            {
                warn!("no memory to align a request of {} bytes: {error}", flight.left);
            }
        }
        self.pending += 1;
        self.push(index);
    }

    /// Queues what the operation has to do next.
    fn push(&mut self, index: usize) {
        let flight = &mut self.flights[index];
        let file = types::Fixed(flight.disk.into());
        let pieces = &flight.pieces[flight.next.min(flight.pieces.len())..];
        let pieces = &pieces[..pieces.len().min(PIECES)];
        let entry = match (flight.stage, pieces) {
            (Stage::Read, [one]) => {
                opcode::Read::new(file, one.iov_base.cast(), one.iov_len as u32).offset(flight.at).build()
            }
            (Stage::Read, many) => {
                opcode::Readv::new(file, many.as_ptr(), many.len() as u32).offset(flight.at).build()
            }
            (Stage::Write { through }, [one]) => {
                opcode::Write::new(file, one.iov_base.cast_const().cast(), one.iov_len as u32)
                    .offset(flight.at)
                    .rw_flags(flags(through))
                    .build()
            }
            (Stage::Write { through }, many) => opcode::Writev::new(file, many.as_ptr(), many.len() as u32)
                .offset(flight.at)
                .rw_flags(flags(through))
                .build(),
            (Stage::Sync, _) => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
            (Stage::Punch { len, .. }, _) => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(file, len).offset(flight.at).mode(mode).build()
            }
            (Stage::Zero { len, .. }, _) => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(file, len).offset(flight.at).mode(mode).build()
            }
            (Stage::ZeroData { through }, _) => {
                let len = flight.left.min(ZEROS as u64) as usize;
                let from = self.zeros.as_ref().map(|zeros| SharedSlice::new(zeros, 0, len).as_ptr());
                let from = from.unwrap_or(std::ptr::null_mut());
                opcode::Write::new(file, from, len as u32).offset(flight.at).rw_flags(flags(through)).build()
            }
            (Stage::Idle, _) => return,
        };
        let entry = entry.user_data(index as u64);
        self.queue(&entry);
    }

    fn queue(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the addresses in the entry stay valid until its completion: guest memory because the worker keeps it
            // until its queues are drained, pieces and bounce buffers because they are the flight's until then.
            let pushed = unsafe { self.ring.submission().push(entry) };
            if pushed.is_ok() {
                return;
            }
            // Full: the kernel takes what is there. It fails only for want of memory, or with completions to be taken.
            if let Err(error) = self.ring.submit()
                && !is_passing(&error)
            {
                warn!("io_uring takes nothing: {error}; trying again");
            }
        }
    }

    /// Hands over what was queued, and lets the kernel finish what is done.
    #[inline]
    pub fn submit(&mut self) -> io::Result<()> {
        if self.pending == 0 {
            return Ok(());
        }
        let queue = self.ring.submission();
        let due = !queue.is_empty() || queue.taskrun() || queue.cq_overflow() || self.iopoll;
        drop(queue);
        if due {
            match self.ring.submit() {
                Err(error) if !is_passing(&error) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    #[inline]
    pub fn reap(&mut self, mut done: impl FnMut(u32, Result<(), Failure>)) {
        if self.pending == 0 {
            return;
        }
        // An operation may go on from here, so the queue is not held while it is looked at.
        loop {
            let next = self.ring.completion().next();
            let Some(entry) = next else { return };
            let index = entry.user_data() as usize;
            let Some(flight) = self.flights.get_mut(index) else { continue };
            match flight.advance(entry.result()) {
                Some(result) => {
                    flight.stage = Stage::Idle;
                    flight.bounce = None;
                    self.pending -= 1;
                    done(index as u32, result);
                }
                None => {
                    if matches!(flight.stage, Stage::ZeroData { .. })
                        && self.zeros.is_none()
                        && let Err(error) = Mapping::anonymous(ZEROS).map(|m| self.zeros = Some(m))
                    {
                        flight.stage = Stage::Idle;
                        self.pending -= 1;
                        done(index as u32, Err(errno(&error)));
                        continue;
                    }
                    self.push(index);
                }
            }
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel may still write into memory that is about to go away.
        while self.pending > 0 {
            match self.ring.submit_and_wait(1) {
                Err(error) if !is_passing(&error) => {
                    warn!("io_uring cannot be drained: {error}");
                    // Better than memory that changes under its next owner.
                    std::process::abort();
                }
                _ => self.reap(|_, _| {}),
            }
        }
    }
}

impl Flight {
    fn idle() -> Self {
        Self { disk: 0, stage: Stage::Idle, pieces: Vec::new(), next: 0, at: 0, left: 0, bounce: None }
    }

    /// Takes an aligned copy in place of the guest's buffers.
    fn bounce(&mut self, data: &[Buffer], memory: &GuestMemory<Mapping>) -> io::Result<()> {
        let len = self.left as usize;
        let copy = Mapping::anonymous(len.next_multiple_of(4096))?;
        let mut at = 0;
        let mut guest = Vec::with_capacity(data.len());
        for buffer in data {
            if let Stage::Write { .. } = self.stage {
                memory.slice(buffer).copy_to(&copy, at);
            }
            at += buffer.len as usize;
            guest.push((memory.regions()[usize::from(buffer.region)].memory.clone(), *buffer));
        }
        self.pieces.clear();
        self.pieces.push(piece(SharedSlice::new(&copy, 0, len)));
        self.bounce = Some(Bounce { memory: copy, guest });
        Ok(())
    }

    /// What a completion means. `Some`: the operation has ended. `None`: there is more to do, or to do again.
    fn advance(&mut self, result: i32) -> Option<Result<(), Failure>> {
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
                if self.stage == Stage::Read {
                    self.bounced();
                }
                Some(Ok(()))
            }
            Stage::ZeroData { .. } => {
                let moved = moved.min(self.left);
                (self.at, self.left) = (self.at + moved, self.left - moved);
                match (moved, self.left) {
                    (_, 0) => Some(Ok(())),
                    (0, _) => Some(Err(Failure::Truncated)),
                    _ => None,
                }
            }
            Stage::Punch { then: AfterPunch::Zeros { through: true }, .. }
            | Stage::Zero { through: true, .. } => {
                self.stage = Stage::Sync;
                None
            }
            Stage::Punch { .. } | Stage::Zero { .. } | Stage::Sync | Stage::Idle => Some(Ok(())),
        }
    }

    fn failed(&mut self, errno: i32) -> Option<Result<(), Failure>> {
        match (errno, self.stage) {
            (libc::EINTR | libc::EAGAIN, _) => None,
            (libc::EOPNOTSUPP | libc::ENODEV, Stage::Punch { then: AfterPunch::Nothing, .. }) => Some(Ok(())),
            (libc::EOPNOTSUPP | libc::ENODEV, Stage::Punch { len, then: AfterPunch::Zeros { through } }) => {
                self.stage = Stage::Zero { len, through };
                None
            }
            (libc::EOPNOTSUPP | libc::ENODEV, Stage::Zero { len, through }) => {
                self.left = len;
                self.stage = Stage::ZeroData { through };
                None
            }
            _ => Some(Err(Failure::Errno(errno))),
        }
    }

    /// Leaves out what has been transferred.
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

    /// Gives the guest what was read into the copy.
    fn bounced(&self) {
        let Some(bounce) = &self.bounce else { return };
        let mut at = 0;
        for (region, buffer) in &bounce.guest {
            bounce.memory.copy_to(at, region, buffer.at, buffer.len as usize);
            at += buffer.len as usize;
        }
    }
}

fn piece(slice: SharedSlice<'_, Mapping>) -> libc::iovec {
    libc::iovec { iov_base: slice.as_ptr().cast(), iov_len: slice.len() }
}

fn flags(through: bool) -> i32 {
    if through { libc::RWF_DSYNC } else { 0 }
}

fn errno(error: &io::Error) -> Failure {
    Failure::Errno(error.raw_os_error().unwrap_or(libc::EIO))
}

/// The kernel is busy, or was interrupted: the next turn tries again.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}
