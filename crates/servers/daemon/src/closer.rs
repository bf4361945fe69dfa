//! Closes connections to programs. The last close of a Unix socket also closes what lies unread in its queue, and may block for as
//! long as the program that sent it likes. So a process of its own (`process`) does it, unless the queue is empty; and another one (`heir`)
//! closes what is open when this process ends.
//!
//! No descriptor of a program other than connections gets into this process ([`crate::strangers`]).

mod heir;
mod process;

use ginnel_fdpass::{RecvFlags, receive};
use heir::Heir;
use process::Process;
use rustix::net::sockopt::socket_type;
use rustix::net::{Shutdown, SocketType, shutdown};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{SendError, Sender, channel};
use std::thread::Builder;

/// Closes connections to programs. Clones share a thread and the processes that do it, which end with the last clone.
#[derive(Clone, Debug)]
pub struct Closer(Sender<OwnedFd>);

impl Closer {
    /// Starts the processes, and the thread that gives them connections.
    pub fn start() -> io::Result<Self> {
        let (mut process, mut heir) = (Process::start()?, Heir::start()?);
        let (closer, connections) = channel();
        // It waits when the process has much to do.
        Builder::new().name("closer".into()).spawn(move || {
            for connection in connections {
                heir.keep();
                process.close(connection);
            }
        })?;
        Ok(Self(closer))
    }

    /// Starts processes that outlive this one.
    pub fn start_for_life() -> io::Result<Self> {
        let closer = Self::start()?;
        std::mem::forget(closer.clone());
        Ok(closer)
    }

    /// Closes a connection, or a socket that listens. The peers see the end at once. Does not block.
    pub fn close(&self, connection: OwnedFd) {
        // What was sent to the peer stays readable. This fails only if the peer has closed its end.
        let _ = shutdown(&connection, Shutdown::Both);
        // Nothing can be added to its queue any more. If there is nothing in it, nothing else is closed with it. In the queue of a stream
        // there may be what this look does not show (`MSG_OOB`).
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        if socket_type(&connection) == Ok(SocketType::SEQPACKET)
            && receive(connection.as_fd(), &mut [0], 0, flags).is_ok_and(|got| got.len == 0 && !got.fds_lost)
        {
            return drop(connection);
        }
        if let Err(SendError(connection)) = self.0.send(connection) {
            // There is no thread any more, so there is no other way to keep it from being closed here.
            std::mem::forget(connection);
        }
    }
}

/// A connection to a program, which a [`Closer`] closes when this is dropped.
#[derive(Debug)]
pub struct Connected {
    fd: ManuallyDrop<OwnedFd>,
    closer: Option<Closer>,
}

impl Connected {
    /// Takes over a connection.
    pub fn new(fd: OwnedFd, closer: &Closer) -> Self {
        Self { fd: ManuallyDrop::new(fd), closer: Some(closer.clone()) }
    }

    /// Takes over a connection to a process that is trusted, so that it can be closed here.
    pub fn trusted(fd: OwnedFd) -> Self {
        Self { fd: ManuallyDrop::new(fd), closer: None }
    }
}

impl Drop for Connected {
    #[expect(unsafe_code, reason = "a field is moved out of a value that is being dropped")]
    fn drop(&mut self) {
        // SAFETY: nothing uses the field after this.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        match &self.closer {
            Some(closer) => closer.close(fd),
            None => drop(fd),
        }
    }
}

impl AsFd for Connected {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_fdpass::{SendFlags, send};
    use kit::hold::lingering;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::{AddressFamily, SocketFlags, socketpair};
    use std::os::unix::net::UnixStream;

    #[test]
    fn connections_with_sockets_that_linger_in_their_queues_are_closed_one_after_another() {
        let closer = Closer::start().unwrap();
        let mut kept = Vec::new();
        for _ in 0..64 {
            let (near, far) = UnixStream::pair().unwrap();
            let (socket, end) = lingering();
            send(far.as_fd(), &[0], &[socket], SendFlags::empty()).unwrap();
            kept.push((far, end));
            drop(Connected::new(near.into(), &closer));
        }
        // This must be closed after all of the earlier ones.
        let (last, peer) = UnixStream::pair().unwrap();
        send(last.as_fd(), b"x", &[] as &[OwnedFd], SendFlags::empty()).unwrap();
        closer.close(last.into());
        let hung_up =
            poll(&mut [PollFd::new(&peer, PollFlags::IN)], Some(&Timespec { tv_sec: 20, tv_nsec: 0 }));
        assert_eq!(hung_up, Ok(1), "it waits");
        let mut byte = [0; 2];
        assert_eq!(rustix::io::read(&peer, &mut byte), Ok(1), "what was sent can still be read");
        assert_eq!(rustix::io::read(&peer, &mut byte), Ok(0));
    }

    #[test]
    fn an_empty_packet_hides_nothing() {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::sockopt::set_socket_passcred(&near, true).unwrap();
        send(far.as_fd(), &[], &[] as &[OwnedFd], SendFlags::empty()).unwrap();
        let (socket, _end) = lingering();
        send(far.as_fd(), &[0], &[socket], SendFlags::empty()).unwrap();
        // If it were closed here, this would take a day.
        Closer::start().unwrap().close(near);
    }
}
