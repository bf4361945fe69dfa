//! Receiving.

use std::sync::atomic::Ordering;

use ginnel::SocketReceiver;
use ginnel_layout::ring::HEADER;
use ginnel_ring::wait::Waitable;
use ginnel_ring::{RecvError, carrier};
use ginnel_shmem::Memory;
use libc::c_int;

use crate::errno::{Errno, Result, check, tell};
use crate::grow;
use crate::kernel;
use crate::real;
use crate::rings::Rings;
use crate::send::attend_or_wait;
use crate::socket::{Carrier, End, Socket};
use crate::wait::{self, Deadline};

/// Receives into the pieces one after the other, as a call of the kernel with these flags would. `native` is that call.
#[inline]
pub fn receive<'a>(
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
        if let Some(got) = socket.receiving.through_kernel(call, moved) {
            return got;
        }
    }
    tell(counted(socket, fd, flags, pieces))
}

/// Receives while the kernel carries no more than up to a byte that the sender names.
fn counted<'a>(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a mut [u8]>,
) -> Result<usize> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno(libc::EINVAL));
    }
    let (peek, all) = (flags & libc::MSG_PEEK != 0, flags & libc::MSG_WAITALL != 0);
    let mut got = 0;
    let waits = flags & libc::MSG_DONTWAIT == 0 && !socket.is_nonblocking(fd);
    let mut deadline = Deadline::default();
    for piece in pieces {
        let mut at = 0;
        while at < piece.len() {
            let how = if peek {
                How::Peek
            } else if flags & libc::MSG_TRUNC != 0 {
                How::Discard
            } else {
                How::Take
            };
            match some(socket, fd, &mut piece[at..], how, waits) {
                // The end of the stream.
                Ok(0) => return Ok(got),
                Ok(n) => {
                    at += n;
                    got += n;
                    // What was looked at is still there: a second look would find it again.
                    if peek && (!all || got >= piece.len()) {
                        return Ok(got);
                    }
                    if peek {
                        (at, got) = (at - n, got - n);
                        wait::for_data(socket, fd, &mut deadline)?;
                    }
                }
                Err(Errno(libc::EAGAIN)) if got > 0 && !all => return Ok(got),
                Err(Errno(libc::EAGAIN)) if waits => match wait::for_data(socket, fd, &mut deadline) {
                    Ok(()) => {}
                    Err(_) if got > 0 => return Ok(got),
                    Err(errno) => return Err(errno),
                },
                Err(_) if got > 0 => return Ok(got),
                Err(errno) => {
                    if errno == Errno(libc::ECONNRESET) {
                        socket.said.reset.store(true, Ordering::Relaxed);
                    }
                    return Err(errno);
                }
            }
        }
    }
    Ok(got)
}

/// What is done with the bytes.
#[derive(Clone, Copy, PartialEq)]
enum How {
    Take,
    /// They stay.
    Peek,
    /// They go nowhere (MSG_TRUNC).
    Discard,
}

/// Receives what is there, at least one byte. `Ok(0)` is the end; EAGAIN: nothing is there now, and the caller waits if it has said so.
fn some(socket: &'static Socket, fd: c_int, into: &mut [u8], how: How, waits: bool) -> Result<usize> {
    if !crate::family::may_use(socket, crate::family::Way::Receiving) {
        return Err(Errno(libc::ECONNRESET));
    }
    let mut rings = socket.receiving.ring.lock();
    if socket.receiving.carrier() == Carrier::Counted {
        // Closed by another thread.
        let receiver = rings.as_ref().ok_or(Errno(libc::EBADF))?;
        match from_kernel(socket, fd, receiver, into, how)? {
            Some(n) => return Ok(n),
            None => begin_ring(socket),
        }
    }
    from_ring(socket, fd, &mut rings, into, how, waits)
}

/// All that the kernel carries has been received.
#[cold]
fn begin_ring(socket: &'static Socket) {
    socket.receiving.set_carrier(Carrier::Ring);
    let begun = socket.facts.lock().begun;
    crate::change::note_time(&socket.receiving, begun);
    crate::report::changed(socket);
}

/// Goes on with the ring if all that the kernel carries has been received: for programs that receive nothing for a while, and yet
/// need to know what bytes in the kernel's socket mean.
pub fn begin_ring_if_due(socket: &'static Socket) {
    let ring = socket.receiving.ring.lock();
    if let Some(receiver) = ring.as_ref()
        && socket.receiving.carrier() == Carrier::Counted
        && left(receiver, socket.receiving.native.load(Ordering::Relaxed)) == Ok(Some(0))
    {
        begin_ring(socket);
    }
}

/// Whether the sender has named the byte from which on the ring carries.
pub fn is_named(socket: &'static Socket) -> bool {
    let ring = socket.receiving.ring.lock();
    let received = socket.receiving.native.load(Ordering::Relaxed);
    ring.as_ref().is_some_and(|receiver| left(receiver, received) != Ok(None))
}

/// How many bytes of the stream the carrier before this ring still has, if the sender has said so.
pub fn left(receiver: &SocketReceiver, received: u64) -> Result<Option<u64>> {
    // A position that was received before it was named: the peer is no library of ours.
    carrier::left(receiver.ring.memory(), received).map_err(|_| Errno(libc::ECONNRESET))
}

/// `None`: all that the kernel carries has been received.
fn from_kernel(
    socket: &'static Socket,
    fd: c_int,
    receiver: &SocketReceiver,
    into: &mut [u8],
    how: How,
) -> Result<Option<usize>> {
    let received = socket.receiving.native.load(Ordering::Relaxed);
    let len = match left(receiver, received)? {
        Some(0) => return Ok(None),
        left => within(into.len(), left),
    };
    let flags = match how {
        How::Take => 0,
        How::Peek => libc::MSG_PEEK,
        How::Discard => libc::MSG_TRUNC,
    };
    #[expect(unsafe_code, reason = "a call of the kernel")]
    // SAFETY: room for as many bytes.
    let got = unsafe {
        real::recvfrom(
            fd,
            into.as_mut_ptr().cast(),
            len,
            flags | libc::MSG_DONTWAIT,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
    let got = check(got);
    // The sender may have named the byte meanwhile: what is behind it are wake bytes, and the end of the kernel's stream is not the
    // end of the connection's.
    let left = left(receiver, received)?;
    match got {
        _ if left == Some(0) => Ok(None),
        // It ended before the byte that the sender has named.
        Ok(0) if left.is_some() => Err(Errno(libc::ECONNRESET)),
        Ok(n) => {
            let n = within(n, left);
            if how != How::Peek {
                socket.receiving.native.fetch_add(n as u64, Ordering::Relaxed);
            }
            Ok(Some(n))
        }
        Err(errno) => Err(errno),
    }
}

/// At most as much as is left.
fn within(len: usize, left: Option<u64>) -> usize {
    left.and_then(|left| usize::try_from(left).ok()).map_or(len, |left| len.min(left))
}

fn from_ring(
    socket: &'static Socket,
    fd: c_int,
    rings: &mut Rings<SocketReceiver>,
    into: &mut [u8],
    how: How,
    waits: bool,
) -> Result<usize> {
    let wake = || kernel::wake_back(socket, fd);
    let mut ended = None;
    loop {
        if rings.is_ahead() {
            grow::step_receiving(socket, rings)?;
        }
        // Closed by another thread.
        let receiver = rings.as_mut().ok_or(Errno(libc::EBADF))?;
        let got = match how {
            How::Take => receiver.ring.read(into, wake),
            How::Peek => peek(receiver, into),
            How::Discard => discard(receiver, into.len(), wake),
        };
        match got {
            Ok(n) => {
                if how != How::Peek {
                    socket.receiving.shared.fetch_add(n as u64, Ordering::Relaxed);
                }
                if carrier::wants_more(receiver.ring.memory()) {
                    socket.grow();
                }
                return Ok(n);
            }
            // Nothing will ever come.
            Err(RecvError::Empty) if receiver.ring.memory().is_broken() => {
                return Err(Errno(libc::ECONNRESET));
            }
            Err(RecvError::Empty) => {
                // The kernel's end was seen before the ring was found empty, so nothing can have come between.
                if let Some(end) = ended {
                    return end;
                }
                // "Nothing" is not said for long without a look at the kernel's socket, which knows whether the peer lives.
                // Who waits looks there before it sleeps. If the peer has ended, it may have written before.
                if socket.end() == End::None
                    && (waits || !socket.is_look_due() || !look_at_kernel(socket, fd))
                {
                    return Err(Errno(libc::EAGAIN));
                }
                ended = how_ended(socket);
            }
            // A ring that was left is finished too.
            Err(RecvError::Finished | RecvError::PeerDead)
                if rings.is_ahead() && grow::step_receiving(socket, rings)? => {}
            Err(RecvError::Finished) if is_broken(socket) => return Err(Errno(libc::ECONNRESET)),
            Err(RecvError::Finished) => return Ok(0),
            Err(RecvError::PeerDead) => return how_ended(socket).unwrap_or(Ok(0)),
            Err(_) => return Err(Errno(libc::ECONNRESET)),
        }
    }
}

/// Whether the peer has broken the connection, and the program was not told so.
fn is_broken(socket: &'static Socket) -> bool {
    let ring = socket.sending.ring.lock();
    let is_broken = ring.as_ref().is_some_and(|sender| sender.ring.is_aborted());
    is_broken && !socket.said.reset.load(Ordering::Relaxed)
}

/// The peer's process has ended without a word in the ring, as the kernel says. `None` if it has not.
fn how_ended(socket: &'static Socket) -> Option<Result<usize>> {
    match socket.end() {
        End::None => None,
        End::Fin => Some(Ok(0)),
        End::Reset => {
            // What it had not read of ours is lost: the connection is broken. Else it is an end as any other: a killed process
            // leaves wake bytes unread, and the kernel resets for them too.
            let ring = socket.sending.ring.lock();
            let lost = ring.as_ref().is_some_and(|sender| sender.ring.in_flight() > 0)
                && !socket.said.reset.load(Ordering::Relaxed);
            Some(if lost { Err(Errno(libc::ECONNRESET)) } else { Ok(0) })
        }
    }
}

/// True if the connection has ended.
fn look_at_kernel(socket: &'static Socket, fd: c_int) -> bool {
    // Whoever sleeps in epoll_wait for this socket has to find the wake bytes.
    let sleeper = wait::Sleeper::begin(socket);
    if socket.end() == End::None && socket.watchers.is_empty() && sleeper.is_alone {
        kernel::drain(socket, fd);
    } else if socket.end() == End::None {
        kernel::look_for_end(socket, fd);
    }
    socket.end() != End::None
}

/// Copies out without taking.
fn peek(receiver: &mut SocketReceiver, into: &mut [u8]) -> std::result::Result<usize, RecvError> {
    let n = receiver.ring.poll()?.min(into.len());
    let memory = receiver.ring.memory();
    let capacity = memory.len() - HEADER;
    let start = receiver.ring.cursor().position as usize & (capacity - 1);
    let first = n.min(capacity - start);
    memory.read(HEADER + start, &mut into[..first]);
    memory.read(HEADER, &mut into[first..n]);
    Ok(n)
}

/// Takes without copying.
fn discard(
    receiver: &mut SocketReceiver,
    len: usize,
    wake: impl Fn(),
) -> std::result::Result<usize, RecvError> {
    let bytes = receiver.ring.peek()?;
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

/// What a call that receives would find, if the kernel does not carry this direction alone. `kernel` says whether the kernel's socket is readable; it
/// is asked only where that matters.
pub fn look(socket: &'static Socket, kernel: impl FnOnce() -> bool) -> Found {
    let mut rings = socket.receiving.ring.lock();
    let Some(receiver) = rings.as_ref() else { return Found::Something };
    // (Not the kernel's alone, so the carrier is one of the two.)
    if socket.receiving.carrier() == Carrier::Counted {
        let received = socket.receiving.native.load(Ordering::Relaxed);
        match left(receiver, received) {
            Ok(Some(0)) => {}
            Err(_) => return Found::Something,
            Ok(_) => return if kernel() { Found::Something } else { Found::Nothing },
        }
    }
    match poll(socket, &mut rings) {
        Ok(_) => Found::Something,
        Err(RecvError::Empty) if socket.end() == End::None => Found::Nothing,
        Err(RecvError::Empty | RecvError::Finished | RecvError::PeerDead) => Found::End,
        Err(_) => Found::Something,
    }
}

/// What the ring has that carries now.
fn poll(socket: &'static Socket, rings: &mut Rings<SocketReceiver>) -> std::result::Result<usize, RecvError> {
    loop {
        if rings.is_ahead() && grow::step_receiving(socket, rings).is_err() {
            // The call that receives says which.
            return Err(RecvError::Aborted);
        }
        let Some(receiver) = rings.as_mut() else { return Err(RecvError::Aborted) };
        if carrier::wants_more(receiver.ring.memory()) {
            socket.grow();
        }
        let found = receiver.ring.poll();
        // A ring that was left is finished too.
        let is_over = matches!(found, Err(RecvError::Finished | RecvError::PeerDead));
        if !(is_over && rings.is_ahead() && grow::step_receiving(socket, rings) == Ok(true)) {
            return found;
        }
    }
}

/// Says "wake me" to the peer, for a sleeper more. The caller looks once more before it sleeps, and calls [`rise`] when it is awake.
pub fn arm(socket: &'static Socket) {
    let mut ring = socket.receiving.ring.lock();
    socket.receiving.waiting.fetch_add(1, Ordering::Relaxed);
    if let Some(receiver) = ring.as_mut() {
        receiver.ring.arm();
    }
}

/// Says it again, for the same sleeper: the peer may have woken it.
pub fn arm_again(socket: &'static Socket) {
    if let Some(receiver) = socket.receiving.ring.lock().as_mut() {
        receiver.ring.arm();
    }
}

/// The sleeper is awake. The peer is told when there is no other.
pub fn rise(socket: &'static Socket) {
    let mut ring = socket.receiving.ring.lock();
    if socket.receiving.waiting.fetch_sub(1, Ordering::Relaxed) == 1
        && let Some(receiver) = ring.as_mut()
    {
        receiver.ring.disarm();
    }
}

/// Whether the ring has something, or has ended.
pub fn is_ready(socket: &'static Socket) -> bool {
    poll(socket, &mut socket.receiving.ring.lock()) != Err(RecvError::Empty)
}

/// The position in the ring up to which bytes have come.
pub fn position(socket: &'static Socket) -> u64 {
    let mut ring = socket.receiving.ring.lock();
    let available = poll(socket, &mut ring);
    let Some(receiver) = ring.as_ref() else { return u64::MAX };
    let position = ring.before() + receiver.ring.cursor().position;
    // The end is news too.
    match available {
        Ok(n) => position + n as u64,
        Err(RecvError::Empty) => position,
        Err(_) => u64::MAX,
    }
}

/// Bytes that can be received without waiting; `None` if that is the kernel's to say.
pub fn available(socket: &'static Socket) -> Option<usize> {
    if socket.receiving.carrier() != Carrier::Ring {
        return None;
    }
    Some(poll(socket, &mut socket.receiving.ring.lock()).unwrap_or(0))
}
