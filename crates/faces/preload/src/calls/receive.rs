//! Receiving from the kernel and from rings.

use crate::carrying::attend::attend_or_wait;
use crate::carrying::input::How;
use crate::carrying::{input, look, peek};
use crate::process::section::Section;
use crate::served::{Rooms, transfer};
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::{End, Socket};
use crate::system::errno::{Errno, Result, tell};
use crate::system::memory::can_write;
use crate::waiting::call::Call;
use crate::waiting::{points, wait};
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
        if !has_room_for_answers(socket, flags, &mut pieces) {
            return tell(Err(Errno(libc::EFAULT)));
        }
        return transfer::receive(socket, fd, flags, &mut pieces, native)
            .unwrap_or_else(|native| receive_on(socket, fd, flags, pieces.into_iter(), native));
    }
    receive_on(socket, fd, flags, pieces, native)
}

/// Returns whether there is memory of the program for what its cache has queued.
fn has_room_for_answers(socket: &Socket, flags: c_int, pieces: &mut Rooms<'_>) -> bool {
    let mut left = if flags & libc::MSG_TRUNC == 0 { socket.cache.queued() } else { 0 };
    pieces.iter_mut().all(|piece| {
        let n = piece.len().min(left);
        left -= n;
        can_write(piece.as_mut_ptr(), n)
    })
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
        if socket.is_resident.load(Ordering::Relaxed) {
            points::move_out(socket);
        }
        let takes = flags & libc::MSG_PEEK == 0;
        let moved = |got: &isize| if takes { usize::try_from(*got).unwrap_or(0) } else { 0 };
        match socket.receiving.through_kernel(call, moved) {
            // The kernel may have told this library why it is the end.
            Some(0) if socket.end() != End::None => return tell(input::untold(socket).map_or(Ok(0), Err)),
            Some(got) => {
                if got > 0 && takes {
                    socket.turns.received();
                }
                return got;
            }
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
        if !has_room_for_answers(socket, flags, &mut pieces) {
            return tell(Err(Errno(libc::EFAULT)));
        }
        return transfer::receive_further(socket, flags, &mut pieces)
            .unwrap_or_else(|| tell(counted(socket, fd, flags, pieces.into_iter())));
    }
    attend_or_wait(socket, fd);
    tell(counted(socket, fd, flags, pieces))
}

/// Receives while the kernel carries the direction only up to a byte that the sender names, or not at all.
fn counted<'a>(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a mut [u8]>,
) -> Result<usize> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno(libc::EINVAL));
    }
    crate::system::cancel::point();
    crate::state::family::attend(socket);
    if flags & libc::MSG_PEEK != 0 {
        return peeked(socket, fd, flags, pieces.filter(|piece| !piece.is_empty()).collect());
    }
    let all = flags & libc::MSG_WAITALL != 0;
    let (mut got, mut asks_for_some) = (0, false);
    let least = socket.lowat.bytes();
    let may_wait = flags & libc::MSG_DONTWAIT == 0;
    let mut waits = may_wait && !socket.seems_nonblocking(fd);
    // Relatives may have changed that. A call asks once, as the kernel does, and only if there is nothing for it.
    let mut is_certain = !(may_wait && socket.may_be_shared());
    let mut call = Call::receiving(socket, fd);
    // What the call receives may come from two carriers, and a signal handler must not receive in between.
    let mut section = Some(Section::begin());
    for piece in pieces {
        asks_for_some |= !piece.is_empty();
        let mut at = 0;
        while at < piece.len() {
            let how = if flags & libc::MSG_TRUNC != 0 { How::Discard } else { How::Take };
            // The kernel may carry again meanwhile, so its call must not wait for more than there is.
            let waits_now = waits && (got < least || all);
            match input::some(socket, call.fd, &mut piece[at..], how, waits_now) {
                // The end of the stream.
                Ok(0) => return Ok(got),
                Ok(n) => {
                    at += n;
                    got += n;
                }
                Err(Errno(libc::EAGAIN))
                    if got > 0 && got >= least && !all || socket.has(Fact::ShutDownReceiving) =>
                {
                    return Ok(got);
                }
                Err(Errno(libc::EAGAIN)) if !is_certain => {
                    (waits, is_certain) = (!socket.is_nonblocking(call.fd), true);
                }
                Err(Errno(libc::EAGAIN)) if waits => {
                    call.has_moved = got > 0;
                    match outside(&mut section, || wait::for_data(&mut call)) {
                        Err(_) if got > 0 => return Ok(got),
                        waited => waited?,
                    }
                }
                Err(errno) if got > 0 => {
                    // The kernel tells how the connection has ended only once, and this call does not tell the program.
                    let is_end =
                        !matches!(errno, Errno(libc::EAGAIN | libc::EINTR | libc::EBADF | libc::EFAULT));
                    if is_end && socket.receiving.carrier() == Carrier::Kernel && call.has_connection() {
                        socket.set_error(errno);
                    }
                    return Ok(got);
                }
                Err(_) if !call.has_connection() => return Err(call.gone()),
                Err(errno) => {
                    input::note_told(socket, errno);
                    return Err(errno);
                }
            }
        }
    }
    drop(section);
    if asks_for_some { Ok(got) } else { nothing(call, may_wait && !socket.is_nonblocking(fd)) }
}

/// Does the same for a call that leaves the bytes where they are. Each look shows all that there are, as in the kernel. None of the
/// pieces is empty.
#[cold]
fn peeked(socket: &'static Socket, fd: c_int, flags: c_int, mut pieces: Rooms<'_>) -> Result<usize> {
    let may_wait = flags & libc::MSG_DONTWAIT == 0;
    let waits = may_wait && !socket.is_nonblocking(fd);
    if pieces.is_empty() {
        return nothing(Call::receiving(socket, fd), waits);
    }
    let wanted = match flags & libc::MSG_WAITALL {
        0 => socket.lowat.bytes(),
        _ => peek::room(&pieces),
    };
    let how = if flags & libc::MSG_TRUNC != 0 { How::Count } else { How::Peek };
    let least = wanted.min(peek::room(&pieces));
    let mut call = Call::receiving(socket, fd);
    loop {
        match input::peek(socket, call.fd, &mut pieces, how, waits) {
            // There is more, which has come since, or for which the program's memory is not there.
            Ok(n @ 1..)
                if n < least
                    && input::peek(socket, call.fd, &mut pieces, How::Count, false)
                        .is_ok_and(|all| all > n) =>
            {
                match input::peek(socket, call.fd, &mut pieces, how, false) {
                    Ok(more) if more > n => {}
                    _ => return Ok(n),
                }
            }
            // They keep the socket readable, so the thread sleeps by the clock.
            Ok(n @ 1..) if n < least && waits && !is_all(socket) => {
                if wait::a_moment(&mut call).is_err() {
                    return Ok(n);
                }
            }
            Ok(n) => return Ok(n),
            Err(Errno(libc::EAGAIN)) if socket.has(Fact::ShutDownReceiving) => return Ok(0),
            Err(Errno(libc::EAGAIN)) if waits => wait::for_data(&mut call)?,
            Err(_) if !call.has_connection() => return Err(call.gone()),
            Err(errno) => {
                input::note_told(socket, errno);
                return Err(errno);
            }
        }
    }
}

/// Waits without being in a section.
fn outside<R>(section: &mut Option<Section>, wait: impl FnOnce() -> R) -> R {
    *section = None;
    let result = wait();
    *section = Some(Section::begin());
    result
}

/// Does what a call does that asks for no bytes: it waits for some, or for the end, and reports an error.
fn nothing(mut call: Call, waits: bool) -> Result<usize> {
    let socket = call.socket;
    loop {
        match input::some(socket, call.fd, &mut [0], How::Peek, waits) {
            Err(Errno(libc::EAGAIN)) if socket.has(Fact::ShutDownReceiving) => return Ok(0),
            Err(Errno(libc::EAGAIN)) if waits => wait::for_data(&mut call)?,
            Err(errno) => {
                if errno == Errno(libc::ECONNRESET) {
                    socket.note(Fact::ToldReset);
                }
                return Err(errno);
            }
            Ok(_) => return Ok(0),
        }
    }
}

/// Returns whether no more bytes come than are there.
fn is_all(socket: &'static Socket) -> bool {
    socket.has(Fact::ShutDownReceiving)
        || socket.end() != End::None
        || look::is_ending(socket, &socket.receiving.lock())
}
