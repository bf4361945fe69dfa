//! The change of a direction from the kernel to a ring, and the end of a connection.
//!
//! | sender | receiver |
//! |---|---|
//! | counts the bytes that the program sends | counts the bytes that the program receives |
//! | | sets READY to 1 once no thread is in a system call and its count is the kernel's |
//! | once it sees READY, no thread is in a system call, and its count is the kernel's: sets BASE to count + 1, and sends into the ring | takes the kernel's bytes up to BASE, then the ring's |
//!
//! Two independent counts have to agree, so bytes that went past this library keep a connection on TCP and never corrupt it. A
//! sender changes over as soon as it may, whether it has data or not, because wake bytes may only travel in a direction that has
//! changed over.

use crate::carrying::connection::Sending;
use crate::carrying::{connection, delays, room};
use crate::process::signals::Blocked;
use crate::state::carrier::Carrier;
use crate::state::direction;
use crate::state::known::Fact;
use crate::state::socket::{Growth, Socket};
use crate::state::sockets::Using;
use crate::system::confined::is_confined;
use crate::system::kernel;
use ginnel_ring::carrier;
use ginnel_ring::carrier::{Earlier, Place};
use ginnel_tcp::{Counts, Role};
use libc::c_int;

/// The number of tries with differing counts of the kernel and this library after which the socket stays on TCP.
const MISMATCHES: u32 = 3;

/// Advances a socket that has rings, if that is possible. Called at the beginning of each call.
#[cold]
pub fn attend(socket: &'static Socket, fd: c_int) {
    // A thread that is about to change over keeps others out of the kernel. No signal handler may make it leave in the middle of
    // that.
    let _blocked = Blocked::new();
    let Some(_using) = Using::begin(socket, fd) else { return };
    let (role, begun) = {
        let facts = socket.facts.lock();
        (facts.role, facts.begun)
    };
    crate::carrying::returning::leave_if_recalled(socket, fd);
    if socket.has(Fact::Passed) {
        crate::carrying::counted::begin_ring_if_due(socket);
        let reason = socket.facts.lock().reason;
        if crate::state::reasons::LATER.contains(&reason) {
            crate::carrying::passing::go_on(socket, fd);
        }
        return crate::carrying::passing::rest(socket);
    }
    let is_used_otherwise =
        || crate::state::family::is_shared(socket) || crate::state::sockets::has_standard_stream(socket);
    let (receiving, sending) = match is_confined() || is_used_otherwise() {
        // Another process, or the C library, may send or receive through the kernel. If this side changed over, those bytes would
        // be lost.
        true => (Change::No, Change::No),
        false => (receive_counted(socket, fd, role), change_sending(socket, fd, role)),
    };
    if sending == Change::Done {
        direction::note_time(&socket.sending, begun);
        socket.watchers.changed(socket);
        crate::daemon::report::changed(socket);
    }
    if receiving == Change::Done {
        socket.watchers.changed(socket);
    }
    if [sending, receiving].contains(&Change::Mismatch) {
        let mut facts = socket.facts.lock();
        facts.mismatches += 1;
        if facts.mismatches >= MISMATCHES && socket.sending.carrier() == Carrier::Kernel {
            drop(facts);
            // The other direction may still change over; this side keeps sending over TCP.
            socket.facts.lock().reason = "bytes went past the library";
            socket.leave_alone();
        }
    }
    if [sending, receiving].contains(&Change::Never) {
        if socket.growth() == Growth::Begun {
            socket.set_growth(Growth::Over);
        }
        if socket.receiving.carrier() == Carrier::Kernel {
            socket.leave_alone();
        }
    }
    crate::carrying::counted::begin_ring_if_due(socket);
    if crate::daemon::larger::may_begin(socket) {
        crate::carrying::grow::attend(socket, fd);
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Change {
    /// The direction had changed before, or cannot change yet.
    No,
    /// The connection has ended, or nobody receives what is sent.
    Never,
    Done,
    Mismatch,
}

/// Announces that the receiver counts.
fn receive_counted(socket: &'static Socket, fd: c_int, role: Role) -> Change {
    let direction = &socket.receiving;
    let mut ring = direction.lock();
    let Some(receiver) = ring.as_mut() else { return Change::No };
    // A thread may be about to fork since it was asked whether the socket is shared.
    if direction.carrier() != Carrier::Kernel || direction.common().is_some() {
        return Change::No;
    }
    // Once the program has shut down both directions, a byte that wakes it breaks the connection.
    if socket.has(Fact::ShutDownReceiving) && room::has_shut_down(socket) {
        let _ = receiver.ring.finish();
        return Change::Never;
    }
    let Some(received) = direction.begin_change() else { return Change::No };
    match Counts::of(kernel::borrow(fd), role) {
        Ok(Some(counts)) if counts.received == received => {
            crate::carrying::lowat::keep(socket, fd);
            carrier::count(receiver.ring.memory(), Earlier::Kernel);
            direction.set_returned(false);
            direction.set_carrier(Carrier::Counted);
            Change::Done
        }
        Ok(Some(_)) => {
            direction.set_carrier(Carrier::Kernel);
            Change::Mismatch
        }
        _ => {
            direction.set_carrier(Carrier::Kernel);
            Change::No
        }
    }
}

/// Names the byte from which on the ring carries what this side sends.
fn change_sending(socket: &'static Socket, fd: c_int, role: Role) -> Change {
    let direction = &socket.sending;
    let mut ring = direction.lock();
    let Some(sender) = ring.as_mut() else { return Change::No };
    let memory = sender.ring.memory();
    // A thread may be about to fork since it was asked whether the socket is shared.
    if direction.carrier() != Carrier::Kernel || direction.common().is_some() {
        return Change::No;
    }
    if sender.ring.is_closed() {
        return Change::Never;
    }
    if !carrier::is_counted(memory, Earlier::Kernel) {
        return Change::No;
    }
    let Some(sent) = direction.begin_change() else { return Change::No };
    match Counts::of(kernel::borrow(fd), role) {
        Ok(Some(counts)) if counts.sent == sent => {
            match connection::sending(fd) {
                Sending::Open => {}
                // Only the kernel knows how such a connection ends.
                sending => {
                    direction.set_carrier(Carrier::Kernel);
                    return if sending == Sending::Ended { Change::Never } else { Change::No };
                }
            }
            delays::hurry(socket, fd);
            delays::note_options(socket, fd);
            if !carrier::begin(memory, sent) {
                // The receiver's process passes the connection on, and continues over the kernel.
                carrier::give_back(memory, Place { ring: 0, kernel: sent, repeated: 0 });
                delays::relax(socket, fd);
                drop(ring.give_back(0));
                direction.set_carrier(Carrier::Kernel);
                socket.note(Fact::Passed);
                return Change::No;
            }
            direction.set_returned(false);
            direction.set_carrier(Carrier::Ring);
            // The receiver may sleep in the kernel. It need not be woken, because there is nothing to receive yet.
            Change::Done
        }
        Ok(Some(_)) => {
            direction.set_carrier(Carrier::Kernel);
            Change::Mismatch
        }
        _ => {
            direction.set_carrier(Carrier::Kernel);
            Change::No
        }
    }
}
