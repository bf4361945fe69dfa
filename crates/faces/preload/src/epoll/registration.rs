//! This library's registrations in the program's instances.

use crate::system::errno::{Errno, Kept};
use crate::system::real;
use libc::{c_int, epoll_event};

/// The number of bits in the data of this library's registrations that hold the descriptor.
const FD_BITS: u32 = 21;
/// The descriptor bits in the registration of a doorbell. No socket in the table has a descriptor with this number.
pub const RUNG: u64 = (1 << FD_BITS) - 1;

/// Replaces the program's events and data in the kernel's registration by this library's. The kernel reports an event at once,
/// because the socket is writable, so a thread that sleeps in the instance looks at the rings.
pub fn register(epoll: c_int, fd: c_int) {
    let _errno = Kept::new();
    let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
    let mut event = epoll_event { events: events as u32, u64: cookie() | fd as u64 };
    #[expect(unsafe_code, reason = "a call of the kernel")]
    // SAFETY: `event` is one event, valid for the call.
    let mut set = |operation| unsafe { real::epoll_ctl(epoll, operation, fd, &raw mut event) };
    if set(libc::EPOLL_CTL_MOD) != 0 && Errno::last() == Errno(libc::EINVAL) {
        // A registration that was added with EPOLLEXCLUSIVE cannot be modified.
        set(libc::EPOLL_CTL_DEL);
        set(libc::EPOLL_CTL_ADD);
    }
}

/// Creates [`cookie`]. Runs when the library is loaded.
pub fn load() {
    cookie();
}

/// Returns the bits that tell this library's registrations from the program's: a random number that no program uses.
pub fn cookie() -> u64 {
    static COOKIE: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *COOKIE.get_or_init(|| {
        let mut bytes = [0u8; 8];
        #[expect(unsafe_code, reason = "getrandom")]
        // SAFETY: `bytes` has room for that many bytes.
        let _ = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
        (u64::from_ne_bytes(bytes) | 1 << 63) >> FD_BITS << FD_BITS
    })
}

/// Returns the descriptor of one of this library's registrations, or `None` if the registration is the program's.
pub fn descriptor(data: u64) -> Option<c_int> {
    (data >> FD_BITS == cookie() >> FD_BITS).then_some((data & ((1 << FD_BITS) - 1)) as c_int)
}
