//! Receiving from the kernel and from rings.

use crate::cache::{self, Rooms};
use crate::direction::Carrier;
use crate::doorbell::{self, Wake};
use crate::errno::{Errno, Kept, Result, check, tell};
use crate::memory::is_low;
use crate::rings::Rings;
use crate::section::Section;
use crate::send::{self, attend_or_wait};
use crate::socket::{End, Socket};
use crate::table::{Using, number_in};
use crate::wait::{self, Deadline};
use crate::wakes::{self, Keeper};
use crate::{disconnecting, grow, kernel, lowat, peek, returning};
use ginnel::{SocketReceiver, SocketSender};
use ginnel_ring::stream::Consumer;
use ginnel_ring::wait::Waitable;
use ginnel_ring::{RecvError, carrier};
use ginnel_shmem::{Mapping, SharedMemory};
use libc::c_int;
use std::sync::atomic::Ordering;

/// Receives into the pieces one after the other, as a system call with these flags would. `native` is that call.
#[inline]
pub fn receive<'a>(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a mut [u8]>,
    native: impl FnOnce() -> isize,
) -> isize {
    if socket.cache.is_there() {
        let mut pieces: Rooms<'a> = pieces.collect();
        let is_bad = |piece: &&'a mut [u8]| !piece.is_empty() && is_low(piece.as_ptr());
        if flags & libc::MSG_TRUNC == 0 && socket.cache.has_answers() && pieces.iter().any(is_bad) {
            return tell(Err(Errno(libc::EFAULT)));
        }
        return cache::receive(socket, fd, flags, &mut pieces, native)
            .unwrap_or_else(|native| receive_on(socket, fd, flags, pieces.into_iter(), native));
    }
    receive_on(socket, fd, flags, pieces, native)
}

/// Does the same, without the handling of cache requests.
#[inline]
fn receive_on<'a>(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a mut [u8]>,
    native: impl FnOnce() -> isize,
) -> isize {
    attend_or_wait(socket, fd);
    let mut native = Some(native);
    let mut call = || native.take().map_or(-1, |native| native());
    // Errors of earlier sends are not in the stream.
    if flags & libc::MSG_ERRQUEUE != 0 {
        return call();
    }
    if socket.receiving.carrier() == Carrier::Kernel {
        let takes = flags & libc::MSG_PEEK == 0;
        let moved = |got: &isize| if takes { usize::try_from(*got).unwrap_or(0) } else { 0 };
        match socket.receiving.through_kernel(call, moved) {
            // The kernel may have told this library why it is the end.
            Some(0) if socket.end() != End::None => return tell(untold(socket).map_or(Ok(0), Err)),
            Some(got) => return got,
            None => {}
        }
    }
    tell(counted(socket, fd, flags, pieces))
}

/// The same for a call that goes on after it has received something, as the first of its calls of the kernel would.
pub fn go_on<'a>(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a mut [u8]>,
) -> isize {
    if socket.cache.is_there() {
        let mut pieces: Rooms<'a> = pieces.collect();
        return cache::receive_further(socket, flags, &mut pieces)
            .unwrap_or_else(|| tell(counted(socket, fd, flags, pieces.into_iter())));
    }
    attend_or_wait(socket, fd);
    tell(counted(socket, fd, flags, pieces))
}

/// Receives while the kernel carries the direction only up to a byte that the sender names, or not at all.
fn counted<'a>(
    socket: &'static Socket,
    mut fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a mut [u8]>,
) -> Result<usize> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno(libc::EINVAL));
    }
    crate::cancel::point();
    crate::family::attend(socket);
    let (peek, all) = (flags & libc::MSG_PEEK != 0, flags & libc::MSG_WAITALL != 0);
    let (mut got, mut asks_for_some) = (0, false);
    let least = socket.lowat.bytes();
    let may_wait = flags & libc::MSG_DONTWAIT == 0;
    let mut waits = may_wait && !socket.seems_nonblocking(fd);
    // Relatives may have changed that. A call asks once, as the kernel does, and only if there is nothing for it.
    let mut is_certain = !(may_wait && socket.may_be_shared());
    let mut deadline = Deadline::default();
    let connection = socket.connection();
    let number = |fd| number_in(socket, connection, fd, DISCONNECTED);
    // What the call receives may come from two carriers, and a signal handler must not receive in between.
    let mut section = Some(Section::begin());
    for piece in pieces {
        asks_for_some |= !piece.is_empty();
        let mut at = 0;
        while at < piece.len() {
            let how = if peek && flags & libc::MSG_TRUNC != 0 {
                How::Count
            } else if peek {
                How::Peek
            } else if flags & libc::MSG_TRUNC != 0 {
                How::Discard
            } else {
                How::Take
            };
            let is_bad = how.copies() && is_low(piece.as_ptr());
            let how = if is_bad { How::Count } else { how };
            // The kernel may carry again meanwhile, so its call must not wait for more than there is.
            let waits_now = waits && (got < least || all);
            match some(socket, fd, &mut piece[at..], how, waits_now) {
                // The end of the stream.
                Ok(0) => return Ok(got),
                // There are bytes, and they stay.
                Ok(_) if is_bad => return if got > 0 { Ok(got) } else { Err(Errno(libc::EFAULT)) },
                Ok(n) => {
                    at += n;
                    got += n;
                    // The peeked bytes are still there, so another look would find them again.
                    let is_enough = !all && got >= least;
                    if peek && (is_enough || got >= piece.len() || !waits || is_all(socket)) {
                        return Ok(got);
                    }
                    if peek {
                        // They keep the socket readable, so the thread sleeps by the clock.
                        match outside(&mut section, || wait::a_moment(fd, &mut deadline))
                            .and_then(|()| number(fd))
                        {
                            Ok(number) => fd = number,
                            Err(_) => return Ok(got),
                        }
                        (at, got) = (at - n, got - n);
                    }
                }
                Err(Errno(libc::EAGAIN))
                    if got > 0 && got >= least && !all || socket.has_shut_down_receiving() =>
                {
                    return Ok(got);
                }
                Err(Errno(libc::EAGAIN)) if !is_certain => {
                    (waits, is_certain) = (!socket.is_nonblocking(fd), true);
                }
                Err(Errno(libc::EAGAIN)) if waits => {
                    let waited = outside(&mut section, || wait::for_data(socket, fd, &mut deadline));
                    match waited.and_then(|()| number(fd)) {
                        Ok(number) => fd = number,
                        Err(_) if got > 0 => return Ok(got),
                        Err(errno) => return Err(errno),
                    }
                }
                Err(errno) if got > 0 => {
                    // The kernel tells how the connection has ended only once, and this call does not tell the program.
                    let is_end =
                        !matches!(errno, Errno(libc::EAGAIN | libc::EINTR | libc::EBADF | libc::EFAULT));
                    if is_end
                        && socket.receiving.carrier() == Carrier::Kernel
                        && socket.connection() == connection
                    {
                        socket.set_error(errno);
                    }
                    return Ok(got);
                }
                Err(_) if socket.connection() != connection => return Err(DISCONNECTED),
                Err(errno) => {
                    note_told(socket, errno);
                    return Err(errno);
                }
            }
        }
    }
    drop(section);
    if asks_for_some { Ok(got) } else { nothing(socket, fd, may_wait && !socket.is_nonblocking(fd)) }
}

/// The error of a call that waits while the program disconnects the socket.
const DISCONNECTED: Errno = Errno(libc::EPIPE);

/// Waits without being in a section.
fn outside<R>(section: &mut Option<Section>, wait: impl FnOnce() -> R) -> R {
    *section = None;
    let result = wait();
    *section = Some(Section::begin());
    result
}

/// Does what a call does that asks for no bytes: it waits for some, or for the end, and reports an error.
fn nothing(socket: &'static Socket, mut fd: c_int, waits: bool) -> Result<usize> {
    let mut deadline = Deadline::default();
    let connection = socket.connection();
    loop {
        match some(socket, fd, &mut [0], How::Peek, waits) {
            Err(Errno(libc::EAGAIN)) if socket.has_shut_down_receiving() => return Ok(0),
            Err(Errno(libc::EAGAIN)) if waits => {
                let waited = wait::for_data(socket, fd, &mut deadline);
                fd = waited.and_then(|()| number_in(socket, connection, fd, DISCONNECTED))?;
            }
            Err(errno) => {
                if errno == Errno(libc::ECONNRESET) {
                    socket.said.reset.store(true, Ordering::Relaxed);
                }
                return Err(errno);
            }
            Ok(_) => return Ok(0),
        }
    }
}

/// Returns whether no more bytes come than are there.
fn is_all(socket: &'static Socket) -> bool {
    socket.has_shut_down_receiving()
        || socket.end() != End::None
        || is_ending(socket, &socket.receiving.lock())
}

/// What happens to the received bytes.
#[derive(Clone, Copy, PartialEq)]
enum How {
    Take,
    /// The bytes stay.
    Peek,
    /// The bytes are discarded (MSG_TRUNC).
    Discard,
    /// The bytes stay, and are only counted (MSG_PEEK and MSG_TRUNC).
    Count,
}

impl How {
    fn flags(self) -> c_int {
        match self {
            Self::Take => 0,
            Self::Peek => libc::MSG_PEEK,
            Self::Discard => libc::MSG_TRUNC,
            Self::Count => libc::MSG_PEEK | libc::MSG_TRUNC,
        }
    }

    fn stays(self) -> bool {
        matches!(self, Self::Peek | Self::Count)
    }

    /// Returns whether the bytes are written to the program's memory, which there need not be otherwise.
    fn copies(self) -> bool {
        matches!(self, Self::Take | Self::Peek)
    }
}

/// Receives at least one byte of what is there. Returns 0 at the end of the stream, and EAGAIN if nothing is there
/// now; the caller then waits if the program's call is to wait.
fn some(socket: &'static Socket, fd: c_int, into: &mut [u8], how: How, waits: bool) -> Result<usize> {
    loop {
        let mut rings = socket.receiving.lock();
        if !socket.receiving.uses() {
            drop(rings);
            if disconnecting::follow(socket) {
                continue;
            }
            return Err(Errno(libc::ECONNRESET));
        }
        if is_kernels(socket) {
            drop(rings);
            if let Some(got) = natively(socket, fd, into, how) {
                return got;
            }
        } else if let Some(n) = carried(socket, fd, &mut rings, into, how, waits)? {
            return Ok(further(socket, fd, &mut rings, into, how, n));
        }
    }
}

/// Returns whether the kernel alone carries.
#[inline]
fn is_kernels(socket: &Socket) -> bool {
    matches!(socket.receiving.carrier(), Carrier::Kernel | Carrier::Changing)
}

/// Does the same while the kernel does not carry alone. Returns `None` if the carrier has changed.
#[inline]
fn carried(
    socket: &'static Socket,
    fd: c_int,
    rings: &mut Rings<SocketReceiver>,
    into: &mut [u8],
    how: How,
    waits: bool,
) -> Result<Option<usize>> {
    match socket.receiving.carrier() {
        Carrier::Kernel | Carrier::Changing => Ok(None),
        Carrier::Counted => {
            let got = from_kernel(socket, fd, rings, into, how)?;
            if got.is_none() {
                begin_ring(socket);
            }
            Ok(got)
        }
        Carrier::Ring => from_ring(socket, fd, rings, into, how, waits),
        Carrier::Returning => {
            if returning::settle(socket, fd, rings) {
                return Ok(None);
            }
            if let Some(n) = returning::from_stash(socket, into, how.copies(), how.stays()) {
                return Ok(Some(n));
            }
            let is_over = socket.receiving.kernels() < socket.resume.load(Ordering::Relaxed);
            how_ended(socket).filter(|_| is_over).unwrap_or(Err(Errno(libc::EAGAIN))).map(Some)
        }
    }
}

/// Shows bytes of what is there to `take`, which does not wait and returns how many of them it has taken, and receives just those.
/// Returns their number, as [`some`] does, or `None` if the kernel alone carries. The bytes are copied into `buffer` first.
pub fn some_to(
    socket: &'static Socket,
    fd: c_int,
    buffer: &mut [u8],
    waits: bool,
    take: impl FnOnce(&[u8]) -> Result<usize>,
) -> Option<Result<usize>> {
    let mut rings = socket.receiving.lock();
    if !socket.receiving.uses() {
        return Some(Err(Errno(libc::ECONNRESET)));
    }
    let there = loop {
        if is_kernels(socket) {
            return None;
        }
        match carried(socket, fd, &mut rings, buffer, How::Peek, waits) {
            Ok(None) => {}
            Ok(Some(0)) => return Some(Ok(0)),
            Ok(Some(n)) => break n,
            Err(errno) => {
                note_told(socket, errno);
                return Some(Err(errno));
            }
        }
    };
    let taken = match take(&buffer[..there]) {
        Ok(taken) => taken,
        Err(errno) => return Some(Err(errno)),
    };
    let mut received = 0;
    while received < taken && !is_kernels(socket) {
        match carried(socket, fd, &mut rings, &mut buffer[..taken - received], How::Take, waits) {
            Ok(None) => {}
            Ok(Some(n)) if n > 0 => received += n,
            // The connection has broken meanwhile. The next call reports that.
            _ => break,
        }
    }
    Some(Ok(taken))
}

/// Records that the program is told of an error that ends the connection.
fn note_told(socket: &Socket, errno: Errno) {
    if errno == Errno(libc::ECONNRESET) || socket.untold() == Some(errno) {
        socket.said.reset.store(true, Ordering::Relaxed);
    }
}

/// Returns how many bytes there are for a call that leaves them where they are, if the carrier has `n`, and the next ones may have more.
#[inline]
fn further(
    socket: &'static Socket,
    fd: c_int,
    rings: &mut Rings<SocketReceiver>,
    into: &mut [u8],
    how: How,
    n: usize,
) -> usize {
    if !how.stays() || n == 0 || n >= into.len() {
        return n;
    }
    let len = into.len();
    peek::show(socket, fd, rings, how.copies().then_some(into)).clamp(n, len)
}

/// Receives by a call of the kernel that does not wait. Returns `None` if the kernel no longer carries.
fn natively(socket: &'static Socket, fd: c_int, into: &mut [u8], how: How) -> Option<Result<usize>> {
    // The call never waits here, because the descriptor's number may become another file's meanwhile. The caller
    // waits. A call of the program that succeeds in the end leaves errno as it was.
    let _errno = Kept::new();
    let flags = how.flags() | libc::MSG_DONTWAIT;
    let moved = |got: &isize| if how.stays() { 0 } else { usize::try_from(*got).unwrap_or(0) };
    let receive = || match Using::begin(socket, fd) {
        Some(_using) => kernel::receive(fd, into, flags),
        None => tell(Err(Errno(libc::EBADF))),
    };
    match socket.receiving.through_kernel(receive, moved).map(check) {
        // Somebody who has slept for it has been told.
        Some(Ok(0)) if !into.is_empty() => Some(untold(socket).map_or(Ok(0), Err)),
        got => got,
    }
}

/// Returns the error that the kernel has reported to this library instead of the program, because the library slept
/// in a call of its own.
fn untold(socket: &'static Socket) -> Option<Errno> {
    socket.take_error().filter(|errno| *errno != Errno(0))
}

/// Changes over to the ring: all that the kernel carries has been received.
#[cold]
pub fn begin_ring(socket: &'static Socket) {
    socket.receiving.set_carrier(Carrier::Ring);
    let begun = socket.facts.lock().begun;
    crate::change::note_time(&socket.receiving, begun);
    crate::report::changed(socket);
}

/// Changes over to the ring if all that the kernel carries has been received. This is for programs that receive
/// nothing for a while, although the library has to know what bytes in the kernel's socket mean.
pub fn begin_ring_if_due(socket: &'static Socket) {
    let ring = socket.receiving.lock();
    if let Some(receiver) = ring.as_ref()
        && socket.receiving.carrier() == Carrier::Counted
        && left(receiver, socket.receiving.kernels()) == Ok(Some(0))
    {
        begin_ring(socket);
    }
}

/// Returns whether the sender has named the byte from which on the ring carries.
pub fn is_named(socket: &'static Socket) -> bool {
    let ring = socket.receiving.lock();
    ring.as_ref().is_some_and(|receiver| left(receiver, socket.receiving.kernels()) != Ok(None))
}

/// Returns how many bytes of the stream the carrier before this ring still has, if the sender has named that
/// position.
pub fn left(receiver: &SocketReceiver, received: u64) -> Result<Option<u64>> {
    // The named position was already passed, so the peer does not run this library.
    carrier::left(receiver.ring.memory(), received).map_err(|_| Errno(libc::ECONNRESET))
}

/// Receives from the kernel. Returns `None` if all that the kernel carries has been received.
fn from_kernel(
    socket: &'static Socket,
    fd: c_int,
    rings: &Rings<SocketReceiver>,
    into: &mut [u8],
    how: How,
) -> Result<Option<usize>> {
    // Another thread has closed the socket.
    let receiver = rings.as_ref().ok_or(Errno(libc::EBADF))?;
    let received = socket.receiving.kernels();
    let known = left(receiver, received)?;
    if known == Some(0) {
        return Ok(None);
    }
    let len = within(into.len(), known);
    // Bytes that are to be discarded are checked too, because there may be more of them than should be discarded.
    let mut dropped = [0; 4096];
    let bytes = match how.copies() {
        false => &mut dropped[..len.min(4096)],
        true => &mut into[..len],
    };
    // Wake bytes behind the program's bytes are for others that sleep.
    let is_careful = !how.stays() && known.is_none() && wakes::has_sleepers(socket);
    let peeks = if how.stays() || is_careful { libc::MSG_PEEK } else { 0 };
    let _errno = Kept::new();
    let using = Using::begin(socket, fd).ok_or(Errno(libc::EBADF))?;
    let mut got = check(kernel::receive(fd, bytes, peeks | libc::MSG_DONTWAIT));
    if is_careful && let Ok(n @ 1..) = got {
        got = match within(n, left(receiver, received)?) {
            0 => Err(Errno(libc::EAGAIN)),
            ours => check(kernel::receive(fd, &mut bytes[..ours], libc::MSG_DONTWAIT)),
        };
    }
    drop(using);
    // The sender may have named the byte meanwhile. Bytes behind it are wake bytes, and the end of the kernel's
    // stream is not the end of the connection's.
    let left = left(receiver, received)?;
    match got {
        // That is not the peer's end: the program has shut down receiving.
        Ok(0) if !bytes.is_empty() && !kernel::is_peers_end(socket, fd) => Err(Errno(libc::EAGAIN)),
        // The stream ended before the byte that the sender has named.
        Ok(0) if left.is_some_and(|left| left > 0) => Err(socket.untold().unwrap_or(Errno(libc::ECONNRESET))),
        Ok(0) if !bytes.is_empty() && left.is_none() => untold(socket).map_or(Ok(Some(0)), Err),
        Ok(n) => {
            let ours = within(n, left);
            if !how.stays() {
                socket.receiving.count_native(ours as u64);
                returning::sort(socket, rings, &bytes[ours..n]);
                // That was all that the kernel carries. (What is counted of it from now on is no part of the stream.)
                if 0 < ours && ours < n {
                    begin_ring(socket);
                }
            }
            Ok((left != Some(0)).then_some(ours))
        }
        Err(_) if left == Some(0) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Limits a length to what is left.
fn within(len: usize, left: Option<u64>) -> usize {
    left.and_then(|left| usize::try_from(left).ok()).map_or(len, |left| len.min(left))
}

/// Receives from a ring. Returns `None` if the kernel carries again.
fn from_ring(
    socket: &'static Socket,
    fd: c_int,
    rings: &mut Rings<SocketReceiver>,
    into: &mut [u8],
    how: How,
    waits: bool,
) -> Result<Option<usize>> {
    let mut ended: Option<Result<usize>> = None;
    loop {
        if rings.is_ahead() {
            grow::step_receiving(socket, rings)?;
        }
        // Another thread has closed the socket.
        let receiver = rings.as_mut().ok_or(Errno(libc::EBADF))?;
        let left = carrier::given_back(receiver.ring.memory()).is_some();
        let waker = &receiver.waker;
        let wake = || {
            if !left {
                doorbell::wake(socket, fd, waker)
            }
        };
        let got = match how {
            How::Take => receiver.ring.read(into, wake),
            How::Peek => peek_ring(&mut receiver.ring, into),
            How::Count => receiver.ring.poll_all().map(|n| n.min(into.len())),
            How::Discard => discard(&mut receiver.ring, into.len(), wake),
        };
        match got {
            Ok(n) => {
                if !how.stays() {
                    socket.receiving.shared.fetch_add(n as u64, Ordering::Relaxed);
                    carrier::note_taken(receiver.ring.memory(), receiver.ring.cursor().position);
                }
                if carrier::wants_more(receiver.ring.memory()) {
                    socket.grow();
                }
                return Ok(Some(n));
            }
            // Nothing can come any more.
            Err(RecvError::Empty) if receiver.ring.memory().is_broken() => {
                return Err(Errno(libc::ECONNRESET));
            }
            // A ring that the sender has left counts as finished too.
            Err(RecvError::Empty | RecvError::Finished | RecvError::PeerDead)
                if returning::begin_if_due(socket, fd, rings)? =>
            {
                return Ok(None);
            }
            Err(RecvError::Empty) => {
                // The kernel's end was seen before the ring was found empty, so nothing can have come between.
                if let Some(end) = ended {
                    return end.map(Some);
                }
                // The answer "nothing" is not repeated for long without a check of the kernel's socket, which knows
                // whether the peer lives. A waiting thread checks there before it sleeps. If the peer has ended, it
                // may have written something before.
                if socket.end() == End::None
                    && (waits || !socket.is_look_due() || !look_at_kernel(socket, fd, rings))
                {
                    return Err(Errno(libc::EAGAIN));
                }
                ended = how_ended(socket);
            }
            // A ring that was left is finished too.
            Err(RecvError::Finished | RecvError::PeerDead)
                if rings.is_ahead() && grow::step_receiving(socket, rings)? => {}
            Err(RecvError::Finished) if is_broken(socket) => return Err(Errno(libc::ECONNRESET)),
            Err(RecvError::Finished) => return Ok(Some(0)),
            Err(RecvError::PeerDead) if !waits && kernel::may_end_still(socket, fd) => {
                return Err(Errno(libc::EAGAIN));
            }
            Err(RecvError::PeerDead) => return how_died(socket, fd).map(Some),
            Err(_) => return Err(Errno(libc::ECONNRESET)),
        }
    }
}

/// Returns whether the peer has broken the connection and the program has not been told.
fn is_broken(socket: &'static Socket) -> bool {
    let ring = socket.sending.lock();
    let is_broken = ring.as_ref().is_some_and(|sender| sender.ring.is_aborted());
    is_broken && !socket.said.reset.load(Ordering::Relaxed)
}

/// Returns how the connection has ended, if the kernel says that the peer's process has ended without recording that
/// in the ring. Returns `None` if it has not ended.
fn how_ended(socket: &'static Socket) -> Option<Result<usize>> {
    match socket.end() {
        End::None => None,
        End::Lost => Some(socket.untold().map_or(Ok(0), Err)),
        End::Fin | End::Reset => {
            // If the peer has broken the connection, or data that it had not read is lost, TCP breaks the connection. Otherwise this is an
            // ordinary end: a killed process leaves wake bytes unread, and the kernel resets the connection for these too.
            let ring = socket.sending.lock();
            let is_unread = |sender: &SocketSender| sender.ring.is_aborted() || send::untaken(sender) > 0;
            let is_lost = ring.as_ref().is_some_and(is_unread) && !socket.said.reset.load(Ordering::Relaxed);
            Some(if is_lost { Err(Errno(libc::ECONNRESET)) } else { Ok(0) })
        }
    }
}

/// Decides how the connection ended when the daemon says that the peer's process is dead. If the process has ended,
/// its kernel reports that too, now or soon. If the kernel reports nothing, the peer's VM is gone and the connection
/// is broken: the received bytes may be any part of the stream.
#[cold]
fn how_died(socket: &'static Socket, fd: c_int) -> Result<usize> {
    if kernel::may_end_still(socket, fd) {
        kernel::wait_for_end(socket, fd);
    }
    how_ended(socket).unwrap_or_else(|| match socket.said.reset.swap(true, Ordering::Relaxed) {
        false => Err(Errno(libc::ECONNRESET)),
        true => Ok(0),
    })
}

/// Checks the kernel's socket. Returns true if the connection has ended.
fn look_at_kernel(socket: &'static Socket, fd: c_int, rings: &Rings<SocketReceiver>) -> bool {
    if socket.end() == End::None && socket.watchers.is_empty() {
        returning::drain_ring(socket, fd, rings, Keeper::begin(socket).as_ref());
    } else if socket.end() == End::None {
        // The instance that the bytes wake takes them.
        kernel::look_for_end(socket, fd);
    }
    socket.end() != End::None
}

/// Copies bytes from the ring and leaves them there.
fn peek_ring(ring: &mut Consumer<Mapping>, into: &mut [u8]) -> std::result::Result<usize, RecvError> {
    let n = ring.poll_all()?.min(into.len());
    peek::copy(ring, &mut into[..n]);
    Ok(n)
}

/// Removes bytes from the ring without copying them.
fn discard(
    ring: &mut Consumer<Mapping>,
    len: usize,
    wake: impl Fn(),
) -> std::result::Result<usize, RecvError> {
    let bytes = ring.peek()?;
    let n = len.min(bytes.len());
    if bytes.release(n) {
        wake();
    }
    Ok(n)
}

/// What a call that receives would find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing now.
    Nothing,
    /// Bytes, or an error.
    Something,
    /// The end of the stream: no more bytes.
    End,
}

/// Returns what a receiving call would find, unless the kernel alone carries this direction. `kernel` returns whether
/// the kernel's socket is readable; it is called only where that matters.
fn look(socket: &'static Socket, kernel: impl FnOnce() -> bool) -> Found {
    look_at(socket, &mut socket.receiving.lock(), kernel, 1)
}

/// Looks with the lock held. `least` is how many bytes are something.
fn look_at(
    socket: &'static Socket,
    rings: &mut Rings<SocketReceiver>,
    kernel: impl FnOnce() -> bool,
    least: usize,
) -> Found {
    let readable = |kernel: bool| if kernel { Found::Something } else { Found::Nothing };
    let fd = socket.fd.load(Ordering::Relaxed);
    match socket.receiving.carrier() {
        Carrier::Kernel | Carrier::Changing => return readable(kernel()),
        Carrier::Counted => {
            let Some(receiver) = rings.as_ref() else { return Found::Something };
            match left(receiver, socket.receiving.kernels()) {
                Ok(Some(0)) => {}
                Err(_) => return Found::Something,
                Ok(_) => return readable(kernel() && (least <= 1 || has_enough(socket, rings))),
            }
        }
        Carrier::Ring | Carrier::Returning => {}
    }
    if socket.receiving.carrier() != Carrier::Returning {
        let found = match poll(socket, rings) {
            Ok(_) if least > 1 && !has_enough(socket, rings) => return Found::Nothing,
            Ok(_) => return Found::Something,
            Err(RecvError::Empty) if socket.end() == End::None => Found::Nothing,
            Err(RecvError::PeerDead) if kernel::may_end_still(socket, fd) => Found::Nothing,
            Err(RecvError::Empty | RecvError::Finished | RecvError::PeerDead) => Found::End,
            Err(_) => return Found::Something,
        };
        match returning::begin_if_due(socket, fd, rings) {
            Ok(false) => return found,
            // The receiving call reports the error.
            Err(_) => return Found::Something,
            Ok(true) => {}
        }
    }
    if returning::settle(socket, fd, rings) {
        return readable(kernel());
    }
    readable(!socket.stash.lock().is_empty() || socket.end() != End::None)
}

/// Does the same for a program that is to be told of input. Also returns whether the peer sends nothing more, although there may be bytes
/// before that end. Where the kernel carries, the caller asks the kernel for that.
pub fn look_ahead(socket: &'static Socket, kernel: impl FnOnce() -> bool) -> (Found, bool) {
    let mut rings = socket.receiving.lock();
    let found = look_at(socket, &mut rings, kernel, socket.lowat.bytes());
    (found, is_ending(socket, &rings))
}

/// Returns whether as much is there as the program wants to be told of.
#[cold]
fn has_enough(socket: &'static Socket, rings: &mut Rings<SocketReceiver>) -> bool {
    // The kernel has some of it, up to the byte that the sender has named.
    let (kernels, named) = match (socket.receiving.carrier(), rings.as_ref()) {
        (Carrier::Counted, Some(receiver)) => match left(receiver, socket.receiving.kernels()) {
            Ok(left) => (within(kernel::unread(socket.fd.load(Ordering::Relaxed)), left), left.is_some()),
            Err(_) => return true,
        },
        _ => (0, true),
    };
    let there = if named { poll_all(socket, rings).unwrap_or(0) } else { 0 };
    lowat::is_reached(socket, rings, kernels, there)
}

/// Returns whether a ring carries and the peer sends nothing more.
fn is_ending(socket: &'static Socket, rings: &Rings<SocketReceiver>) -> bool {
    // A ring that the sender has left counts as finished too. It has named the byte at which the next ring begins before it left.
    let goes_on = |next: &SocketReceiver| left(next, 0) != Ok(None);
    let is_last = |receiver: &SocketReceiver| {
        !rings.next().is_some_and(goes_on) && carrier::given_back(receiver.ring.memory()).is_none()
    };
    match socket.receiving.carrier() {
        Carrier::Ring => {
            socket.end() != End::None
                || rings.as_ref().is_some_and(|receiver| receiver.ring.is_ending() && is_last(receiver))
        }
        Carrier::Returning => socket.end() != End::None,
        Carrier::Kernel | Carrier::Changing | Carrier::Counted => false,
    }
}

/// Returns whether the peer has broken the connection: it has closed its end with bytes of ours unread, or has asked for it.
pub fn is_reset(socket: &'static Socket) -> bool {
    if socket.receiving.carrier() != Carrier::Ring || socket.sending.carrier() != Carrier::Ring {
        return false;
    }
    // A peer that has marked its end in the ring has not died.
    let has_finished = socket.receiving.lock().as_ref().is_some_and(|receiver| receiver.ring.is_ending());
    let ring = socket.sending.lock();
    // A process that has ended without a close has left bytes unread too.
    let has_left = |sender: &SocketSender| {
        matches!(socket.end(), End::Fin | End::Reset)
            && !has_finished
            && !sender.ring.is_closed()
            && send::untaken(sender) > 0
    };
    ring.as_ref().is_some_and(|sender| sender.ring.is_aborted() || has_left(sender))
}

/// Returns the error that SO_ERROR gives the program, and records that the program is told now.
pub fn take_error(socket: &'static Socket) -> Errno {
    let is_told = || socket.said.reset.swap(true, Ordering::Relaxed);
    match socket.tell() {
        Some(errno) => errno,
        // The peer has broken the connection after it had ended it.
        None if socket.said.closed.load(Ordering::Relaxed) && !is_told() => Errno(libc::EPIPE),
        None if is_reset(socket) && !is_told() => Errno(libc::ECONNRESET),
        None => Errno(0),
    }
}

/// Polls the ring that carries now, and returns how many bytes it offers.
fn poll(socket: &'static Socket, rings: &mut Rings<SocketReceiver>) -> std::result::Result<usize, RecvError> {
    poll_by(socket, rings, Consumer::poll)
}

/// Returns how many bytes the ring that carries now has in total.
fn poll_all(
    socket: &'static Socket,
    rings: &mut Rings<SocketReceiver>,
) -> std::result::Result<usize, RecvError> {
    poll_by(socket, rings, Consumer::poll_all)
}

fn poll_by(
    socket: &'static Socket,
    rings: &mut Rings<SocketReceiver>,
    poll: impl Fn(&mut Consumer<Mapping>) -> std::result::Result<usize, RecvError>,
) -> std::result::Result<usize, RecvError> {
    loop {
        if rings.is_ahead() && grow::step_receiving(socket, rings).is_err() {
            // The receiving call reports the error.
            return Err(RecvError::Aborted);
        }
        let Some(receiver) = rings.as_mut() else { return Err(RecvError::Aborted) };
        if carrier::wants_more(receiver.ring.memory()) {
            socket.grow();
        }
        let found = poll(&mut receiver.ring);
        // A ring that the sender has left counts as finished too.
        let is_over = matches!(found, Err(RecvError::Finished | RecvError::PeerDead));
        if !(is_over && rings.is_ahead() && grow::step_receiving(socket, rings) == Ok(true)) {
            return found;
        }
    }
}

/// Asks the peer to wake one more sleeper. The caller checks once more before it sleeps, and calls [`rise`] when it
/// is awake.
pub fn arm(socket: &'static Socket, how: Wake) {
    let mut ring = socket.receiving.lock();
    socket.receiving.uses();
    let is_first = socket.receiving.add_sleeper();
    if let Some(receiver) = ring.as_mut() {
        doorbell::announce(&mut receiver.ring, how, is_first);
        receiver.ring.arm();
    }
    drop(ring);
    if socket.gives_up.load(Ordering::Relaxed) {
        send::probe(socket);
    }
}

/// Asks again, for the same sleeper, because the peer may have woken it.
pub fn arm_again(socket: &'static Socket, how: Wake) {
    let mut ring = socket.receiving.lock();
    let is_alone = socket.receiving.waiting.load(Ordering::Relaxed) == 1;
    if let Some(receiver) = ring.as_mut() {
        doorbell::announce(&mut receiver.ring, how, is_alone);
        receiver.ring.arm();
    }
}

/// Records that a sleeper is awake. If no other thread of any process sleeps, the peer need not wake this side any
/// more.
pub fn rise(socket: &'static Socket) {
    let mut ring = socket.receiving.lock();
    if socket.receiving.remove_sleeper()
        && socket.receiving.common().is_none()
        // A peer that is to return to the kernel learns of that when it wakes this side.
        && !socket.is_passed()
        && let Some(receiver) = ring.as_mut()
    {
        receiver.ring.disarm();
    }
}

/// Returns whether the ring has something, has ended, or no longer carries.
pub fn is_ready(socket: &'static Socket) -> bool {
    match socket.receiving.carrier() {
        Carrier::Ring | Carrier::Returning => {
            let fd = socket.fd.load(Ordering::Relaxed);
            look(socket, || kernel::poll_now(fd, libc::POLLIN) != 0) != Found::Nothing
        }
        _ => poll(socket, &mut socket.receiving.lock()) != Err(RecvError::Empty),
    }
}

/// How far a direction has come, as far as its rings say.
#[derive(Clone, Copy, PartialEq)]
pub struct Progress {
    /// The position up to which bytes have come.
    pub position: u64,
    /// Whether the peer sends nothing more.
    pub is_ending: bool,
    /// Whether the sender has left the ring for the kernel.
    pub is_left: bool,
}

/// Returns how far the receiving direction has come.
pub fn progress(socket: &'static Socket) -> Progress {
    let mut ring = socket.receiving.lock();
    let available = poll_all(socket, &mut ring);
    let fd = socket.fd.load(Ordering::Relaxed);
    let (is_ending, before) = (is_ending(socket, &ring), ring.before());
    let Some(receiver) = ring.as_ref() else {
        return Progress { position: before, is_ending, is_left: false };
    };
    let position = before + receiver.ring.cursor().position;
    // The end is news too.
    let position = match available {
        Ok(n) => position + n as u64,
        Err(RecvError::Empty) => position,
        // Whoever asks lets the time pass in which a late end may come.
        Err(RecvError::PeerDead) if kernel::may_end_still(socket, fd) => position,
        Err(_) => u64::MAX,
    };
    Progress { position, is_ending, is_left: carrier::given_back(receiver.ring.memory()).is_some() }
}

/// Returns whether a ring carries and the peer sends nothing more after what is there.
pub fn has_peer_finished(socket: &'static Socket) -> bool {
    is_ending(socket, &socket.receiving.lock())
}

/// Bytes that can be received without waiting; `None` if that is the kernel's to say.
pub fn available(socket: &'static Socket, fd: c_int) -> Option<usize> {
    let mut rings = socket.receiving.lock();
    match socket.receiving.carrier() {
        Carrier::Kernel | Carrier::Changing => return None,
        Carrier::Counted => {}
        // This also notices that the sender asks for a larger ring, or has left.
        Carrier::Ring | Carrier::Returning => {
            look_at(socket, &mut rings, || true, 1);
        }
    }
    match socket.receiving.carrier() {
        Carrier::Kernel => None,
        _ => Some(peek::show(socket, fd, &mut rings, None)),
    }
}
