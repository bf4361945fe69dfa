//! Closes connections to programs. A thread of its own does this, because the last close of a Unix socket also closes what lies
//! unread in its queue, and may block for as long as the program that sent it likes: a TCP socket with `SO_LINGER` and unsent
//! bytes does. A signal ends that wait, and the kernel sends the rest by itself. So a timer interrupts the thread.
//!
//! No descriptor of a program other than connections gets into this process ([`crate::strangers`]).

use crate::interrupt::{Interrupter, PATIENCE};
use ginnel_fdpass::{SendFlags, send};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Builder;
use std::time::Duration;

/// The number of connections that may wait to be closed. The next one blocks until there is room, for about [`PATIENCE`].
const QUEUE: usize = 256;

/// The thread that closes connections. Clones share it, and it ends with the last clone.
#[derive(Clone, Debug)]
pub struct Closer(SyncSender<OwnedFd>);

impl Closer {
    /// Starts the thread.
    pub fn start() -> io::Result<Self> {
        let (connections, queue) = sync_channel(QUEUE);
        Builder::new().name("closer".into()).spawn(move || close_connections(&queue))?;
        Ok(Self(connections))
    }

    /// Closes a connection. Its peer sees the end at once.
    pub fn close(&self, connection: OwnedFd) {
        // What was sent to the peer stays readable. This fails only if the peer has closed its end.
        let _ = shutdown(&connection, Shutdown::Both);
        // If the thread is gone, the connection is closed here. The thread ends only with the last sender.
        let _ = self.0.send(connection);
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

fn close_connections(queue: &Receiver<OwnedFd>) {
    let interrupter = Interrupter::new();
    if let Err(error) = &interrupter {
        tracing::warn!(%error, "cannot make a timer: a program can delay the closing of connections of others");
    }
    let interrupt = |every| interrupter.iter().for_each(|timer| timer.set(every));
    while let Ok(connection) = queue.recv() {
        interrupt(PATIENCE);
        close_together(connection, queue);
        interrupt(Duration::ZERO);
    }
}

/// Closes this connection and those that wait, with a single system call if possible, so that one signal ends the wait for all of
/// them. To that end they are put in the queue of a socket, which is then closed.
fn close_together(first: OwnedFd, queue: &Receiver<OwnedFd>) {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let Ok((near, far)) = pair else { return drop(first) };
    let mut connection = first;
    loop {
        let taken = send(near.as_fd(), &[0], &[&connection], SendFlags::DONTWAIT).is_ok();
        // If it was sent, this is not its last close.
        drop(connection);
        match queue.try_recv() {
            Ok(next) if taken => connection = next,
            Ok(next) => {
                drop(next);
                break;
            }
            Err(_) => break,
        }
    }
    drop((near, far));
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::hold::lingering;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
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
}
