//! The way from a ring back to the kernel.
//!
//! A ring holds less than TCP's buffers do, and a receiver may not receive for a while. A program may rely on TCP's
//! buffers, because it sends much before it receives, or before it tells the receiver to receive. Such a program
//! would wait for ever. So a sender whose ring has had no room for a while returns to the kernel
//! ([`ginnel_ring::carrier`]), and asks for rings again later.
//!
//! | sender | receiver |
//! |---|---|
//! | its ring has had no room for a while ([`STUCK`]), no thread is in a call of the kernel, and its count agrees with the kernel's: names the byte at which wake bytes end | |
//! | sends again what the receiver has not released, as far as the kernel takes it, for a receiver that passes the connection on (`passing`) | |
//! | names how much the ring and the kernel have carried; sends through the kernel from now on | |
//! | | has received all that the ring has: drops the remaining wake bytes and the repeated bytes; receives the data that it has mistaken for wake bytes, then through the kernel |
//! | asks for rings after a pause, which is longer each time | does so too |
//! | changes over as at first | changes over as at first |
//!
//! A call that does not wait returns to the kernel at once if the ring is one of the smallest and the message is
//! short.
//!
//! What can go wrong:
//!
//! | | |
//! |---|---|
//! | bytes bypassed the library | the sender keeps its ring |
//! | another process has the socket too, after a fork | it learns of the return with its next call, and sends no wake byte meanwhile; a receiver asks the kernel whether all bytes that were taken are counted |
//! | a side dies | as without a return; what it has sent is in the ring and in the kernel |
//! | larger rings were about to take over | they wait for the next change |
//! | the named position lies before what was received | ECONNRESET |
//! | the named position lies beyond what the ring gets | the receiver waits, as with TCP |
//! | the named position in the kernel's stream is wrong | wake bytes are taken for data, or data for wake bytes |
//! | the sender returns and closes while the receiver is about to wake it | that byte resets the connection, as a byte of the program would: what the sender's kernel has not sent is lost |

use crate::carrying::keeper::Keeper;
use crate::carrying::{connection, delays, keeper, room};
use crate::daemon::{larger, report};
use crate::process::signals::Blocked;
use crate::process::{lock, thread};
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::rings::Rings;
use crate::state::socket::{End, Socket};
use crate::state::sockets::Using;
use crate::state::{family, stash, taken};
use crate::system::clock::now;
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, Result};
use crate::system::kernel;
use ginnel::{SocketReceiver, SocketSender};
use ginnel_ring::carrier::Place;
use ginnel_ring::wait::Waitable;
use ginnel_ring::{RecvError, carrier};
use ginnel_tcp::Counts;
use libc::c_int;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The time after which a sender leaves a ring without room, in microseconds. TCP's buffers would have taken more
/// than a small ring.
const STUCK: u64 = 20_000;
/// The same for a ring of the largest size. A receiver that only pauses makes room within that time.
const STUCK_LARGE: u64 = 1_000_000;
/// The bytes that TCP's buffer of an idle connection takes at least, with the default configuration
/// (`net.ipv4.tcp_wmem`).
pub const TCP_TAKES: usize = 16 << 10;
/// The interval at which a thread that waits for room checks again, in milliseconds.
pub const STEP: c_int = 20;

/// Records that the ring has no room.
pub fn note_full(socket: &Socket) {
    if socket.full_since.load(Ordering::Relaxed) == 0 {
        socket.full_since.store(now(), Ordering::Relaxed);
    }
}

/// Records that the ring has room.
#[inline]
pub fn note_room(socket: &Socket) {
    if socket.full_since.load(Ordering::Relaxed) != 0 {
        socket.full_since.store(0, Ordering::Relaxed);
    }
}

/// Returns whether the ring into which this side sends has no room. If it has had none for long, this function
/// returns the direction to the kernel.
pub fn is_full(socket: &'static Socket, fd: c_int) -> bool {
    is_full_for(socket, fd, 1)
}

/// Does the same for a call that waits for room for so many bytes.
pub fn is_full_for(socket: &'static Socket, fd: c_int, least: usize) -> bool {
    if socket.sending.carrier() != Carrier::Ring || room::has_room(socket, least) {
        note_room(socket);
        return false;
    }
    note_full(socket);
    !leave_if_stuck(socket, fd, least)
}

/// Returns to the kernel if the ring has had no room for long. Returns true if it has done so.
fn leave_if_stuck(socket: &'static Socket, fd: c_int, least: usize) -> bool {
    let since = socket.full_since.load(Ordering::Relaxed);
    let patience = match socket.ring_bytes.load(Ordering::Relaxed) < larger::LARGEST as u64 {
        true => STUCK,
        false => STUCK_LARGE,
    };
    let is_stuck = since != 0 && now().saturating_sub(since) >= patience;
    is_stuck && may_leave(socket) && leave(socket, fd, least)
}

/// Returns to the kernel at once if the ring is smaller than TCP's buffer would be: programs do not expect a
/// non-blocking call to take only a part of a short message.
pub fn leave_if_small(socket: &'static Socket, fd: c_int) -> bool {
    let is_small = socket.ring_bytes.load(Ordering::Relaxed) < TCP_TAKES as u64;
    is_small && may_leave(socket) && leave(socket, fd, 1)
}

/// Returns whether this process may return to the kernel. If relatives have the socket too, they must be able to learn of it.
fn may_leave(socket: &'static Socket) -> bool {
    !is_confined() && (!family::is_shared(socket) || socket.sending.common().is_some())
}

#[cold]
fn leave(socket: &'static Socket, fd: c_int, least: usize) -> bool {
    leave_if(socket, fd, |sender| !room::has_room_in(sender, least))
}

/// Returns to the kernel at once, whatever room the ring has.
#[cold]
pub fn leave_now(socket: &'static Socket, fd: c_int) -> bool {
    leave_if(socket, fd, |_| true)
}

/// Returns to the kernel if the receiver has asked for it.
#[cold]
pub fn leave_if_recalled(socket: &'static Socket, fd: c_int) {
    if is_recalled(socket) && may_leave(socket) && leave_now(socket, fd) {
        // The process that gets the connection at the other end may know nothing of rings.
        socket.note(Fact::Passed);
    }
}

/// Returns whether the next bytes in the kernel's socket are wake bytes.
pub fn may_be_woken(socket: &'static Socket) -> bool {
    socket.receiving.carrier() == Carrier::Ring && wakes_end(&socket.receiving.lock()).is_none()
}

/// Returns whether the receiver has asked this side to return to the kernel.
fn is_recalled(socket: &'static Socket) -> bool {
    let is = |sender: &SocketSender| carrier::is_recalled(sender.ring.memory());
    socket.sending.carrier() == Carrier::Ring && socket.sending.lock().as_ref().is_some_and(is)
}

fn leave_if(socket: &'static Socket, fd: c_int, is_due: impl FnOnce(&mut SocketSender) -> bool) -> bool {
    let (_errno, _blocked) = (Kept::new(), Blocked::new());
    let Some(_using) = Using::begin(socket, fd) else { return false };
    let role = socket.facts.lock().role;
    let direction = &socket.sending;
    let mut rings = direction.lock();
    if direction.carrier() != Carrier::Ring {
        return true;
    }
    let Some(sender) = rings.as_mut() else { return false };
    if !is_due(sender) {
        return false;
    }
    // A ring that the peer had closed before says only that.
    let is_finished = sender.ring.is_finished() || socket.has(Fact::ShutDownSending);
    let Some(sent) = direction.begin_change() else { return false };
    match Counts::of(kernel::borrow(fd), role) {
        Ok(Some(counts)) if counts.sent == sent => {}
        // The kernel counts its end as a byte, and sends nothing after it.
        _ if is_finished && kernel::has_sent_end(fd) => {}
        _ => {
            direction.set_carrier(Carrier::Ring);
            socket.full_since.store(now(), Ordering::Relaxed);
            return false;
        }
    }
    // The receiver may pass the connection on before it has received these. It waits for that if it has asked for it.
    // A receiver that has closed its end, or has died, has none of them left to receive, and would answer with a reset.
    let is_over = sender.ring.is_closed() || sender.ring.is_aborted() || sender.ring.is_dead();
    let unreleased = if is_over { Vec::new() } else { sender.ring.unreleased() };
    let (memory, position) = (sender.ring.memory(), sender.ring.cursor().position);
    carrier::end_wakes(memory, sent);
    direction.wakes_end().store(sent, Ordering::Relaxed);
    let again = kernel::send_some(fd, &unreleased, carrier::is_recalled(memory)) as u64;
    direction.count_others(again);
    let (kernel, repeated) = match again == unreleased.len() as u64 {
        true => (sent, again),
        // The repeated bytes that got through are useless.
        false => (sent + again, 0),
    };
    carrier::give_back(memory, Place { ring: position, kernel, repeated });
    // Room in the ring is useless now, and a wake byte that comes after a close would break the connection.
    sender.ring.disarm();
    if is_finished {
        kernel::send_no_more(fd);
    }
    delays::relax(socket, fd);
    let left = rings.give_back(position);
    direction.set_returned(true);
    direction.set_carrier(Carrier::Kernel);
    drop(rings);
    drop(left);
    note_room(socket);
    socket.fulls.store(0, Ordering::Relaxed);
    socket.returned();
    report::changed(socket);
    true
}

/// Returns the position at which the sender has left a ring for the kernel, if it has.
fn place(rings: &Rings<SocketReceiver>) -> Option<Place> {
    rings.all().find_map(|receiver| carrier::given_back(receiver.ring.memory()))
}

/// Returns how many of the kernel's bytes may be wake bytes, if the sender has left a ring for the kernel or is about
/// to.
fn wakes_end(rings: &Rings<SocketReceiver>) -> Option<u64> {
    rings.all().find_map(|receiver| carrier::wakes_end(receiver.ring.memory()))
}

/// Consumes the wake bytes that the thread may take, and records whether the connection has ended.
pub fn drain(socket: &'static Socket, fd: c_int, keeper: Option<&Keeper>) {
    let rings = socket.receiving.lock();
    if socket.receiving.carrier() == Carrier::Ring {
        drain_ring(socket, fd, &rings, keeper);
    }
    drop(rings);
    if socket.needs_attention() {
        leave_if_recalled(socket, fd);
    }
}

/// Does the same with the lock held, while the ring carries.
pub fn drain_ring(
    socket: &'static Socket,
    fd: c_int,
    rings: &Rings<SocketReceiver>,
    keeper: Option<&Keeper>,
) {
    if !taken::catch_up(socket, fd, rings) {
        return socket.receiving.lose();
    }
    // Bytes beyond what one call can take are left for the next call. Bytes behind a known end of the wake bytes are
    // not touched.
    let mut bytes = [0; stash::MOST];
    let most = wakes_end(rings).map_or(bytes.len(), |end| {
        usize::try_from(end.saturating_sub(socket.receiving.kernels()))
            .map_or(bytes.len(), |left| left.min(bytes.len()))
    });
    if most == 0 {
        if place(rings).is_none() {
            // The sender is about to name the position. What it has sent meanwhile wakes any sleeper.
            std::thread::yield_now();
        }
        return connection::look_for_end_in(socket, fd, rings);
    }
    let most = match keeper::is_last_kept(socket, fd, keeper) {
        true => most.min(keeper::without_last(socket, fd)),
        false => most,
    };
    if most == 0 {
        return connection::look_for_end_in(socket, fd, rings);
    }
    let n = connection::take(socket, fd, &mut bytes[..most], rings);
    sort(socket, rings, &bytes[..n]);
    if n > 0 {
        note_recall(socket);
    }
}

/// Makes the next call return to the kernel if the receiver has asked for that. This call may hold the receiving direction's lock.
fn note_recall(socket: &'static Socket) {
    if is_recalled(socket) {
        socket.attention.store(true, Ordering::Release);
    }
}

/// Handles bytes that were taken from the kernel as wake bytes. Those beyond the position that the sender has named
/// meanwhile are data.
pub fn sort(socket: &'static Socket, rings: &Rings<SocketReceiver>, bytes: &[u8]) {
    let direction = &socket.receiving;
    let taken = direction.kernels() + bytes.len() as u64;
    let beyond = wakes_end(rings).map_or(0, |end| taken.saturating_sub(end));
    let data = usize::try_from(beyond).map_or(bytes.len(), |beyond| beyond.min(bytes.len()));
    direction.count_wakes((bytes.len() - data) as u64);
    if data > 0 {
        direction.count_native(data as u64);
        if !direction.stash().push(&bytes[bytes.len() - data..]) {
            direction.lose();
        }
    }
}

/// A thread that sleeps in a call that takes the byte that wakes it. The kernel does not carry again before this is
/// dropped.
pub struct Taker(&'static Socket);

impl Taker {
    /// Returns `None` if the next byte may be the program's.
    pub fn begin(socket: &'static Socket) -> Option<Self> {
        // ORDER preload.taker: either this thread sees that the ring does not carry any more, or the thread that is
        // about to let the kernel carry sees this thread, because both write before they read. Pairs with:
        // `is_taken`.
        socket.taker.store(thread::tid(), Ordering::SeqCst);
        let taker = Self(socket);
        socket.receiving.is_ring().then_some(taker)
    }

    /// Handles a byte that the call has taken.
    pub fn took(&self, fd: c_int, byte: u8) {
        let rings = self.0.receiving.lock();
        // A signal handler may have made a relative meanwhile, which has counted the byte.
        if self.0.receiving.common().is_none() || taken::is_more_than_counted(self.0, fd) {
            sort(self.0, &rings, &[byte]);
        }
        drop(rings);
        leave_if_recalled(self.0, fd);
    }
}

impl Drop for Taker {
    fn drop(&mut self) {
        let _ = self.0.taker.compare_exchange(thread::tid(), 0, Ordering::SeqCst, Ordering::Relaxed);
    }
}

/// Begins to receive from the kernel if the ring is empty and the sender has left it. Returns true if so.
pub fn begin_if_due(socket: &'static Socket, fd: c_int, rings: &Rings<SocketReceiver>) -> Result<bool> {
    begin(socket, fd, rings, false)
}

/// Does the same for a ring that may still have bytes, if all of them come again over the kernel's connection.
pub fn begin_unread(socket: &'static Socket, fd: c_int, rings: &Rings<SocketReceiver>) -> Result<bool> {
    begin(socket, fd, rings, true)
}

fn begin(
    socket: &'static Socket,
    fd: c_int,
    rings: &Rings<SocketReceiver>,
    may_be_unread: bool,
) -> Result<bool> {
    let Some(receiver) = rings.as_ref() else { return Ok(false) };
    let Some(place) = carrier::given_back(receiver.ring.memory()) else { return Ok(false) };
    // Bytes that were received before are not sent again, apart from those that are repeated.
    let Some(unread) = place.ring.checked_sub(receiver.ring.cursor().position) else {
        return Err(Errno(libc::ECONNRESET));
    };
    let most = if may_be_unread { place.repeated } else { 0 };
    if unread > most {
        // More bytes will come in the ring, or never do.
        return Ok(false);
    }
    let resume = place.kernel.saturating_add(place.repeated - unread);
    if !taken::is_counted_until(socket, fd, resume) {
        return Err(Errno(libc::ECONNRESET));
    }
    socket.receiving.wakes_end().store(place.kernel, Ordering::Relaxed);
    socket.resume.store(resume, Ordering::Relaxed);
    // The bytes that were taken for wake bytes may begin with repeated ones.
    let beyond = usize::try_from(socket.receiving.kernels().saturating_sub(resume)).unwrap_or(usize::MAX);
    let stash = socket.receiving.stash();
    let known = stash.len().saturating_sub(beyond);
    stash.remove(known);
    socket.receiving.recount_others(known as u64);
    socket.receiving.begin_return();
    Ok(true)
}

/// Begins to receive from the kernel if the peer has closed its end, or the program has shut down both directions, and everything has
/// been received. Returns true if so.
pub fn begin_over(socket: &'static Socket, fd: c_int, rings: &mut Rings<SocketReceiver>) -> bool {
    // The kernel does not know of a peer that has only shut down sending. That peer still has to return.
    connection::look_for_end_in(socket, fd, rings);
    let is_over = matches!(socket.end(), End::Fin | End::Reset)
        || socket.has(Fact::ShutDownReceiving) && socket.has(Fact::ShutDownSending);
    // A larger ring that the peer has begun comes first.
    let is_begun = |next: &SocketReceiver| carrier::left(next.ring.memory(), 0) != Ok(None);
    if !is_over || is_taken(socket) || rings.next().is_some_and(is_begun) || wakes_end(rings).is_some() {
        return false;
    }
    let Some(receiver) = rings.as_mut() else { return false };
    if !matches!(receiver.ring.poll_all(), Err(RecvError::Empty | RecvError::Finished | RecvError::PeerDead))
    {
        return false;
    }
    let position = receiver.ring.cursor().position;
    let mut bytes = [0; 256];
    loop {
        match connection::take(socket, fd, &mut bytes, rings) as u64 {
            0 => break,
            n => socket.receiving.count_wakes(n),
        }
    }
    crate::carrying::lowat::give_back(socket, fd);
    drop(rings.give_back(position));
    socket.receiving.set_returned(true);
    socket.receiving.set_carrier(Carrier::Kernel);
    true
}

/// Returns whether this process has taken all that the kernel carries before the direction returns to it, by the
/// kernel's count.
#[cold]
fn has_taken(socket: &'static Socket, fd: c_int) -> bool {
    if is_confined() {
        return false;
    }
    let role = socket.facts.lock().role;
    let resume = socket.resume.load(Ordering::Relaxed);
    matches!(Counts::of(kernel::borrow(fd), role), Ok(Some(counts)) if counts.received == resume)
}

/// Returns whether another thread sleeps in a call that takes a byte. (A thread that has left such a call without
/// returning from it, by `longjmp`, or that was cancelled in it, does not count.)
pub fn is_taken(socket: &Socket) -> bool {
    // ORDER preload.taker: see `Taker::begin`.
    let taker = socket.taker.load(Ordering::SeqCst);
    taker != 0 && taker != thread::tid() && lock::is_alive(taker)
}

/// Advances a socket to which the kernel is about to carry again. Returns true if the kernel carries now.
pub fn settle(socket: &'static Socket, fd: c_int, rings: &mut Rings<SocketReceiver>) -> bool {
    let direction = &socket.receiving;
    let mut bytes = [0; 256];
    loop {
        let resume = socket.resume.load(Ordering::Relaxed);
        if !taken::catch_up(socket, fd, rings) {
            direction.lose();
            return false;
        }
        let left = resume.saturating_sub(direction.kernels());
        if left == 0 {
            break;
        }
        let most = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
        let n = connection::take(socket, fd, &mut bytes[..most], rings);
        count_dropped(socket, n as u64);
        // A signal handler has left a call that had taken these bytes and not counted them yet. Or they have come after the program had
        // shut down both directions, and the kernel has broken the connection because of them.
        if n == 0 && (has_taken(socket, fd) || connection::brings_no_more(fd)) {
            count_dropped(socket, left);
            break;
        }
        if n == 0 {
            return false;
        }
    }
    if is_taken(socket) || !direction.stash().is_empty() {
        return false;
    }
    let received = rings.as_ref().map_or(0, |receiver| receiver.ring.cursor().position);
    crate::carrying::lowat::give_back(socket, fd);
    drop(rings.give_back(received));
    direction.set_returned(true);
    direction.set_carrier(Carrier::Kernel);
    socket.returned();
    report::changed(socket);
    true
}

/// How long to wait for repeated bytes of which none comes. A peer whose kernel has found no room tries again after 200 ms.
const NO_MORE: Duration = Duration::from_millis(300);

/// Waits until the bytes have come that the peer has sent once more, if the program has received them before. This is for a program that is
/// about to shut down both directions: bytes that come afterwards break the connection.
pub fn await_repeated(socket: &'static Socket, fd: c_int) {
    let direction = &socket.receiving;
    let (mut seen, mut last) = (0, Instant::now());
    loop {
        {
            let mut rings = direction.lock();
            let is_returning = match direction.carrier() {
                Carrier::Ring => begin_if_due(socket, fd, &rings) == Ok(true),
                carrier => carrier == Carrier::Returning,
            };
            if !is_returning || settle(socket, fd, &mut rings) {
                return;
            }
        }
        let taken = direction.kernels();
        if taken > seen {
            (seen, last) = (taken, Instant::now());
            // The kernel tells the peer's kernel that it has room again, but not once the program has shut down receiving. A byte tells it
            // too.
            if !room::is_peer_deaf(socket) {
                connection::wake(socket, fd);
            }
        }
        let is_over = direction.is_lost() || taken >= socket.resume.load(Ordering::Relaxed);
        if is_over || last.elapsed() >= NO_MORE || is_confined() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Counts bytes that have been dropped: wake bytes, and the repeated bytes behind them.
fn count_dropped(socket: &'static Socket, bytes: u64) {
    let direction = &socket.receiving;
    let left = direction.wakes_end().load(Ordering::Relaxed).saturating_sub(direction.kernels());
    let wakes = bytes.min(left);
    direction.count_wakes(wakes);
    direction.count_others(bytes - wakes);
}

/// Receives data that was taken for wake bytes, and copies it if it is not to be discarded. Returns `None` if there is none.
pub fn from_stash(socket: &'static Socket, into: &mut [u8], copies: bool, stays: bool) -> Option<usize> {
    let stash = socket.receiving.stash();
    let n = stash.len().min(into.len());
    if copies {
        stash.show(0, &mut into[..n]);
    }
    if !stays {
        stash.remove(n);
    }
    (n > 0).then_some(n)
}
