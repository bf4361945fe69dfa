//! One io_uring, and what is on its way in it.
#![allow(unsafe_code)] // The kernel is handed raw addresses, and io_uring's interface is unsafe for that.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{Ordering, fence};

use io_uring::register::{Probe, Restriction};
use io_uring::{IoUring, opcode, squeue, types};
use tracing::warn;

/// Entries of the submission queue. What does not fit is handed over in several calls.
const ENTRIES: u32 = 256;

/// All that a ring does. No other operation is ever carried out, and none on a descriptor that is not registered: system call
/// filters do not see what a ring is asked for, so that is for the ring itself to refuse.
pub(crate) const OPERATIONS: [u8; 9] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::ReadFixed::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::WriteFixed::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    // A block device knows one command, its discard, and files know none.
    opcode::UringCmd16::CODE,
];

/// What may be registered once the ring is enabled, as numbered in linux/io_uring.h.
pub(crate) const REGISTER_BUFFERS: u8 = 0;
pub(crate) const UNREGISTER_BUFFERS: u8 = 1;
/// How a ring is enabled.
pub(crate) const REGISTER_ENABLE_RINGS: u8 = 12;

/// Discards a part of a block device (linux/blkdev.h, since 6.12): `addr` is where, the command's first word how much.
const BLOCK_URING_CMD_DISCARD: u32 = 0x1200;

/// The entry that discards so many bytes of a block device.
pub(super) fn discard(device: types::Fixed, at: u64, len: u64) -> squeue::Entry {
    let mut more = [0; 16];
    more[..8].copy_from_slice(&len.to_ne_bytes());
    opcode::UringCmd16::new(device, BLOCK_URING_CMD_DISCARD).addr(Some(at)).cmd(more).build()
}

/// Says for tests that the kernel has no such command. What takes its place then is the real thing.
const WITHOUT: &str = "GINNEL_TEST_NO_URING_DISCARD";

/// Whether discards on this block device, which has some, can be done by a ring. Asks the kernel for a discard of nothing. Who has
/// the command refuses that as invalid.
pub(crate) fn can_discard(device: &File) -> bool {
    let ask = || {
        let mut ring = IoUring::new(1)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        // Before 5.19 there are no commands at all.
        if !probe.is_supported(opcode::UringCmd16::CODE) {
            return Ok(false);
        }
        ring.submitter().register_files(&[device.as_raw_fd()])?;
        let entry = discard(types::Fixed(0), 0, 0);
        // SAFETY: there is no address in it.
        let queued = unsafe { ring.submission().push(&entry) };
        debug_assert!(queued.is_ok());
        ring.submit_and_wait(1)?;
        let answer = ring.completion().next();
        Ok::<_, io::Error>(answer.is_some_and(|answer| answer.result() != -libc::EOPNOTSUPP))
    };
    // A kernel that has no rings at all says so soon, when the workers' are made.
    std::env::var_os(WITHOUT).is_none() && ask().unwrap_or(false)
}

pub(crate) struct Ring {
    ring: IoUring,
    /// Entries whose completions were not taken yet.
    pending: u32,
    /// Completions come only to who asks the device for them.
    polls: bool,
}

impl Ring {
    /// Makes a ring that does nothing before [`Ring::enable`]. `files` become those that entries name by number; -1 is none.
    /// The kernel writes to `bell` with each completion, while it is asked to ([`Ring::arm`]). Without one, completions are
    /// polled from the devices, and the ring can only read and write.
    pub fn new(files: &[RawFd], bell: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let polls = bell.is_none();
        let build = |modern: bool| {
            let mut builder = IoUring::builder();
            builder.setup_clamp().setup_cqsize(4 * ENTRIES).setup_r_disabled();
            if modern {
                // Completions are processed by this thread, when it looks: no interrupt of its work by others.
                builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
            }
            if polls {
                builder.setup_iopoll();
            }
            builder.build(ENTRIES)
        };
        // Kernels before 6.1 do not know these flags.
        let ring = build(true).or_else(|_| build(false)).map_err(|e| {
            let fix = "see the sysctl kernel.io_uring_disabled, and RLIMIT_MEMLOCK on kernels before 5.12";
            io::Error::new(e.kind(), format!("no io_uring: {e}; {fix}"))
        })?;
        let mut ring = Self { ring, pending: 0, polls };
        let submitter = ring.ring.submitter();
        submitter.register_files(files)?;
        if let Some(bell) = bell {
            submitter.register_eventfd(bell.as_raw_fd())?;
        }
        let restrict = |operations: &[u8]| {
            let mut restrictions: Vec<_> = operations.iter().copied().map(Restriction::sqe_op).collect();
            restrictions.extend([REGISTER_BUFFERS, UNREGISTER_BUFFERS].map(Restriction::register_op));
            restrictions.push(Restriction::sqe_flags_required(squeue::Flags::FIXED_FILE.bits()));
            submitter.register_restrictions(&mut restrictions)
        };
        // Kernels before 5.19 do not know the last one.
        restrict(&OPERATIONS)
            .or_else(|_| restrict(&OPERATIONS[..OPERATIONS.len() - 1]))
            .map_err(|e| io::Error::new(e.kind(), format!("an io_uring cannot be restricted: {e}")))?;
        ring.disarm();
        Ok(ring)
    }

    /// Puts the ring, and what it is restricted to, into force, for the calling thread: only that may submit.
    pub fn enable(&self) -> io::Result<()> {
        self.ring.submitter().register_enable_rings()
    }

    #[inline]
    pub fn pending(&self) -> u32 {
        self.pending
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

    /// Pins memory, whose numbers entries can name. The memory may go away before it is unpinned: its pages stay.
    pub fn register_buffers(&mut self, buffers: &[libc::iovec]) -> io::Result<()> {
        // SAFETY: the kernel takes hold of pages that are mapped there now, or fails; it does not come back to the addresses.
        unsafe { self.ring.submitter().register_buffers(buffers) }
    }

    /// Pins nothing any more.
    pub fn unregister_buffers(&mut self) {
        // It fails only if nothing is pinned.
        let _ = self.ring.submitter().unregister_buffers();
    }

    /// Queues an entry. Returns how many are queued now.
    ///
    /// # Safety
    /// The addresses in the entry stay valid until its completion was taken.
    #[inline]
    pub unsafe fn push(&mut self, entry: &squeue::Entry) -> usize {
        self.pending += 1;
        loop {
            let mut queue = self.ring.submission();
            // SAFETY: the caller's promise.
            if unsafe { queue.push(entry) }.is_ok() {
                return queue.len();
            }
            drop(queue);
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
        let due = !queue.is_empty() || queue.taskrun() || queue.cq_overflow() || self.polls;
        drop(queue);
        if due {
            match self.ring.submit() {
                Err(error) if !is_passing(&error) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes a completion: the entry's number, and its result.
    #[inline]
    pub fn take(&mut self) -> Option<(usize, i32)> {
        if self.pending == 0 {
            return None;
        }
        let entry = self.ring.completion().next()?;
        self.pending -= 1;
        Some((entry.user_data() as usize, entry.result()))
    }

    /// Waits until all has ended.
    pub fn drain(&mut self) {
        while self.pending > 0 {
            match self.ring.submit_and_wait(1) {
                Err(error) if !is_passing(&error) => {
                    warn!("io_uring cannot be drained: {error}");
                    // Better than memory that changes under its next owner.
                    std::process::abort();
                }
                _ => while self.take().is_some() {},
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still write into memory that is about to go away.
        self.drain();
    }
}

/// The kernel is busy, or was interrupted: the next turn tries again.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}
