//! Which descriptors of connections the programs that this process executes are to inherit.

use crate::state::socket::Socket;
use crate::state::sockets::SOCKETS;
use crate::system::kernel;
use libc::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

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
pub fn is_meant(fd: c_int) -> bool {
    let is_own = || SOCKETS.get(fd).is_some_and(|socket| !crate::state::family::is_shared(socket));
    INHERITED.has(fd) && (CHOSEN.has(fd) || is_own())
}
