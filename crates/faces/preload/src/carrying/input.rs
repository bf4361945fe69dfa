//! Receiving from what carries now, without sleeping.

use crate::carrying::keeper::Keeper;
use crate::carrying::{bell, connection, counted, disconnecting, grow, peek, returning, room};
use crate::state::carrier::Carrier;
use crate::state::direction::Held;
use crate::state::known::Fact;
use crate::state::rings::Rings;
use crate::state::socket::{End, Socket};
use crate::state::sockets::Using;
use crate::state::taken;
use crate::system::errno::{Errno, Kept, Result, check};
use crate::system::kernel;
use crate::system::memory::can_write;
use ginnel::{SocketReceiver, SocketSender};
use ginnel_ring::stream::Consumer;
use ginnel_ring::{RecvError, carrier};
use ginnel_shmem::{Mapping, SharedMemory};
use libc::c_int;
use std::sync::atomic::Ordering;

/// What happens to the received bytes.
#[derive(Clone, Copy, PartialEq)]
pub enum How {
    Take,
    /// The bytes stay.
    Peek,
    /// The bytes are discarded (MSG_TRUNC).
    Discard,
    /// The bytes stay, and are only counted (MSG_PEEK and MSG_TRUNC).
    Count,
}

impl How {
    pub fn flags(self) -> c_int {
        match self {
            Self::Take => 0,
            Self::Peek => libc::MSG_PEEK,
            Self::Discard => libc::MSG_TRUNC,
            Self::Count => libc::MSG_PEEK | libc::MSG_TRUNC,
        }
    }

    pub fn stays(self) -> bool {
        matches!(self, Self::Peek | Self::Count)
    }

    /// Returns whether the bytes are written to the program's memory, which there need not be otherwise.
    pub fn copies(self) -> bool {
        matches!(self, Self::Take | Self::Peek)
    }
}

/// Receives at least one byte of what is there. Returns 0 at the end of the stream, and EAGAIN if nothing is there
/// now; the caller then waits if the program's call is to wait.
pub fn some(socket: &'static Socket, fd: c_int, into: &mut [u8], how: How, waits: bool) -> Result<usize> {
    by_carrier(socket, |rings| match rings {
        Some(mut rings) => carried(socket, fd, &mut rings, into, how, waits),
        None => {
            natively(socket, fd, how, || check(kernel::receive(fd, into, how.flags() | libc::MSG_DONTWAIT)))
        }
    })
}

/// Shows bytes to a call that leaves them where they are: as many as have room in the pieces, of all that are there. Returns what
/// [`some`] does. None of the pieces is empty, and there is one at least.
pub fn peek(
    socket: &'static Socket,
    fd: c_int,
    into: &mut [&mut [u8]],
    how: How,
    waits: bool,
) -> Result<usize> {
    let room = peek::room(into);
    by_carrier(socket, |rings| match rings {
        Some(mut rings) => {
            let first = carried(socket, fd, &mut rings, into[0], how, waits)?;
            // The carrier may have more, and the next ones too.
            Ok(first.map(|n| match n {
                1.. if n < room => {
                    peek::show(socket, fd, &mut rings, how.copies().then_some(&mut *into)).clamp(n, room)
                }
                n => n,
            }))
        }
        None => natively(socket, fd, how, || kernel::peek_behind(fd, 0, into, !how.copies())),
    })
}

/// Calls `receive` with the rings, or with `None` if the kernel alone carries, until it says how much it has received. It returns `None`
/// if the carrier has changed.
#[inline]
fn by_carrier(
    socket: &'static Socket,
    mut receive: impl FnMut(Option<Held<'_, SocketReceiver>>) -> Result<Option<usize>>,
) -> Result<usize> {
    loop {
        let rings = socket.receiving.lock();
        if !socket.receiving.uses() {
            drop(rings);
            if disconnecting::follow(socket) {
                continue;
            }
            return Err(Errno(libc::ECONNRESET));
        }
        if let Some(n) = receive(Some(rings).filter(|_| !is_kernels(socket)))? {
            return Ok(n);
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
                counted::begin_ring(socket);
            }
            Ok(got)
        }
        Carrier::Ring => from_ring(socket, fd, rings, into, how, waits),
        Carrier::Returning => {
            if returning::settle(socket, fd, rings) {
                return Ok(None);
            }
            if socket.receiving.is_lost() {
                return Err(Errno(libc::ECONNRESET));
            }
            let there = socket.receiving.stash().len().min(into.len());
            if how.copies() && !can_write(into.as_mut_ptr(), there) {
                return Err(Errno(libc::EFAULT));
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
pub fn note_told(socket: &Socket, errno: Errno) {
    if errno == Errno(libc::ECONNRESET) || socket.untold() == Some(errno) {
        socket.note(Fact::ToldReset);
    }
}

/// Receives by a call of the kernel, which does not wait and has room for some bytes. Returns `None` if the kernel no longer carries.
fn natively(
    socket: &'static Socket,
    fd: c_int,
    how: How,
    call: impl FnOnce() -> Result<usize>,
) -> Result<Option<usize>> {
    // The call never waits here, because the descriptor's number may become another file's meanwhile. The caller
    // waits. A call of the program that succeeds in the end leaves errno as it was.
    let _errno = Kept::new();
    let moved = |got: &Result<usize>| if how.stays() { 0 } else { got.unwrap_or(0) };
    let receive = || match Using::begin(socket, fd) {
        Some(_using) => call(),
        None => Err(Errno(libc::EBADF)),
    };
    match socket.receiving.through_kernel(receive, moved) {
        // Somebody who has slept for it has been told.
        Some(Ok(0)) => untold(socket).map_or(Ok(Some(0)), Err),
        got => got.transpose(),
    }
}

/// Returns the error that the kernel has reported to this library instead of the program, because the library slept
/// in a call of its own.
pub fn untold(socket: &'static Socket) -> Option<Errno> {
    socket.take_error().filter(|errno| *errno != Errno(0))
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
    if !taken::catch_up(socket, fd, rings) {
        return Err(Errno(libc::ECONNRESET));
    }
    let received = socket.receiving.kernels();
    let known = counted::left(receiver, received)?;
    if known == Some(0) {
        return Ok(None);
    }
    let len = counted::within(into.len(), known);
    // Bytes that are to be discarded are checked too, because there may be more of them than should be discarded.
    let mut dropped = [0; 4096];
    let bytes = match how.copies() {
        false => &mut dropped[..len.min(4096)],
        true => &mut into[..len],
    };
    // Bytes behind the named one stay: they are wake bytes, or come behind a ring that the sender has left already. All bytes that are
    // there before the byte is named are the program's.
    let looks = !how.stays() && known.is_none();
    let flags = if looks {
        How::Count.flags()
    } else if how.stays() {
        libc::MSG_PEEK
    } else {
        0
    };
    let _errno = Kept::new();
    let using = Using::begin(socket, fd).ok_or(Errno(libc::EBADF))?;
    let mut got = check(kernel::receive(fd, bytes, flags | libc::MSG_DONTWAIT));
    if looks && let Ok(n @ 1..) = got {
        got = match counted::within(n, counted::left(receiver, received)?) {
            0 => Err(Errno(libc::EAGAIN)),
            ours => check(kernel::receive(fd, &mut bytes[..ours], libc::MSG_DONTWAIT)),
        };
    }
    drop(using);
    // The sender may have named the byte meanwhile. The end of the kernel's stream is not the end of the connection's then.
    let left = counted::left(receiver, received)?;
    match got {
        // That is not the peer's end: the program has shut down receiving.
        Ok(0) if !bytes.is_empty() && !connection::is_peers_end(socket, fd) => Err(Errno(libc::EAGAIN)),
        // The stream ended before the byte that the sender has named.
        Ok(0) if left.is_some_and(|left| left > 0) => Err(socket.untold().unwrap_or(Errno(libc::ECONNRESET))),
        Ok(0) if !bytes.is_empty() && left.is_none() => untold(socket).map_or(Ok(Some(0)), Err),
        Ok(n) => {
            let ours = counted::within(n, left);
            if !how.stays() {
                socket.receiving.count_native(ours as u64);
            }
            Ok((left != Some(0)).then_some(ours))
        }
        Err(_) if left == Some(0) => Ok(None),
        Err(errno) => Err(errno),
    }
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
                bell::wake(socket, fd, waker)
            }
        };
        // The bytes stay if the program's memory is not there.
        if how.copies()
            && let Ok(there) = receiver.ring.poll_all()
            && !can_write(into.as_mut_ptr(), there.min(into.len()))
        {
            return Err(Errno(libc::EFAULT));
        }
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
            Err(RecvError::Empty) if socket.has(Fact::ShutDownReceiving) && is_broken(socket) => {
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
            Err(RecvError::PeerDead) if !waits && connection::may_end_still(socket, fd, rings) => {
                return Err(Errno(libc::EAGAIN));
            }
            Err(RecvError::PeerDead) => return how_died(socket, fd, rings).map(Some),
            Err(_) => return Err(Errno(libc::ECONNRESET)),
        }
    }
}

/// Returns whether the peer has broken the connection and the program has not been told.
fn is_broken(socket: &'static Socket) -> bool {
    let is_aborted = |sender: &SocketSender| sender.ring.is_aborted();
    let is_broken = match socket.sending.carrier() {
        Carrier::Ring => socket.sending.lock().as_ref().is_some_and(is_aborted),
        _ => socket.end() == End::Reset,
    };
    is_broken && !socket.has(Fact::ToldReset)
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
            let has_unread = || {
                let is_there = |sender: &SocketSender| room::untaken(sender) > 0;
                let is_unread = socket.sending.lock().as_ref().is_some_and(is_there);
                is_unread && !socket.has(Fact::ToldReset)
            };
            Some(if is_broken(socket) || has_unread() { Err(Errno(libc::ECONNRESET)) } else { Ok(0) })
        }
    }
}

/// Decides how the connection ended when the daemon says that the peer's process is dead. If the process has ended,
/// its kernel reports that too, now or soon. If the kernel reports nothing, the peer's VM is gone and the connection
/// is broken: the received bytes may be any part of the stream.
#[cold]
fn how_died(socket: &'static Socket, fd: c_int, rings: &Rings<SocketReceiver>) -> Result<usize> {
    if connection::may_end_still(socket, fd, rings) {
        connection::wait_for_end(socket, fd, rings);
    }
    how_ended(socket).unwrap_or_else(|| match socket.note(Fact::ToldReset) {
        true => Err(Errno(libc::ECONNRESET)),
        false => Ok(0),
    })
}

/// Checks the kernel's socket. Returns true if the connection has ended.
fn look_at_kernel(socket: &'static Socket, fd: c_int, rings: &Rings<SocketReceiver>) -> bool {
    if socket.end() == End::None && socket.watchers.is_empty() {
        returning::drain_ring(socket, fd, rings, Keeper::begin(socket).as_ref());
    } else if socket.end() == End::None {
        // The instance that the bytes wake takes them.
        connection::look_for_end_in(socket, fd, rings);
    }
    socket.end() != End::None
}

/// Copies bytes from the ring and leaves them there.
fn peek_ring(ring: &mut Consumer<Mapping>, into: &mut [u8]) -> std::result::Result<usize, RecvError> {
    let n = ring.poll_all()?.min(into.len());
    peek::copy(ring, 0, &mut into[..n]);
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
