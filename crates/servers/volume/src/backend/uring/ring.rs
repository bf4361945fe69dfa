//! One io_uring and its entries.
#![allow(unsafe_code)] // The kernel is handed raw addresses, and io_uring's interface is unsafe for that.

use io_uring::register::{Probe, Restriction};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{Ordering, fence};
use tracing::warn;

/// Number of entries of the submission queue. If more are queued, they are submitted in several calls.
const ENTRIES: u32 = 256;

/// The only operations that a ring for images executes, and only on registered descriptors. System call filters do not see the
/// operations of a ring, so the ring itself must refuse all others.
pub(crate) const OPERATIONS: [u8; 9] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::ReadFixed::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::WriteFixed::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    // A block device supports one command, discard, and files support none. Kernels before 5.19 do not know this operation.
    opcode::UringCmd16::CODE,
];

/// The only operation of a ring for NVMe passthrough. Its files are the character devices of namespaces, to which it can send any command
/// that the kernel lets this process send.
pub(crate) const COMMANDS: [u8; 1] = [opcode::UringCmd80::CODE];

/// What may be registered after the ring is enabled, as numbered in linux/io_uring.h.
pub(crate) const REGISTER_BUFFERS: u8 = 0;
pub(crate) const UNREGISTER_BUFFERS: u8 = 1;
/// The number of the call that enables a ring.
pub(crate) const REGISTER_ENABLE_RINGS: u8 = 12;

/// Discards a part of a block device (linux/blkdev.h, since 6.12): `addr` is the offset, and the command's first word
/// is the length.
const BLOCK_URING_CMD_DISCARD: u32 = 0x1200;

/// Returns the entry that discards `len` bytes of a block device.
pub(super) fn discard(device: types::Fixed, at: u64, len: u64) -> squeue::Entry {
    let mut more = [0; 16];
    more[..8].copy_from_slice(&len.to_ne_bytes());
    opcode::UringCmd16::new(device, BLOCK_URING_CMD_DISCARD).addr(Some(at)).cmd(more).build()
}

/// Environment variable for tests: if it is set, this process behaves as if the kernel had no such command. The
/// replacement for it is then the real one.
const WITHOUT: &str = "GINNEL_TEST_NO_URING_DISCARD";

/// Returns whether a ring can make the discards of this block device, which supports discards. Asks the kernel for a
/// discard of no bytes, which a kernel with the command refuses as invalid.
pub(crate) fn can_discard(device: &File) -> bool {
    let ask = || {
        let mut ring = IoUring::new(1)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        // Before Linux 5.19 there are no such commands.
        if !probe.is_supported(opcode::UringCmd16::CODE) {
            return Ok(false);
        }
        ring.submitter().register_files(&[device.as_raw_fd()])?;
        let entry = discard(types::Fixed(0), 0, 0);
        // SAFETY: the entry contains no address.
        let queued = unsafe { ring.submission().push(&entry) };
        debug_assert!(queued.is_ok());
        ring.submit_and_wait(1)?;
        let answer = ring.completion().next();
        Ok::<_, io::Error>(answer.is_some_and(|answer| answer.result() != -libc::EOPNOTSUPP))
    };
    // If the kernel has no rings at all, that is reported soon, when the workers' rings are created.
    std::env::var_os(WITHOUT).is_none() && ask().unwrap_or(false)
}

/// An io_uring. Those for NVMe passthrough have larger entries.
pub(crate) struct Ring<S: squeue::EntryMarker = squeue::Entry, C: cqueue::EntryMarker = cqueue::Entry> {
    ring: IoUring<S, C>,
    /// Number of entries whose completions were not taken yet.
    pending: u32,
    /// Whether completions must be polled from the device.
    polls: bool,
}

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Ring<S, C> {
    /// Creates a ring that does nothing before [`Ring::enable`], and then only these operations. If the kernel does not
    /// know the last of several, the ring has the others. Entries name the `files` by their index; -1 means no file. The
    /// kernel writes to `bell` with each completion, while notifications are enabled ([`Ring::arm`]). Without a `bell`,
    /// completions are polled from the devices: of files, such a ring can only read and write.
    pub fn new(operations: &[u8], files: &[RawFd], bell: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let polls = bell.is_none();
        let build = |modern: bool| {
            let mut builder = IoUring::<S, C>::builder();
            builder.setup_clamp().setup_cqsize(4 * ENTRIES).setup_r_disabled();
            if modern {
                // This thread processes completions when it looks for them, so they do not interrupt its work.
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
            io::Error::new(e.kind(), format!("an io_uring cannot be created: {e}; {fix}"))
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
        restrict(operations)
            .or_else(|error| match operations {
                [known @ .., _] if !known.is_empty() => restrict(known),
                _ => Err(error),
            })
            .map_err(|e| io::Error::new(e.kind(), format!("an io_uring cannot be restricted: {e}")))?;
        ring.disarm();
        Ok(ring)
    }

    /// Enables the ring and its restrictions for the calling thread. No other thread can submit.
    pub fn enable(&self) -> io::Result<()> {
        self.ring.submitter().register_enable_rings()
    }

    #[inline]
    pub fn pending(&self) -> u32 {
        self.pending
    }

    /// Enables notifications. Returns true if a request has ended already, in which case the caller must not sleep.
    pub fn arm(&mut self) -> bool {
        self.ring.completion().enable_eventfd();
        // ORDER uring.arm: the flag is cleared before the look. Pairs with: the kernel, which publishes a completion
        // and then looks at the flag.
        fence(Ordering::SeqCst);
        let queue = self.ring.submission();
        // The next step of an operation may have been queued after this turn's submission.
        let due = queue.taskrun() || !queue.is_empty();
        drop(queue);
        due || !self.ring.completion().is_empty()
    }

    /// Disables notifications.
    pub fn disarm(&mut self) {
        self.ring.completion().disable_eventfd();
    }

    /// Pins memory, so that entries can name it by number. The memory may be unmapped before it is unpinned: its pages
    /// stay.
    pub fn register_buffers(&mut self, buffers: &[libc::iovec]) -> io::Result<()> {
        // SAFETY: the kernel pins the pages that are mapped there now, or fails; it does not use the addresses later.
        unsafe { self.ring.submitter().register_buffers(buffers) }
    }

    /// Unpins all memory.
    pub fn unregister_buffers(&mut self) {
        // Fails only if nothing is pinned.
        let _ = self.ring.submitter().unregister_buffers();
    }

    /// Queues an entry. Returns how many are queued now.
    ///
    /// # Safety
    /// The addresses in the entry stay valid until its completion was taken.
    #[inline]
    pub unsafe fn push(&mut self, entry: &S) -> usize {
        self.pending += 1;
        loop {
            let mut queue = self.ring.submission();
            // SAFETY: the caller's promise.
            if unsafe { queue.push(entry) }.is_ok() {
                return queue.len();
            }
            drop(queue);
            // The queue is full: the kernel takes the queued entries. That fails only for lack of memory, or if
            // completions must be taken first.
            if let Err(error) = self.ring.submit()
                && !is_passing(&error)
            {
                warn!("io_uring accepts no requests: {error}; trying again");
            }
        }
    }

    /// Submits the queued entries, and lets the kernel process completions.
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

    /// Takes a completion. Returns the entry's number and its result.
    #[inline]
    pub fn take(&mut self) -> Option<(usize, i32)> {
        if self.pending == 0 {
            return None;
        }
        let entry: cqueue::Entry = self.ring.completion().next()?.into();
        self.pending -= 1;
        Some((entry.user_data() as usize, entry.result()))
    }

    /// Submits the queued entries, and blocks until one has ended, or a signal has come.
    pub fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Err(error) if !is_passing(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Blocks until all entries have ended.
    pub fn drain(&mut self) {
        while self.pending > 0 {
            if let Err(error) = self.wait() {
                warn!("io_uring cannot be drained: {error}");
                // Otherwise the kernel could change memory that has another owner by then.
                std::process::abort();
            }
            while self.take().is_some() {}
        }
    }
}

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Drop for Ring<S, C> {
    fn drop(&mut self) {
        // The kernel may still write into memory that is about to be freed.
        self.drain();
    }
}

/// Returns whether the kernel is busy or was interrupted, so that the next turn should try again.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}
