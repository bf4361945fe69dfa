//! Connections that another process gets, by `exec` or in a message with the descriptor (SCM_RIGHTS), and connections
//! for which the program wants signals from the kernel (O_ASYNC).
//!
//! The other process may know nothing of rings. So both directions first return to the kernel and stay there. Bytes
//! that this process has not received are in the kernel's stream again, and the process that gets the descriptor
//! finds an ordinary TCP connection.
//!
//! | this side | its peer |
//! |---|---|
//! | asks the peer to return ([`ginnel_ring::carrier::recall`]), and wakes it | |
//! | | with the next call on the socket, or the call in which it sleeps: returns (`returning`), and sends what this side may not have received over the kernel's connection |
//! | drops the wake bytes, and the repeated bytes that it has received; the kernel carries its receiving direction | |
//! | returns; the kernel carries its sending direction | receives the rest of the ring, then from the kernel |
//!
//! What can go wrong:
//!
//! | | |
//! |---|---|
//! | the peer makes no call for a while | after [`PATIENCE`] the message is refused (EAGAIN), or the executed program does not get the connection. The peer returns when it makes its next call |
//! | more is unread than the kernel takes at once, or a larger ring is about to take over | the same |
//! | another process has the socket too, after a fork, and uses it | the same. Where that is the peer's socket, any of the processes that have it returns |
//! | the peer dies, or closes | the same; what it has sent can still be received here |
//! | the peer lies about what it sends again | it harms its own stream |

use crate::carrying::bell::Wake;
use crate::carrying::{bell, connection, counted, grow, look, returning, room};
use crate::daemon::report;
use crate::process::section::{Scratch, Section};
use crate::process::signals;
use crate::state::carrier::Carrier;
use crate::state::direction::Held;
use crate::state::inherited;
use crate::state::known::Fact;
use crate::state::reasons::{PASSED, SIGNALLED};
use crate::state::socket::{End, Growth, Socket, Stage};
use crate::state::sockets::SOCKETS;
use crate::system::clock::now;
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept};
use crate::system::kernel;
use ginnel::SocketReceiver;
use ginnel_ring::carrier;
use ginnel_ring::carrier::Place;
use ginnel_ring::wait::Waitable;
use libc::c_int;
use std::sync::atomic::Ordering;

/// How long a peer may take to return, in microseconds.
const PATIENCE: u64 = 1_000_000;
/// The time between two checks whether it has returned, in milliseconds.
const STEP: c_int = 1;
/// The number of checks between two wake-ups.
const LOOKS: u32 = 20;

/// Handles a program's request for a signal when a connection can be read or written. A connection that is still on
/// TCP stays there, and any other one returns to TCP. Its peer may make no call for a while. The peer then returns
/// with its next call, and until then it sends a wake byte for what it sends, for which the kernel sends the signal.
#[cold]
pub fn signalled(socket: &'static Socket, fd: c_int) {
    match socket.stage() {
        // The kernel is asked for the signal setting when the socket is about to be reported.
        Stage::New | Stage::Listening => return,
        _ => crate::daemon::session::stays(socket, SIGNALLED),
    }
    if socket.is_joined() && !is_confined() && !pass_on(&[(socket, fd)], SIGNALLED) {
        socket.attention.store(true, Ordering::SeqCst);
    }
}

/// Advances a connection that has not returned in time, during a call of its program.
#[cold]
pub fn go_on(socket: &'static Socket, fd: c_int) {
    if is_back(socket, fd, false) {
        return;
    }
    let mut rings = socket.receiving.lock();
    if let Some(receiver) = rings.as_mut() {
        bell::announce(&mut receiver.ring, Wake::Byte, true);
        receiver.ring.arm();
    }
}

/// Makes these connections return to the kernel, and keeps them there. Returns true if the kernel carries all of
/// them. Waits for their peers, but no longer than [`PATIENCE`].
#[cold]
pub fn pass_on(sockets: &[(&'static Socket, c_int)], reason: &'static str) -> bool {
    return_within(PATIENCE, sockets, reason)
}

/// Does the same, and waits for so many microseconds at most. A connection that has not returned by then for one of
/// [`crate::state::reasons::LATER`] goes on with that during the program's calls.
#[cold]
pub fn return_within(patience: u64, sockets: &[(&'static Socket, c_int)], reason: &'static str) -> bool {
    let _errno = Kept::new();
    let deadline = now() + patience;
    for (socket, _) in sockets {
        socket.note(Fact::Passed);
        socket.facts.lock().reason = reason;
    }
    for looks in 0.. {
        let left = sockets.iter().filter(|(socket, fd)| !is_back(socket, *fd, looks % LOOKS == 0)).count();
        if left == 0 {
            return true;
        }
        // Both ends may be in this process, or even in this thread.
        for fd in SOCKETS.used(0, u32::MAX) {
            if let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.is_joined()) {
                returning::leave_if_recalled(socket, fd);
            }
        }
        if now() >= deadline {
            break;
        }
        // A signal only makes the sleep shorter.
        let _ = signals::sleep(STEP);
    }
    false
}

/// Advances the return of a connection. Returns true if the kernel carries it.
fn is_back(socket: &'static Socket, fd: c_int, wakes: bool) -> bool {
    if !socket.is_joined() {
        return true;
    }
    if is_confined() || crate::state::family::is_used_elsewhere(socket) {
        return false;
    }
    let is_broken = is_broken(socket);
    let is_back = receives_natively(socket, fd, wakes) && sends_natively(socket, fd);
    if is_back && !socket.is_back.swap(true, Ordering::Relaxed) {
        if is_broken {
            // The peer's kernel has ended the connection in order, so this one would go on sending.
            kernel::shut_down(fd);
        }
        rest(socket);
        inherited::leave_to_program(socket);
        report::changed(socket);
    }
    is_back
}

/// Returns whether the peer has broken the connection. Only the rings may say that, so an error that the program has not been told is kept
/// for it before they are given up.
fn is_broken(socket: &'static Socket) -> bool {
    let is_told = || socket.has(Fact::ToldReset) || socket.has(Fact::SentInVain);
    if look::is_reset(socket) && !is_told() {
        socket.set_error(Errno(libc::ECONNRESET));
    }
    is_told() || socket.end() == End::Reset
}

/// Ends the attention for a connection that another process has, or its peer's, once the kernel carries it both ways.
pub fn rest(socket: &Socket) {
    let carriers = [socket.sending.carrier(), socket.receiving.carrier()];
    if carriers == [Carrier::Kernel; 2] {
        socket.set_growth(Growth::Over);
        socket.leave_alone();
    }
}

fn receives_natively(socket: &'static Socket, fd: c_int, wakes: bool) -> bool {
    // Rings that were left are dropped behind the lock.
    let _section = Section::begin();
    let direction = &socket.receiving;
    let mut rings = direction.lock();
    match direction.carrier() {
        Carrier::Changing => return false,
        Carrier::Kernel => {}
        Carrier::Counted => {
            let Some(receiver) = rings.as_ref() else { return false };
            let memory = receiver.ring.memory();
            carrier::recall(memory);
            match counted::left(receiver, direction.kernels()) {
                // The ring never will begin.
                Ok(None) => {}
                Ok(Some(0)) => {
                    counted::begin_ring(socket);
                    return false;
                }
                // What the program has not received lies before all wake bytes, of which there must be none, and
                // before what the ring has.
                Ok(Some(left)) => {
                    let base = direction.kernels() + left;
                    let is_all = |place: Place| place.kernel == base && place.ring == place.repeated;
                    if !carrier::given_back(memory).is_some_and(is_all) {
                        return ask(socket, fd, rings, wakes);
                    }
                }
                Err(_) => return false,
            }
            drop(rings.give_back(0));
            direction.set_returned(true);
            crate::carrying::lowat::give_back(socket, fd);
            direction.set_carrier(Carrier::Kernel);
        }
        Carrier::Ring => {
            if rings.is_ahead() && grow::step_receiving(socket, &mut rings).is_err() {
                return false;
            }
            let Some(receiver) = rings.as_ref() else { return false };
            carrier::recall(receiver.ring.memory());
            match returning::begin_unread(socket, fd, &rings) {
                Ok(false) if returning::begin_over(socket, fd, &mut rings) => {}
                Ok(false) => return ask(socket, fd, rings, wakes),
                _ => return false,
            }
        }
        Carrier::Returning => {
            if !returning::settle(socket, fd, &mut rings) {
                return false;
            }
        }
    }
    let left: Vec<_> = match direction.common() {
        // Related processes follow the state in the shared memory.
        Some(_) => Vec::new(),
        None => rings.take().collect(),
    };
    drop(rings);
    drop(left);
    true
}

/// Asks the peer to return, and wakes it if it sleeps and `wakes` says so. Returns false, because it has not returned
/// yet.
fn ask(socket: &'static Socket, fd: c_int, mut rings: Held<'_, SocketReceiver>, wakes: bool) -> bool {
    if wakes {
        // A peer that sends without looking for wake-ups finds this side armed, and so looks.
        if let Some(receiver) = rings.as_mut() {
            bell::announce(&mut receiver.ring, Wake::Byte, true);
            receiver.ring.arm();
        }
        drop(rings);
        // A byte for a peer that takes no more breaks the connection, with what that peer has sent and this side has not received.
        if !room::is_peer_deaf(socket) {
            connection::wake(socket, fd);
        }
    }
    false
}

fn sends_natively(socket: &'static Socket, fd: c_int) -> bool {
    if !returning::leave_now(socket, fd) {
        return false;
    }
    let _section = Section::begin();
    let mut rings = socket.sending.lock();
    let left: Vec<_> = match socket.sending.common() {
        Some(_) => Vec::new(),
        None => rings.take().collect(),
    };
    drop(rings);
    drop(left);
    true
}

/// Returns the connections on TCP that a program which this process executes inherits.
pub fn inherited_natively() -> Scratch<Vec<&'static Socket>> {
    let mut sockets: Scratch<Vec<&'static Socket>> = Scratch::new(Vec::new);
    for fd in SOCKETS.used(0, u32::MAX) {
        if let Some(socket) = SOCKETS.get(fd)
            && socket.may_change()
            && kernel::is_left_on_exec(fd)
            && !sockets.iter().any(|other| std::ptr::eq(*other, socket))
        {
            sockets.change(|sockets| sockets.push(socket));
        }
    }
    sockets
}

/// The most descriptors of a `vfork` child that are checked for copies of a connection of its parent. A process about
/// to execute a program has few.
pub const COPIES: c_int = 256;

/// Prepares for the execution of another program, which gets the connections that it should inherit on TCP. In a
/// child of `vfork` (`is_child`) the tables are its parent's, and the descriptors are its own.
#[cold]
pub fn before_exec(is_child: bool) {
    let is_joined = |fd: &c_int| SOCKETS.get(*fd).is_some_and(|socket| socket.is_joined());
    let joined: Scratch<Vec<c_int>> = Scratch::new(|| SOCKETS.used(0, u32::MAX).filter(is_joined).collect());
    if joined.is_empty() || is_confined() {
        return;
    }
    let socket_of = |fd: c_int, cookie: u64| {
        let own = SOCKETS.get(fd).filter(|socket| socket.is_joined() && socket.cookie() == cookie);
        let others = || joined.iter().filter_map(|fd| SOCKETS.get(*fd));
        own.or_else(|| others().find(|socket| socket.is_joined() && socket.cookie() == cookie))
    };
    let fds: Scratch<Vec<c_int>> = Scratch::new(|| match is_child {
        true => (0..COPIES).filter(|fd| kernel::is_left_on_exec(*fd)).collect(),
        false => joined.iter().copied().filter(|fd| inherited::is_meant(*fd)).collect(),
    });
    let mut sockets: Scratch<Vec<(&'static Socket, c_int)>> = Scratch::new(Vec::new);
    for fd in fds.iter() {
        if let Some(socket) = kernel::cookie(*fd).and_then(|cookie| socket_of(*fd, cookie))
            && !sockets.iter().any(|(other, _)| std::ptr::eq(*other, socket))
        {
            sockets.change(|sockets| sockets.push((socket, *fd)));
        }
    }
    if sockets.is_empty() {
        return;
    }
    pass_on(&sockets, PASSED);
    for &fd in fds.iter() {
        if let Some(socket) = kernel::cookie(fd).and_then(|cookie| socket_of(fd, cookie)) {
            kernel::set_close_on_exec(fd, !socket.is_back.load(Ordering::Relaxed));
        }
    }
}
