//! How much of the kernel's stream has been taken, where several processes share a connection.
//!
//! Each process counts what it takes. One that is killed between its call and its count has taken bytes of which no other process knows:
//! the others would take as many bytes of the program for wake bytes, or the other way round. It was killed under the lock of the receiving
//! direction, so the next process that takes the lock knows of it. While that process holds the lock, nobody else takes bytes, and the
//! kernel can be asked how many have been taken. (A thread that sleeps in a call which takes a byte holds no lock. There are no relatives
//! then, unless a signal handler has made one; see `returning::Taker`.)

use crate::process::ids;
use crate::state::carrier::Carrier;
use crate::state::rings::Rings;
use crate::state::socket::Socket;
use crate::system::confined::is_confined;
use crate::system::kernel;
use ginnel::SocketReceiver;
use ginnel_ring::carrier;
use libc::c_int;
use std::sync::atomic::Ordering;

/// Counts what a killed relative has taken without counting it. Returns false if that was the program's, so that nobody can go on. The
/// caller holds the lock of the receiving direction.
#[inline]
pub fn catch_up(socket: &Socket, fd: c_int, rings: &Rings<SocketReceiver>) -> bool {
    match socket.receiving.common() {
        Some(common) if common.is_in_doubt() => count(socket, fd, rings),
        _ => true,
    }
}

#[cold]
fn count(socket: &Socket, fd: c_int, rings: &Rings<SocketReceiver>) -> bool {
    let end = match socket.receiving.carrier() {
        // Others may take bytes without the lock, and the count is compared with the kernel's before it matters.
        Carrier::Kernel | Carrier::Changing => return true,
        // What a killed process has received is lost, as over TCP.
        Carrier::Counted => u64::MAX,
        Carrier::Ring => {
            let wakes_end = |receiver: &SocketReceiver| carrier::wakes_end(receiver.ring.memory());
            rings.all().find_map(wakes_end).unwrap_or(u64::MAX)
        }
        Carrier::Returning => socket.resume.load(Ordering::Relaxed),
    };
    is_counted_until(socket, fd, end)
}

/// Does the same, whether a process was killed or not. Nothing before `end` is of use to the program.
pub fn is_counted_until(socket: &Socket, fd: c_int, end: u64) -> bool {
    let Some(common) = socket.receiving.common() else { return true };
    // Such a program cannot ask the kernel. There, the process that was the last to receive has counted.
    if is_confined() {
        return [0, ids::process()].contains(&common.user());
    }
    let counted = socket.receiving.kernels();
    let Some(taken) = taken(fd, counted) else { return true };
    let is_right = match taken.checked_sub(counted) {
        Some(0) => true,
        Some(uncounted) if taken <= end => {
            socket.receiving.count_others(uncounted);
            true
        }
        _ => false,
    };
    if is_right {
        common.is_certain();
    }
    is_right
}

/// Returns whether more has been taken than was counted. The caller holds the lock of the receiving direction.
pub fn is_more_than_counted(socket: &Socket, fd: c_int) -> bool {
    let counted = socket.receiving.kernels();
    taken(fd, counted).is_none_or(|taken| taken > counted)
}

/// Returns how many bytes have been taken, where `counted` of them have been counted; `None` if the kernel does not say.
fn taken(fd: c_int, counted: u64) -> Option<u64> {
    loop {
        let has_end = kernel::has_received_end(fd);
        let bytes = ginnel_tcp::bytes_read(kernel::borrow(fd)).ok()?;
        // A FIN may come in between.
        if kernel::has_received_end(fd) == has_end {
            // The kernel counts a FIN as a byte. Once it has forgotten the connection, it does not say whether there was one.
            let fin = has_end.unwrap_or(bytes == counted + 1);
            return Some(bytes.saturating_sub(u64::from(fin)));
        }
    }
}
