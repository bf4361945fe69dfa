//! Connections that are standard input, output or error.
//!
//! The C library's own streams use these descriptors, and each program that the C library executes (`system`, `popen`) gets them.
//! So a connection stays on TCP for as long as it has one of them, and one that has changed over returns to TCP before it gets one.
//! If its peer does not take part at once, it goes on with its rings until the peer does. Streams use this library's functions
//! meanwhile, where that is possible (`exports::streams`); where not, the descriptor is not made.

use crate::carrying::passing;
use crate::state::known::Fact;
use crate::state::reasons::STANDARD;
use crate::state::socket::{Socket, Stage};
use crate::system::confined::is_confined;
use libc::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

/// How long a call that makes such a descriptor waits for the peer, in microseconds: if streams can use the rings,
const SHORT: u64 = 100_000;
/// and if they cannot.
const LONG: u64 = 1_000_000;

/// Streams of the C library use this library's functions.
static ARE_FOLLOWED: AtomicBool = AtomicBool::new(false);

/// Notes that streams of the C library use this library's functions.
pub fn follow() {
    ARE_FOLLOWED.store(true, Ordering::Relaxed);
}

fn is_standard(fd: c_int) -> bool {
    (libc::STDIN_FILENO..=libc::STDERR_FILENO).contains(&fd)
}

/// Prepares a socket that has the descriptor `fd` for the descriptor `copy`, or for what it may be used for if it is there already.
/// Returns false if the socket must not have it.
pub fn prepare(socket: &'static Socket, fd: c_int, copy: c_int) -> bool {
    !is_standard(copy) || leave(socket, fd)
}

#[cold]
fn leave(socket: &'static Socket, fd: c_int) -> bool {
    match socket.stage() {
        // Such a socket is not reported while it has the descriptor (`session::attend`).
        Stage::New | Stage::Listening | Stage::Native => socket.cache.leave(),
        _ => crate::daemon::session::stays(socket, STANDARD),
    }
    // A program that has confined itself continues with what it has.
    if !socket.is_joined() || socket.is_back.load(Ordering::Relaxed) || is_confined() {
        return true;
    }
    let are_followed = ARE_FOLLOWED.load(Ordering::Relaxed);
    let patience = match are_followed {
        // The peer has been asked before.
        true if socket.has(Fact::Passed) => 0,
        true => SHORT,
        false => LONG,
    };
    if passing::return_within(patience, &[(socket, fd)], STANDARD) {
        return true;
    }
    socket.attention.store(true, Ordering::SeqCst);
    are_followed
}
