//! `GINNEL_SOCKETS_WAIT`, for tests: calls wait until a connection has changed over.
//!
//! In a test that sends a few bytes over a connection and closes it, the connection would change over only by luck. With this
//! setting, `accept` and the first call that sends or receives over a connection wait until it has changed over, but no longer
//! than the given time. Both ends may be in one process, or even in one thread, so a waiting thread advances all connections of
//! the process.

use crate::carrying::advance;
use crate::process::settings;
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::{Socket, Stage};
use crate::state::sockets::SOCKETS;
use crate::system::errno::Kept;
use crate::system::kernel;
use libc::c_int;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The pause between two checks.
const PAUSE: Duration = Duration::from_micros(100);

/// Waits until a connection has changed over, if the setting is there and no call has waited for this connection before.
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

/// Returns whether both directions have reached their final carrier, or cannot reach it as long as another process has the socket.
/// Bytes that were sent over TCP before the change may still be unreceived.
fn is_settled(socket: &'static Socket) -> bool {
    let changed = || socket.sending.carrier() == Carrier::Ring && crate::carrying::counted::is_named(socket);
    let stays = || {
        socket.has(Fact::Passed)
            || crate::state::family::is_shared(socket)
            || crate::state::sockets::has_standard_stream(socket)
    };
    !socket.needs_attention() || stays() || (socket.is_joined() && changed())
}

/// Advances the change of a socket, unless it is still connecting.
fn attend(fd: c_int) {
    let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.needs_attention()) else { return };
    if socket.stage() == Stage::Native && ginnel_tcp::addresses(kernel::borrow(fd)).is_err() {
        return;
    }
    advance::advance(socket, fd);
}
