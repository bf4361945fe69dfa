//! From the kernel to a ring, and the end.
//!
//! | sender | receiver |
//! |---|---|
//! | counts what the program sends | counts what it receives |
//! | | READY := 1, once nobody is in a call of the kernel and its count is the kernel's |
//! | sees READY, nobody is in a call of the kernel, its count is the kernel's: BASE := count + 1; sends into the ring | takes the kernel's bytes up to BASE, then the ring's |
//!
//! Two independent counts have to agree, so that bytes which went past this library keep a connection on TCP and never corrupt it.
//! A sender changes over as soon as it may, whether it has data or not, because wake bytes may only travel in a direction that has
//! changed over.

use std::sync::atomic::Ordering;

use ginnel::SocketReceiver;
use ginnel_ring::carrier::{self, Earlier, Place};
use ginnel_ring::wait::Waitable;
use ginnel_tcp::{Connecting, Counts, Role};
use libc::c_int;

use crate::confined::is_confined;
use crate::direction::{Carrier, Direction};
use crate::kernel;
use crate::signals::Blocked;
use crate::socket::{Growth, Socket, Stage};
use crate::table::Using;

/// Tries in which the kernel counts otherwise than this library, after which the socket stays on TCP.
const MISMATCHES: u32 = 3;

/// Brings a socket with rings further, if it can be. Called at the beginning of each call.
#[cold]
pub fn attend(socket: &'static Socket, fd: c_int) {
    // Whoever is about to change over keeps others out of the kernel: nobody may leave in the middle of that.
    let _blocked = Blocked::new();
    let Some(_using) = Using::begin(socket, fd) else { return };
    let (role, begun) = {
        let facts = socket.facts.lock();
        (facts.role, facts.begun)
    };
    crate::returning::leave_if_recalled(socket, fd);
    if socket.is_passed() {
        crate::receive::begin_ring_if_due(socket);
        if socket.facts.lock().reason == crate::passing::SIGNALLED {
            crate::passing::go_on(socket, fd);
        }
        return crate::passing::rest(socket);
    }
    let (receiving, sending) = match is_confined() || crate::family::is_shared(socket) {
        // Another process may send or receive through the kernel: if this one changed over, the bytes of that one would be lost.
        true => (Change::No, Change::No),
        false => (receive_counted(socket, fd, role), change_sending(socket, fd, role)),
    };
    if sending == Change::Done {
        note_time(&socket.sending, begun);
        crate::epoll::changed(socket);
        crate::report::changed(socket);
    }
    if receiving == Change::Done {
        crate::epoll::changed(socket);
    }
    if [sending, receiving].contains(&Change::Mismatch) {
        let mut facts = socket.facts.lock();
        facts.mismatches += 1;
        if facts.mismatches >= MISMATCHES && socket.sending.carrier() == Carrier::Kernel {
            drop(facts);
            // What the other side sends may change over all the same; this one's stays.
            socket.facts.lock().reason = "bytes went past the library";
            socket.leave_alone();
        }
    }
    crate::receive::begin_ring_if_due(socket);
    if crate::grow::may_begin(socket) {
        crate::grow::attend(socket, fd);
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Change {
    /// It had changed before, or cannot yet.
    No,
    Done,
    Mismatch,
}

/// The receiver says that it counts.
fn receive_counted(socket: &'static Socket, fd: c_int, role: Role) -> Change {
    let direction = &socket.receiving;
    let mut ring = direction.lock();
    let Some(receiver) = ring.as_mut() else { return Change::No };
    if direction.carrier() != Carrier::Kernel {
        return Change::No;
    }
    let Some(received) = direction.begin_change() else { return Change::No };
    match Counts::of(kernel::borrow(fd), role) {
        Ok(Some(counts)) if counts.received == received => {
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

/// The sender names the byte from which on the ring carries.
fn change_sending(socket: &'static Socket, fd: c_int, role: Role) -> Change {
    let direction = &socket.sending;
    let mut ring = direction.lock();
    let Some(sender) = ring.as_mut() else { return Change::No };
    let memory = sender.ring.memory();
    if direction.carrier() != Carrier::Kernel || !carrier::is_counted(memory, Earlier::Kernel) {
        return Change::No;
    }
    let Some(sent) = direction.begin_change() else { return Change::No };
    match Counts::of(kernel::borrow(fd), role) {
        Ok(Some(counts)) if counts.sent == sent => {
            hurry(socket, fd);
            note_options(socket, fd);
            if !carrier::begin(memory, sent) {
                // The receiver's process passes the connection on, and goes on with the kernel.
                carrier::give_back(memory, Place { ring: 0, kernel: sent, repeated: 0 });
                relax(socket, fd);
                drop(ring.give_back(0));
                direction.set_carrier(Carrier::Kernel);
                socket.set_passed();
                return Change::No;
            }
            direction.set_returned(false);
            direction.set_carrier(Carrier::Ring);
            // The receiver may sleep and wait for the kernel: it needs no waking, because there is nothing to receive yet.
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

/// The options of TCP by which bytes are kept back for more of them to come.
pub const DELAYS: [(c_int, bool); 2] = [(libc::TCP_NODELAY, true), (libc::TCP_CORK, false)];

/// Wake bytes have to leave at once. What the program has set is remembered, because it may ask.
fn hurry(socket: &Socket, fd: c_int) {
    for (i, (option, at_once)) in DELAYS.into_iter().enumerate() {
        let set = kernel::tcp_flag(fd, option);
        socket.delays[i].store(set, Ordering::Relaxed);
        if set != at_once {
            kernel::set_tcp_flag(fd, option, at_once);
        }
    }
}

/// What the program has asked for of the kernel that counts for bytes in a ring too. A connection may have it from its listener.
fn note_options(socket: &Socket, fd: c_int) {
    socket.gives_up.store(kernel::tcp_flag(fd, libc::TCP_USER_TIMEOUT), Ordering::Relaxed);
}

/// What the program has set is the kernel's again.
pub fn relax(socket: &Socket, fd: c_int) {
    for (i, (option, at_once)) in DELAYS.into_iter().enumerate() {
        let set = socket.delays[i].load(Ordering::Relaxed);
        if set != at_once {
            kernel::set_tcp_flag(fd, option, set);
        }
    }
}

/// Notes how long the connection took to change over at first.
pub fn note_time<R>(direction: &Direction<R>, begun: std::time::Duration) {
    if direction.changed_after.load(Ordering::Relaxed) != 0 {
        return;
    }
    let after = Connecting::now().saturating_sub(begun).as_micros() as u64;
    direction.changed_after.store(after.max(1), Ordering::Relaxed);
}

/// The socket's last descriptor is about to be closed: ends what it has in rings. The kernel's close, which follows, wakes the peer.
pub fn close(socket: &'static Socket, fd: c_int) {
    let was_reported = crate::meet::withdraw(socket);
    socket.watchers.close(socket);
    let was_joined = {
        // Whoever brings rings takes the same lock first.
        let _facts = socket.facts.lock();
        let was_joined = socket.is_joined();
        socket.set_stage(Stage::New);
        was_joined
    };
    if was_joined {
        end(socket, fd);
    }
    crate::family::leave(socket);
    if was_reported || socket.growth() == Growth::Asked {
        crate::meet::tidy();
    }
    crate::report::ended(socket);
    socket.cache.end();
}

/// The end of a ring is given back to the daemon, unless the program may not talk to it any more.
fn keep_if_confined<R>(side: R) {
    if is_confined() {
        std::mem::forget(side);
    }
}

fn end(socket: &'static Socket, fd: c_int) {
    let is_shared = crate::family::is_shared(socket);
    socket.sending.detach();
    socket.receiving.detach();
    let receivers = socket.receiving.lock().take();
    let senders = socket.sending.lock().take();
    if is_shared {
        // Another process may go on with them. The kernel tells the peer when the last one has closed the socket.
        std::mem::forget((receivers, senders));
        return;
    }
    // Who closes with bytes unread has broken the connection, as with TCP; and who asks for it. The peer is told by the ring in which it
    // sends, because what it was sent is still its own: TCP too hands out what has come before the reset.
    let mut receivers: Vec<_> = receivers.collect();
    let unread = receivers.iter_mut().any(|receiver| matches!(receiver.ring.poll(), Ok(n) if n > 0));
    let is_broken = unread || !is_confined() && kernel::lingers_not(fd);
    for mut receiver in receivers.into_iter().filter(SocketReceiver::is_ours) {
        receiver.ring.disarm();
        let _ = if is_broken { receiver.ring.abort() } else { receiver.ring.finish() };
        keep_if_confined(receiver);
    }
    let carries = socket.sending.carrier() == Carrier::Ring;
    for mut sender in senders.filter(|sender| carries && sender.is_ours()) {
        let _ = sender.ring.finish();
        keep_if_confined(sender);
    }
    if !carries && unread {
        // The kernel knows nothing of these bytes.
        kernel::linger_not(fd);
    }
    let wakes_come = matches!(socket.receiving.carrier(), Carrier::Ring | Carrier::Returning);
    if !carries && !unread && wakes_come && crate::family::may_drain(socket) {
        // The kernel's stream still carries what was sent, and its end. It would be reset for wake bytes that nobody has read.
        kernel::take_last(socket, fd, &mut [0; 256]);
    }
}
