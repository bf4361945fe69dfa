//! Sending into what carries now, without sleeping.

use crate::carrying::{attend, bell, connection, disconnecting, grow, look, returning};
use crate::process::signals;
use crate::process::thread::tid;
use crate::state::carrier::Carrier;
use crate::state::direction::Held;
use crate::state::known::Fact;
use crate::state::rings::Rings;
use crate::state::socket::{End, Socket};
use crate::system::errno::{Errno, Result};
use ginnel::SocketSender;
use ginnel_ring::wait::Waitable;
use ginnel_ring::{SendError, carrier};
use ginnel_shmem::SharedMemory;
use libc::c_int;
use std::sync::atomic::{Ordering, fence};

/// Flags that make the library leave a connection to the kernel, if the kernel still carries it.
pub const UNUSUAL: c_int = libc::MSG_OOB | libc::MSG_ZEROCOPY | libc::MSG_FASTOPEN;

/// Sends with a system call. Returns `None` if the kernel no longer carries this direction.
#[inline]
pub fn through_kernel(socket: &'static Socket, fd: c_int, native: impl FnOnce() -> isize) -> Option<isize> {
    attend::attend_or_wait(socket, fd);
    if socket.sending.carrier() != Carrier::Kernel {
        return None;
    }
    let sent = socket.sending.through_kernel(native, |sent: &isize| usize::try_from(*sent).unwrap_or(0))?;
    if sent > 0 {
        socket.turns.sent();
    } else if sent < 0
        && !matches!(Errno::last(), Errno(libc::EAGAIN | libc::EINTR))
        && matches!(socket.receiving.carrier(), Carrier::Ring | Carrier::Returning)
    {
        // The kernel may have told the program that the connection is broken, and it does so only once.
        connection::look_for_end(socket, fd);
    }
    Some(sent)
}

/// Records that bytes are sent to a peer that has closed its end, or has shut down both directions. Over TCP it answers with a reset,
/// which is an event for both. Returns false if that was recorded before.
#[cold]
pub fn begins_in_vain(socket: &'static Socket) -> bool {
    let begins = socket.note(Fact::SentInVain);
    if begins {
        socket.receiving.lock().all_mut().for_each(|receiver| receiver.ring.refuse());
        // The peer's kernel answers with a reset too.
        connection::wake(socket, socket.fd.load(Ordering::Relaxed));
        socket.watchers.changed(socket);
    }
    begins
}

/// A call that waits for room for the rest of what it sends. Other calls that may wait do not begin meanwhile.
pub struct Turn(&'static Socket);

impl Turn {
    pub fn take(socket: &'static Socket) -> Self {
        let _ = socket.turn.compare_exchange(0, tid(), Ordering::Relaxed, Ordering::Relaxed);
        Self(socket)
    }

    /// Forgets a turn that has lasted for too long.
    #[cold]
    pub fn forget(socket: &Socket) {
        socket.turn.store(0, Ordering::Relaxed);
    }

    /// Returns whether another thread has the turn.
    #[inline]
    pub fn is_others(socket: &Socket) -> bool {
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
pub fn some_into_ring<'s>(
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
            bell::wake(socket, fd, &sender.waker);
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
    if socket.gives_up.load(Ordering::Relaxed)
        && socket.receiving.waiting.load(Ordering::Relaxed) > socket.asleep.by_clock.load(Ordering::Relaxed)
    {
        // Another thread already waits for the answer, and relies on the kernel's timeout for unacknowledged bytes (see
        // `wakeups::probe`). It does not look again by the clock.
        connection::wake(socket, fd);
    }
    Ok(n)
}

/// Does what is due when a ring has no room.
#[cold]
fn found_full(socket: &'static Socket, fd: c_int, sender: &mut SocketSender) {
    // A call that a signal handler has left (`longjmp`) may still owe the peer a wake-up.
    if sender.ring.take_owed() {
        bell::wake(socket, fd, &sender.waker);
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
        Err(SendError::Closed) if socket.has(Fact::ShutDownSending) => {
            return Some(Err(Stop::Ended(SendError::AfterFinish)));
        }
        Err(SendError::Closed) if !socket.has(Fact::SentInVain) => {
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
pub fn room(
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

/// Notes that a call is about to report that there is no room. The caller looks once more afterwards.
pub fn note_no_room(socket: &'static Socket) {
    socket.calls_without_room().fetch_add(1, Ordering::Relaxed);
    // ORDER preload.room: either the thread that looks for this note, after it has asked the peer to wake it (with a fence), sees the
    // note, or the caller sees the room for which the peer has woken that thread. Pairs with: `room_again`.
    fence(Ordering::SeqCst);
    // A thread that sleeps there may not have asked the peer at all.
    if !socket.watchers.is_empty() {
        socket.watchers.without_room(socket);
    }
}

/// Returns the number of calls that have reported that there is no room, if there is room again after them; otherwise `seen`.
pub fn room_again(socket: &'static Socket, seen: u32) -> u32 {
    // ORDER preload.room: see `note_no_room`.
    let calls = socket.calls_without_room().load(Ordering::Relaxed);
    // A ring that has had no room for long is left for the kernel: `is_full` finds that out.
    let fd = socket.fd.load(Ordering::Relaxed);
    if calls != seen && !returning::is_full(socket, fd) { calls } else { seen }
}

/// Where the end of the stream is marked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// Only the kernel can do that.
    Nowhere,
    InRing,
    /// In the ring, and the kernel must end its stream too. If it has no connection any more, that does not matter.
    InRingOfDeaf,
}

/// Handles the program's request to shut down sending.
pub fn finish(socket: &'static Socket, fd: c_int) -> Finished {
    disconnecting::follow_if_due(socket);
    let mut ring = socket.sending.lock();
    if socket.sending.carrier() != Carrier::Ring {
        return Finished::Nowhere;
    }
    if !socket.sending.uses() {
        return Finished::InRing;
    }
    // No other ring takes over any more, so the end of the stream is in the ring where the receiver looks for it.
    drop(ring.stay());
    let Some(sender) = ring.as_mut() else { return Finished::InRing };
    let wakes = sender.ring.finish();
    socket.note(Fact::ShutDownSending);
    // Nobody waits for room any more, and a byte that tells of some would break the connection once both directions are shut down here.
    sender.ring.disarm();
    // If the peer takes no more, a byte would break the connection. The kernel's own end wakes the peer too, and breaks nothing. (A peer
    // that shuts down both directions at this very moment may still get the byte.)
    if sender.ring.is_closed() {
        return Finished::InRingOfDeaf;
    }
    if wakes {
        bell::wake(socket, fd, &sender.waker);
    }
    Finished::InRing
}

/// Returns the error that the kernel would report to a program that sends over a broken connection.
#[cold]
pub fn broken(socket: &'static Socket, fd: c_int, error: SendError, flags: c_int) -> Errno {
    if error == SendError::PeerDead && socket.end() == End::None {
        connection::look_for_end(socket, fd);
    }
    if let Some(errno) = socket.tell() {
        return errno;
    }
    let is_reset = match error {
        // The peer's VM is gone: no kernel has reported an end.
        SendError::PeerDead if socket.end() == End::None => socket.note(Fact::ToldReset),
        SendError::PeerDead => look::is_reset(socket) && socket.note(Fact::ToldReset),
        SendError::Closed => {
            socket.note(Fact::ToldReset);
            false
        }
        SendError::AfterFinish => look::is_reset(socket) && socket.note(Fact::ToldReset),
        // The error is reported once, by the first call.
        _ => socket.note(Fact::ToldReset),
    };
    match is_reset {
        false => {
            if flags & libc::MSG_NOSIGNAL == 0 {
                signals::raise_sigpipe();
            }
            Errno(libc::EPIPE)
        }
        true => Errno(libc::ECONNRESET),
    }
}
