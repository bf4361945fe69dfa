//! System calls that this library makes on the kernel's socket without the program's knowledge.
#![allow(unsafe_code)] // System calls on descriptors of the program.

use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, check};
use crate::system::{cancel, errno, real};
use libc::c_int;
use smallvec::SmallVec;
use std::os::fd::BorrowedFd;

/// Returns the program's descriptor as a borrowed one, for the duration of a call about it.
pub fn borrow(fd: c_int) -> BorrowedFd<'static> {
    // SAFETY: the number is not -1. Whether it is open, and still the same file, is for the kernel to say: a program may close it
    // at any time.
    unsafe { BorrowedFd::borrow_raw(fd.max(0)) }
}

/// Sends bytes of the program, or of the library.
pub fn send(fd: c_int, bytes: &[u8], flags: c_int) -> isize {
    if is_confined() && flags & !(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) == 0 {
        if flags & libc::MSG_DONTWAIT != 0 && poll_now(fd, libc::POLLOUT) == 0 {
            Errno(libc::EAGAIN).set();
            return -1;
        }
        return cancel::write(fd, bytes);
    }
    if flags & libc::MSG_DONTWAIT != 0 {
        return cancel::send(fd, bytes, flags);
    }
    // SAFETY: `bytes` has that many bytes to read.
    unsafe { real::sendto(fd, bytes.as_ptr().cast(), bytes.len(), flags, std::ptr::null(), 0) }
}

/// Sends as many of these bytes as the kernel takes, and returns their number. With `waits`, waits a limited time for room for all
/// of them.
pub fn send_some(fd: c_int, bytes: &[u8], waits: bool) -> usize {
    /// The number of waits for room, and the length of each in milliseconds.
    const WAITS: (u32, c_int) = (10, 10);
    let _errno = Kept::new();
    let (mut sent, mut waited) = (0, 0);
    while sent < bytes.len() {
        match check(send(fd, &bytes[sent..], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)) {
            Ok(n) => sent += n,
            Err(Errno(libc::EINTR)) => {}
            Err(Errno(libc::EAGAIN)) if waits && waited < WAITS.0 => {
                waited += 1;
                let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
                // SAFETY: `poll` is one pollfd, and the count is 1.
                unsafe { real::poll(&raw mut poll, 1, WAITS.1) };
            }
            Err(_) => break,
        }
    }
    sent
}

/// Ends the kernel's stream in the sending direction.
pub fn send_no_more(fd: c_int) {
    let _errno = Kept::new();
    // SAFETY: the call takes numbers only.
    unsafe { real::shutdown(fd, libc::SHUT_WR) };
}

/// Ends the kernel's stream in both directions.
pub fn shut_down(fd: c_int) {
    let _errno = Kept::new();
    // SAFETY: the call takes numbers only.
    unsafe { real::shutdown(fd, libc::SHUT_RDWR) };
}

/// Receives bytes of the program, or of the library.
pub fn receive(fd: c_int, into: &mut [u8], flags: c_int) -> isize {
    if is_confined() && flags & !libc::MSG_DONTWAIT == 0 {
        if flags & libc::MSG_DONTWAIT != 0 && poll_now(fd, libc::POLLIN) == 0 {
            Errno(libc::EAGAIN).set();
            return -1;
        }
        if flags & libc::MSG_DONTWAIT != 0 {
            return cancel::read(fd, into);
        }
        // SAFETY: `into` has room for that many bytes.
        return unsafe { real::read(fd, into.as_mut_ptr().cast(), into.len()) };
    }
    if flags & libc::MSG_DONTWAIT != 0 {
        return cancel::receive(fd, into, flags);
    }
    let (none, len) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: `into` has room for that many bytes.
    unsafe { real::recvfrom(fd, into.as_mut_ptr().cast(), into.len(), flags, none, len) }
}

/// Returns the value of a TCP socket option that is on or off.
pub fn tcp_flag(fd: c_int, name: c_int) -> bool {
    let _errno = Kept::new();
    let (mut value, mut len) = (0 as c_int, size_of::<c_int>() as libc::socklen_t);
    // SAFETY: `value` has room for an int, and `len` is its length.
    let result =
        unsafe { real::getsockopt(fd, libc::IPPROTO_TCP, name, (&raw mut value).cast(), &raw mut len) };
    result == 0 && value != 0
}

/// Sets a TCP socket option that is on or off.
pub fn set_tcp_flag(fd: c_int, name: c_int, on: bool) {
    let _errno = Kept::new();
    let value = c_int::from(on);
    let len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: `value` is an int, and `len` is its length.
    unsafe { real::setsockopt(fd, libc::IPPROTO_TCP, name, (&raw const value).cast(), len) };
}

/// Marks a descriptor so that `exec` closes it.
pub fn close_on_exec(fd: c_int) {
    set_close_on_exec(fd, true);
}

/// Sets whether `exec` closes a descriptor.
pub fn set_close_on_exec(fd: c_int, closes: bool) {
    let _errno = Kept::new();
    let flags = if closes { libc::FD_CLOEXEC } else { 0 };
    // SAFETY: F_SETFD takes an int.
    unsafe { real::fcntl(fd, libc::F_SETFD, flags as usize as *mut std::ffi::c_void) };
}

/// Returns whether a descriptor is open.
pub fn is_open(fd: c_int) -> bool {
    let _errno = Kept::new();
    // SAFETY: the call takes numbers only.
    unsafe { real::fcntl(fd, libc::F_GETFD, std::ptr::null_mut()) >= 0 }
}

/// Returns whether a descriptor is open, and stays open over `exec`.
pub fn is_left_on_exec(fd: c_int) -> bool {
    let _errno = Kept::new();
    // SAFETY: the call takes numbers only.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFD, std::ptr::null_mut()) };
    flags >= 0 && flags & libc::FD_CLOEXEC == 0
}

/// Returns whether O_NONBLOCK is set.
pub fn is_nonblocking(fd: c_int) -> bool {
    let _errno = Kept::new();
    // SAFETY: F_GETFL has no argument.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFL, std::ptr::null_mut()) };
    flags != -1 && flags & libc::O_NONBLOCK != 0
}

/// Returns whether O_ASYNC is set.
pub fn sends_signals(fd: c_int) -> bool {
    let _errno = Kept::new();
    // SAFETY: F_GETFL has no argument.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFL, std::ptr::null_mut()) };
    flags != -1 && flags & libc::O_ASYNC != 0
}

/// Returns whether the kernel closes a descriptor when the program executes another one.
pub fn closes_on_exec(fd: c_int) -> bool {
    let _errno = Kept::new();
    // SAFETY: the call takes numbers only.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFD, std::ptr::null_mut()) };
    flags >= 0 && flags & libc::FD_CLOEXEC != 0
}

/// Returns the kernel's cookie of a socket (SO_COOKIE). No other socket ever has the same.
pub fn cookie(fd: c_int) -> Option<u64> {
    let _errno = Kept::new();
    let (mut value, mut len) = (0_u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: `value` has room for a `u64`, and `len` is its length.
    let result = unsafe {
        real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, (&raw mut value).cast(), &raw mut len)
    };
    (result == 0).then_some(value)
}

/// What the kernel's socket reports for bytes and for the end.
pub const READABLE: libc::c_short = libc::POLLIN | libc::POLLRDHUP;

/// Waits for bytes or an end, for at most the given number of milliseconds, or without limit if it is negative. Returns whether
/// there are any.
pub fn poll_readable(fd: c_int, milliseconds: c_int) -> Result<bool, Errno> {
    let _errno = Kept::new();
    let mut poll = libc::pollfd { fd, events: READABLE, revents: 0 };
    // SAFETY: `poll` is one pollfd, and the count is 1.
    let ready = unsafe { real::poll(&raw mut poll, 1, milliseconds) };
    check(ready as isize).map(|n| n > 0)
}

/// Waits for room or an end, for at most the given number of milliseconds, or without limit if it is negative.
pub fn poll_writable(fd: c_int, milliseconds: c_int) -> Result<(), Errno> {
    let _errno = Kept::new();
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: `poll` is one pollfd, and the count is 1.
    let ready = unsafe { real::poll(&raw mut poll, 1, milliseconds) };
    check(ready as isize).map(drop)
}

/// Returns how often this thread has left its CPU, because other threads wanted it or because this thread slept.
pub fn switches() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: there is room for the kernel's answer; zeros are valid if the kernel does not answer.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_nvcsw + usage.ru_nivcsw
}

/// Returns SO_RCVLOWAT.
pub fn lowat(fd: c_int) -> u32 {
    let _errno = Kept::new();
    let (mut value, mut len) = (1 as c_int, size_of::<c_int>() as libc::socklen_t);
    // SAFETY: `value` has room for an int, and `len` is its length.
    unsafe {
        real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, (&raw mut value).cast(), &raw mut len)
    };
    u32::try_from(value).unwrap_or(1)
}

/// Sets SO_RCVLOWAT.
pub fn set_lowat(fd: c_int, bytes: u32) {
    let _errno = Kept::new();
    let value = bytes as c_int;
    let len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: `value` is an int, and `len` is its length.
    unsafe { real::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, (&raw const value).cast(), len) };
}

/// The most bytes that [`peek_behind`] can skip.
const MOST_BEFORE: usize = 63 << 10;

/// Shows what the kernel's socket has received, without waiting, and leaves it there. The pieces are filled with what comes behind
/// `skipped` bytes, unless `counts`. Returns how many bytes that is; 0 if there are none, or too many come before them.
pub fn peek_behind(fd: c_int, skipped: usize, into: &mut [&mut [u8]], counts: bool) -> Result<usize, Errno> {
    let _errno = Kept::new();
    let (mut unused, mut left) = ([0_u8; 1024], skipped);
    if skipped > MOST_BEFORE || into.is_empty() {
        return Ok(0);
    }
    let mut pieces = SmallVec::<[libc::iovec; 96]>::new();
    // All pieces before those of the caller are the same memory.
    while left > 0 {
        let len = left.min(unused.len());
        pieces.push(libc::iovec { iov_base: unused.as_mut_ptr().cast(), iov_len: len });
        left -= len;
    }
    pieces.extend(
        into.iter_mut()
            .take(libc::UIO_MAXIOV as usize - pieces.len())
            .map(|piece| libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() }),
    );
    let flags = libc::MSG_PEEK | if counts { libc::MSG_TRUNC } else { 0 };
    // SAFETY: zeros are a valid message, and each piece has room for as many bytes as it says.
    let got = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (pieces.as_mut_ptr(), pieces.len() as _);
        cancel::receive_message(fd, &mut message, flags)
    };
    check(got).map(|got| got.saturating_sub(skipped))
}

/// Returns how many descriptors the program may have (RLIMIT_NOFILE), or 0 if the kernel does not say.
pub fn most_descriptors() -> usize {
    if is_confined() {
        return 0;
    }
    let _errno = Kept::new();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: there is room for the limit.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    if result == 0 { usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX) } else { 0 }
}

/// Returns how many sent bytes the peer's kernel has not acknowledged.
pub fn unacknowledged(fd: c_int) -> usize {
    queue(fd, libc::TIOCOUTQ)
}

/// Returns how many bytes the kernel has received that nobody has taken.
pub fn unread(fd: c_int) -> usize {
    queue(fd, libc::FIONREAD)
}

fn queue(fd: c_int, request: libc::c_ulong) -> usize {
    let _errno = Kept::new();
    let mut bytes: c_int = 0;
    // SAFETY: `bytes` has room for an int.
    let result = unsafe { real::ioctl(fd, request, (&raw mut bytes).cast()) };
    if result == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// Returns the state of a TCP connection, which is the first byte of TCP_INFO.
pub fn tcp_state(fd: c_int) -> Option<u8> {
    let _errno = Kept::new();
    let (mut state, mut len) = (0_u8, size_of::<u8>() as libc::socklen_t);
    // SAFETY: `state` has room for the first byte of a `tcp_info`, which is the state, and `len` is its length.
    let result = unsafe {
        real::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut state).cast(), &raw mut len)
    };
    (result == 0).then_some(state)
}

/// Returns whether the kernel has ended what this side sends.
pub fn has_sent_end(fd: c_int) -> bool {
    // TCP_FIN_WAIT1, TCP_FIN_WAIT2, TCP_TIME_WAIT, TCP_CLOSE, TCP_LAST_ACK and TCP_CLOSING.
    tcp_state(fd).is_some_and(|state| matches!(state, 4..=7 | 9 | 11))
}

/// Returns whether a TCP connection has got the peer's FIN; `None` if the kernel has forgotten that.
pub fn has_received_end(fd: c_int) -> Option<bool> {
    match tcp_state(fd)? {
        // TCP_TIME_WAIT, TCP_CLOSE_WAIT, TCP_LAST_ACK and TCP_CLOSING.
        6 | 8 | 9 | 11 => Some(true),
        // TCP_CLOSE.
        7 => None,
        _ => Some(false),
    }
}

/// Returns the events that the kernel reports for a socket at this moment.
pub fn poll_now(fd: c_int, events: i16) -> i16 {
    let _errno = Kept::new();
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    if cancel::poll(&mut poll) > 0 { poll.revents } else { 0 }
}

/// Does the same for several descriptors. Returns how many have events.
pub fn poll_all_now(fds: &mut [libc::pollfd]) -> errno::Result<usize> {
    // SAFETY: `fds` has as many entries as the call says.
    check(unsafe { real::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, 0) } as isize)
}

/// Returns a socket option that is a `struct timeval`; `None` means that there is no limit. Does not ask the kernel if the program
/// has confined itself.
pub fn timeout(fd: c_int, name: c_int) -> Option<std::time::Duration> {
    if is_confined() {
        return None;
    }
    let _errno = Kept::new();
    let mut value = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut len = size_of::<libc::timeval>() as libc::socklen_t;
    // SAFETY: `value` has room for a timeval, and `len` is its length.
    let result =
        unsafe { real::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) };
    if result != 0 || (value.tv_sec == 0 && value.tv_usec == 0) {
        return None;
    }
    Some(std::time::Duration::new(value.tv_sec.unsigned_abs(), value.tv_usec.unsigned_abs() as u32 * 1000))
}

/// Returns whether a close has to abort the connection: SO_LINGER is set with a time of zero.
pub fn lingers_not(fd: c_int) -> bool {
    let _errno = Kept::new();
    let mut value = libc::linger { l_onoff: 0, l_linger: 0 };
    let mut len = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: `value` has room for a linger, and `len` is its length.
    let result = unsafe {
        real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, (&raw mut value).cast(), &raw mut len)
    };
    result == 0 && value.l_onoff != 0 && value.l_linger == 0
}

/// Makes a close abort the connection.
pub fn linger_not(fd: c_int) {
    let _errno = Kept::new();
    let value = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: `value` is a linger, and `len` is its length.
    unsafe { real::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, (&raw const value).cast(), len) };
}

/// Returns whether `connect` with this address of the program ends the connection that there is (AF_UNSPEC). The kernel refuses an
/// address that is not there, so this function must not fault.
pub fn names_nobody(address: *const libc::sockaddr, len: libc::socklen_t) -> bool {
    const LEN: usize = size_of::<libc::sa_family_t>();
    if address.is_null() || !(LEN..=size_of::<libc::sockaddr_storage>()).contains(&(len as usize)) {
        return false;
    }
    let _errno = Kept::new();
    if !is_confined() {
        let mut family: libc::sa_family_t = 0;
        let to = libc::iovec { iov_base: (&raw mut family).cast(), iov_len: LEN };
        let from = libc::iovec { iov_base: address.cast_mut().cast(), iov_len: LEN };
        // SAFETY: `family` has room for a family. The call fails if there is none at the address.
        let got = unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
        // Some systems do not allow the call.
        if got >= 0 || Errno::last() == Errno(libc::EFAULT) {
            return got == LEN as isize && c_int::from(family) == libc::AF_UNSPEC;
        }
    }
    // SAFETY: the program says that there is an address of this length.
    unsafe { is_unspecified(address) }
}

/// Returns whether an address has the family AF_UNSPEC.
///
/// # Safety
///
/// A family can be read there.
pub unsafe fn is_unspecified(address: *const libc::sockaddr) -> bool {
    // SAFETY: the caller guarantees it.
    let family = unsafe { address.cast::<libc::sa_family_t>().read_unaligned() };
    c_int::from(family) == libc::AF_UNSPEC
}

/// Returns whether a socket that was created elsewhere is a TCP socket.
pub fn is_tcp(fd: c_int) -> bool {
    let _errno = Kept::new();
    let option = |name| {
        let (mut value, mut len) = (0 as c_int, size_of::<c_int>() as libc::socklen_t);
        // SAFETY: `value` has room for an int, and `len` is its length.
        let result =
            unsafe { real::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) };
        if result == 0 { value } else { -1 }
    };
    matches!(option(libc::SO_DOMAIN), libc::AF_INET | libc::AF_INET6)
        && option(libc::SO_TYPE) == libc::SOCK_STREAM
        && option(libc::SO_PROTOCOL) == libc::IPPROTO_TCP
}
