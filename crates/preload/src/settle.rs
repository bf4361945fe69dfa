//! `GINNEL_SOCKETS_WAIT`, for tests: connections wait until they have changed over.
//!
//! Tests that send a few bytes over a connection and close it would change nothing over but by luck. With this, `accept` and the first
//! call that sends or receives over a connection wait for it, but no longer than this time. Both ends may be in one
//! process, even in one thread, so whoever waits brings all connections of the process further.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::c_int;

use crate::direction::Carrier;
use crate::errno::Kept;
use crate::socket::{Socket, Stage};
use crate::table::SOCKETS;
use crate::{change, kernel, meet, settings};

/// Between two looks.
const PAUSE: Duration = Duration::from_micros(100);

/// Waits for a connection that has not waited before, if that is set.
#[cold]
pub fn wait(socket: &'static Socket) {
    let Some(patience) = settings::wait() else { return };
    if socket.has_settled.swap(true, Ordering::Relaxed) {
        return;
    }
    let _errno = Kept::new();
    let deadline = Instant::now() + patience;
    while !is_settled(socket) && Instant::now() < deadline {
        SOCKETS.used(0, u32::MAX).for_each(attend);
        std::thread::sleep(PAUSE);
    }
}

/// Whether both directions are where they are to be. What was sent over TCP before the change need not have been received.
fn is_settled(socket: &'static Socket) -> bool {
    let changed = || socket.sending.carrier() == Carrier::Ring && crate::receive::is_named(socket);
    !socket.needs_attention() || socket.is_passed() || (socket.is_joined() && changed())
}

/// Brings a socket further, unless it is still being connected.
fn attend(fd: c_int) {
    let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.needs_attention()) else { return };
    if socket.stage() == Stage::Native && ginnel_tcp::addresses(kernel::borrow(fd)).is_err() {
        return;
    }
    meet::attend(socket, fd);
    if socket.is_joined() {
        change::attend(socket, fd);
    }
}
