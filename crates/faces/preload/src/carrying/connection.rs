//! The kernel's connection under a socket: its end, and the wake bytes in it.
#![allow(unsafe_code)] // System calls on descriptors of the program.

use crate::carrying::{counted, room};
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::rings::Rings;
use crate::state::socket::{End, Socket};
use crate::state::sockets::Using;
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, check};
use crate::system::{kernel, real};
use ginnel::SocketReceiver;
use ginnel_ring::carrier;
use libc::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// Wakes a sleeping peer with a byte that has no meaning. If there is no room for the byte, other bytes are on their way and wake
/// the peer. Sends nothing in a direction that no ring carries; there the peer looks by itself at intervals.
#[cold]
pub fn wake(socket: &'static Socket, fd: c_int) {
    let _errno = Kept::new();
    socket.sending.wake(|| {
        Using::begin(socket, fd)
            .is_some_and(|_using| kernel::send(fd, &[0], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) == 1)
    });
}

/// Records whether the connection has ended. Consumes no wake bytes: those are for the threads that sleep for them.
pub fn look_for_end(socket: &'static Socket, fd: c_int) {
    look_for(socket, fd, || ends_both(socket, &socket.receiving.lock()));
}

/// Does the same for a caller that holds the lock of the receiving direction.
pub fn look_for_end_in(socket: &'static Socket, fd: c_int, rings: &Rings<SocketReceiver>) {
    look_for(socket, fd, || ends_both(socket, rings));
}

fn look_for(socket: &'static Socket, fd: c_int, ends_both: impl FnOnce() -> bool) {
    let Some(_using) = Using::begin(socket, fd).filter(|_| !socket.receiving.is_superseded()) else { return };
    let ready = kernel::poll_now(fd, libc::POLLRDHUP);
    if ready & libc::POLLRDHUP != 0 && ready & libc::POLLERR == 0 && !is_peers_end(socket, fd) {
        return;
    }
    if ready & (libc::POLLERR | libc::POLLHUP) != 0 {
        // While the kernel carries the receiving direction, the program gets the error from the kernel, which tells it only once.
        if !matches!(socket.receiving.carrier(), Carrier::Ring | Carrier::Returning) {
            return socket.set_end(if ready & libc::POLLERR != 0 { End::Reset } else { End::Fin });
        }
        // Only one thread asks at a time. Otherwise a thread could find no error before another one has recorded the error that it
        // got.
        let facts = socket.facts.lock();
        if socket.end() < End::Reset {
            match error(fd) {
                // Both directions have ended. If this side has not shut down its own, the peer has broken the connection, and the
                // program was told.
                Errno(0) if ready & libc::POLLERR == 0 => {
                    let is_broken =
                        socket.sending.carrier() == Carrier::Kernel && !room::has_shut_down(socket);
                    if is_broken {
                        socket.note(Fact::ToldReset);
                    }
                    socket.set_end(if is_broken { End::Reset } else { End::Fin });
                }
                errno => socket.set_error(errno),
            }
        }
        drop(facts);
    } else if ready & libc::POLLRDHUP != 0 && ends_both() {
        socket.set_end(End::Fin);
    }
}

/// Returns whether a FIN of the kernel means that the peer has closed its socket. While the kernel carries what the peer sends, again or
/// still, a FIN ends that direction only. A ring that carries has an end of its own.
fn ends_both(socket: &'static Socket, rings: &Rings<SocketReceiver>) -> bool {
    let is_left = |receiver: &SocketReceiver| carrier::wakes_end(receiver.ring.memory()).is_some();
    match socket.receiving.carrier() {
        Carrier::Ring => !rings.all().any(is_left),
        Carrier::Counted => {
            rings.as_ref().is_some_and(|ring| counted::left(ring, socket.receiving.kernels()) != Ok(None))
        }
        Carrier::Kernel | Carrier::Changing | Carrier::Returning => false,
    }
}

/// Returns whether an end that the kernel reports is the peer's. If not, the program has shut down receiving, in this process or in a
/// relative; this function records that.
pub fn is_peers_end(socket: &'static Socket, fd: c_int) -> bool {
    if is_confined() {
        return !socket.has(Fact::ShutDownReceiving);
    }
    // TCP_TIME_WAIT, TCP_CLOSE, TCP_CLOSE_WAIT, TCP_LAST_ACK and TCP_CLOSING.
    let is_peers = kernel::tcp_state(fd).is_none_or(|state| matches!(state, 6..=9 | 11));
    if !is_peers {
        socket.note(Fact::ShutDownReceiving);
    }
    is_peers
}

/// What the kernel's connection is worth for what this side sends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sending {
    Open,
    /// The peer's kernel has ended what it sends, and has not acknowledged all of what this side has sent. It may answer with a reset.
    Undecided,
    Ended,
}

/// Returns that.
pub fn sending(fd: c_int) -> Sending {
    match kernel::tcp_state(fd) {
        // TCP_ESTABLISHED.
        Some(1) => Sending::Open,
        // TCP_CLOSE_WAIT.
        Some(8) if kernel::unacknowledged(fd) == 0 => Sending::Open,
        Some(8) => Sending::Undecided,
        _ => Sending::Ended,
    }
}

/// Returns whether the kernel has no bytes of the connection, and none can come.
pub fn brings_no_more(fd: c_int) -> bool {
    // As in `is_peers_end`.
    !is_confined()
        && kernel::unread(fd) == 0
        && kernel::tcp_state(fd).is_some_and(|state| matches!(state, 6..=9 | 11))
}

/// Returns the socket's pending error (SO_ERROR), which the kernel tells only once.
fn error(fd: c_int) -> Errno {
    if is_confined() {
        return Errno(0);
    }
    let _errno = Kept::new();
    let (mut value, mut len) = (0 as c_int, size_of::<c_int>() as libc::socklen_t);
    // SAFETY: `value` has room for an int, and `len` is its length.
    unsafe { real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut value).cast(), &raw mut len) };
    Errno(value)
}

/// The time in which the end of a dead peer's connection arrives, even if TCP has to send it a second time, in milliseconds.
const LATE: c_int = 300;

/// The time until which this process waits for no such end, in milliseconds of CLOCK_MONOTONIC.
static IN_VAIN_UNTIL: AtomicU64 = AtomicU64::new(0);

fn now() -> u64 {
    ginnel_clock::monotonic().as_millis() as u64
}

/// Records the end of a connection whose peer is dead. The end may be under way, so this call waits for it. When one end has not
/// come, this process does not wait for the next ones: a VM that is gone has left all of its connections at once.
pub fn wait_for_end(socket: &'static Socket, fd: c_int, rings: &Rings<SocketReceiver>) {
    let _errno = Kept::new();
    let begun = now();
    let end = if begun < IN_VAIN_UNTIL.load(Ordering::Relaxed) { begun } else { begun + LATE as u64 };
    loop {
        let left = end.saturating_sub(now()) as c_int;
        // If the program has shut down receiving, the kernel always reports an end, so this looks from time to time.
        let looks = socket.has(Fact::ShutDownReceiving);
        let (events, most) = if looks { (0, left.min(10)) } else { (libc::POLLRDHUP, left) };
        let mut poll = libc::pollfd { fd, events, revents: 0 };
        // SAFETY: `poll` is one pollfd, and the count is 1.
        let ready = unsafe { real::poll(&raw mut poll, 1, most) };
        let goes_on = ready < 0 || ready == 0 && looks && !is_peers_end(socket, fd);
        if !goes_on || left == 0 {
            break;
        }
    }
    look_for_end_in(socket, fd, rings);
    if socket.end() == End::None {
        IN_VAIN_UNTIL.store(now() + LATE as u64, Ordering::Relaxed);
    }
}

/// The value of [`Socket::dead_since`] for a connection whose end is not waited for any more.
const DECIDED: u64 = 1;

/// Does the same for a call that does not wait: returns whether the end of a connection whose peer is dead may still come.
pub fn may_end_still(socket: &'static Socket, fd: c_int, rings: &Rings<SocketReceiver>) -> bool {
    let since = socket.dead_since.load(Ordering::Relaxed);
    if since == DECIDED || socket.end() != End::None {
        return false;
    }
    look_for_end_in(socket, fd, rings);
    if socket.end() != End::None {
        return false;
    }
    let now = now();
    let is_decided = match since {
        0 => now < IN_VAIN_UNTIL.load(Ordering::Relaxed),
        since => now >= since + LATE as u64,
    };
    if is_decided {
        IN_VAIN_UNTIL.store(now + LATE as u64, Ordering::Relaxed);
    }
    if since == 0 || is_decided {
        socket.dead_since.store(if is_decided { DECIDED } else { now }, Ordering::Relaxed);
    }
    !is_decided
}

/// Returns whether that was so when it was last asked. Nothing reports when it is no longer so.
pub fn is_undecided(socket: &Socket) -> bool {
    socket.dead_since.load(Ordering::Relaxed) > DECIDED && socket.end() == End::None
}

/// Receives the bytes that are there, and records whether the connection has ended. Returns the number of bytes. The caller holds the
/// lock of the receiving direction.
pub fn take(socket: &'static Socket, fd: c_int, into: &mut [u8], rings: &Rings<SocketReceiver>) -> usize {
    match Using::begin(socket, fd) {
        Some(_using) if !socket.receiving.is_superseded() => {
            receive(socket, fd, into, || look_for_end_in(socket, fd, rings))
        }
        _ => 0,
    }
}

/// Does the same for the thread that closes the socket, and has taken the rings.
pub fn take_last(socket: &'static Socket, fd: c_int, into: &mut [u8]) -> usize {
    receive(socket, fd, into, || look_for_end(socket, fd))
}

fn receive(socket: &'static Socket, fd: c_int, into: &mut [u8], look_for_end: impl FnOnce()) -> usize {
    let _errno = Kept::new();
    match check(kernel::receive(fd, into, libc::MSG_DONTWAIT)) {
        // The end, or what is left of a connection that was broken.
        Ok(0) => look_for_end(),
        Ok(n) => return n,
        Err(Errno(libc::EAGAIN | libc::EINTR)) => {}
        Err(errno) => socket.set_error(errno),
    }
    0
}
