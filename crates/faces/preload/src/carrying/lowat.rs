//! SO_RCVLOWAT: how many bytes must be there before the program is told of them.
//!
//! While the kernel does not carry the receiving direction alone, the kernel's own value is 1, because a wake byte has to wake. The
//! library keeps the program's value, and does with it what the kernel does: `poll`, `select` and `epoll` report input at so many bytes,
//! at an end, and where no more can come; a call that receives waits for so many, or for as many as it has room for.

use crate::state::carrier::Carrier;
use crate::state::rings::Rings;
use crate::state::socket::Socket;
use crate::system::kernel;
use ginnel::SocketReceiver;
use ginnel_layout::ring::HEADER;
use ginnel_ring::carrier;
use ginnel_shmem::SharedMemory;
use libc::c_int;
use std::sync::atomic::Ordering;

/// Keeps the program's value from now on. The caller holds the receiving direction's lock, and is about to let the library count.
pub fn keep(socket: &Socket, fd: c_int) {
    let bytes = kernel::lowat(fd);
    socket.lowat.0.store(bytes, Ordering::Relaxed);
    if bytes != 1 {
        kernel::set_lowat(fd, 1);
    }
}

/// Gives the program's value back to the kernel, which is about to carry again. The caller holds the receiving direction's lock.
pub fn give_back(socket: &Socket, fd: c_int) {
    let bytes = socket.lowat.0.swap(1, Ordering::Relaxed);
    if bytes != 1 {
        kernel::set_lowat(fd, bytes);
    }
}

/// Returns the program's value if the kernel has another one.
pub fn of_program(socket: &Socket) -> Option<c_int> {
    let is_kept = !matches!(socket.receiving.carrier(), Carrier::Kernel | Carrier::Changing);
    is_kept.then(|| socket.lowat.0.load(Ordering::Relaxed) as c_int)
}

/// Sets the value as the program has asked for it. `native` makes the program's call: the kernel checks the value and limits it.
pub fn set(socket: &'static Socket, fd: c_int, native: impl FnOnce() -> c_int) -> c_int {
    let lock = socket.receiving.lock();
    let result = native();
    if result == 0 && of_program(socket).is_some() {
        keep(socket, fd);
        drop(lock);
        // As in the kernel, a lower value is an event.
        socket.watchers.changed(socket);
    }
    result
}

/// Returns whether as much is there as the program wants to be told of, where the kernel has `kernels` bytes and the ring `there`.
pub fn is_reached(socket: &Socket, rings: &Rings<SocketReceiver>, kernels: usize, there: usize) -> bool {
    kernels + there >= socket.lowat.bytes() || is_all(rings, there)
}

/// Returns whether no more comes before something is received: the ring has no room, or another carrier follows.
fn is_all(rings: &Rings<SocketReceiver>, there: usize) -> bool {
    let Some(receiver) = rings.as_ref() else { return true };
    let memory = receiver.ring.memory();
    let capacity = memory.len() - HEADER;
    // The consumer may not have given back up to one eighth.
    there >= capacity - capacity / 8 || rings.is_ahead() || carrier::given_back(memory).is_some()
}
