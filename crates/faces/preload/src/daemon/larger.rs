//! Larger rings: how large they are, when they may be asked for, and how a socket takes them. [`crate::carrying::grow`] describes the
//! change.

use crate::state::carrier::Carrier;
use crate::state::family;
use crate::state::known::Fact;
use crate::state::socket::{Growth, Socket};
use ginnel::SocketChannel;
use ginnel_layout::ring::HEADER;
use ginnel_ring::carrier;
use ginnel_ring::carrier::Earlier;
use ginnel_ring::wait::Waitable;
use ginnel_shmem::SharedMemory;
use std::sync::atomic::Ordering;

/// The number of data bytes in the rings that a connection begins with.
pub const SMALLEST: usize = 4 << 10;
/// The number of data bytes in the largest rings.
pub const LARGEST: usize = 256 << 10;
/// The ratio between the sizes of the next rings and the present ones.
const FACTOR: usize = 16;

pub fn capacity(ring: &impl SharedMemory) -> usize {
    ring.len() - HEADER
}

/// Returns the number of data bytes in the next rings; `None` if there are none.
pub fn next_capacity(socket: &'static Socket) -> Option<usize> {
    if family::is_shared(socket) {
        return None;
    }
    if socket.has_returned() {
        let before = socket.ring_bytes.load(Ordering::Relaxed) as usize;
        // Rings that a direction has left for the kernel were too small in any case.
        return Some((before * FACTOR).clamp(SMALLEST * FACTOR, LARGEST));
    }
    let rings = socket.sending.lock();
    let now = capacity(rings.as_ref()?.ring.memory());
    (now < LARGEST).then(|| (now * FACTOR).min(LARGEST))
}

/// Returns whether larger rings may be asked for: both directions have left the kernel, or have returned to it.
pub fn may_begin(socket: &'static Socket) -> bool {
    let has_left = |carrier, returned| carrier == Carrier::Ring || carrier == Carrier::Kernel && returned;
    has_left(socket.sending.carrier(), socket.sending.has_returned())
        && has_left(socket.receiving.carrier(), socket.receiving.has_returned())
}

/// Takes the larger rings. `is_current` returns whether the socket has not been closed; a thread that closes it says so before it
/// takes the locks of the rings. Returns false if the socket was closed, or if it takes no larger rings.
pub fn take(socket: &'static Socket, channel: SocketChannel, is_current: impl Fn() -> bool) -> bool {
    let (sender, mut receiver) = channel.split();
    let is_shared = family::is_shared(socket);
    let mut sending = socket.sending.lock();
    if !is_current() {
        return false;
    }
    if is_shared || socket.has(Fact::Passed) {
        socket.set_growth(Growth::Over);
        return false;
    }
    // Rings that are not taken are closed here. In a direction that the kernel carries, `carrying::change` continues with the new ring.
    let _ = match socket.sending.has_returned() {
        true => {
            socket.ring_bytes.store(capacity(sender.ring.memory()) as u64, Ordering::Relaxed);
            sending.begin_again(sender)
        }
        false => sending.offer(sender),
    };
    drop(sending);
    let mut receiving = socket.receiving.lock();
    if !is_current() {
        return false;
    }
    if socket.receiving.has_returned() {
        // The ring is armed as when a connection changes over for the first time, because another thread may sleep.
        receiver.ring.arm();
        let _ = receiving.begin_again(receiver);
    } else if receiving.offer(receiver).is_ok()
        && let Some(next) = receiving.next()
    {
        carrier::count(next.ring.memory(), Earlier::Ring);
    }
    socket.set_growth(Growth::Begun);
    true
}
