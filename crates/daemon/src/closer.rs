//! Closes what programs have sent, in threads of its own, because the last close of a descriptor may wait for whoever has made it:
//!
//! - A TCP socket with `SO_LINGER` and unsent bytes waits for as long as its user likes. So does a Unix socket in which a message
//!   with such a descriptor lies unread, and a message whose descriptors find no room. A signal ends that wait, and the kernel
//!   sends the rest by itself: one thread closes all sockets, and a timer interrupts it.
//! - Another file may wait for a program and heed no signal (FUSE). Nobody sends one in good faith, so each such packet gets a thread
//!   of its own, and a user who keeps several of these busy is not listened to.
#![allow(unsafe_code)] // A timer that sends a signal to one thread, which no safe crate offers.

use ginnel_fdpass::{SendFlags, send};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

/// The longest that sockets wait, and all that are closed together with them.
const PATIENCE: Duration = Duration::from_millis(1);
/// Packets whose sockets may wait to be closed. The next one waits for its turn, which is a matter of [`PATIENCE`].
const QUEUE: usize = 32;
/// Packets with other files that may be closed for a user at a time.
const STRAYS: usize = 4;

/// Why a user is not listened to ([`Closer::is_held_up_by`]).
pub const HELD_UP: &str = "this user has sent files that take too long to be closed (FUSE?): let the file system answer, or unmount it";

/// The user of a connection of whom nothing is known.
pub const NOBODY: u32 = u32::MAX;

/// The threads. Clones share them; they end with the last one.
#[derive(Clone, Debug)]
pub struct Closer {
    sockets: SyncSender<Sockets>,
    strays: Strays,
}

/// Sockets to be closed.
#[derive(Debug)]
struct Sockets {
    fds: Vec<OwnedFd>,
    /// Only after those before them.
    later: bool,
}

/// Packets of each user that are being closed, other than sockets.
type Strays = Arc<Mutex<BTreeMap<u32, usize>>>;

impl Closer {
    /// Starts the thread for sockets.
    pub fn start() -> io::Result<Self> {
        let (sockets, queue) = sync_channel(QUEUE);
        Builder::new().name("closer".into()).spawn(move || close_sockets(&queue))?;
        Ok(Self { sockets, strays: Strays::default() })
    }

    /// Closes what a user has sent with a packet, and connections.
    pub fn close(&self, uid: u32, fds: impl IntoIterator<Item = OwnedFd>) {
        self.close_in_order(uid, fds, false);
    }

    /// The same, for sockets only after all sockets that were to be closed before.
    pub fn close_later(&self, uid: u32, fds: impl IntoIterator<Item = OwnedFd>) {
        self.close_in_order(uid, fds, true);
    }

    fn close_in_order(&self, uid: u32, fds: impl IntoIterator<Item = OwnedFd>, later: bool) {
        let is_socket = |fd: &OwnedFd| sockopt::socket_domain(fd).is_ok();
        let (sockets, strays): (Vec<_>, Vec<_>) = fds.into_iter().partition(is_socket);
        if !sockets.is_empty() {
            // Without the thread, which ends with the last sender only, they are closed here.
            let _ = self.sockets.send(Sockets { fds: sockets, later });
        }
        if !strays.is_empty() {
            self.close_strays(uid, strays);
        }
    }

    /// Whether so much of this user's is being closed that nothing more is to be taken from it: its connections are to be ended.
    pub fn is_held_up_by(&self, uid: u32) -> bool {
        self.strays.lock().unwrap_or_else(PoisonError::into_inner).get(&uid).is_some_and(|n| *n >= STRAYS)
    }

    fn close_strays(&self, uid: u32, fds: Vec<OwnedFd>) {
        let counted = Stray::count(&self.strays, uid);
        let closing = Builder::new().name("stray".into()).spawn(move || {
            drop(fds);
            drop(counted);
        });
        if let Err(error) = closing {
            tracing::warn!(uid, %error, "no thread to close a file that a program has sent");
        }
    }
}

/// A packet in [`Strays`].
struct Stray(Strays, u32);

impl Stray {
    fn count(strays: &Strays, uid: u32) -> Self {
        *strays.lock().unwrap_or_else(PoisonError::into_inner).entry(uid).or_default() += 1;
        Self(strays.clone(), uid)
    }
}

impl Drop for Stray {
    fn drop(&mut self) {
        let mut strays = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = strays.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                strays.remove(&self.1);
            }
        }
    }
}

fn close_sockets(queue: &Receiver<Sockets>) {
    let interrupter = Interrupter::new();
    if let Err(error) = &interrupter {
        tracing::warn!(%error, "no timer: programs can delay what other programs have sent from being closed");
    }
    let interrupt = |every| interrupter.iter().for_each(|timer| timer.set(every));
    let mut next = None;
    while let Some(Sockets { fds, .. }) = next.take().or_else(|| queue.recv().ok()) {
        interrupt(PATIENCE);
        next = close_together(fds, queue);
        interrupt(Duration::ZERO);
    }
}

/// Closes these, and those that wait, with a single call as far as possible: a signal that comes meanwhile counts for all of them.
/// They lie in the queue of a socket that is closed. Returns those that are to be closed after them.
fn close_together(first: Vec<OwnedFd>, queue: &Receiver<Sockets>) -> Option<Sockets> {
    let (near, far) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).ok()?;
    let mut fds = first;
    let later = loop {
        let taken = send(near.as_fd(), &[0], &fds, SendFlags::DONTWAIT).is_ok();
        // Not the last close if they were taken.
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

/// Calls the kernel about what a program has sent. If that closes something which keeps the call waiting, it does so for about
/// `PATIENCE`.
pub fn interrupted<T>(call: impl FnOnce() -> T) -> T {
    let interrupt = |every| INTERRUPTER.with(|timer| timer.iter().for_each(|timer| timer.set(every)));
    interrupt(PATIENCE);
    let result = call();
    interrupt(Duration::ZERO);
    result
}

/// Interrupts what the thread that has made it waits for.
struct Interrupter(libc::timer_t);

const SIGNAL: libc::c_int = libc::SIGALRM;

impl Interrupter {
    fn new() -> io::Result<Self> {
        // SAFETY: the handler does nothing.
        unsafe { signal_hook::low_level::register(SIGNAL, || ()) }?;
        // SAFETY: zeros are a valid event and a valid set of signals, which the calls below fill. The thread is this one, and the
        // timer does not outlive it.
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

    /// Interrupts that often from now on, and not any more for zero.
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
        // SAFETY: it exists, and is not used any more.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::net::{TcpListener, TcpStream};

    /// A socket whose last close waits for a day, and its other end, which never reads.
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
        // Closed after all of them.
        let (last, peer) = std::os::unix::net::UnixStream::pair().unwrap();
        closer.close(1, [last.into()]);
        let hung_up =
            poll(&mut [PollFd::new(&peer, PollFlags::IN)], Some(&Timespec { tv_sec: 20, tv_nsec: 0 }));
        assert_eq!(hung_up, Ok(1), "it waits");
        assert!(!closer.is_held_up_by(1));
    }

    #[test]
    fn the_kernel_closes_what_finds_no_room_without_waiting() {
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
    fn who_keeps_threads_busy_is_not_listened_to() {
        let closer = Closer::start().unwrap();
        let mut busy: Vec<_> = (0..STRAYS).map(|_| Stray::count(&closer.strays, 7)).collect();
        assert!(closer.is_held_up_by(7) && !closer.is_held_up_by(8));
        busy.pop();
        assert!(!closer.is_held_up_by(7));
        busy.clear();
        assert!(closer.strays.lock().unwrap().is_empty());
        // A file that nothing holds up.
        let (read, write) = rustix::pipe::pipe().unwrap();
        closer.close(7, [write]);
        assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0), "closed");
    }
}
