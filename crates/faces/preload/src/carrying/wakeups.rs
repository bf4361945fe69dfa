//! Asking the peer to wake this side.

use crate::carrying::bell::Wake;
use crate::carrying::{bell, connection, room};
use crate::state::known::Fact;
use crate::state::rings::Rings;
use crate::state::socket::Socket;
use crate::system::clock;
use ginnel::{SocketReceiver, SocketSender};
use ginnel_ring::wait::Waitable;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Asks the peer to wake one more sleeper. The caller checks once more before it sleeps, and calls [`rise_from_data`]
/// when it is awake.
pub fn arm_for_data(socket: &'static Socket, how: Wake) {
    let mut rings = socket.receiving.lock();
    socket.receiving.uses();
    let is_first = socket.receiving.add_sleeper();
    arm(&mut rings, how, is_first);
}

/// Asks again, for the same sleeper, because the peer may have woken it.
pub fn arm_for_data_again(socket: &'static Socket, how: Wake) {
    let mut rings = socket.receiving.lock();
    let is_alone = socket.receiving.waiting.load(Ordering::Relaxed) == 1;
    arm(&mut rings, how, is_alone);
}

/// A peer may send into a larger ring already while this side has bytes in the smaller one, of which the program may know.
fn arm(rings: &mut Rings<SocketReceiver>, how: Wake, is_only: bool) {
    for receiver in rings.all_mut() {
        bell::announce(&mut receiver.ring, how, is_only);
        receiver.ring.arm();
    }
}

/// Records that a sleeper is awake. If no other thread of any process sleeps, the peer need not wake this side any
/// more.
pub fn rise_from_data(socket: &'static Socket) {
    let mut rings = socket.receiving.lock();
    if socket.receiving.remove_sleeper()
        && socket.receiving.common().is_none()
        // A peer that is to return to the kernel learns of that when it wakes this side.
        && !socket.has(Fact::Passed)
    {
        rings.all_mut().for_each(|receiver| receiver.ring.disarm());
    }
}

/// Sends a wake byte if the ring has bytes that the peer has not taken, and the program relies on the kernel to notice that the peer
/// acknowledges nothing (TCP_USER_TIMEOUT). The kernel does not know the bytes in the ring, so it needs a byte of its own. It is for a
/// thread that is about to sleep.
pub fn probe(socket: &'static Socket) {
    if socket.gives_up.load(Ordering::Relaxed) && has_untaken(socket) {
        connection::wake(socket, socket.fd.load(Ordering::Relaxed));
    }
}

/// How long a peer may leave bytes untaken before a thread that sleeps by the clock sends such a byte, in microseconds.
const UNTAKEN: u64 = 100_000;
/// How long a thread sleeps at most that would send such a byte.
const BY_CLOCK: Duration = Duration::from_secs(1);

/// Does the same for a thread that sleeps by the clock, so that a peer that takes what it is sent gets no such byte. Returns how long
/// the thread may sleep before it calls this function again; `None` is for ever.
pub fn probe_by_clock(socket: &'static Socket) -> Option<Duration> {
    if !socket.gives_up.load(Ordering::Relaxed) {
        return None;
    }
    let untaken_since = &socket.asleep.untaken_since;
    if !has_untaken(socket) {
        untaken_since.store(0, Ordering::Relaxed);
        return Some(BY_CLOCK);
    }
    let (now, since) = (clock::now(), untaken_since.load(Ordering::Relaxed));
    if since != 0 && now.saturating_sub(since) >= UNTAKEN {
        connection::wake(socket, socket.fd.load(Ordering::Relaxed));
        untaken_since.store(now, Ordering::Relaxed);
        return Some(BY_CLOCK);
    }
    if since == 0 {
        untaken_since.store(now, Ordering::Relaxed);
    }
    Some(Duration::from_micros(UNTAKEN))
}

/// Returns whether the peer has yet to take something. One that takes no more never does, and a byte for it breaks the connection.
fn has_untaken(socket: &'static Socket) -> bool {
    let is_left = |sender: &SocketSender| room::untaken(sender) > 0 && !sender.ring.is_closed();
    socket.sending.lock().as_ref().is_some_and(is_left)
}

/// Asks the peer to wake one more sleeper when there is room. The caller checks once more before it sleeps, and calls
/// [`rise_from_room`] when it is awake.
pub fn arm_for_room(socket: &'static Socket, how: Wake) {
    let mut ring = socket.sending.lock();
    let is_first = socket.sending.add_sleeper();
    ask_for_room(&mut ring, how, is_first);
}

/// Asks again, for the same sleeper, because the peer may have woken it.
pub fn arm_for_room_again(socket: &'static Socket, how: Wake) {
    let mut ring = socket.sending.lock();
    let is_alone = socket.sending.waiting.load(Ordering::Relaxed) == 1;
    ask_for_room(&mut ring, how, is_alone);
}

fn ask_for_room(rings: &mut Rings<SocketSender>, how: Wake, is_only: bool) {
    // A program that has shut down sending needs no room. If it has shut down both directions, the byte that tells it of some would break
    // the connection.
    if let Some(sender) = rings.as_mut()
        && !sender.ring.is_finished()
    {
        bell::announce(&mut sender.ring, how, is_only);
        sender.ring.arm();
    }
}

/// Records that a sleeper is awake. If no other thread of any process sleeps, the peer need not wake this side any
/// more.
pub fn rise_from_room(socket: &'static Socket) {
    let mut ring = socket.sending.lock();
    if socket.sending.remove_sleeper()
        && socket.sending.common().is_none()
        && let Some(sender) = ring.as_mut()
    {
        sender.ring.disarm();
    }
}
