//! The end of a connection whose socket remains: `connect` with AF_UNSPEC. The program may connect the socket anew afterwards.
//!
//! The kernel breaks the connection, so what the peer learns is what it learns when a program closes a connection with unread bytes
//! ([`crate::carrying::closing::mark_received`]). This library marks the rings first, because the peer looks at them once its kernel has
//! told it. Both directions stay locked until the socket has no connection: a thread that takes wake bytes must not take the kernel's
//! error, or bytes of the next connection.
//!
//! Calls that wait for the earlier connection end ([`Socket::connection`]). Relatives that have the socket learn of its end by a count
//! in the memory that they share, and leave the next connection to the kernel ([`follow`]). As long as they have it, it does not change
//! over.

use crate::carrying::{closing, delays, lowat};
use crate::daemon::session;
use crate::process::signals::Blocked;
use crate::state::carrier::Carrier;
use crate::state::direction::Held;
use crate::state::known::Fact;
use crate::state::socket::{Growth, Socket, Stage};
use crate::state::sockets::Using;
use crate::state::{family, inherited, reasons};
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept};
use crate::system::kernel;
use ginnel::{SocketReceiver, SocketSender};
use libc::c_int;
use std::sync::atomic::Ordering;

/// Makes the kernel's call that disconnects a socket, and resets the socket if that succeeds.
#[cold]
#[cfg_attr(test, expect(dead_code, reason = "only the exports call it"))]
pub fn disconnect(socket: &'static Socket, fd: c_int, native: impl FnOnce() -> c_int) -> c_int {
    let blocked = Blocked::new();
    let Some(using) = Using::begin(socket, fd) else { return native() };
    let was_reported = session::withdraw(socket) || socket.growth() == Growth::Asked;
    let is_shared = family::is_shared(socket);
    crate::daemon::report::ended(socket);
    let before = {
        // A thread that brings rings, or reports the socket, takes the same lock first. It finds another connection.
        let _facts = socket.facts.lock();
        socket.connection.fetch_add(1, Ordering::Relaxed);
        let before = socket.stage();
        if before != Stage::Joined {
            socket.set_stage(Stage::New);
        }
        before
    };
    // Elsewhere, too, a thread that takes both locks takes this one first.
    let mut receiving = socket.receiving.lock();
    let mut sending = socket.sending.lock();
    mark_broken(socket, fd, &mut receiving, &mut sending);
    let result = native();
    let errno = Errno::last();
    if result != 0 {
        match before {
            // The rings are broken already, and so is the connection.
            Stage::Joined => kernel::shut_down(fd),
            Stage::Reported => socket.set_stage(Stage::Native),
            before => socket.set_stage(before),
        }
        errno.set();
        return result;
    }
    let rings = (receiving.renew(), sending.renew());
    let is_passed = socket.has(Fact::Passed);
    socket.renew();
    socket.cache.renew();
    // Another process that got the socket may use its next connection, and knows nothing of rings.
    if is_passed {
        socket.facts.lock().reason = reasons::PASSED;
    }
    socket.set_stage(if is_passed { Stage::Stays } else { Stage::New });
    drop((receiving, sending));
    closing::give_up(rings.0, rings.1, is_shared);
    if before == Stage::Joined {
        inherited::leave_to_program(socket);
        socket.watchers.changed(socket);
    }
    if was_reported {
        session::tidy();
    }
    drop((using, blocked));
    errno.set();
    result
}

/// Tells the peer in the rings that the connection is broken, unless it is over: then TCP breaks nothing.
fn mark_broken(
    socket: &'static Socket,
    fd: c_int,
    receiving: &mut Held<'_, SocketReceiver>,
    sending: &mut Held<'_, SocketSender>,
) {
    let carries = socket.sending.carrier() == Carrier::Ring;
    let is_over = receiving.as_ref().is_some_and(|receiver| receiver.ring.is_ending())
        && sending.as_ref().is_some_and(|sender| sender.ring.is_finished());
    receiving.all_mut().for_each(|receiver| closing::mark_received(receiver, !is_over));
    if !matches!(socket.receiving.carrier(), Carrier::Kernel | Carrier::Changing) && !is_confined() {
        lowat::give_back(socket, fd);
    }
    if carries {
        for sender in sending.all_mut() {
            let _ = sender.ring.finish();
        }
        if !is_confined() {
            delays::relax(socket, fd);
        }
    }
}

/// Does what [`follow`] does for calls that only look at the socket.
#[inline]
pub fn follow_if_due(socket: &'static Socket) {
    if socket.receiving.is_superseded() {
        follow(socket);
    }
}

/// Leaves the socket to the kernel if a relative has disconnected it. Returns false if none has. The caller holds no lock of the
/// directions.
#[cold]
pub fn follow(socket: &'static Socket) -> bool {
    let _errno = Kept::new();
    let mut receiving = socket.receiving.lock();
    let mut sending = socket.sending.lock();
    if !receiving.is_superseded() && !sending.is_superseded() {
        return false;
    }
    let rings = (receiving.follow(), sending.follow());
    socket.renew();
    socket.facts.lock().reason = "another process has disconnected it";
    socket.set_stage(Stage::Stays);
    drop((receiving, sending));
    // They are the process's that has opened them.
    closing::give_up(rings.0, rings.1, true);
    true
}
