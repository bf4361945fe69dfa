//! The **closer**: a process that has nothing open of this one, gets connections by `SCM_RIGHTS`, and closes them last.
//!
//! The last close of a Unix socket also closes what lies unread in its queue, and a program can send what nobody can close: an eventfd in
//! an epoll instance whose lock it holds, or a file of a file system that does not answer. No signal ends that wait. A thread that is in
//! it keeps its process from ending, even by `kill -9`. So the closer has a **worker**, which takes the connections and closes them. A
//! timer interrupts a close that can be interrupted (of a TCP socket with `SO_LINGER`). A worker that gets nowhere is killed, and not
//! waited for: its end goes on with the close, and may take for ever, and another worker takes its place.
//!
//! A worker takes all connections that wait before it closes one. While too many of those that were killed have not ended, it closes
//! nothing; when it has as many as it can take, it ends, and the next one goes on. So whatever programs send, and however fast, the
//! daemon gets rid of the descriptors.
//!
//! | the closer | if the daemon ends | if the closer is killed | if its worker is killed |
//! |---|---|---|---|
//! | is idle | it ends, and so does the worker | so is the worker; the next close starts another | another is started |
//! | has a worker that closes | the same, and the worker's end closes what it has | the same | the same |
//! | has a worker that is stuck | the same, but that worker is there until it is let go | the same | it has been already |
#![allow(unsafe_code)] // Descriptors that are known by number, and messages without memory from the allocator.

use crate::forked::{Forked, Shared, exit, fork, has_ended, last_error, name, part_from_daemon, reap};
use ginnel_fdpass::{SendFlags, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, PidfdFlags, Resource, Signal, getpid, getppid, getrlimit, kill_process, pidfd_open,
    set_parent_process_death_signal,
};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use zerocopy::FromZeros;

/// A worker that has closed nothing for this long is killed.
const PATIENCE: Duration = Duration::from_millis(100);
/// While this many workers that were killed have not ended, nothing is closed.
const STUCK: u32 = 16;
/// How often a close that can be interrupted is.
const INTERRUPTION: libc::suseconds_t = 1000;
/// The most connections that a worker has.
const HELD: usize = 16384;
/// The descriptors of a worker that are not connections.
const OTHERS: u64 = 16;

/// The messages to a worker: a connection, and that this process has closed all that it has sent.
const CONNECTION: u8 = 1;
const CLOSED: u8 = 2;

/// The daemon's side of the closer.
#[derive(Debug)]
pub struct Process {
    /// Where workers get connections.
    socket: OwnedFd,
    ends: Ends,
    child: Forked,
}

/// What the closer has open.
#[derive(Debug)]
struct Ends {
    socket: OwnedFd,
    /// Becomes readable when the daemon has ended.
    daemon: OwnedFd,
    /// A worker writes to this before it closes, and before it ends.
    news: OwnedFd,
    reader: OwnedFd,
}

impl Process {
    /// Starts the closer. The earlier this is, the less memory it keeps.
    pub fn start() -> io::Result<Self> {
        let (socket, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let daemon = pidfd_open(getpid(), PidfdFlags::empty())?;
        let (reader, news) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let ends = Ends { socket: theirs, daemon, news, reader };
        let child = ends.start()?;
        Ok(Self { socket, ends, child })
    }

    /// Has a connection closed. Waits until a worker has room for it.
    pub fn close(&mut self, fd: OwnedFd) {
        self.say(CONNECTION, &[fd.as_fd()]);
        // The message has it, too, so this is not its last close.
        drop(fd);
        self.say(CLOSED, &[]);
    }

    fn say(&mut self, kind: u8, fds: &[BorrowedFd<'_>]) {
        loop {
            let errno = match send(self.socket.as_fd(), &[kind], fds, SendFlags::DONTWAIT) {
                Ok(_) if !self.child.has_ended() => return,
                // The next one gets it.
                Ok(_) => return self.restart(),
                Err(errno) => errno,
            };
            if errno != Errno::AGAIN {
                tracing::warn!(%errno, "a connection cannot be closed yet");
                std::thread::sleep(PATIENCE);
            } else {
                let mut events = [
                    PollFd::new(&self.socket, PollFlags::OUT),
                    PollFd::from_borrowed_fd(self.child.ended(), PollFlags::IN),
                ];
                let _ = poll(&mut events, None);
            }
            if self.child.has_ended() {
                self.restart();
            }
        }
    }

    fn restart(&mut self) {
        match self.ends.start() {
            Ok(child) => {
                tracing::warn!("the closer of connections has ended, and is started again: was it killed?");
                self.child = child;
            }
            Err(error) => {
                tracing::error!(%error, "there is no closer of connections: some stay open");
                std::thread::sleep(PATIENCE);
            }
        }
    }
}

impl Ends {
    /// Starts a closer.
    fn start(&self) -> io::Result<Forked> {
        let progress = Shared::new()?;
        // SAFETY: all of this makes system calls only.
        unsafe {
            Forked::start(|| {
                part_from_daemon(&[&self.socket, &self.daemon, &self.news, &self.reader]);
                serve(self, &progress)
            })
        }
    }
}

/// What a worker does. The memory is shared with it.
#[derive(Debug, FromZeros)]
struct Progress {
    /// The worker may close what it has got.
    may_close: AtomicBool,
    /// How many closes have begun, and how many are done.
    begun: AtomicU32,
    done: AtomicU32,
    /// The worker ends, which may take for ever.
    ends: AtomicBool,
}

/// What the closer does, by system calls only.
fn serve(ends: &Ends, progress: &Progress) -> ! {
    name(c"ginneld-closer");
    let own = getpid();
    // The workers that have not ended, with the present one while there is one.
    let mut stuck = 0;
    loop {
        progress.may_close.store(stuck < STUCK, Ordering::Relaxed);
        progress.begun.store(0, Ordering::Relaxed);
        progress.done.store(0, Ordering::Relaxed);
        progress.ends.store(false, Ordering::Relaxed);
        // SAFETY: `work` makes system calls only.
        match unsafe { fork() } {
            Ok(None) => work(ends, progress, own),
            Ok(Some(worker)) => {
                stuck += 1;
                watch(worker, ends, progress, &mut stuck);
            }
            Err(_) => std::thread::sleep(PATIENCE),
        }
        if has_ended(ends.daemon.as_fd()) {
            exit();
        }
    }
}

/// Watches a worker until it ends, or another must take its place, or the daemon ends.
fn watch(worker: Pid, ends: &Ends, progress: &Progress, stuck: &mut u32) {
    let (mut seen, mut since) = (0, None);
    loop {
        // The end of a worker that was killed is no event here.
        let wait = match since {
            Some(_) => Some(Timespec { tv_sec: 0, tv_nsec: 1_000_000 }),
            None if *stuck > 1 => Some(Timespec { tv_sec: 0, tv_nsec: 100_000_000 }),
            None => None,
        };
        let mut events = [PollFd::new(&ends.reader, PollFlags::IN), PollFd::new(&ends.daemon, PollFlags::IN)];
        let _ = poll(&mut events, wait.as_ref());
        if has_ended(ends.daemon.as_fd()) {
            return;
        }
        let _ = rustix::io::read(&ends.reader, &mut [0; 64]);
        let mut ended = false;
        while let Some(child) = reap() {
            *stuck -= 1;
            ended |= child == worker;
        }
        if ended || progress.ends.load(Ordering::Relaxed) {
            return;
        }
        progress.may_close.store(*stuck <= STUCK, Ordering::Relaxed);
        let (done, begun) = (progress.done.load(Ordering::Relaxed), progress.begun.load(Ordering::Relaxed));
        since = match since {
            _ if begun == done => None,
            Some(since) if seen == begun => Some(since),
            _ => Some(Instant::now()),
        };
        seen = begun;
        if since.is_some_and(|since: Instant| since.elapsed() > PATIENCE) {
            let _ = kill_process(worker, Signal::KILL);
            return;
        }
    }
}

/// What a worker does, by system calls only.
fn work(ends: &Ends, progress: &Progress, closer: Pid) -> ! {
    name(c"ginneld-close");
    // What another worker is told is not for this one.
    if set_parent_process_death_signal(Some(Signal::KILL)).is_err() || getppid() != Some(closer) {
        exit();
    }
    prepare_interruptions();
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).saturating_sub(OTHERS);
    let most = usize::try_from(limit).unwrap_or(HELD).clamp(1, HELD);
    let mut held = [0; HELD];
    // While the daemon has the last of these open too, this process neither closes anything nor ends, so that the daemon's close of it is
    // not the last one.
    let (mut len, mut shared) = (0, false);
    loop {
        let may_close = progress.may_close.load(Ordering::Relaxed);
        if shared || len < most {
            let wait = match shared || len == 0 {
                true => None,
                // The leave to close is no event here.
                false => Some(Timespec { tv_sec: 0, tv_nsec: if may_close { 0 } else { 100_000_000 } }),
            };
            let mut events = [PollFd::new(&ends.socket, PollFlags::IN)];
            let _ = poll(&mut events, wait.as_ref());
            if !events[0].revents().is_empty() {
                match receive(ends.socket.as_fd()) {
                    // One too many ends this process, which closes it.
                    Ok(Some(Message::Connection(_))) if len == most => break,
                    Ok(Some(Message::Connection(fd))) => {
                        held[len] = fd;
                        (len, shared) = (len + 1, true);
                    }
                    Ok(Some(Message::Closed)) => shared = false,
                    Ok(None) => {}
                    Err(()) => break,
                }
                continue;
            }
            if shared {
                continue;
            }
        } else if !may_close {
            break;
        }
        if may_close && len > 0 {
            len -= 1;
            close(held[len], ends, progress);
        }
    }
    progress.ends.store(true, Ordering::Relaxed);
    let _ = rustix::io::write(&ends.news, &[0]);
    exit();
}

/// Makes the timer's signal interrupt this process, and do nothing else.
fn prepare_interruptions() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: zeros are a valid action and a valid set, and the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut());
        let mut alarm: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut alarm, libc::SIGALRM);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const alarm, std::ptr::null_mut());
    }
}

/// Interrupts this process from time to time, or not any more (0).
fn interrupt(every: libc::suseconds_t) {
    let every = libc::timeval { tv_sec: 0, tv_usec: every };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: the timer is this process's.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
}

fn close(connection: RawFd, ends: &Ends, progress: &Progress) {
    progress.begun.fetch_add(1, Ordering::Relaxed);
    // If the pipe is full, the closer has something to read.
    let _ = rustix::io::write(&ends.news, &[0]);
    interrupt(INTERRUPTION);
    // SAFETY: the descriptor has come with a message, and nothing else uses it.
    unsafe { libc::close(connection) };
    interrupt(0);
    progress.done.fetch_add(1, Ordering::Relaxed);
}

/// What a worker is told.
enum Message {
    Connection(RawFd),
    Closed,
}

/// Takes a message, without memory from the allocator. Fails at the end, and if a descriptor is lost.
fn receive(socket: BorrowedFd<'_>) -> Result<Option<Message>, ()> {
    #[repr(C)]
    union Control {
        header: libc::cmsghdr,
        bytes: [u8; 64],
    }
    let mut kind = [0u8; 1];
    let mut control = MaybeUninit::<Control>::zeroed();
    let mut iov = libc::iovec { iov_base: kind.as_mut_ptr().cast(), iov_len: kind.len() };
    // SAFETY: zeros are a valid header; it names a byte and a buffer that live longer than the call, which is aligned for headers.
    // `CMSG_LEN` only computes. The descriptor's header and bytes lie in the buffer, as the length in the header says.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as usize;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        let len = libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags);
        if len < 0 && matches!(last_error(), Errno::AGAIN | Errno::INTR) {
            return Ok(None);
        }
        if len != 1 || message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(());
        }
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if kind[0] == CONNECTION
            && let Some(found) = header.as_ref()
            && found.cmsg_len as u64 == u64::from(libc::CMSG_LEN(size_of::<RawFd>() as u32))
        {
            return Ok(Some(Message::Connection(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned())));
        }
    }
    Ok((kind[0] == CLOSED).then_some(Message::Closed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::wait::wait_until;
    use rustix::pipe::pipe;

    /// Has a descriptor closed, and waits until it is.
    fn closes(process: &mut Process) {
        let (read, write) = pipe().unwrap();
        process.close(write);
        assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0), "the other end");
    }

    #[test]
    fn one_that_was_killed_is_started_again() {
        let mut process = Process::start().unwrap();
        closes(&mut process);
        let first = process.child.pid();
        kill_process(first, Signal::KILL).unwrap();
        wait_until("its end", || process.child.has_ended());
        closes(&mut process);
        assert_ne!(process.child.pid(), first);
    }

    #[test]
    fn more_descriptors_than_a_worker_holds() {
        let mut process = Process::start().unwrap();
        let (read, write) = pipe().unwrap();
        for _ in 0..HELD + 100 {
            process.close(write.try_clone().unwrap());
        }
        drop(write);
        assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0));
    }

    #[test]
    fn what_the_daemon_has_open_is_not_open_in_the_closer() {
        let pipe = || pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (earlier, write) = pipe();
        let mut process = Process::start().unwrap();
        let (later, other) = pipe();
        closes(&mut process);
        drop((write, other));
        for end in [earlier, later] {
            assert_eq!(rustix::io::read(&end, &mut [0; 1]), Ok(0));
        }
    }
}
