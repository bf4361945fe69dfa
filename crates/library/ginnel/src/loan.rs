//! A file descriptor that is lent to the daemon.
//!
//! A descriptor on its way to another process keeps its file open, and so does the other process. If the daemon were
//! sent a copy of a connection's descriptor, the peer would see the connection end only when the daemon had closed that
//! copy. So this side does not send the descriptor itself, but one end of a pair of Unix sockets, in which a message
//! with the descriptor waits. This side keeps a copy of that end:
//!
//! - As long as the daemon has not taken the message, this side can take it back, whatever the daemon does.
//! - Once the daemon has taken the message, it reads what it needs, closes the descriptor, and then closes its end of
//!   the pair, which this side notices.

use crate::connection::wait;
use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use rustix::event::PollFlags;
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// A file descriptor that is lent to the daemon. The loan belongs to the process that has made it; in a child of a
/// fork, dropping it only closes the child's own copies. Dropping it in its process leaves the descriptor to the
/// daemon.
#[derive(Debug)]
pub struct Loan {
    process: u32,
    /// The end that the daemon has too, until the daemon has taken the message.
    shared: Option<Hidden>,
    /// The other end, which hangs up when the daemon has closed the descriptor.
    own: Hidden,
}

impl Loan {
    /// Prepares to lend a descriptor. Nobody else has it before [`Loan::to_send`] is sent.
    pub(crate) fn new(lent: BorrowedFd<'_>) -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (own, shared) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        fdpass::send(own.as_fd(), &[0], &[lent], SendFlags::DONTWAIT)?;
        Ok(Self { process: std::process::id(), shared: Some(Hidden::new(shared)?), own: Hidden::new(own)? })
    }

    /// Returns the descriptor to send to the daemon.
    pub(crate) fn to_send(&self) -> Option<BorrowedFd<'_>> {
        self.shared.as_ref()?.get()
    }

    /// Returns whether the daemon has closed the descriptor. Does not wait.
    pub fn is_over(&mut self) -> bool {
        self.ends_by(Instant::now())
    }

    /// Takes the descriptor back. If the daemon has taken it, waits until the daemon has closed it, but for at most
    /// `patience`. Returns false if the daemon still has it.
    pub fn end(mut self, patience: Duration) -> bool {
        if self.process != std::process::id() {
            return true;
        }
        if let Some(shared) = self.shared.as_ref().and_then(Hidden::get)
            && fdpass::receive(shared, &mut [0], 1, RecvFlags::DONTWAIT).is_ok()
        {
            return true;
        }
        self.ends_by(Instant::now() + patience)
    }

    fn ends_by(&mut self, deadline: Instant) -> bool {
        if let Some(shared) = self.shared.as_ref().and_then(Hidden::get)
            && wait(shared, PollFlags::IN, Some(Instant::now()))
        {
            return false;
        }
        self.shared = None;
        self.own.get().is_none_or(|own| wait(own, PollFlags::IN, Some(deadline)))
    }
}

/// A descriptor that the program does not know about. A program that closes all descriptors it does not know closes
/// this one too, and its number may then belong to another file.
#[derive(Debug)]
struct Hidden {
    fd: ManuallyDrop<OwnedFd>,
    inode: u64,
}

impl Hidden {
    fn new(fd: OwnedFd) -> Result<Self, Errno> {
        let inode = fstat(&fd)?.st_ino;
        Ok(Self { fd: ManuallyDrop::new(fd), inode })
    }

    /// Returns the descriptor if its number still refers to this file.
    fn get(&self) -> Option<BorrowedFd<'_>> {
        let is_ours = fstat(&*self.fd).is_ok_and(|stat| stat.st_ino == self.inode);
        is_ours.then(|| self.fd.as_fd())
    }
}

impl Drop for Hidden {
    #[expect(unsafe_code, reason = "whether the descriptor is closed is decided here")]
    fn drop(&mut self) {
        if self.get().is_some() {
            // SAFETY: the descriptor is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::pipe;

    /// Returns a loan of one end of a pipe, the daemon's copy of the shared end, and the other end of the pipe.
    fn lent() -> (Loan, OwnedFd, OwnedFd) {
        let (read, write) = pipe().unwrap();
        let loan = Loan::new(write.as_fd()).unwrap();
        let daemons = loan.to_send().unwrap().try_clone_to_owned().unwrap();
        (loan, daemons, read)
    }

    /// Returns whether all copies of the other end of a pipe are closed.
    fn is_closed(read: &OwnedFd) -> bool {
        wait(read.as_fd(), PollFlags::IN, Some(Instant::now()))
    }

    fn take(daemons: &OwnedFd) -> OwnedFd {
        fdpass::receive(daemons.as_fd(), &mut [0], 1, RecvFlags::DONTWAIT).unwrap().fds.pop().unwrap()
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_descriptor_that_the_daemon_has_not_taken_comes_back_at_once() {
        let (mut loan, daemons, read) = lent();
        assert!(!loan.is_over() && !is_closed(&read));
        assert!(loan.end(Duration::ZERO));
        assert!(is_closed(&read));
        let nothing = fdpass::receive(daemons.as_fd(), &mut [0], 1, RecvFlags::DONTWAIT).unwrap();
        assert_eq!((nothing.len, nothing.fds.len()), (0, 0), "the daemon finds the end of the pair");
    }

    #[test]
    fn a_descriptor_that_the_daemon_has_taken_is_waited_for() {
        let (mut loan, daemons, read) = lent();
        let taken = take(&daemons);
        assert!(!loan.is_over(), "it has it");
        let closing = std::thread::spawn(move || drop((taken, daemons)));
        assert!(loan.end(PATIENCE));
        assert!(is_closed(&read));
        closing.join().unwrap();

        let (mut loan, daemons, _read) = lent();
        drop(take(&daemons));
        drop(daemons);
        assert!(loan.is_over());

        let (loan, daemons, read) = lent();
        let taken = take(&daemons);
        assert!(!loan.end(Duration::from_millis(1)), "no longer than it was told");
        drop((taken, daemons));
        assert!(is_closed(&read));
    }

    #[test]
    fn the_death_of_the_daemon_ends_the_loan() {
        let (mut loan, daemons, read) = lent();
        drop((take(&daemons), daemons));
        assert!(loan.is_over() && is_closed(&read));
        // The daemon dies before it has taken the message.
        let (loan, daemons, read) = lent();
        drop(daemons);
        assert!(loan.end(PATIENCE) && is_closed(&read));
    }
}
