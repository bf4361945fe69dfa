//! Closes the files that programs have sent. Threads of its own do this, because the last close of a descriptor may block for as
//! long as the program that made it likes:
//!
//! - A TCP socket with `SO_LINGER` and unsent bytes blocks for as long as its user has chosen. So does a Unix socket that holds
//!   an unread message with such a descriptor, and so does a message whose descriptors find no room. A signal ends that wait, and
//!   the kernel sends the rest by itself. Therefore one thread closes all sockets, and a timer interrupts it.
//! - Another file may wait for a program and ignore signals (FUSE). No honest program sends one, so each such packet gets a
//!   thread of its own, and the daemon does not listen to a user who keeps several of these threads busy.
#![allow(unsafe_code)] // For a timer that sends a signal to one thread, which no safe crate offers.

use ginnel_fdpass::{SendFlags, send};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

/// The longest time that closing a batch of sockets may block.
const PATIENCE: Duration = Duration::from_millis(1);
/// The number of packets whose sockets may wait to be closed. The next packet blocks until there is room, for about [`PATIENCE`].
const QUEUE: usize = 32;
/// The number of packets with other files that may be in the process of being closed for one user.
const SLOW_PACKETS: usize = 4;

/// The reason for which the daemon does not listen to a user ([`Closer::is_held_up_by`]).
pub const HELD_UP: &str = "this user has sent files that take too long to close (FUSE?): make the file system answer, or unmount it";

/// The user of a connection whose user is not known.
pub const NOBODY: u32 = u32::MAX;

/// The threads that close files. Clones share them, and they end with the last clone.
#[derive(Clone, Debug)]
pub struct Closer {
    sockets: SyncSender<Sockets>,
    slow_packets: SlowPackets,
}

/// Sockets to be closed.
#[derive(Debug)]
struct Sockets {
    fds: Vec<OwnedFd>,
    /// Close these only after those that were queued before them.
    later: bool,
}

/// The number of packets of each user that contain files other than sockets and are being closed now.
type SlowPackets = Arc<Mutex<BTreeMap<u32, usize>>>;

impl Closer {
    /// Starts the thread that closes sockets.
    pub fn start() -> io::Result<Self> {
        let (sockets, queue) = sync_channel(QUEUE);
        Builder::new().name("closer".into()).spawn(move || close_sockets(&queue))?;
        Ok(Self { sockets, slow_packets: SlowPackets::default() })
    }

    /// Closes connections of a user, and what the user has sent with a packet.
    pub fn close(&self, uid: u32, fds: impl IntoIterator<Item = OwnedFd>) {
        self.close_in_order(uid, fds, false);
    }

    /// Does the same as `close`, but closes these sockets only after all sockets that were queued before.
    pub fn close_later(&self, uid: u32, fds: impl IntoIterator<Item = OwnedFd>) {
        self.close_in_order(uid, fds, true);
    }

    fn close_in_order(&self, uid: u32, fds: impl IntoIterator<Item = OwnedFd>, later: bool) {
        let is_socket = |fd: &OwnedFd| sockopt::socket_domain(fd).is_ok();
        let (sockets, others): (Vec<_>, Vec<_>) = fds.into_iter().partition(is_socket);
        if !sockets.is_empty() {
            // If the thread is gone, the sockets are closed here. It ends only with the last sender.
            let _ = self.sockets.send(Sockets { fds: sockets, later });
        }
        if !others.is_empty() {
            self.close_slowly(uid, others);
        }
    }

    /// Returns whether so many files of this user are being closed that its connections should end and nothing more should be
    /// accepted from it.
    pub fn is_held_up_by(&self, uid: u32) -> bool {
        self.slow_packets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&uid)
            .is_some_and(|n| *n >= SLOW_PACKETS)
    }

    fn close_slowly(&self, uid: u32, fds: Vec<OwnedFd>) {
        let counted = SlowPacket::count(&self.slow_packets, uid);
        let closing = Builder::new().name("stray".into()).spawn(move || {
            drop(fds);
            drop(counted);
        });
        if let Err(error) = closing {
            tracing::warn!(uid, %error, "cannot start a thread to close a file that a program has sent");
        }
    }
}

/// One packet that is counted in [`SlowPackets`].
struct SlowPacket(SlowPackets, u32);

impl SlowPacket {
    fn count(slow_packets: &SlowPackets, uid: u32) -> Self {
        *slow_packets.lock().unwrap_or_else(PoisonError::into_inner).entry(uid).or_default() += 1;
        Self(slow_packets.clone(), uid)
    }
}

impl Drop for SlowPacket {
    fn drop(&mut self) {
        let mut slow_packets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = slow_packets.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                slow_packets.remove(&self.1);
            }
        }
    }
}

fn close_sockets(queue: &Receiver<Sockets>) {
    let interrupter = Interrupter::new();
    if let Err(error) = &interrupter {
        tracing::warn!(%error, "cannot make a timer: a program can delay the closing of files that others have sent");
    }
    let interrupt = |every| interrupter.iter().for_each(|timer| timer.set(every));
    let mut next = None;
    while let Some(Sockets { fds, .. }) = next.take().or_else(|| queue.recv().ok()) {
        interrupt(PATIENCE);
        next = close_together(fds, queue);
        interrupt(Duration::ZERO);
    }
}

/// Closes these sockets and those that wait, with a single system call if possible, so that one signal ends the wait for all of
/// them. To that end they are put in the queue of a socket, which is then closed. Returns the sockets that must be closed after
/// them.
fn close_together(first: Vec<OwnedFd>, queue: &Receiver<Sockets>) -> Option<Sockets> {
    let (near, far) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).ok()?;
    let mut fds = first;
    let later = loop {
        let taken = send(near.as_fd(), &[0], &fds, SendFlags::DONTWAIT).is_ok();
        // If the sockets were sent, this is not their last close.
        drop(fds);
        match queue.try_recv() {
            Ok(next) if next.later || !taken => break Some(next),
            Ok(next) => fds = next.fds,
            Err(_) => break None,
        }
    };
    drop((near, far));
    later
}

thread_local! {
    static INTERRUPTER: Option<Interrupter> = Interrupter::new().ok();
}

/// Makes a system call with a descriptor that a program has sent. If the call closes something and blocks on that, a timer
/// interrupts it after about `PATIENCE`.
pub fn interrupted<T>(call: impl FnOnce() -> T) -> T {
    let interrupt = |every| INTERRUPTER.with(|timer| timer.iter().for_each(|timer| timer.set(every)));
    interrupt(PATIENCE);
    let result = call();
    interrupt(Duration::ZERO);
    result
}

/// A timer that interrupts the blocking calls of the thread that made it.
struct Interrupter(libc::timer_t);

const SIGNAL: libc::c_int = libc::SIGALRM;

impl Interrupter {
    fn new() -> io::Result<Self> {
        // SAFETY: the handler does nothing.
        unsafe { signal_hook::low_level::register(SIGNAL, || ()) }?;
        // SAFETY: zeros are a valid event and a valid set of signals, which the calls below fill. The event names this thread,
        // and the timer does not outlive it.
        unsafe {
            let mut signals: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut signals);
            libc::sigaddset(&raw mut signals, SIGNAL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const signals, std::ptr::null_mut());
            let mut event: libc::sigevent = std::mem::zeroed();
            (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_THREAD_ID, SIGNAL);
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer: libc::timer_t = std::ptr::null_mut();
            match libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) {
                0 => Ok(Self(timer)),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }

    /// Sets the interval of the interruptions, from now on; zero stops them.
    fn set(&self, every: Duration) {
        let time = libc::timespec {
            tv_sec: every.as_secs() as libc::time_t,
            tv_nsec: every.subsec_nanos() as libc::c_long,
        };
        let times = libc::itimerspec { it_interval: time, it_value: time };
        // SAFETY: the timer exists, and the times outlive the call.
        unsafe { libc::timer_settime(self.0, 0, &raw const times, std::ptr::null_mut()) };
    }
}

impl Drop for Interrupter {
    fn drop(&mut self) {
        // SAFETY: the timer exists, and is not used after this.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::net::{TcpListener, TcpStream};

    /// Returns a socket whose last close blocks for a day, and its other end, which never reads.
    fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        sockopt::set_socket_linger(&near, Some(Duration::from_secs(24 * 3600))).unwrap();
        near.set_nonblocking(true).unwrap();
        while rustix::io::write(&near, &[0; 65536]).is_ok() {}
        (near.into(), far)
    }

    #[test]
    fn sockets_that_linger_are_closed_one_after_another() {
        let closer = Closer::start().unwrap();
        let mut far = Vec::new();
        for packet in 0..2 * QUEUE {
            let (near, end) = lingering();
            far.push(end);
            let more = (packet % 8 == 0).then(lingering);
            closer.close(
                1,
                [near].into_iter().chain(more.map(|(near, end)| {
                    far.push(end);
                    near
                })),
            );
        }
        // These must be closed after all of the earlier ones.
        let (last, peer) = std::os::unix::net::UnixStream::pair().unwrap();
        closer.close(1, [last.into()]);
        let hung_up =
            poll(&mut [PollFd::new(&peer, PollFlags::IN)], Some(&Timespec { tv_sec: 20, tv_nsec: 0 }));
        assert_eq!(hung_up, Ok(1), "it waits");
        assert!(!closer.is_held_up_by(1));
    }

    #[test]
    fn the_kernel_closes_descriptors_without_room_and_does_not_block() {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let mut ends = Vec::new();
        for _ in 0..3 {
            let (socket, end) = lingering();
            ends.push(end);
            send(near.as_fd(), &[0], &[socket], SendFlags::empty()).unwrap();
            let flags = ginnel_fdpass::RecvFlags::DONTWAIT;
            let got = interrupted(|| ginnel_fdpass::receive(far.as_fd(), &mut [0], 0, flags)).unwrap();
            assert!(got.fds_lost && got.fds.is_empty());
        }
    }

    #[test]
    fn a_user_who_keeps_threads_busy_is_held_up() {
        let closer = Closer::start().unwrap();
        let mut busy: Vec<_> =
            (0..SLOW_PACKETS).map(|_| SlowPacket::count(&closer.slow_packets, 7)).collect();
        assert!(closer.is_held_up_by(7) && !closer.is_held_up_by(8));
        busy.pop();
        assert!(!closer.is_held_up_by(7));
        busy.clear();
        assert!(closer.slow_packets.lock().unwrap().is_empty());
        // A file whose close does not block.
        let (read, write) = rustix::pipe::pipe().unwrap();
        closer.close(7, [write]);
        assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0), "closed");
    }
}
