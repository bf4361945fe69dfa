//! Sending to the kernel and to rings.

use crate::cache::{self, Pieces};
use crate::direction::{Carrier, Held};
use crate::doorbell::{self, Wake};
use crate::errno::{Errno, Kept, Result, check, tell};
use crate::lock::tid;
use crate::memory::is_low;
use crate::rings::Rings;
use crate::socket::{End, Socket, now};
use crate::table::{Using, number_in};
use crate::wait::{self, Deadline};
use crate::{change, daemon, disconnecting, grow, kernel, receive, returning};
use ginnel::SocketSender;
use ginnel_ring::wait::Waitable;
use ginnel_ring::{SendError, carrier};
use ginnel_shmem::SharedMemory;
use libc::c_int;
use std::iter::Peekable;
use std::sync::atomic::{Ordering, fence};

/// Flags that make the library leave a connection to the kernel, if the kernel still carries it.
pub const UNUSUAL: c_int = libc::MSG_OOB | libc::MSG_ZEROCOPY | libc::MSG_FASTOPEN;

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
        if pieces.iter().any(|piece| is_low(piece.as_ptr())) {
            cache::leave(socket);
            return send_on(socket, fd, flags, pieces.iter().copied(), native);
        }
        return cache::send(socket, fd, flags, &pieces)
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
        daemon::stays(socket, "a flag that the kernel alone knows (MSG_OOB, MSG_ZEROCOPY, MSG_FASTOPEN)");
    }
    if let Some(sent) = through_kernel(socket, fd, native) {
        return sent;
    }
    tell(into_ring(socket, fd, flags, pieces))
}

/// Sends with a system call. Returns `None` if the kernel no longer carries this direction.
#[inline]
pub fn through_kernel(socket: &'static Socket, fd: c_int, native: impl FnOnce() -> isize) -> Option<isize> {
    attend_or_wait(socket, fd);
    if socket.sending.carrier() != Carrier::Kernel {
        return None;
    }
    let sent = socket.sending.through_kernel(native, |sent: &isize| usize::try_from(*sent).unwrap_or(0))?;
    if sent > 0 {
        socket.sends.fetch_add(1, Ordering::Relaxed);
    }
    Some(sent)
}

/// Does the work that is due for a connection before a call does its own work.
#[cold]
fn attend(socket: &'static Socket, fd: c_int) {
    let _errno = Kept::new();
    daemon::attend(socket, fd);
    if socket.is_joined() {
        change::attend(socket, fd);
    }
}

/// Does the work that is due for a connection before a call moves bytes.
#[inline]
pub fn attend_or_wait(socket: &'static Socket, fd: c_int) {
    if socket.needs_attention() && !daemon::is_young(socket) {
        crate::settle::wait(socket);
        attend(socket, fd);
    }
}

/// Does the same for other calls that look at the socket.
#[inline]
pub fn attend_if_needed(socket: &'static Socket, fd: c_int) {
    if socket.needs_attention() {
        attend(socket, fd);
    }
}

/// The number of bytes up to which the small pieces of a call are put into the ring together, so that the peer gets them
/// together and is woken once.
const TOGETHER: usize = 4096;

/// Returns the piece, or a copy of it and of as many following pieces as there is room for.
fn gather<'p: 'r, 'r>(
    piece: &'p [u8],
    rest: &mut Peekable<impl Iterator<Item = &'p [u8]>>,
    room: &'r mut Option<[u8; TOGETHER]>,
) -> &'r [u8] {
    let is_there = |next: &[u8]| next.is_empty() || !is_low(next.as_ptr());
    let fits = |at: usize, next: &[u8]| at.saturating_add(next.len()) <= TOGETHER && is_there(next);
    let mut at = piece.len();
    if !is_there(piece) || rest.peek().is_none_or(|next| !fits(at, next)) {
        return piece;
    }
    let room = room.get_or_insert([0; TOGETHER]);
    room[..at].copy_from_slice(piece);
    while let Some(next) = rest.next_if(|next| fits(at, next)) {
        room[at..at + next.len()].copy_from_slice(next);
        at += next.len();
    }
    &room[..at]
}

fn into_ring<'a>(
    socket: &'static Socket,
    mut fd: c_int,
    flags: c_int,
    pieces: impl Iterator<Item = &'a [u8]> + Clone,
) -> Result<usize> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    crate::cancel::point();
    crate::family::attend(socket);
    // The daemon may not have seen yet that the peer is dead.
    if socket.end() == End::Lost || socket.end() != End::None && receive::is_reset(socket) {
        return Err(broken(socket, fd, SendError::PeerDead, flags));
    }
    let (mut sent, mut in_vain, mut has_some) = (0, false, false);
    let mut deadline = Deadline::default();
    let connection = socket.connection();
    let number = |fd| number_in(socket, connection, fd, Errno(libc::ECONNRESET));
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
            let result = match is_low(rest.as_ptr()) {
                false => some_into_ring(socket, fd, rest, whole.least, &mut held),
                true => {
                    held = None;
                    match some_from(socket, fd, &mut [0], |_| Err(Errno(libc::EFAULT))) {
                        Some(Err(Stop::Full)) => Some(Err(SendError::Full)),
                        Some(Err(Stop::Ended(error))) => Some(Err(error)),
                        Some(_) if sent > 0 => return Ok(sent),
                        Some(_) => return Err(Errno(libc::EFAULT)),
                        None => None,
                    }
                }
            };
            let Some(result) = result else {
                let sent_now = natively(socket, fd, rest, flags, &mut deadline);
                match sent_now.and_then(|n| number(fd).map(|number| (n, number))) {
                    Ok((n, number)) => {
                        fd = number;
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
                Err(SendError::Full) => {
                    let waits = !is_nonblocking(fd);
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
                        true => wait::for_turn(fd, &mut deadline),
                        false => wait_for_room(socket, fd, waits, whole.least, is_small, &mut deadline),
                    };
                    match result.and_then(|()| number(fd)) {
                        Ok(number) => fd = number,
                        Err(_) if sent > 0 => return Ok(sent),
                        Err(errno) => return Err(socket.tell().unwrap_or(errno)),
                    }
                }
                // TCP accepts what is sent to a peer that has closed its end, and learns of the close by sending.
                Err(SendError::Closed) if in_vain || begins_in_vain(socket) => {
                    in_vain = true;
                    sent += rest.len();
                    rest = &[];
                }
                Err(_) if sent > 0 => return Ok(sent),
                Err(error) => return Err(broken(socket, fd, error, flags)),
            }
        }
    }
    drop(held);
    // A call that sends nothing still fails after a shutdown.
    if !has_some && has_shut_down(socket) {
        return Err(broken(socket, fd, SendError::AfterFinish, flags));
    }
    Ok(sent)
}

/// Waits until another attempt to put bytes into the ring is worthwhile, with room for `least` of them. If the call does not wait, fails
/// with EAGAIN, unless the kernel carries now. It does if the message is small and the ring is one of the smallest.
pub fn wait_for_room(
    socket: &'static Socket,
    fd: c_int,
    waits: bool,
    least: usize,
    is_small: bool,
    deadline: &mut Deadline,
) -> Result<()> {
    if waits {
        return wait::for_space(socket, fd, least, deadline);
    }
    note_no_room(socket);
    match returning::is_full(socket, fd) && !(is_small && returning::leave_if_small(socket, fd)) {
        true => Err(Errno(libc::EAGAIN)),
        false => Ok(()),
    }
}

/// Records that bytes are sent to a peer that has closed its end. Over TCP it answers with a reset, which is an event. Returns false
/// if that was recorded before.
#[cold]
fn begins_in_vain(socket: &'static Socket) -> bool {
    let begins = !socket.said.closed.swap(true, Ordering::Relaxed);
    if begins {
        crate::epoll::changed(socket);
    }
    begins
}

/// Returns whether the program has shut down sending, in this process or another one that has the socket.
pub fn has_shut_down(socket: &'static Socket) -> bool {
    let is = |sender: &SocketSender| sender.ring.is_finished();
    socket.shut_down.sending.load(Ordering::Relaxed)
        || socket.sending.common().is_some()
            && socket.sending.carrier() == Carrier::Ring
            && socket.sending.lock().as_ref().is_some_and(is)
}

/// Sends some of the bytes with a system call, because the kernel carries again or still. That call does not wait, because
/// the descriptor's number may become another file's meanwhile.
#[cold]
fn natively(
    socket: &'static Socket,
    fd: c_int,
    bytes: &[u8],
    flags: c_int,
    deadline: &mut Deadline,
) -> Result<usize> {
    let _errno = Kept::new();
    let send = || match Using::begin(socket, fd) {
        Some(_using) => kernel::send(fd, bytes, flags | libc::MSG_DONTWAIT),
        None => tell(Err(Errno(libc::EBADF))),
    };
    let sent = socket.sending.through_kernel(send, |sent: &isize| usize::try_from(*sent).unwrap_or(0));
    // Without a result, a ring carries or is about to.
    match sent.map_or(Ok(0), check) {
        Err(Errno(libc::EAGAIN)) if flags & libc::MSG_DONTWAIT == 0 && !socket.is_nonblocking(fd) => {
            wait::for_kernel(fd, deadline).map(|()| 0)
        }
        sent => sent,
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
        return cache::send(socket, fd, flags, &pieces)
            .unwrap_or_else(|| tell(into_ring(socket, fd, flags, pieces.iter().copied())));
    }
    attend_or_wait(socket, fd);
    tell(into_ring(socket, fd, flags, pieces))
}

/// How a call that waits for room keeps what it sends together.
///
/// Programs have several threads or processes send messages over one connection, without a lock of their own. TCP keeps each message
/// together while it has room, and it has much. So a call begins when the ring has room for all that it sends. If that is much, or more
/// than the ring ever has at once, the call has its [`Turn`] until it ends.
struct Whole {
    /// The number of bytes for which the call waits before it begins; 0 once it has begun, or does not wait for that any longer.
    least: usize,
    /// The time since which the call waits for that, in microseconds.
    since: Option<u64>,
}

impl Whole {
    fn of(bytes: usize) -> Self {
        // A long message need not wait, because it has its turn. So the peer receives its beginning while the rest is copied.
        Self { least: if bytes > returning::TCP_TAKES { 1 } else { bytes }, since: None }
    }

    /// Notes that some bytes are under way. The rest follows as there is room.
    fn begun(&mut self, bytes: usize) {
        if bytes > 0 {
            self.least = 0;
        }
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

/// A call that waits for room for the rest of what it sends. Other calls that may wait do not begin meanwhile.
struct Turn(&'static Socket);

impl Turn {
    fn take(socket: &'static Socket) -> Self {
        let _ = socket.turn.compare_exchange(0, tid(), Ordering::Relaxed, Ordering::Relaxed);
        Self(socket)
    }

    /// Forgets a turn that has lasted for too long.
    #[cold]
    fn forget(socket: &Socket) {
        socket.turn.store(0, Ordering::Relaxed);
    }

    /// Returns whether another thread has the turn.
    #[inline]
    fn is_others(socket: &Socket) -> bool {
        let owner = socket.turn.load(Ordering::Relaxed);
        owner != 0 && owner != tid()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let _ = self.0.turn.compare_exchange(tid(), 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Puts some of the bytes into the ring, and wakes the peer if it sleeps. Returns `None` if no ring carries this direction. If `least`
/// is not 0, the call has not begun, and begins only if there is room for so many bytes (or for some, if the ring never has room for so
/// many at once). Leaves the ring held if some bytes were put in.
#[inline]
fn some_into_ring<'s>(
    socket: &'static Socket,
    fd: c_int,
    bytes: &[u8],
    least: usize,
    held: &mut Option<Held<'s, SocketSender>>,
) -> Option<std::result::Result<usize, SendError>> {
    let ring = held.get_or_insert_with(|| socket.sending.lock());
    if socket.sending.carrier() != Carrier::Ring {
        *held = None;
        return None;
    }
    if !socket.sending.uses() {
        *held = None;
        let has_followed = disconnecting::follow(socket);
        return if has_followed { None } else { Some(Err(SendError::Aborted)) };
    }
    let mut has_woken = false;
    let written = write(socket, fd, ring, bytes, least, &mut has_woken);
    // The peer may have asked for the wake-up because it wants this side to return to the kernel.
    let is_recalled = |sender: &SocketSender| carrier::is_recalled(sender.ring.memory());
    let leaves = has_woken && ring.as_ref().is_some_and(is_recalled);
    if leaves || written.is_err() {
        *held = None;
    }
    if leaves {
        returning::leave_if_recalled(socket, fd);
    }
    Some(written)
}

#[inline]
fn write(
    socket: &'static Socket,
    fd: c_int,
    ring: &mut Rings<SocketSender>,
    bytes: &[u8],
    least: usize,
    has_woken: &mut bool,
) -> std::result::Result<usize, SendError> {
    if ring.is_ahead() {
        grow::step_sending(socket, fd, ring);
    }
    let sender = ring.as_mut().ok_or(SendError::AfterFinish)?;
    let may_begin = least == 0
        || !Turn::is_others(socket) && (least > sender.ring.at_once() || sender.ring.has_room(least));
    let written = match may_begin {
        true => sender.ring.write(bytes, || {
            *has_woken = true;
            doorbell::wake(socket, fd, &sender.waker);
        }),
        false => Err(SendError::Full),
    };
    if written == Err(SendError::Full) {
        found_full(socket, fd, sender);
    }
    let n = written?;
    returning::note_room(socket);
    if sender.ring.memory().is_broken() {
        return Err(SendError::Aborted);
    }
    socket.sending.shared.fetch_add(n as u64, Ordering::Relaxed);
    if socket.gives_up.load(Ordering::Relaxed) && socket.receiving.waiting.load(Ordering::Relaxed) > 0 {
        // Another thread already waits for the answer, and relies on the kernel's timeout for unacknowledged bytes (see `probe`).
        kernel::wake(socket, fd);
    }
    Ok(n)
}

/// Does what is due when a ring has no room.
#[cold]
fn found_full(socket: &'static Socket, fd: c_int, sender: &mut SocketSender) {
    // A call that a signal handler has left (`longjmp`) may still owe the peer a wake-up.
    if sender.ring.take_owed() {
        doorbell::wake(socket, fd, &sender.waker);
    }
    grow::note_full(socket, fd, sender);
    returning::note_full(socket);
}

/// Why nothing was moved into a ring.
pub enum Stop {
    /// The source has failed.
    Source(Errno),
    /// The ring has no room.
    Full,
    /// Nothing can be sent any more.
    Ended(SendError),
}

/// Moves bytes from a source into the ring: at most as many as the buffer and the ring have room for. `read` fills the front of
/// a buffer from the source, does not wait, and returns the number of bytes. Returns that number, or `None` if no ring carries
/// this direction.
pub fn some_from(
    socket: &'static Socket,
    fd: c_int,
    buffer: &mut [u8],
    read: impl FnOnce(&mut [u8]) -> Result<usize>,
) -> Option<std::result::Result<usize, Stop>> {
    let mut ring = socket.sending.lock();
    if socket.sending.carrier() != Carrier::Ring {
        return None;
    }
    let room = match room(socket, fd, &mut ring, buffer.len()) {
        Ok(room) => room,
        Err(SendError::Full) => return Some(Err(Stop::Full)),
        // TCP accepts what is sent to a peer that has closed its end, and learns of the close by sending.
        Err(SendError::Closed) if !socket.said.closed.load(Ordering::Relaxed) => {
            drop(ring);
            let read = read(buffer);
            if read.is_ok_and(|n| n > 0) {
                begins_in_vain(socket);
            }
            return Some(read.map_err(Stop::Source));
        }
        Err(error) => return Some(Err(Stop::Ended(error))),
    };
    let read = match read(&mut buffer[..room]) {
        Ok(n) => n,
        Err(errno) => return Some(Err(Stop::Source(errno))),
    };
    let mut has_woken = false;
    // The room cannot have become less. If the peer has ended meanwhile, the bytes are lost, as over TCP.
    let _ = write(socket, fd, &mut ring, &buffer[..read], 0, &mut has_woken);
    drop(ring);
    if has_woken {
        returning::leave_if_recalled(socket, fd);
    }
    Some(Ok(read))
}

/// Returns how much room the ring has, which is at most `most`, or why it has none.
fn room(
    socket: &'static Socket,
    fd: c_int,
    ring: &mut Rings<SocketSender>,
    most: usize,
) -> std::result::Result<usize, SendError> {
    if !socket.sending.uses() {
        return Err(SendError::Aborted);
    }
    if ring.is_ahead() {
        grow::step_sending(socket, fd, ring);
    }
    let sender = ring.as_mut().ok_or(SendError::AfterFinish)?;
    let room = sender.ring.claim(most).map(|room| room.slice().len());
    if room == Err(SendError::Full) {
        found_full(socket, fd, sender);
    }
    room
}

/// Returns how many bytes in the ring the peer's program has not received. The peer may not have released the room of received
/// bytes yet. The result never exceeds the bytes in flight, whatever number the peer has stored.
pub fn untaken(sender: &SocketSender) -> usize {
    let untaken = sender.ring.cursor().position.saturating_sub(carrier::taken(sender.ring.memory()));
    usize::try_from(untaken).unwrap_or(usize::MAX).min(sender.ring.in_flight())
}

/// Sends a wake byte if the ring has bytes that the peer has not taken. It is for a thread that is about to sleep and relies on
/// the kernel to notice that the peer acknowledges nothing (TCP_USER_TIMEOUT). The kernel does not know the bytes in the ring,
/// so it needs a byte of its own.
#[cold]
pub fn probe(socket: &'static Socket) {
    if socket.sending.lock().as_ref().is_some_and(|sender| untaken(sender) > 0) {
        kernel::wake(socket, socket.fd.load(Ordering::Relaxed));
    }
}

/// Returns whether a call that sends so many bytes would end without waiting, with success or an error. A ring must carry the
/// direction.
pub fn has_room(socket: &'static Socket, least: usize) -> bool {
    let mut ring = socket.sending.lock();
    ring.as_mut().is_none_or(|sender| has_room_in(sender, least))
}

/// Does the same for the ring that carries.
pub fn has_room_in(sender: &mut SocketSender, least: usize) -> bool {
    let is_possible = least <= sender.ring.at_once();
    sender.ring.has_room(if is_possible { least.max(1) } else { 1 })
}

/// Asks the peer to wake one more sleeper when there is room. The caller checks once more before it sleeps, and calls
/// [`rise`] when it is awake.
pub fn arm(socket: &'static Socket, how: Wake) {
    let mut ring = socket.sending.lock();
    let is_first = socket.sending.add_sleeper();
    if let Some(sender) = ring.as_mut() {
        doorbell::announce(&mut sender.ring, how, is_first);
        sender.ring.arm();
    }
}

/// Asks again, for the same sleeper, because the peer may have woken it.
pub fn arm_again(socket: &'static Socket, how: Wake) {
    let mut ring = socket.sending.lock();
    let is_alone = socket.sending.waiting.load(Ordering::Relaxed) == 1;
    if let Some(sender) = ring.as_mut() {
        doorbell::announce(&mut sender.ring, how, is_alone);
        sender.ring.arm();
    }
}

/// Records that a sleeper is awake. If no other thread of any process sleeps, the peer need not wake this side any
/// more.
pub fn rise(socket: &'static Socket) {
    let mut ring = socket.sending.lock();
    if socket.sending.remove_sleeper()
        && socket.sending.common().is_none()
        && let Some(sender) = ring.as_mut()
    {
        sender.ring.disarm();
    }
}

/// Notes that a call is about to report that there is no room. The caller looks once more afterwards.
fn note_no_room(socket: &'static Socket) {
    socket.without_room.fetch_add(1, Ordering::Relaxed);
    // ORDER preload.room: either the thread that looks for this note, after it has asked the peer to wake it (with a fence), sees the
    // note, or the caller sees the room for which the peer has woken that thread. Pairs with: `room_again`.
    fence(Ordering::SeqCst);
}

/// Returns the number of calls that have reported that there is no room, if there is room again after them; otherwise `seen`.
pub fn room_again(socket: &'static Socket, seen: u32) -> u32 {
    // ORDER preload.room: see `note_no_room`.
    let calls = socket.without_room.load(Ordering::Relaxed);
    // A ring that has had no room for long is left for the kernel: `is_full` finds that out.
    let fd = socket.fd.load(Ordering::Relaxed);
    if calls != seen && !returning::is_full(socket, fd) { calls } else { seen }
}

/// Handles the program's request to shut down sending. Returns false if the kernel must do that.
pub fn finish(socket: &'static Socket, fd: c_int) -> bool {
    disconnecting::follow_if_due(socket);
    let mut ring = socket.sending.lock();
    if socket.sending.carrier() != Carrier::Ring {
        return false;
    }
    if !socket.sending.uses() {
        return true;
    }
    // No other ring takes over any more, so the end of the stream is in the ring where the receiver looks for it.
    drop(ring.stay());
    if let Some(sender) = ring.as_mut()
        && sender.ring.finish()
    {
        kernel::wake(socket, fd);
    }
    true
}

/// Returns the error that the kernel would report to a program that sends over a broken connection.
#[cold]
pub fn broken(socket: &'static Socket, fd: c_int, error: SendError, flags: c_int) -> Errno {
    if error == SendError::PeerDead && socket.end() == End::None {
        kernel::look_for_end(socket, fd);
    }
    if let Some(errno) = socket.tell() {
        return errno;
    }
    let is_reset = match error {
        // The peer's VM is gone: no kernel has reported an end.
        SendError::PeerDead if socket.end() == End::None => !socket.said.reset.swap(true, Ordering::Relaxed),
        SendError::PeerDead => receive::is_reset(socket) && !socket.said.reset.swap(true, Ordering::Relaxed),
        SendError::Closed => {
            socket.said.reset.store(true, Ordering::Relaxed);
            false
        }
        SendError::AfterFinish => false,
        // The error is reported once, by the first call.
        _ => !socket.said.reset.swap(true, Ordering::Relaxed),
    };
    match is_reset {
        false => {
            if flags & libc::MSG_NOSIGNAL == 0 {
                raise_sigpipe();
            }
            Errno(libc::EPIPE)
        }
        true => Errno(libc::ECONNRESET),
    }
}

/// Sends SIGPIPE to this thread, as the kernel does.
#[expect(unsafe_code, reason = "a signal to this very thread")]
pub fn raise_sigpipe() {
    // SAFETY: the numbers are those of this process and of this thread.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), libc::SIGPIPE) };
}

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
