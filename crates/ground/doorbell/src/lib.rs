//! Ringing an eventfd that others hold too, without blocking.
//!
//! A doorbell is an eventfd that a daemon, a QEMU and several programs hold at once. `O_NONBLOCK` belongs to the open file
//! description, which all of them share: any holder can clear it and fill the counter, and from then on a ring by `write(2)`
//! blocks. `pwritev2(2)` with `RWF_NOWAIT` does not help, because eventfds do not support it for writes.
//!
//! The kernel itself adds to an eventfd without blocking, whatever the counter and the flags are (`eventfd_signal()`): a
//! counter at its end stays there, and sleepers are woken nevertheless. Asynchronous I/O offers that call to programs: a
//! request with `IOCB_FLAG_RESFD` signals the eventfd in `aio_resfd` when it completes (`io_submit(2)`). [`ring`] submits a
//! request that completes at once: it polls the eventfd for reading or writing, and one of the two is always possible.
//!
//! Nobody reads a doorbell. A sleeper waits with an edge-triggered epoll of its own, which sees each ring.
#![allow(unsafe_code)] // io_setup(2), io_submit(2) and io_getevents(2), which no safe crate offers.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// The ringer that [`ring`] uses.
static SHARED: Ringer = Ringer::new();
/// The context of a ringer for which the kernel refuses one.
const NONE: u64 = u64::MAX;
/// The number of completions that one call fetches.
const COMPLETIONS: usize = 64;
/// The number of attempts to submit a request while the context is full. Each attempt empties the context first, but another
/// thread may fill it again in between.
const TRIES: usize = 64;

/// `struct iocb` of `linux/aio_abi.h`, little-endian.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    /// The events to poll for.
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    /// The eventfd to signal.
    event: u32,
}
const _: () = assert!(size_of::<Request>() == 64);
const _: () = assert!(cfg!(target_endian = "little"), "the order of key and rw_flags depends on it");

/// `IOCB_CMD_POLL`, since Linux 4.18.
const POLL: u16 = 5;
/// `IOCB_FLAG_RESFD`.
const SIGNAL: u32 = 1;

/// A context for asynchronous I/O. All rings with one context wait for each other for a moment: as long as the kernel takes to wake
/// those who wait for a doorbell, which is long if a hostile holder has added very many of them. Rings with different contexts do not.
#[derive(Debug)]
pub struct Ringer {
    /// 0 before the first ring, [`NONE`] if the kernel refuses one.
    context: AtomicU64,
}

/// Adds one to an eventfd and wakes everyone who waits for it. Does not block, whatever other holders of the same open file
/// description do to its flags and its counter, with one exception. Where the system refuses asynchronous I/O (because of a
/// seccomp filter, or because `fs.aio-max-nr` is used up), this function checks that the eventfd has room and then writes to it.
/// A hostile holder that fills it between the two makes the write block. [`is_safe`] returns whether this can happen. May be
/// called from any thread, and in a child after `fork(2)`.
pub fn ring(event: BorrowedFd<'_>) {
    SHARED.ring(event);
}

/// Returns whether [`ring`] has asynchronous I/O in this process, so that it cannot be made to block. Sets it up if necessary.
pub fn is_safe() -> bool {
    SHARED.context().is_some()
}

impl Default for Ringer {
    fn default() -> Self {
        Self::new()
    }
}

impl Ringer {
    /// Makes a ringer, which asks the kernel for a context at its first ring.
    pub const fn new() -> Self {
        Self { context: AtomicU64::new(0) }
    }

    /// Does the same as [`ring`], in this ringer's context. If it gets none, this rings in that of the process.
    pub fn ring(&self, event: BorrowedFd<'_>) {
        if !self.signal(event) && !SHARED.signal(event) {
            write(event);
        }
    }

    /// Makes the kernel signal the eventfd. Returns false if the kernel does not.
    fn signal(&self, event: BorrowedFd<'_>) -> bool {
        let fd = event.as_raw_fd() as u32;
        let events = (libc::POLLIN | libc::POLLOUT) as u64;
        let request =
            Request { opcode: POLL, fd, buffer: events, flags: SIGNAL, event: fd, ..Request::default() };
        for _ in 0..TRIES {
            let Some(context) = self.context() else { return false };
            match submit(context, &request) {
                Ok(()) => return true,
                // The context is full of completions that nobody has fetched yet.
                Err(libc::EAGAIN) => fetch(context),
                // A child of fork(2) does not inherit the context.
                Err(libc::EINVAL) if self.forget(context) => {}
                Err(_) => return false,
            }
        }
        false
    }

    fn context(&self) -> Option<u64> {
        match self.context.load(Ordering::Relaxed) {
            0 => self.set_up(),
            NONE => None,
            context => Some(context),
        }
    }

    #[cold]
    fn set_up(&self) -> Option<u64> {
        let mut new: u64 = 0;
        // SAFETY: The kernel writes one word, the context, to the address of a word that outlives the call. One request is the
        // least that can be asked for, and everything that is asked for counts against `fs.aio-max-nr`.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut new) };
        let new = if result == 0 { new } else { NONE };
        match self.context.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => (new != NONE).then_some(new),
            Err(other) => {
                if new != NONE {
                    destroy(new);
                }
                (other != NONE && other != 0).then_some(other)
            }
        }
    }

    /// Gives up a context that the kernel does not know. Returns false if the kernel knows it.
    #[cold]
    fn forget(&self, context: u64) -> bool {
        // SAFETY: No request is submitted: the count is zero, and the list is not read.
        let known =
            unsafe { libc::syscall(libc::SYS_io_submit, context, 0, std::ptr::null::<*const Request>()) };
        if known == 0 {
            return false;
        }
        // Another thread may have replaced it already; in both cases the old context is gone.
        let _ = self.context.compare_exchange(context, 0, Ordering::Relaxed, Ordering::Relaxed);
        true
    }
}

impl Drop for Ringer {
    fn drop(&mut self) {
        let context = *self.context.get_mut();
        if context != 0 && context != NONE {
            destroy(context);
        }
    }
}

/// Gives back a context that nobody uses.
fn destroy(context: u64) {
    // SAFETY: The call takes a number. If it is not that of a context of this process (after fork(2)), the kernel refuses it.
    unsafe { libc::syscall(libc::SYS_io_destroy, context) };
}

fn submit(context: u64, request: &Request) -> Result<(), i32> {
    let list = [std::ptr::from_ref(request)];
    // SAFETY: One pointer to one request, both of which outlive the call. The kernel copies the request before it returns
    // (apart from `key`, which it writes first); polling reads and writes no memory of ours.
    let submitted = unsafe { libc::syscall(libc::SYS_io_submit, context, 1, list.as_ptr()) };
    match submitted {
        1 => Ok(()),
        0 => Err(libc::EAGAIN),
        _ => {
            Err(Errno::from_io_error(&std::io::Error::last_os_error()).map_or(libc::EIO, Errno::raw_os_error))
        }
    }
}

/// Fetches completions, so that there is room for requests. Their contents do not matter.
#[cold]
fn fetch(context: u64) {
    let mut completions = [[0u64; 4]; COMPLETIONS];
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: The kernel writes at most `COMPLETIONS` events of 32 bytes to an array of that size, and reads a timeout that
    // outlives the call; it is zero, so the call does not wait.
    unsafe {
        libc::syscall(
            libc::SYS_io_getevents,
            context,
            0,
            COMPLETIONS,
            completions.as_mut_ptr(),
            &raw const now,
        )
    };
}

/// Rings without asynchronous I/O: checks that there is room, then writes.
#[cold]
fn write(event: BorrowedFd<'_>) {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut room = [PollFd::from_borrowed_fd(event, PollFlags::OUT)];
    let is_full = |room: &mut [PollFd<'_>]| {
        !(poll(room, Some(&now)).is_ok() && room[0].revents().contains(PollFlags::OUT))
    };
    if is_full(&mut room) {
        // Nobody reads this eventfd, so a hostile holder has filled the counter. Reading resets it.
        let _ = rustix::io::read(event, &mut [0u8; 8]);
        if is_full(&mut room) {
            return;
        }
    }
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}
