//! The byte of the stream at which one carrier ends and the next one begins.

use crate::state::carrier::Carrier;
use crate::state::socket::Socket;
use crate::system::errno::{Errno, Result};
use ginnel::SocketReceiver;
use ginnel_ring::carrier;

/// Changes over to the ring: all that the kernel carries has been received.
#[cold]
pub fn begin_ring(socket: &'static Socket) {
    socket.receiving.set_carrier(Carrier::Ring);
    let begun = socket.facts.lock().begun;
    crate::state::direction::note_time(&socket.receiving, begun);
    crate::daemon::report::changed(socket);
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

/// Limits a length to what is left.
pub fn within(len: usize, left: Option<u64>) -> usize {
    left.and_then(|left| usize::try_from(left).ok()).map_or(len, |left| len.min(left))
}
