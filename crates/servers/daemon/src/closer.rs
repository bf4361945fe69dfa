//! Closes connections to programs. Threads of their own do this, because the last close of a Unix socket also closes what lies
//! unread in its queue, and may block for as long as the program that sent it likes: a TCP socket with `SO_LINGER` and unsent
//! bytes does. A signal ends that wait, and the kernel sends the rest by itself. So a timer interrupts the thread.
//!
//! There are files whose close no signal ends. A thread that closes one is lost, and another takes its place. So nobody waits for the
//! closing of connections, but the process does not end as long as such a thread waits.
//!
//! No descriptor of a program other than connections gets into this process ([`crate::strangers`]).

use crate::interrupt::{Interrupter, PATIENCE};
use ginnel_fdpass::{RecvFlags, SendFlags, receive, send};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

/// The number of connections that may wait for one thread. If more wait, there is another thread.
const QUEUE: usize = 256;
/// The most threads.
const THREADS: usize = 16;

/// The threads that close connections. Clones share them, and they end with the last clone.
#[derive(Clone, Debug)]
pub struct Closer(Arc<Mutex<Vec<SyncSender<OwnedFd>>>>);

impl Closer {
    /// Starts the first thread.
    pub fn start() -> io::Result<Self> {
        Ok(Self(Arc::new(Mutex::new(vec![start_thread()?]))))
    }

    /// Closes a connection. Its peer sees the end at once. Does not block.
    pub fn close(&self, connection: OwnedFd) {
        // What was sent to the peer stays readable. This fails only if the peer has closed its end.
        let _ = shutdown(&connection, Shutdown::Both);
        // Nothing can be added to its queue any more. If there is nothing in it, nothing else is closed with it.
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        if receive(connection.as_fd(), &mut [0], 0, flags).is_ok_and(|got| got.len == 0 && !got.fds_lost) {
            return drop(connection);
        }
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left = Some(connection);
        let mut give = |thread: &SyncSender<OwnedFd>| {
            left = left.take().and_then(|connection| match thread.try_send(connection) {
                Ok(()) => None,
                Err(TrySendError::Full(back) | TrySendError::Disconnected(back)) => Some(back),
            });
            left.is_none()
        };
        if threads.iter().any(&mut give) {
            return;
        }
        if threads.len() < THREADS
            && let Ok(thread) = start_thread()
        {
            give(&thread);
            threads.push(thread);
        }
        if let Some(connection) = left {
            tracing::warn!(
                "a connection stays open, because programs hold up the threads that close connections"
            );
            let _ = connection.into_raw_fd();
        }
    }
}

fn start_thread() -> io::Result<SyncSender<OwnedFd>> {
    let (connections, queue) = sync_channel(QUEUE);
    Builder::new().name("closer".into()).spawn(move || close_connections(&queue))?;
    Ok(connections)
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

    #[test]
    fn nobody_waits_for_threads_that_are_held_up() {
        let (held, _queue) = sync_channel(0);
        let closer = Closer(Arc::new(Mutex::new(vec![held])));
        let mut peers = Vec::new();
        for _ in 0..2 * QUEUE {
            let (near, far) = UnixStream::pair().unwrap();
            send(far.as_fd(), b"unread", &[] as &[OwnedFd], SendFlags::empty()).unwrap();
            closer.close(near.into());
            peers.push(far);
        }
        for peer in peers {
            let mut end = [PollFd::new(&peer, PollFlags::IN)];
            assert_eq!(poll(&mut end, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })), Ok(1));
        }
        assert!(closer.0.lock().unwrap().len() >= 2, "another thread has taken its place");
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
