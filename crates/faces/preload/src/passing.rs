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
//! | another process has the socket too, after a fork, and uses it | the same |
//! | the peer dies, or closes | the same; what it has sent can still be received here |
//! | the peer lies about what it sends again | it harms its own stream |

use crate::confined::is_confined;
use crate::direction::{Carrier, Held};
use crate::doorbell::{self, Wake};
use crate::errno::Kept;
use crate::socket::{Growth, Socket, Stage, now};
use crate::table::SOCKETS;
use crate::{grow, kernel, receive, report, returning, signals};
use ginnel::SocketReceiver;
use ginnel_ring::carrier::{self, Place};
use ginnel_ring::wait::Waitable;
use libc::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// How long a peer may take to return, in microseconds.
const PATIENCE: u64 = 1_000_000;
/// The time between two checks whether it has returned, in milliseconds.
const STEP: c_int = 1;
/// The number of checks between two wake-ups.
const LOOKS: u32 = 20;

/// The reason why a connection returns if another process gets it,
pub const PASSED: &str = "its descriptor was passed on";
/// and if the program wants a signal when something comes, which only the kernel can send.
pub const SIGNALLED: &str = "the program asks for SIGIO (O_ASYNC)";
/// and if a standard stream gets it.
pub const STANDARD: &str = "it is standard input, output or error";
/// and if another process gets this process's memory or all of its descriptors.
pub const SHARED: &str = "a process shares memory or descriptors with this one";

/// The reasons for which a connection returns as soon as its peer takes part.
pub const LATER: [&str; 3] = [SIGNALLED, STANDARD, SHARED];

/// Handles a program's request for a signal when a connection can be read or written. A connection that is still on
/// TCP stays there, and any other one returns to TCP. Its peer may make no call for a while. The peer then returns
/// with its next call, and until then it sends a wake byte for what it sends, for which the kernel sends the signal.
#[cold]
pub fn signalled(socket: &'static Socket, fd: c_int) {
    match socket.stage() {
        // The kernel is asked for the signal setting when the socket is about to be reported.
        Stage::New | Stage::Listening => return,
        _ => crate::daemon::stays(socket, SIGNALLED),
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
        doorbell::announce(&mut receiver.ring, Wake::Byte, true);
        receiver.ring.arm();
    }
}

/// Makes these connections return to the kernel, and keeps them there. Returns true if the kernel carries all of
/// them. Waits for their peers, but no longer than [`PATIENCE`].
#[cold]
pub fn pass_on(sockets: &[(&'static Socket, c_int)], reason: &'static str) -> bool {
    return_within(PATIENCE, sockets, reason)
}

/// Does the same, and waits for so many microseconds at most. A connection that has not returned by then for one of [`LATER`]
/// goes on with that during the program's calls.
#[cold]
pub fn return_within(patience: u64, sockets: &[(&'static Socket, c_int)], reason: &'static str) -> bool {
    let _errno = Kept::new();
    let deadline = now() + patience;
    for (socket, _) in sockets {
        socket.set_passed();
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
    if is_confined() || crate::family::is_used_elsewhere(socket) {
        return false;
    }
    let is_back = receives_natively(socket, fd, wakes) && sends_natively(socket, fd);
    if is_back && !socket.is_back.swap(true, Ordering::Relaxed) {
        rest(socket);
        leave_to_program(socket);
        report::changed(socket);
    }
    is_back
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
    let direction = &socket.receiving;
    let mut rings = direction.lock();
    match direction.carrier() {
        Carrier::Changing => return false,
        Carrier::Kernel => {}
        Carrier::Counted => {
            let Some(receiver) = rings.as_ref() else { return false };
            let memory = receiver.ring.memory();
            carrier::recall(memory);
            match receive::left(receiver, direction.kernels()) {
                // The ring never will begin.
                Ok(None) => {}
                Ok(Some(0)) => {
                    receive::begin_ring(socket);
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
            crate::lowat::give_back(socket, fd);
            direction.set_carrier(Carrier::Kernel);
        }
        Carrier::Ring => {
            if rings.is_ahead() && grow::step_receiving(socket, &mut rings).is_err() {
                return false;
            }
            let Some(receiver) = rings.as_ref() else { return false };
            carrier::recall(receiver.ring.memory());
            return match returning::begin_unread(socket, fd, &rings) {
                Ok(false) => ask(socket, fd, rings, wakes),
                _ => false,
            };
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
            doorbell::announce(&mut receiver.ring, Wake::Byte, true);
            receiver.ring.arm();
        }
        drop(rings);
        kernel::wake(socket, fd);
    }
    false
}

fn sends_natively(socket: &'static Socket, fd: c_int) -> bool {
    if !returning::leave_now(socket, fd) {
        return false;
    }
    let mut rings = socket.sending.lock();
    let left: Vec<_> = match socket.sending.common() {
        Some(_) => Vec::new(),
        None => rings.take().collect(),
    };
    drop(rings);
    drop(left);
    true
}

/// A set of descriptors, with one bit for each.
struct Descriptors([AtomicU64; FDS / 64]);

/// Descriptors from this number on are in no set.
const FDS: usize = 1 << 20;

impl Descriptors {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; FDS / 64])
    }

    fn bit(&self, fd: c_int) -> Option<(&AtomicU64, u64)> {
        let fd = usize::try_from(fd).ok()?;
        Some((self.0.get(fd / 64)?, 1 << (fd % 64)))
    }

    fn has(&self, fd: c_int) -> bool {
        self.bit(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    fn set(&self, fd: c_int, is_in: bool) {
        if let Some((word, bit)) = self.bit(fd) {
            match is_in {
                true => word.fetch_or(bit, Ordering::Relaxed),
                false => word.fetch_and(!bit, Ordering::Relaxed),
            };
        }
    }
}

/// Descriptors of changed-over connections that the program wants executed programs to inherit. The kernel closes
/// them all the same (close-on-exec), unless the connection has returned.
static INHERITED: Descriptors = Descriptors::new();

/// Those of them that this process itself has created or marked, in contrast to those inherited from its parent.
static CHOSEN: Descriptors = Descriptors::new();

/// Records whether the program wants executed programs to inherit this descriptor of a changed-over connection.
pub fn set_inherited(fd: c_int, is_inherited: bool) {
    INHERITED.set(fd, is_inherited);
    CHOSEN.set(fd, is_inherited);
}

/// Returns what [`set_inherited`] has recorded.
pub fn is_inherited(fd: c_int) -> bool {
    INHERITED.has(fd)
}

/// Notes a copy of a descriptor of a connection that has rings.
pub fn copied(socket: &Socket, copy: c_int) {
    match socket.is_back.load(Ordering::Relaxed) {
        true => set_inherited(copy, !kernel::closes_on_exec(copy)),
        false => withhold(copy),
    }
}

/// Keeps executed programs from inheriting this descriptor, whatever the program wants: they would take wake bytes
/// for the peer's data, and the peer would take their data for wake bytes.
pub fn withhold(fd: c_int) {
    set_inherited(fd, !kernel::closes_on_exec(fd));
    kernel::close_on_exec(fd);
}

/// Lets executed programs inherit the descriptors of a socket that has no rings any more, if the program wants that. The C library
/// executes programs too (`system`, `popen`), and this library does not see that.
pub fn leave_to_program(socket: &'static Socket) {
    for fd in SOCKETS.used(0, u32::MAX).filter(|fd| SOCKETS.is(*fd, socket)) {
        kernel::set_close_on_exec(fd, !is_inherited(fd));
    }
}

/// Clears the marks in the child of a fork, which has marked nothing yet.
pub fn in_child() {
    SOCKETS.used(0, u32::MAX).for_each(|fd| CHOSEN.set(fd, false));
}

/// Returns whether a program that this process executes should inherit a connection by this descriptor. A child has
/// all of its parent's descriptors; one that the parent still has, and that the child has not marked, is not meant
/// for the executed program.
fn is_meant(fd: c_int) -> bool {
    let is_own = || SOCKETS.get(fd).is_some_and(|socket| !crate::family::is_shared(socket));
    INHERITED.has(fd) && (CHOSEN.has(fd) || is_own())
}

/// Returns the connections on TCP that a program which this process executes inherits.
pub fn inherited_natively() -> Vec<&'static Socket> {
    let mut sockets: Vec<&'static Socket> = Vec::new();
    for fd in SOCKETS.used(0, u32::MAX) {
        if let Some(socket) = SOCKETS.get(fd)
            && matches!(socket.stage(), Stage::Native | Stage::Reported)
            && kernel::is_left_on_exec(fd)
            && !sockets.iter().any(|other| std::ptr::eq(*other, socket))
        {
            sockets.push(socket);
        }
    }
    sockets
}

/// The most descriptors of a `vfork` child that are checked for copies of a connection of its parent. A process about
/// to execute a program has few.
const COPIES: c_int = 256;

/// Prepares for the execution of another program, which gets the connections that it should inherit on TCP. In a
/// child of `vfork` (`is_child`) the tables are its parent's, and the descriptors are its own.
#[cold]
pub fn before_exec(is_child: bool) {
    let is_joined = |fd: &c_int| SOCKETS.get(*fd).is_some_and(|socket| socket.is_joined());
    let joined: Vec<c_int> = SOCKETS.used(0, u32::MAX).filter(is_joined).collect();
    if joined.is_empty() || is_confined() {
        return;
    }
    let socket_of = |fd: c_int, cookie: u64| {
        let own = SOCKETS.get(fd).filter(|socket| socket.is_joined() && socket.cookie() == cookie);
        let others = || joined.iter().filter_map(|fd| SOCKETS.get(*fd));
        own.or_else(|| others().find(|socket| socket.is_joined() && socket.cookie() == cookie))
    };
    let fds: Vec<c_int> = match is_child {
        true => (0..COPIES).filter(|fd| kernel::is_left_on_exec(*fd)).collect(),
        false => joined.iter().copied().filter(|fd| is_meant(*fd)).collect(),
    };
    let mut sockets: Vec<(&'static Socket, c_int)> = Vec::new();
    for fd in &fds {
        if let Some(socket) = kernel::cookie(*fd).and_then(|cookie| socket_of(*fd, cookie))
            && !sockets.iter().any(|(other, _)| std::ptr::eq(*other, socket))
        {
            sockets.push((socket, *fd));
        }
    }
    if sockets.is_empty() {
        return;
    }
    pass_on(&sockets, PASSED);
    for fd in fds {
        if let Some(socket) = kernel::cookie(fd).and_then(|cookie| socket_of(fd, cookie)) {
            kernel::set_close_on_exec(fd, !socket.is_back.load(Ordering::Relaxed));
        }
    }
}
