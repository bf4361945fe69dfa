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

use crate::confined::is_confined;
use crate::direction::{Carrier, Direction};
use crate::kernel;
use crate::signals::Blocked;
use crate::socket::{Growth, Socket, Stage};
use crate::table::{self, Using};
use ginnel::{SocketReceiver, SocketSender};
use ginnel_ring::carrier::{self, Earlier, Place};
use ginnel_ring::wait::Waitable;
use ginnel_tcp::{Counts, Role};
use libc::c_int;
use std::sync::atomic::Ordering;

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
    crate::returning::leave_if_recalled(socket, fd);
    if socket.is_passed() {
        crate::receive::begin_ring_if_due(socket);
        let reason = socket.facts.lock().reason;
        if crate::passing::LATER.contains(&reason) {
            crate::passing::go_on(socket, fd);
        }
        return crate::passing::rest(socket);
    }
    let is_used_otherwise = || crate::family::is_shared(socket) || crate::stdio::has(socket);
    let (receiving, sending) = match is_confined() || is_used_otherwise() {
        // Another process, or the C library, may send or receive through the kernel. If this side changed over, those bytes would
        // be lost.
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
            // The other direction may still change over; this side keeps sending over TCP.
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
    /// The direction had changed before, or cannot change yet.
    No,
    Done,
    Mismatch,
}

/// Announces that the receiver counts.
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
            crate::lowat::keep(socket, fd);
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
    if direction.carrier() != Carrier::Kernel || !carrier::is_counted(memory, Earlier::Kernel) {
        return Change::No;
    }
    let Some(sent) = direction.begin_change() else { return Change::No };
    match Counts::of(kernel::borrow(fd), role) {
        Ok(Some(counts)) if counts.sent == sent => {
            hurry(socket, fd);
            note_options(socket, fd);
            if !carrier::begin(memory, sent) {
                // The receiver's process passes the connection on, and continues over the kernel.
                carrier::give_back(memory, Place { ring: 0, kernel: sent, repeated: 0 });
                relax(socket, fd);
                drop(ring.give_back(0));
                direction.set_carrier(Carrier::Kernel);
                socket.set_passed();
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

/// The TCP options that decide whether the kernel delays bytes to wait for more, each with the value that disables the delay.
pub const DELAYS: [(c_int, bool); 2] = [(libc::TCP_NODELAY, true), (libc::TCP_CORK, false)];

/// Makes the kernel send wake bytes at once. Remembers what the program has set, because the program may ask for it.
fn hurry(socket: &Socket, fd: c_int) {
    for (i, (option, at_once)) in DELAYS.into_iter().enumerate() {
        let set = kernel::tcp_flag(fd, option);
        socket.delays[i].store(set, Ordering::Relaxed);
        if set != at_once {
            kernel::set_tcp_flag(fd, option, at_once);
        }
    }
}

/// Notes the program's socket options that also apply to bytes in a ring. A connection may have inherited them from its listener.
fn note_options(socket: &Socket, fd: c_int) {
    socket.gives_up.store(kernel::tcp_flag(fd, libc::TCP_USER_TIMEOUT), Ordering::Relaxed);
    socket.tells_inq.store(kernel::tcp_flag(fd, libc::TCP_INQ), Ordering::Relaxed);
}

/// Restores the options that the program has set.
pub fn relax(socket: &'static Socket, fd: c_int) {
    let delays = crate::family::delays(socket);
    for (i, (option, at_once)) in DELAYS.into_iter().enumerate() {
        let set = delays[i].load(Ordering::Relaxed);
        if set != at_once {
            kernel::set_tcp_flag(fd, option, set);
        }
    }
}

/// Notes how long the connection took until it changed over for the first time.
pub fn note_time<R>(direction: &Direction<R>, begun: std::time::Duration) {
    if direction.changed_after.load(Ordering::Relaxed) != 0 {
        return;
    }
    let after = ginnel_clock::monotonic().saturating_sub(begun).as_micros() as u64;
    direction.changed_after.store(after.max(1), Ordering::Relaxed);
}

/// Ends the socket's rings, because its last descriptor is about to be closed. The kernel's close, which follows, wakes the peer.
pub fn close(socket: &'static Socket, fd: c_int) {
    let was_reported = crate::daemon::withdraw(socket);
    socket.watchers.close(socket);
    let was_joined = {
        // A thread that brings rings takes the same lock first.
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
        crate::daemon::tidy();
    }
    crate::report::ended(socket);
    socket.cache.end();
}

/// Marks in a ring that this side receives nothing more, and whether it has broken the connection. The kernel wakes the peer.
pub fn mark_received(receiver: &mut SocketReceiver, is_broken: bool) {
    receiver.ring.disarm();
    let _ = if is_broken { receiver.ring.abort() } else { receiver.ring.finish() };
}

/// Gives up the rings of a connection that has ended. If they are shared, another process may still look at them.
pub fn give_up(
    receivers: impl Iterator<Item = SocketReceiver>,
    senders: impl Iterator<Item = SocketSender>,
    are_shared: bool,
) {
    if are_shared {
        receivers.for_each(std::mem::forget);
        senders.for_each(std::mem::forget);
    } else {
        receivers.for_each(keep_if_confined);
        senders.for_each(keep_if_confined);
    }
}

/// Keeps the end of a ring open if the program may not talk to the daemon any more. Otherwise it is given back to the daemon here.
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
        // Another process may go on with the rings. The kernel tells the peer when the last process has closed the socket.
        std::mem::forget((receivers, senders));
        return;
    }
    // As with TCP, a program that closes a socket with unread bytes breaks the connection, and so does one that asks for it
    // (SO_LINGER). The peer learns this from the ring in which it sends, because it may still receive the bytes that it was sent
    // before: TCP too delivers bytes that have come before the reset.
    let mut receivers: Vec<_> = receivers.collect();
    let unread = receivers.iter_mut().any(|receiver| matches!(receiver.ring.poll(), Ok(n) if n > 0));
    let is_broken = unread || !is_confined() && kernel::lingers_not(fd);
    // The process that has opened the rings may live on without the connection.
    let may_mark = |is_ours: bool| is_ours || table::owns_tables();
    for mut receiver in receivers.into_iter().filter(|receiver| may_mark(receiver.is_ours())) {
        mark_received(&mut receiver, is_broken);
        keep_if_confined(receiver);
    }
    let carries = socket.sending.carrier() == Carrier::Ring;
    for mut sender in senders.filter(|sender| carries && may_mark(sender.is_ours())) {
        let _ = sender.ring.finish();
        keep_if_confined(sender);
    }
    if !carries && unread {
        // The kernel does not know that there are unread bytes.
        kernel::linger_not(fd);
    }
    let wakes_come = matches!(socket.receiving.carrier(), Carrier::Ring | Carrier::Returning);
    if !carries && !unread && wakes_come && crate::family::may_drain(socket) {
        // The kernel's stream still carries the sent bytes and its end. Wake bytes that nobody has read would make the kernel reset
        // it.
        kernel::take_last(socket, fd, &mut [0; 256]);
    }
}
