//! The **closer**: a process that shares this process's table of descriptors (`CLONE_FILES`), so that this process never is the one that
//! closes a connection last.
//!
//! The last close of a Unix socket also closes what lies unread in its queue, and a program can send what nobody can close: an eventfd in
//! an epoll instance whose lock it holds, or a file of a file system that does not answer. No signal ends that wait. A thread that is in
//! it keeps its process from ending, even by `kill -9`; and at the end of a process the kernel closes what is left. So:
//!
//! - The closer closes what [`Process::close`] is given, in a child that shares the table too. A timer interrupts a close that can be
//!   interrupted (of a TCP socket with `SO_LINGER`). A child that gets nowhere is killed, and not waited for; the next one
//!   goes on behind what that one closes.
//! - When this process ends, the table lives on in the closer. The closer shuts down the sockets, so that peers see the end and
//!   nobody connects any more, and closes files, so that their locks are free. Then it ends, if what is left can be closed.
//!
//! | the closer | if the daemon ends | if the closer is killed |
//! |---|---|---|
//! | is idle | it ends what is open, and itself | the next close starts another |
//! | has a child that closes | the same; the child goes on | the child goes on; what the closer had been given beside that stays open |
//! | has a child that is stuck | the same; what the child shares and nobody has closed is there as long as it is | the same |
//!
//! The closer is this program without `exec`, because that would end the sharing. It may be started while there are other threads, one of
//! which may have locked the allocator: so from its start on it makes system calls only.
#![allow(unsafe_code)] // Processes that share descriptors, which no safe crate offers, and descriptors that are known by number.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Resource, getpid, getrlimit, pidfd_open};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The descriptors that one child closes.
const BATCH: usize = 64;
/// How often a close that can be interrupted is.
const INTERRUPTION: libc::suseconds_t = 1000;
/// A child that has closed nothing for this long is killed.
const PATIENCE: Duration = Duration::from_millis(100);
/// While this many children that were killed have not ended, nothing else is closed.
const STUCK: usize = 16;
/// The descriptors that are looked at when the daemon has ended. It may not have had more.
const MOST: u64 = 1 << 20;

/// The daemon's side of the closer.
#[derive(Debug)]
pub struct Process {
    /// Where the closer gets the numbers of descriptors.
    commands: OwnedFd,
    theirs: OwnedFd,
    /// Becomes readable when this process has ended.
    daemon: OwnedFd,
    child: Child,
}

/// A closer, which has a place of its own for what its children tell it.
#[derive(Debug)]
struct Child {
    pid: Pid,
    ended: OwnedFd,
}

impl Process {
    /// Starts the closer. The earlier this is, the less memory it keeps.
    pub fn start() -> io::Result<Self> {
        let (theirs, commands) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let daemon = pidfd_open(getpid(), PidfdFlags::empty())?;
        let child = Child::start(theirs.as_fd(), daemon.as_fd())?;
        Ok(Self { commands, theirs, daemon, child })
    }

    /// Closes a descriptor, at some time. Does not block. Gives it back if that is impossible now.
    pub fn close(&mut self, fd: OwnedFd) -> Result<(), OwnedFd> {
        if has_ended(self.child.ended.as_fd()) {
            match Child::start(self.theirs.as_fd(), self.daemon.as_fd()) {
                Ok(child) => {
                    tracing::warn!(
                        "the closer of connections has ended, and is started again: was it killed?"
                    );
                    self.child = child;
                }
                Err(error) => {
                    tracing::error!(%error, "there is no closer of connections: some stay open");
                    return Err(fd);
                }
            }
        }
        let number = fd.as_raw_fd().to_ne_bytes();
        // A pipe takes so few bytes all or not at all.
        match rustix::io::write(&self.commands, &number) {
            Ok(_) => {
                // It is the closer's now.
                let _ = fd.into_raw_fd();
                Ok(())
            }
            Err(_) => {
                tracing::warn!(
                    "connections wait to be closed, because programs hold up the processes that close them"
                );
                Err(fd)
            }
        }
    }
}

impl Drop for Child {
    /// Ends the closer while this process lives. (A daemon keeps its closer.)
    fn drop(&mut self) {
        end_child(self.pid);
    }
}

/// Kills a process that this one has started and not waited for, and waits for its end.
fn end_child(pid: Pid) {
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
}

impl Child {
    fn start(commands: BorrowedFd<'_>, daemon: BorrowedFd<'_>) -> io::Result<Self> {
        let progress = Progress::new()?;
        // Signals for the daemon, such as that of a terminal, are not for the closer.
        let signals = blocked()?;
        let forked = fork();
        if forked == Ok(None) {
            serve(commands, daemon, &progress);
        }
        restore(&signals);
        let pid = forked?.ok_or(Errno::INVAL)?;
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(ended) => Ok(Self { pid, ended }),
            Err(errno) => {
                // Two closers must not hear the same commands.
                end_child(pid);
                Err(errno.into())
            }
        }
    }
}

/// Makes a process that shares the descriptors of this one. Returns `None` in the new process, which has one thread.
fn fork() -> Result<Option<Pid>, Errno> {
    // SAFETY: the new process gets a copy of this one's memory, and goes on with a copy of this stack. It makes only system calls, as the
    // module says, so it needs nothing that another thread may have locked.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0) };
    match pid {
        0 => Ok(None),
        1.. => Ok(Pid::from_raw(pid as i32)),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::AGAIN)),
    }
}

/// Blocks all signals of this thread, and returns those that were blocked before.
fn blocked() -> io::Result<libc::sigset_t> {
    // SAFETY: zeros are valid sets, and the calls fill sets that are there.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) =
            (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
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

/// How many descriptors of its batch a child has begun to close. The memory is shared with it.
#[derive(Debug)]
struct Progress(NonNull<AtomicU32>);

impl Progress {
    fn new() -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, and nothing else is there.
        let memory = unsafe {
            mmap_anonymous(std::ptr::null_mut(), size_of::<AtomicU32>(), protection, MapFlags::SHARED)
        }?;
        Ok(Self(NonNull::new(memory.cast()).ok_or(Errno::NOMEM)?))
    }

    fn get(&self) -> &AtomicU32 {
        // SAFETY: the memory is aligned to a page and begins as zeros, which are a valid atomic.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // SAFETY: nothing uses the memory after this. The closer has a mapping of its own.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), size_of::<AtomicU32>()) };
    }
}

/// Ends this process, and nothing of what its copy of the memory is about.
fn exit() -> ! {
    // SAFETY: the call has no rules.
    unsafe { libc::_exit(0) }
}

fn name(name: &'static std::ffi::CStr) {
    // SAFETY: the string ends with a zero.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

fn has_ended(process: BorrowedFd<'_>) -> bool {
    let mut ended = [PollFd::new(&process, PollFlags::IN)];
    poll(&mut ended, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok()
        && ended[0].revents().contains(PollFlags::IN)
}

/// What the closer does.
fn serve(commands: BorrowedFd<'_>, daemon: BorrowedFd<'_>, progress: &Progress) -> ! {
    name(c"ginneld-closer");
    let mut batch = [0; BATCH];
    // What has not been closed of the batch, and the number of children that are stuck.
    let (mut left, mut stuck) = (0..0, 0);
    loop {
        let commanded = if stuck < STUCK { PollFlags::IN } else { PollFlags::empty() };
        // The end of a child is no event here.
        let again = (stuck > 0).then_some(Timespec { tv_sec: 0, tv_nsec: 100_000_000 });
        let mut events = [PollFd::new(&commands, commanded), PollFd::new(&daemon, PollFlags::IN)];
        let _ = poll(&mut events, again.as_ref());
        if has_ended(daemon) {
            end();
        }
        // One that was killed may have ended by now.
        while stuck > 0 && reap(-1) {
            stuck -= 1;
        }
        if left.is_empty() {
            let mut count = 0;
            while count < BATCH
                && stuck < STUCK
                && let Some(number) = next(commands)
            {
                batch[count] = number;
                count += 1;
            }
            left = 0..count;
        }
        while !left.is_empty() && stuck < STUCK {
            progress.get().store(0, Ordering::Relaxed);
            let Ok(child) = fork() else {
                std::thread::sleep(PATIENCE);
                if has_ended(daemon) {
                    end();
                }
                continue;
            };
            let Some(child) = child else { close_all(&batch[left], progress) };
            if !watch(child, daemon, progress) {
                stuck += 1;
            }
            left.start = (left.start + progress.get().load(Ordering::Relaxed) as usize).min(left.end);
        }
    }
}

/// Returns the number of the next descriptor to close.
fn next(commands: BorrowedFd<'_>) -> Option<RawFd> {
    let mut number = [0; size_of::<RawFd>()];
    let len = rustix::io::read(commands, &mut number).ok()?;
    (len == number.len()).then(|| RawFd::from_ne_bytes(number))
}

/// Buries a child that has ended, if there is one: this one, or any (-1).
fn reap(child: libc::pid_t) -> bool {
    // SAFETY: the kernel is told that the status is not wanted.
    let found = unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::WNOHANG) };
    // There is none any more if whoever started the daemon ignored the ends of children.
    found > 0
        || (child > 0 && found < 0 && Errno::from_io_error(&io::Error::last_os_error()) == Some(Errno::CHILD))
}

/// Waits for a child. Kills it if it gets nowhere. Returns whether it has ended.
fn watch(child: Pid, daemon: BorrowedFd<'_>, progress: &Progress) -> bool {
    let (mut seen, mut since, mut killed) = (0, Instant::now(), false);
    loop {
        if reap(child.as_raw_nonzero().get()) {
            return true;
        }
        let _ =
            poll(&mut [PollFd::new(&daemon, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 200_000 }));
        if has_ended(daemon) {
            end();
        }
        let now = progress.get().load(Ordering::Relaxed);
        if now != seen && !killed {
            (seen, since) = (now, Instant::now());
        } else if since.elapsed() > PATIENCE {
            if killed {
                return false;
            }
            let _ = rustix::process::kill_process(child, rustix::process::Signal::KILL);
            (killed, since) = (true, Instant::now());
        }
    }
}

/// What a child of it does.
fn close_all(batch: &[RawFd], progress: &Progress) -> ! {
    extern "C" fn nothing(_: libc::c_int) {}
    name(c"ginneld-close");
    // SAFETY: zeros are a valid action and a valid set, and the handler does nothing. The timer is this process's.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut());
        let mut alarm: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut alarm, libc::SIGALRM);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const alarm, std::ptr::null_mut());
        let every = libc::timeval { tv_sec: 0, tv_usec: INTERRUPTION };
        let timer = libc::itimerval { it_interval: every, it_value: every };
        libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut());
    }
    for &fd in batch {
        progress.get().fetch_add(1, Ordering::Relaxed);
        close(fd);
    }
    exit();
}

fn close(fd: RawFd) {
    // SAFETY: the daemon has given the descriptor up.
    unsafe { libc::close(fd) };
}

/// Ends what is open, after the daemon has ended, and then this process. Nothing here waits for what a stranger can hold.
fn end() -> ! {
    let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(MOST).min(MOST);
    // Standard input and output may be sockets that other programs share.
    for fd in 3..limit as RawFd {
        // SAFETY: nobody closes it meanwhile but a child, after which its number means nothing, because nobody opens anything any more.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let Ok(stat) = rustix::fs::fstat(borrowed) else { continue };
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            // Sockets are closed last, together, because that may take for ever. Nobody can connect to one that was shut down.
            rustix::fs::FileType::Socket => {
                let _ = shutdown(borrowed, Shutdown::Both);
                if socket_acceptconn(borrowed) == Ok(true) {
                    while let Ok(waiting) = accept_with(borrowed, SocketFlags::CLOEXEC) {
                        let _ = shutdown(&waiting, Shutdown::Both);
                        let _ = waiting.into_raw_fd();
                    }
                }
            }
            // What an epoll or an eventfd is closed with may be anything, too. Nobody misses them.
            rustix::fs::FileType::Unknown => {}
            _ => close(fd),
        }
    }
    exit();
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::wait::wait_until;
    use rustix::pipe::pipe;

    /// Has a descriptor closed, and waits until it is.
    fn closes(process: &mut Process) {
        let (read, write) = pipe().unwrap();
        process.close(write).unwrap();
        assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0), "the other end");
    }

    #[test]
    fn one_that_was_killed_is_started_again() {
        let mut process = Process::start().unwrap();
        closes(&mut process);
        let first = process.child.pid;
        rustix::process::kill_process(first, rustix::process::Signal::KILL).unwrap();
        wait_until("its end", || has_ended(process.child.ended.as_fd()));
        closes(&mut process);
        assert_ne!(process.child.pid, first);
    }

    #[test]
    fn more_descriptors_than_one_child_closes() {
        let mut process = Process::start().unwrap();
        let (read, write) = pipe().unwrap();
        for _ in 0..3 * BATCH {
            let mut copy = write.try_clone().unwrap();
            // It may have more to do than it can be told at once.
            while let Err(back) = process.close(copy) {
                copy = back;
                std::thread::yield_now();
            }
        }
        drop(write);
        assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0));
    }
}
