//! Whether a ring pays for the direction that it carries.
//!
//! A message whose receiver sleeps costs a wake-up, in a ring as over TCP. If nearly every message does, the ring saves nothing, and it
//! can lose: over loopback, the kernel lets the receiver of a message follow its sender on the same CPU, and who is woken by a doorbell
//! is woken on another CPU, which may have to wake up first. So a sender that has rung again and again for a few bytes each returns to
//! the kernel ([`returning`]), and asks for a ring again after a long pause, because the program may do something else by then.
//!
//! A peer in another VM is worth a ring in any case: there TCP has to pass two kernels and the hypervisor for each message.

use crate::carrying::returning;
use crate::process::settings;
use crate::state::socket::Socket;
use libc::c_int;
use std::sync::atomic::Ordering;

/// A wake-up for at least this many bytes pays.
const ENOUGH: u64 = 4 << 10;
/// The number of wake-ups in a row that do not pay, from which on the ring does not.
const POOR: u32 = 128;

/// Notes that a message has woken the peer. Returns whether the ring does not pay any more.
pub fn is_poor(socket: &Socket) -> bool {
    let sent = socket.sending.shared.load(Ordering::Relaxed);
    let since = sent.wrapping_sub(socket.woken_at.swap(sent, Ordering::Relaxed));
    if since >= ENOUGH || socket.has_peer_elsewhere.load(Ordering::Relaxed) {
        socket.poor_wakes.store(0, Ordering::Relaxed);
        return false;
    }
    // In tests, connections change over once and for all.
    socket.poor_wakes.fetch_add(1, Ordering::Relaxed) + 1 >= POOR && settings::wait().is_none()
}

/// Returns to the kernel because the ring does not pay.
#[cold]
pub fn leave(socket: &'static Socket, fd: c_int) {
    socket.poor_wakes.store(0, Ordering::Relaxed);
    if returning::leave_for_good(socket, fd) {
        socket.rest();
    }
}
