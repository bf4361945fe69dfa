//! The end of a socket's rings, when its last descriptor is about to be closed.

use crate::carrying::{connection, counted, look, room};
use crate::process::owner;
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::{Growth, Socket, Stage};
use crate::state::sockets::SOCKETS;
use crate::system::confined::is_confined;
use crate::system::kernel;
use ginnel::{SocketReceiver, SocketSender};
use ginnel_ring::carrier;
use ginnel_ring::wait::Waitable;
use libc::c_int;

/// Ends the socket's rings, because its last descriptor is about to be closed. The kernel's close, which follows, wakes the peer.
pub fn close(socket: &'static Socket, fd: c_int) {
    let was_reported = crate::daemon::session::withdraw(socket);
    if socket.has(Fact::Passed) || socket.may_be_shared() {
        // The kernel's file may have other descriptors, of which this library does not know.
        socket.watchers.closes(fd, socket);
    }
    socket.watchers.close(socket);
    let (was_joined, reported) = {
        // A thread that brings rings takes the same lock first.
        let facts = socket.facts.lock();
        let was_joined = socket.is_joined();
        socket.set_stage(Stage::New);
        (was_joined, facts.reported)
    };
    if reported != 0 {
        crate::daemon::worth::learn(socket, reported);
    }
    if was_joined {
        end(socket, fd);
    }
    crate::state::family::leave(socket);
    if socket.growth() == Growth::Asked {
        crate::daemon::session::tidy_larger();
    } else if was_reported {
        crate::daemon::session::tidy();
    }
    crate::daemon::report::ended(socket);
    socket.cache.end();
}

/// Marks in a ring that this side receives nothing more, and whether it has broken the connection. The kernel wakes the peer.
pub fn mark_received(receiver: &mut SocketReceiver, is_broken: bool) {
    receiver.ring.disarm();
    let _ = if is_broken { receiver.ring.abort() } else { receiver.ring.finish() };
}

/// Marks that the program takes nothing that is sent from now on, because it has shut down both directions. The kernel wakes the peer.
pub fn take_no_more(socket: &'static Socket) {
    for receiver in socket.receiving.lock().all_mut() {
        let _ = receiver.ring.finish();
    }
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

/// Returns whether there are bytes that the program has not received. A program that has confined itself does not ask the kernel, which
/// breaks the connection for its part of them.
fn has_unread(socket: &'static Socket, fd: c_int) -> bool {
    if !is_confined() {
        return look::available(socket, fd).unwrap_or_else(|| kernel::unread(fd)) > 0;
    }
    let has_some = |receiver: &mut SocketReceiver| matches!(receiver.ring.poll(), Ok(1..));
    socket.receiving.lock().all_mut().any(has_some)
}

/// Returns whether both directions have ended. As with TCP, nothing breaks such a connection, whatever this side has not received: the
/// peer's end of it is gone.
fn have_both_ended(socket: &'static Socket) -> bool {
    room::has_shut_down(socket) && look::has_peer_finished(socket)
}

/// Tells the kernel, if it carries what the peer sends, that this side has ended what it sends in a ring. Otherwise the kernel would break
/// the connection for what it has, although both directions may have ended.
fn pass_on_end(socket: &'static Socket, fd: c_int) {
    if socket.sending.carrier() == Carrier::Ring
        && socket.receiving.carrier() == Carrier::Kernel
        && room::has_shut_down(socket)
    {
        kernel::send_no_more(fd);
    }
}

fn end(socket: &'static Socket, fd: c_int) {
    // Behind the last byte that the kernel carries, only bytes that wake come. One of them may be there, and would break the connection.
    counted::begin_ring_if_due(socket);
    let is_shared = crate::state::family::is_shared_by_the_living(socket);
    socket.sending.detach();
    socket.receiving.detach();
    if !is_shared {
        pass_on_end(socket, fd);
    }
    let may_break = !is_shared && !have_both_ended(socket);
    let is_unread = may_break && has_unread(socket, fd);
    // If the kernel carries this direction, it knows by itself whether there are unread bytes. They may be another process's, to which
    // this one has handed the connection over.
    let is_kernels = socket.receiving.carrier() == Carrier::Kernel;
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
    let is_broken = is_unread || may_break && !is_confined() && kernel::lingers_not(fd);
    // Where the peer has left the ring in which it sends, it learns this from the kernel.
    let is_left = |receiver: &SocketReceiver| carrier::given_back(receiver.ring.memory()).is_some();
    let mut has_peer_left = matches!(socket.receiving.carrier(), Carrier::Kernel | Carrier::Returning);
    // The process that has opened the rings may live on without the connection.
    let may_mark = |is_ours: bool| is_ours || owner::owns_tables();
    for mut receiver in receivers.filter(|receiver| may_mark(receiver.is_ours())) {
        has_peer_left |= is_left(&receiver);
        mark_received(&mut receiver, is_broken);
        keep_if_confined(receiver);
    }
    let carries = socket.sending.carrier() == Carrier::Ring;
    for mut sender in senders.filter(|sender| carries && may_mark(sender.is_ours())) {
        // This side waits for no room any more, and the byte with which the peer tells of some would break the connection.
        sender.ring.disarm();
        // Otherwise the peer might find the end before it finds that the connection is broken.
        if !(is_broken && has_peer_left) {
            let _ = sender.ring.finish();
        }
        keep_if_confined(sender);
    }
    if (!carries || has_peer_left) && is_unread && !is_kernels && !is_confined() {
        // The kernel does not know that there are unread bytes.
        kernel::linger_not(fd);
    }
    if !is_unread {
        take_last_wakes(socket, fd);
    }
}

/// Takes the wake bytes that nobody has read, before the kernel closes the socket. They would make the kernel reset the connection,
/// although its stream may still carry sent bytes, and the peer may hand the connection over to a process that knows nothing of wake
/// bytes.
fn take_last_wakes(socket: &'static Socket, fd: c_int) {
    let wakes_come = matches!(socket.receiving.carrier(), Carrier::Ring | Carrier::Returning);
    if wakes_come && crate::state::family::may_drain(socket) {
        while connection::take_last(socket, fd, &mut [0; 256]) > 0 {}
    }
}

/// Does at the exit of the process what a close does for the peer, because a program that ends closes its sockets. Other threads may still
/// send until the process has ended. The kernel ends what they send.
pub fn at_exit() {
    for fd in SOCKETS.used(0, u32::MAX).filter(|_| owner::owns_tables()) {
        if let Some(socket) = SOCKETS.get(fd)
            && socket.is_joined()
            && !crate::state::family::is_shared_by_the_living(socket)
        {
            counted::begin_ring_if_due(socket);
            pass_on_end(socket, fd);
            // As for a close, the kernel knows by itself what is unread of what it carries, and whether another process may receive that.
            let is_kernels = socket.receiving.carrier() == Carrier::Kernel;
            let is_unread = !is_kernels && !have_both_ended(socket) && has_unread(socket, fd);
            if !is_kernels {
                receive_no_more(socket, fd, is_unread);
            }
            if !is_unread {
                take_last_wakes(socket, fd);
            }
        }
    }
}

/// Tells the peer that the program receives nothing more, and whether it has broken the connection. The kernel may not know of the unread
/// bytes.
fn receive_no_more(socket: &'static Socket, fd: c_int, is_broken: bool) {
    let mut rings = socket.receiving.lock();
    let is_left = |receiver: &SocketReceiver| carrier::given_back(receiver.ring.memory()).is_some();
    let is_kernels = socket.sending.carrier() != Carrier::Ring
        || socket.receiving.carrier() == Carrier::Returning
        || rings.all().any(is_left);
    // The daemon says when a process has ended that has opened its rings itself.
    let is_told = |receiver: &&mut SocketReceiver| is_broken || !receiver.is_ours();
    rings.all_mut().filter(is_told).for_each(|receiver| mark_received(receiver, is_broken));
    drop(rings);
    // A byte that tells of room would break the connection.
    socket.sending.lock().all_mut().for_each(|sender| sender.ring.disarm());
    if is_broken && is_kernels && !is_confined() {
        kernel::linger_not(fd);
    }
}
