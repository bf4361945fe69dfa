//! Processes that are this program without `exec`, for what must share, or must not share, the descriptors of this process. What may block
//! on files and needs memory is started by [`crate::spawned`].
//!
//! One may be started while there are other threads, one of which may have locked the allocator, the log or anything else: so from its
//! start on it makes system calls only.
#![allow(unsafe_code)] // Such processes, which no safe crate offers.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::process::Pid;
use std::ffi::CStr;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use zerocopy::FromZeros;

/// A process that shares the table of descriptors, and is killed when this is dropped. (A daemon keeps its own for life.)
#[derive(Debug)]
pub struct Forked {
    child: Child,
    ended: OwnedFd,
}

/// A process that this one has started. When this is dropped, it is killed, and its end is waited for.
#[derive(Debug)]
struct Child(Pid);

impl Forked {
    /// Starts a process that runs `serve`.
    ///
    /// # Safety
    ///
    /// `serve` must make system calls only: no memory from the allocator, no lock, no log.
    pub unsafe fn start(serve: impl FnOnce()) -> io::Result<Self> {
        // Signals for the daemon, such as that of a terminal, are not for it.
        let signals = blocked()?;
        let mut ended = -1;
        // SAFETY: what the new process does is `serve`, of which the caller promises this, and `exit`.
        let forked = unsafe { clone(libc::CLONE_FILES | libc::CLONE_PIDFD, &mut ended) };
        if forked == Ok(None) {
            serve();
            exit();
        }
        restore(&signals);
        let pid = forked?.ok_or(Errno::INVAL)?;
        // SAFETY: the kernel has made this descriptor with the process, and nobody else knows it.
        Ok(Self { child: Child(pid), ended: unsafe { OwnedFd::from_raw_fd(ended) } })
    }

    /// Returns whether it has ended.
    pub fn has_ended(&self) -> bool {
        has_ended(self.ended.as_fd())
    }

    /// Returns what becomes readable when it ends.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Kills it, and does not wait for its end.
    pub fn abandon(self) -> Abandoned {
        let child = ManuallyDrop::new(self.child);
        child.kill();
        Abandoned(child.0)
    }

    /// Returns its number.
    pub fn pid(&self) -> Pid {
        self.child.0
    }
}

/// A process that was killed and may take long to end.
#[derive(Debug)]
pub struct Abandoned(Pid);

impl Abandoned {
    #[cfg(test)]
    pub fn of(pid: Pid) -> Self {
        Self(pid)
    }

    /// Returns its number.
    pub fn pid(&self) -> Pid {
        self.0
    }

    /// Buries it if it has ended. Returns whether it had.
    pub fn is_buried(&self) -> bool {
        // Nobody else waits for it, so an error means that nobody needs to.
        !matches!(rustix::process::waitpid(Some(self.0), rustix::process::WaitOptions::NOHANG), Ok(None))
    }
}

impl Child {
    fn kill(&self) {
        let _ = rustix::process::kill_process(self.0, rustix::process::Signal::KILL);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
        let _ = rustix::process::waitpid(Some(self.0), rustix::process::WaitOptions::empty());
    }
}

/// Makes a process that has copies of this one's memory and descriptors. Returns `None` in the new process, which has one thread.
///
/// # Safety
///
/// The new process must make system calls only: no memory from the allocator, no lock, no log.
pub unsafe fn fork() -> Result<Option<Pid>, Errno> {
    // SAFETY: the caller's promise.
    unsafe { clone(0, &mut -1) }
}

/// Makes a process as `fork` does, with these flags of `clone(2)`. With `CLONE_PIDFD`, the new process has a pidfd here.
///
/// # Safety
///
/// That of `fork`.
unsafe fn clone(flags: libc::c_int, pidfd: &mut RawFd) -> Result<Option<Pid>, Errno> {
    let pidfd: *mut RawFd = pidfd;
    // SAFETY: the new process gets a copy of this one's memory, and goes on with a copy of this stack. As the caller promises, it needs
    // nothing that another thread may have locked. The kernel writes a number to `pidfd`, which is there.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, pidfd, 0, 0) };
    match pid {
        0 => Ok(None),
        1.. => Ok(Pid::from_raw(pid as i32)),
        _ => Err(last_error()),
    }
}

/// Gives this process, which shares the table of the daemon, a table of its own, with nothing in it but these descriptors. What is
/// behind them is not copied, not even for a moment: otherwise its last close could be here. A connection that is before them, because
/// something older was closed, is closed here at once. That is its last close only if the daemon gives it up at this moment.
pub fn part_from_daemon(own: &[&OwnedFd]) {
    let is_own = |fd| own.iter().any(|own| own.as_raw_fd() == fd);
    let last = own.iter().map(|fd| fd.as_raw_fd()).max().unwrap_or(0);
    // SAFETY: this unshares the table, and closes in the copy what is behind the last one, of which nothing is copied.
    let parted = unsafe {
        libc::syscall(libc::SYS_close_range, last + 1, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE)
    };
    if parted != 0 {
        exit();
    }
    for other in (0..last).filter(|fd| !is_own(*fd)) {
        // SAFETY: the table is this process's own, which uses only those that were named.
        unsafe { libc::close(other) };
    }
}

/// Blocks all signals of this thread, and returns those that were blocked before. Not the one for the end of a child: where nobody cares
/// for it, the kernel drops it, but not if it is blocked. Then it interrupts another thread.
fn blocked() -> io::Result<libc::sigset_t> {
    // SAFETY: zeros are valid sets, and the calls fill sets that are there.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) =
            (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::sigdelset(&raw mut all, libc::SIGCHLD);
        match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before) {
            0 => Ok(before),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

fn restore(signals: &libc::sigset_t) {
    // SAFETY: the set was filled by `blocked`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, signals, std::ptr::null_mut()) };
}

/// Ends this process, and nothing of what its copy of the memory is about.
pub fn exit() -> ! {
    // SAFETY: the call has no rules.
    unsafe { libc::_exit(0) }
}

/// Gives this process a name.
pub fn name(name: &'static CStr) {
    // SAFETY: the string ends with a zero.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// Buries a child that has ended, and returns which.
pub fn reap() -> Option<Pid> {
    // SAFETY: the kernel is told that the status is not wanted.
    Pid::from_raw(unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) }.max(0))
}

/// Returns whether the process of a pidfd has ended.
pub fn has_ended(process: BorrowedFd<'_>) -> bool {
    let mut ended = [PollFd::new(&process, PollFlags::IN)];
    poll(&mut ended, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok()
        && ended[0].revents().contains(PollFlags::IN)
}

/// Returns the error of the last call of the C library.
pub fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

/// Memory that a process shares with those that it forks.
#[derive(Debug)]
pub struct Shared<T: FromZeros + Sync>(NonNull<T>);

impl<T: FromZeros + Sync> Shared<T> {
    /// Makes it, of zeros.
    pub fn new() -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, and nothing else is there.
        let memory =
            unsafe { mmap_anonymous(std::ptr::null_mut(), size_of::<T>(), protection, MapFlags::SHARED) }?;
        Ok(Self(NonNull::new(memory.cast()).ok_or(Errno::NOMEM)?))
    }
}

impl<T: FromZeros + Sync> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the memory is aligned to a page and begins as zeros, which are a valid value of a type that is `FromZeros`.
        unsafe { self.0.as_ref() }
    }
}

impl<T: FromZeros + Sync> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: nothing in this process uses the memory after this. Others have mappings of their own.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), size_of::<T>()) };
    }
}

// SAFETY: the memory belongs to no thread, and the value in it can be used by any, because its type is `Sync`.
unsafe impl<T: FromZeros + Sync> Send for Shared<T> {}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::wait::wait_until;

    /// Returns whether this process has a descriptor of that one.
    fn has_pidfd(pid: Pid) -> bool {
        let line = format!("Pid:\t{}", pid.as_raw_nonzero());
        let infos = std::fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
        let mut texts = infos.filter_map(|info| std::fs::read_to_string(info.path()).ok());
        texts.any(|text| text.lines().any(|other| other == line))
    }

    #[test]
    fn one_that_is_abandoned_leaves_no_descriptor() {
        // SAFETY: `pause` is a system call.
        let forked = unsafe {
            Forked::start(|| {
                libc::pause();
            })
        }
        .unwrap();
        assert!(has_pidfd(forked.pid()));
        let abandoned = forked.abandon();
        assert!(!has_pidfd(abandoned.pid()));
        wait_until("its end", || abandoned.is_buried());
    }
}
