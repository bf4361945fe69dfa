//! How much room there is for what this side sends, and what the peer has not taken.

use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::Socket;
use crate::system::confined::is_confined;
use crate::system::kernel;
use ginnel::SocketSender;
use ginnel_ring::carrier;
use libc::c_int;
use std::sync::atomic::Ordering;

/// Returns whether the program has shut down sending, in this process or another one that has the socket.
pub fn has_shut_down(socket: &'static Socket) -> bool {
    // A process that was killed may have marked the end in the ring only.
    let is = |sender: &SocketSender| sender.ring.is_finished();
    socket.has(Fact::ShutDownSending)
        || socket.sending.common().is_some()
            && socket.sending.carrier() == Carrier::Ring
            && socket.sending.lock().as_ref().is_some_and(is)
}

/// Returns whether the peer takes nothing more that this side sends, as it has said in the ring. A byte for it breaks the kernel's
/// connection.
pub fn is_peer_deaf(socket: &'static Socket) -> bool {
    let is = |sender: &SocketSender| sender.ring.is_closed();
    socket.sending.carrier() == Carrier::Ring && socket.sending.lock().as_ref().is_some_and(is)
}

/// Returns how many bytes in the ring the peer's program has not received. The peer may not have released the room of received
/// bytes yet. The result never exceeds the bytes in flight, whatever number the peer has stored.
pub fn untaken(sender: &SocketSender) -> usize {
    let untaken = sender.ring.cursor().position.saturating_sub(carrier::taken(sender.ring.memory()));
    usize::try_from(untaken).unwrap_or(usize::MAX).min(sender.ring.in_flight())
}

/// Returns how many bytes the peer's program, or its kernel, has not taken. Returns `None` if that is the kernel's to say.
pub fn queued(socket: &'static Socket, fd: c_int) -> Option<usize> {
    if socket.sending.carrier() == Carrier::Ring {
        return Some(socket.sending.lock().as_ref().map_or(0, untaken));
    }
    if !socket.sending.has_returned() || is_confined() {
        return None;
    }
    let queued = kernel::unacknowledged(fd);
    // The kernel also counts the wake bytes that came before the program's, and its end of the stream.
    let wakes_end = socket.sending.wakes_end().load(Ordering::Relaxed);
    let programs = socket.sending.kernels().saturating_sub(wakes_end);
    let most = programs.saturating_add(u64::from(kernel::has_sent_end(fd)));
    Some(usize::try_from(most).map_or(queued, |most| most.min(queued)))
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
