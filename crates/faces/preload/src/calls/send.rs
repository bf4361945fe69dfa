//! Sending to the kernel and to rings.

use crate::carrying::output::{Stop, Turn, UNUSUAL};
use crate::carrying::{attend, look, output, returning, room};
use crate::daemon::session;
use crate::process::buffers::Buffer;
use crate::served::{Pieces, transfer};
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::{End, Socket};
use crate::state::sockets::Using;
use crate::system::clock::now;
use crate::system::errno::{Errno, Kept, Result, check, tell};
use crate::system::kernel;
use crate::system::memory::can_read;
use crate::waiting::call::Call;
use crate::waiting::wait;
use ginnel_ring::SendError;
use libc::c_int;
use std::iter::Peekable;

/// Sends the pieces one after the other, as a system call with these flags would. `native` is that call.
#[inline]
pub fn send<'a>(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a [u8]> + Clone,
    native: impl FnOnce() -> isize,
) -> isize {
    if socket.cache.is_there() {
        let pieces: Pieces<'a> = pieces.filter(|piece| !piece.is_empty()).collect();
        if !pieces.iter().all(|piece| can_read(piece.as_ptr(), piece.len())) {
            socket.cache.leave();
            return send_on(socket, fd, flags, pieces.iter().copied(), native);
        }
        return transfer::send(socket, fd, flags, &pieces)
            .unwrap_or_else(|| send_on(socket, fd, flags, pieces.iter().copied(), native));
    }
    send_on(socket, fd, flags, pieces, native)
}

/// Does the same, without the handling of cache requests.
#[inline]
fn send_on<'a>(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a [u8]> + Clone,
    native: impl FnOnce() -> isize,
) -> isize {
    if flags & UNUSUAL != 0 && socket.sending.carrier() == Carrier::Kernel {
        session::stays(socket, "a flag that the kernel alone knows (MSG_OOB, MSG_ZEROCOPY, MSG_FASTOPEN)");
    }
    if let Some(sent) = output::through_kernel(socket, fd, native) {
        return sent;
    }
    tell(into_ring(socket, fd, flags, pieces))
}

/// The number of bytes up to which the small pieces of a call are put into the ring together, so that the peer gets them
/// together and is woken once.
const TOGETHER: usize = 4096;
/// The most bytes that a call sends to a peer that has closed its end: as many as Linux buffers for a connection on one host.
const IN_VAIN: usize = 2_626_560;

/// The most bytes for which the library finds out at a time whether they are there. If not all of them are, none of them is sent: the
/// kernel, too, copies in large pieces.
const CHECKED: usize = 64 << 10;

/// Returns whether the first [`CHECKED`] bytes of several pieces are there.
fn are_there<'a>(mut pieces: impl Iterator<Item = &'a [u8]>) -> bool {
    let mut left = CHECKED;
    pieces.all(|piece| {
        let n = piece.len().min(left);
        left -= n;
        can_read(piece.as_ptr(), n)
    })
}

/// Returns the piece, or a copy of it and of as many following pieces as there is room for.
fn gather<'p: 'r, 'r>(
    piece: &'p [u8],
    rest: &mut Peekable<impl Iterator<Item = &'p [u8]>>,
    room: &'r mut Option<Buffer>,
) -> &'r [u8] {
    let is_there = |next: &[u8]| can_read(next.as_ptr(), next.len());
    let fits = |at: usize, next: &[u8]| at.saturating_add(next.len()) <= TOGETHER && is_there(next);
    let mut at = piece.len();
    if rest.peek().is_none_or(|next| !fits(at, next)) || !fits(0, piece) {
        return piece;
    }
    if room.is_none() {
        *room = Buffer::take();
    }
    // Without a buffer, the pieces go one after the other.
    let Some(room) = room.as_mut().map(Buffer::bytes) else { return piece };
    room[..at].copy_from_slice(piece);
    while let Some(next) = rest.next_if(|next| fits(at, next)) {
        room[at..at + next.len()].copy_from_slice(next);
        at += next.len();
    }
    &room[..at]
}

fn into_ring<'a>(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a [u8]> + Clone,
) -> Result<usize> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    crate::system::cancel::point();
    crate::state::family::attend(socket);
    // The daemon may not have seen yet that the peer is dead.
    if socket.end() == End::Lost || socket.end() != End::None && look::is_reset(socket) {
        return Err(output::broken(socket, fd, SendError::PeerDead, flags));
    }
    let (mut sent, mut in_vain, mut has_some) = (0, false, false);
    let mut call = Call::sending(socket, fd);
    let are_there = pieces.clone().nth(1).is_none() || are_there(pieces.clone());
    let mut whole = Whole::of(pieces.clone().map(<[u8]>::len).fold(0, usize::saturating_add));
    let mut pieces = pieces.peekable();
    // The ring is held while the call goes on without waiting, so that nobody else's bytes come between its pieces.
    let mut held = None;
    let mut turn = None;
    let (mut room, mut nonblocking) = (None, None);
    // A call asks once, as the kernel does.
    let mut is_nonblocking =
        |fd| *nonblocking.get_or_insert_with(|| flags & libc::MSG_DONTWAIT != 0 || socket.is_nonblocking(fd));
    while let Some(piece) = pieces.next() {
        has_some |= !piece.is_empty();
        let mut rest = gather(piece, &mut pieces, &mut room);
        while !rest.is_empty() {
            call.has_moved = sent > 0;
            let next = &rest[..rest.len().min(CHECKED)];
            let is_there = (sent > 0 || are_there) && can_read(next.as_ptr(), next.len());
            let result = match is_there {
                true => output::some_into_ring(socket, call.fd, next, whole.least, &mut held),
                false => {
                    held = None;
                    match output::some_from(socket, call.fd, &mut [0], |_| Err(Errno(libc::EFAULT))) {
                        Some(Err(Stop::Full)) => Some(Err(SendError::Full)),
                        Some(Err(Stop::Ended(error))) => Some(Err(error)),
                        Some(_) if sent > 0 => return Ok(sent),
                        Some(_) => return Err(Errno(libc::EFAULT)),
                        None => None,
                    }
                }
            };
            let Some(result) = result else {
                match natively(&mut call, rest, flags) {
                    Ok(n) => {
                        rest = &rest[n..];
                        sent += n;
                        whole.begun(n);
                        continue;
                    }
                    Err(_) if sent > 0 => return Ok(sent),
                    Err(errno) => return Err(errno),
                }
            };
            match result {
                Ok(n) => {
                    rest = &rest[n..];
                    sent += n;
                    whole.begun(n);
                }
                // The program's own end comes first.
                Err(SendError::Closed) if socket.has(Fact::ShutDownSending) && sent > 0 => return Ok(sent),
                Err(SendError::Closed) if socket.has(Fact::ShutDownSending) => {
                    return Err(output::broken(socket, call.fd, SendError::AfterFinish, flags));
                }
                Err(SendError::Full) => {
                    let waits = !is_nonblocking(call.fd);
                    if whole.least > 0 && !(waits && whole.may_wait()) {
                        whole.least = 0;
                        if waits {
                            Turn::forget(socket);
                        }
                        continue;
                    }
                    if waits && sent > 0 {
                        turn.get_or_insert_with(|| Turn::take(socket));
                    }
                    let is_small = sent + rest.len() <= returning::TCP_TAKES;
                    let result = match waits && whole.least > 0 && Turn::is_others(socket) {
                        true => wait::a_moment(&mut call),
                        false => wait_for_room(&mut call, waits, whole.least, is_small),
                    };
                    match result {
                        Ok(()) => {}
                        Err(Errno(libc::ECONNRESET))
                            if whole.has_room_over_tcp() && look::is_reset(socket) =>
                        {
                            return Ok(whole.bytes);
                        }
                        Err(_) if sent > 0 => return Ok(sent),
                        Err(errno) => return Err(socket.tell().unwrap_or(errno)),
                    }
                }
                // TCP accepts what is sent to a peer that has closed its end, and learns of the close by sending.
                Err(SendError::Closed) if in_vain || output::begins_in_vain(socket) => {
                    in_vain = true;
                    // The next call fails.
                    let most = IN_VAIN.saturating_sub(sent);
                    if rest.len() > most {
                        return Ok(sent + most);
                    }
                    sent += rest.len();
                    rest = &[];
                }
                Err(_) if whole.has_room_over_tcp() => return Ok(whole.bytes),
                Err(_) if sent > 0 => return Ok(sent),
                Err(error) => return Err(output::broken(socket, call.fd, error, flags)),
            }
        }
    }
    drop(held);
    // A call that sends nothing still fails after a shutdown.
    if !has_some && room::has_shut_down(socket) {
        return Err(output::broken(socket, call.fd, SendError::AfterFinish, flags));
    }
    Ok(sent)
}

/// Waits until another attempt to put bytes into the ring is worthwhile, with room for `least` of them. If the call does not wait, fails
/// with EAGAIN, unless the kernel carries now. It does if the message is small and the ring is one of the smallest.
pub fn wait_for_room(call: &mut Call, waits: bool, least: usize, is_small: bool) -> Result<()> {
    if waits {
        return wait::for_space(call, least);
    }
    let (socket, fd) = (call.socket, call.fd);
    output::note_no_room(socket);
    let leaves = || is_small && returning::leave_if_small(socket, fd);
    // The receiver may have made room meanwhile, so that the ring was not left.
    match returning::is_full(socket, fd) && !leaves() && returning::is_full(socket, fd) {
        true => Err(Errno(libc::EAGAIN)),
        false => Ok(()),
    }
}

/// Sends some of the bytes with a system call, because the kernel carries again or still. That call does not wait, because
/// the descriptor's number may become another file's meanwhile.
#[cold]
fn natively(call: &mut Call, bytes: &[u8], flags: c_int) -> Result<usize> {
    let _errno = Kept::new();
    let (socket, fd) = (call.socket, call.fd);
    // A call that has sent something returns how much, and raises no signal.
    let quiet = if call.has_moved { libc::MSG_NOSIGNAL } else { 0 };
    let send = || match Using::begin(socket, fd) {
        Some(_using) => kernel::send(fd, bytes, flags | quiet | libc::MSG_DONTWAIT),
        None => tell(Err(Errno(libc::EBADF))),
    };
    let sent = socket.sending.through_kernel(send, |sent: &isize| usize::try_from(*sent).unwrap_or(0));
    // Without a result, a ring carries or is about to.
    match sent.map_or(Ok(0), check) {
        Err(Errno(libc::EAGAIN)) if flags & libc::MSG_DONTWAIT == 0 && !socket.is_nonblocking(fd) => {
            wait::for_kernel(call).map(|()| 0)
        }
        sent => sent.and_then(|n| call.go_on().map(|()| n)),
    }
}

/// Does the same as [`send`], for a call that continues after it has sent something.
pub fn go_on<'a>(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a [u8]> + Clone,
) -> isize {
    if socket.cache.is_there() {
        let pieces: Pieces<'a> = pieces.filter(|piece| !piece.is_empty()).collect();
        if !pieces.iter().all(|piece| can_read(piece.as_ptr(), piece.len())) {
            return tell(Err(Errno(libc::EFAULT)));
        }
        return transfer::send(socket, fd, flags, &pieces)
            .unwrap_or_else(|| tell(into_ring(socket, fd, flags, pieces.iter().copied())));
    }
    attend::attend_or_wait(socket, fd);
    tell(into_ring(socket, fd, flags, pieces))
}

/// How a call that waits for room keeps what it sends together.
///
/// Programs have several threads or processes send messages over one connection, without a lock of their own. TCP keeps each message
/// together while it has room, and it has much. So a call begins when the ring has room for all that it sends. If that is much, or more
/// than the ring ever has at once, the call has its [`Turn`] until it ends.
struct Whole {
    /// The number of bytes that the call sends.
    bytes: usize,
    has_begun: bool,
    /// The number of bytes for which the call waits before it begins; 0 once it has begun, or does not wait for that any longer.
    least: usize,
    /// The time since which the call waits for that, in microseconds.
    since: Option<u64>,
}

impl Whole {
    fn of(bytes: usize) -> Self {
        // A long message need not wait, because it has its turn. So the peer receives its beginning while the rest is copied.
        let least = if bytes > returning::TCP_TAKES { 1 } else { bytes };
        Self { bytes, has_begun: false, least, since: None }
    }

    /// Notes that some bytes are under way. The rest follows as there is room.
    fn begun(&mut self, bytes: usize) {
        if bytes > 0 {
            self.has_begun = true;
            self.least = 0;
        }
    }

    /// Returns whether the call has begun or waits, and would have ended by now over TCP, which had room for all of the message. What
    /// happens to the connection afterwards is for the next call to report.
    fn has_room_over_tcp(&self) -> bool {
        (self.has_begun || self.since.is_some()) && self.bytes <= returning::TCP_TAKES
    }

    /// Returns whether the call may go on waiting before it begins. A receiver may wait for more bytes than it has before it takes any,
    /// and a signal handler may have made a thread leave its turn for good, so a call that has waited for long sends what it can.
    fn may_wait(&mut self) -> bool {
        let now = now();
        now.saturating_sub(*self.since.get_or_insert(now)) < LONGEST_WHOLE
    }
}

/// How long a call waits before it begins, in microseconds. A ring that has no room for so long has been left for TCP before, if that is
/// possible.
const LONGEST_WHOLE: u64 = 2_000_000;

#[cfg(test)]
mod tests {
    use super::{TOGETHER, gather};

    #[test]
    fn small_pieces_go_together() {
        let (large, larger) = ([7; TOGETHER], [7; TOGETHER + 1]);
        let pieces: [&[u8]; 10] = [b"a", b"bc", b"", &large, b"d", &large[1..], b"", &larger, b"", b"e"];
        let (mut pieces, mut room) = (pieces.into_iter().peekable(), None);
        let mut sent = Vec::new();
        while let Some(piece) = pieces.next() {
            sent.push(gather(piece, &mut pieces, &mut room).to_vec());
        }
        let second = [b"d", &large[1..]].concat();
        assert_eq!(sent, [b"abc".to_vec(), large.to_vec(), second, larger.to_vec(), b"e".to_vec()]);
    }

    #[test]
    fn one_piece_is_not_copied() {
        let piece: &[u8] = b"one";
        let mut room = None;
        assert_eq!(gather(piece, &mut std::iter::empty().peekable(), &mut room).as_ptr(), piece.as_ptr());
        assert!(room.is_none());
    }
}
