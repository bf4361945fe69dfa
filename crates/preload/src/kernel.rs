//! What this library asks of the kernel's socket, past the program.
#![allow(unsafe_code)] // Calls with descriptors of the program.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use ginnel_tcp::Connecting;
use libc::c_int;

use crate::confined::is_confined;
use crate::direction::Carrier;
use crate::errno::{Errno, Kept, check};
use crate::real;
use crate::socket::{End, Socket};
use crate::table::{SOCKETS, Using, number};

/// The program's descriptor, for the time of a call about it.
pub fn borrow(fd: c_int) -> BorrowedFd<'static> {
    // SAFETY: not -1; whether it is open, and still the same, is for the kernel to say: a program may close it at any time.
    unsafe { BorrowedFd::borrow_raw(fd.max(0)) }
}

/// Wakes a peer that sleeps: a byte that means nothing. If there is no room for it, others are on their way. Only in a direction that a
/// ring carries; else the peer looks by itself now and then.
#[cold]
pub fn wake(socket: &'static Socket, fd: c_int) {
    let _errno = Kept::new();
    socket.sending.wake(|| {
        Using::begin(socket, fd)
            .is_some_and(|_using| send(fd, &[0], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) == 1)
    });
}

/// Sends bytes of the program, or of the library.
pub fn send(fd: c_int, bytes: &[u8], flags: c_int) -> isize {
    if is_confined() && flags & !(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) == 0 {
        if flags & libc::MSG_DONTWAIT != 0 && poll_now(fd, libc::POLLOUT) == 0 {
            Errno(libc::EAGAIN).set();
            return -1;
        }
        // SAFETY: as many bytes to read.
        return unsafe { real::write(fd, bytes.as_ptr().cast(), bytes.len()) };
    }
    // SAFETY: as many bytes to read.
    unsafe { real::sendto(fd, bytes.as_ptr().cast(), bytes.len(), flags, std::ptr::null(), 0) }
}

/// Sends as many of these bytes as the kernel takes. It is given some time to take all of them if `waits`.
pub fn send_some(fd: c_int, bytes: &[u8], waits: bool) -> usize {
    /// How often room is waited for, and how long each time, in milliseconds.
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
                // SAFETY: one pollfd.
                unsafe { real::poll(&raw mut poll, 1, WAITS.1) };
            }
            Err(_) => break,
        }
    }
    sent
}

/// Ends the kernel's stream.
pub fn send_no_more(fd: c_int) {
    let _errno = Kept::new();
    // SAFETY: it takes numbers.
    unsafe { real::shutdown(fd, libc::SHUT_WR) };
}

/// Receives bytes of the program, or of the library.
pub fn receive(fd: c_int, into: &mut [u8], flags: c_int) -> isize {
    if is_confined() && flags & !libc::MSG_DONTWAIT == 0 {
        if flags & libc::MSG_DONTWAIT != 0 && poll_now(fd, libc::POLLIN) == 0 {
            Errno(libc::EAGAIN).set();
            return -1;
        }
        // SAFETY: room for as many bytes.
        return unsafe { real::read(fd, into.as_mut_ptr().cast(), into.len()) };
    }
    let (none, len) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: room for as many bytes.
    unsafe { real::recvfrom(fd, into.as_mut_ptr().cast(), into.len(), flags, none, len) }
}

/// A socket option of TCP that is on or off.
pub fn tcp_flag(fd: c_int, name: c_int) -> bool {
    let _errno = Kept::new();
    let (mut value, mut len) = (0 as c_int, size_of::<c_int>() as libc::socklen_t);
    // SAFETY: room for an int, and its length.
    let result =
        unsafe { real::getsockopt(fd, libc::IPPROTO_TCP, name, (&raw mut value).cast(), &raw mut len) };
    result == 0 && value != 0
}

/// Sets it.
pub fn set_tcp_flag(fd: c_int, name: c_int, on: bool) {
    let _errno = Kept::new();
    let value = c_int::from(on);
    let len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: an int, and its length.
    unsafe { real::setsockopt(fd, libc::IPPROTO_TCP, name, (&raw const value).cast(), len) };
}

/// Notes if the connection has ended, and leaves wake bytes to whoever sleeps for them.
pub fn look_for_end(socket: &'static Socket, fd: c_int) {
    let Some(_using) = Using::begin(socket, fd) else { return };
    let ready = poll_now(fd, libc::POLLRDHUP);
    if ready & (libc::POLLERR | libc::POLLHUP) != 0 {
        // Who receives from the kernel is told by the kernel, which says it once.
        if !matches!(socket.receiving.carrier(), Carrier::Ring | Carrier::Returning) {
            return socket.set_end(End::Reset);
        }
        // One thread asks at a time, so that none finds nothing before another has said what it has found.
        let facts = socket.facts.lock();
        if socket.end() < End::Reset {
            socket.set_error(error(fd));
        }
        drop(facts);
    } else if ready & libc::POLLRDHUP != 0 {
        socket.set_end(End::Fin);
    }
}

/// The error that the kernel has to tell of a socket, if it has not done so.
fn error(fd: c_int) -> Errno {
    if is_confined() {
        return Errno(0);
    }
    let _errno = Kept::new();
    let (mut value, mut len) = (0 as c_int, size_of::<c_int>() as libc::socklen_t);
    // SAFETY: room for an int, and its length.
    unsafe { real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut value).cast(), &raw mut len) };
    Errno(value)
}

/// Milliseconds in which the end of a dead peer's connection arrives, even if TCP has to send it a second time.
const LATE: c_int = 300;

/// Until when none is waited for, in milliseconds of CLOCK_MONOTONIC.
static IN_VAIN_UNTIL: AtomicU64 = AtomicU64::new(0);

fn now() -> u64 {
    Connecting::now().as_millis() as u64
}

/// The same for a connection whose peer is dead. Its end may be under way, so it is waited for. When one has not come, the next ones
/// of this process are not waited for: a VM that is gone has left all of its connections at once.
pub fn wait_for_end(socket: &'static Socket, fd: c_int) {
    let _errno = Kept::new();
    let begun = now();
    let end = if begun < IN_VAIN_UNTIL.load(Ordering::Relaxed) { begun } else { begun + LATE as u64 };
    loop {
        let left = end.saturating_sub(now()) as c_int;
        let mut poll = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one pollfd.
        let ready = unsafe { real::poll(&raw mut poll, 1, left) };
        if ready >= 0 || left == 0 {
            break;
        }
    }
    look_for_end(socket, fd);
    if socket.end() == End::None {
        IN_VAIN_UNTIL.store(now() + LATE as u64, Ordering::Relaxed);
    }
}

/// [`Socket::dead_since`] of a connection whose end is not waited for any more.
const DECIDED: u64 = 1;

/// The same for a call that does not wait: whether the end of a connection whose peer is dead may come still.
pub fn may_end_still(socket: &'static Socket, fd: c_int) -> bool {
    let since = socket.dead_since.load(Ordering::Relaxed);
    if since == DECIDED || socket.end() != End::None {
        return false;
    }
    look_for_end(socket, fd);
    if socket.end() != End::None {
        return false;
    }
    let now = now();
    let is_decided = match since {
        0 => now < IN_VAIN_UNTIL.load(Ordering::Relaxed),
        since => now >= since + LATE as u64,
    };
    if is_decided {
        IN_VAIN_UNTIL.store(now + LATE as u64, Ordering::Relaxed);
    }
    if since == 0 || is_decided {
        socket.dead_since.store(if is_decided { DECIDED } else { now }, Ordering::Relaxed);
    }
    !is_decided
}

/// Whether that was so when it was last asked: nobody says when it is not any more.
pub fn is_undecided(socket: &Socket) -> bool {
    socket.dead_since.load(Ordering::Relaxed) > DECIDED && socket.end() == End::None
}

/// Takes what there is, and notes if the connection has ended. Returns how many bytes there were.
pub fn take(socket: &'static Socket, fd: c_int, into: &mut [u8]) -> usize {
    Using::begin(socket, fd).map_or(0, |_using| take_last(socket, fd, into))
}

/// The same for the thread that closes the socket.
pub fn take_last(socket: &'static Socket, fd: c_int, into: &mut [u8]) -> usize {
    let _errno = Kept::new();
    match check(receive(fd, into, libc::MSG_DONTWAIT)) {
        Ok(0) => socket.set_end(End::Fin),
        Ok(n) => return n,
        Err(Errno(libc::EAGAIN | libc::EINTR)) => {}
        Err(errno) => socket.set_error(errno),
    }
    0
}

/// Programs that are executed do not get this descriptor.
pub fn close_on_exec(fd: c_int) {
    set_close_on_exec(fd, true);
}

/// Whether programs that are executed get this descriptor.
pub fn set_close_on_exec(fd: c_int, closes: bool) {
    let _errno = Kept::new();
    let flags = if closes { libc::FD_CLOEXEC } else { 0 };
    // SAFETY: F_SETFD takes an int.
    unsafe { real::fcntl(fd, libc::F_SETFD, flags as usize as *mut std::ffi::c_void) };
}

/// Whether a descriptor is open.
pub fn is_open(fd: c_int) -> bool {
    let _errno = Kept::new();
    // SAFETY: it takes numbers.
    unsafe { real::fcntl(fd, libc::F_GETFD, std::ptr::null_mut()) >= 0 }
}

/// Whether a descriptor is open, and programs that are executed get it.
pub fn is_left_on_exec(fd: c_int) -> bool {
    let _errno = Kept::new();
    // SAFETY: it takes numbers.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFD, std::ptr::null_mut()) };
    flags >= 0 && flags & libc::FD_CLOEXEC == 0
}

/// Whether O_NONBLOCK is set.
pub fn is_nonblocking(fd: c_int) -> bool {
    let _errno = Kept::new();
    // SAFETY: F_GETFL has no argument.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFL, std::ptr::null_mut()) };
    flags != -1 && flags & libc::O_NONBLOCK != 0
}

/// Whether O_ASYNC is set.
pub fn sends_signals(fd: c_int) -> bool {
    let _errno = Kept::new();
    // SAFETY: F_GETFL has no argument.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFL, std::ptr::null_mut()) };
    flags != -1 && flags & libc::O_ASYNC != 0
}

/// Sleeps until the kernel's socket has bytes, has ended, or the socket's own timeout for receiving has passed; as `recv` does,
/// with its rules for signals and cancellation. If it `takes`, the first byte is taken away, and returned.
pub fn sleep_as_recv(socket: &'static Socket, fd: c_int, takes: bool) -> Result<Option<u8>, Errno> {
    if is_confined() && !takes {
        return poll_readable(fd, -1).map(|_| {
            look_for_end(socket, fd);
            None
        });
    }
    // Not more than one byte, or SO_RCVLOWAT could make it wait for more of them.
    let mut byte = [0];
    let got = check(receive(fd, &mut byte, if takes { 0 } else { libc::MSG_PEEK }));
    if !SOCKETS.is(fd, socket) {
        // It has slept at another file, to which another thread has given the number, and has taken nothing there; or at the connection, which
        // has no number any more, or another one.
        return match got {
            Err(errno @ Errno(libc::EINTR)) => Err(errno),
            _ => number(socket, fd).map(|_| None),
        };
    }
    match got {
        Ok(0) => {
            socket.set_end(End::Fin);
            Ok(None)
        }
        Ok(_) => Ok(takes.then_some(byte[0])),
        Err(errno @ Errno(libc::EAGAIN | libc::EINTR | libc::EBADF)) => Err(errno),
        Err(errno) => {
            socket.set_error(errno);
            Ok(None)
        }
    }
}

/// Whether the kernel closes a descriptor when the program executes another one.
pub fn closes_on_exec(fd: c_int) -> bool {
    // SAFETY: it takes numbers.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFD, std::ptr::null_mut()) };
    flags >= 0 && flags & libc::FD_CLOEXEC != 0
}

/// The kernel's number for a socket, which no other one ever has.
pub fn cookie(fd: c_int) -> Option<u64> {
    let _errno = Kept::new();
    let (mut value, mut len) = (0_u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: room for a word, and its length.
    let result = unsafe {
        real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, (&raw mut value).cast(), &raw mut len)
    };
    (result == 0).then_some(value)
}

/// Waits for bytes or an end for at most so many milliseconds; for ever, if negative.
pub fn poll_readable(fd: c_int, milliseconds: c_int) -> Result<bool, Errno> {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN | libc::POLLRDHUP, revents: 0 };
    // SAFETY: one pollfd.
    let ready = unsafe { real::poll(&raw mut poll, 1, milliseconds) };
    check(ready as isize).map(|n| n > 0)
}

/// Waits for room or an end for at most so many milliseconds; for ever, if negative.
pub fn poll_writable(fd: c_int, milliseconds: c_int) -> Result<(), Errno> {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one pollfd.
    let ready = unsafe { real::poll(&raw mut poll, 1, milliseconds) };
    check(ready as isize).map(drop)
}

/// How often this thread has been taken off its CPU because others wanted it, or to sleep.
pub fn switches() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: room for what the kernel says; zeros are valid if it says nothing.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_nvcsw + usage.ru_nivcsw
}

/// Bytes of what was sent that the peer's kernel has not acknowledged.
pub fn unacknowledged(fd: c_int) -> usize {
    let _errno = Kept::new();
    let mut bytes: c_int = 0;
    // SAFETY: room for an int.
    let result = unsafe { real::ioctl(fd, libc::TIOCOUTQ, (&raw mut bytes).cast()) };
    if result == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// The kernel's clock as of its last tick, every few milliseconds: in nanoseconds. Costs less than the time of day.
pub fn tick() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: room for a time.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// What the kernel says of a socket at this moment.
pub fn poll_now(fd: c_int, events: i16) -> i16 {
    let _errno = Kept::new();
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one pollfd.
    let ready = unsafe { real::poll(&raw mut poll, 1, 0) };
    if ready > 0 { poll.revents } else { 0 }
}

/// A socket option that is a `struct timeval`; `None` means for ever. A program that has confined itself may not be asked.
pub fn timeout(fd: c_int, name: c_int) -> Option<std::time::Duration> {
    if is_confined() {
        return None;
    }
    let _errno = Kept::new();
    let mut value = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut len = size_of::<libc::timeval>() as libc::socklen_t;
    // SAFETY: room for a timeval, and its length.
    let result =
        unsafe { real::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) };
    if result != 0 || (value.tv_sec == 0 && value.tv_usec == 0) {
        return None;
    }
    Some(std::time::Duration::new(value.tv_sec.unsigned_abs(), value.tv_usec.unsigned_abs() as u32 * 1000))
}

/// Whether a close has to abort: SO_LINGER with a time of zero.
pub fn lingers_not(fd: c_int) -> bool {
    let _errno = Kept::new();
    let mut value = libc::linger { l_onoff: 0, l_linger: 0 };
    let mut len = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: room for a linger, and its length.
    let result = unsafe {
        real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, (&raw mut value).cast(), &raw mut len)
    };
    result == 0 && value.l_onoff != 0 && value.l_linger == 0
}

/// A close aborts.
pub fn linger_not(fd: c_int) {
    let _errno = Kept::new();
    let value = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: a linger, and its length.
    unsafe { real::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, (&raw const value).cast(), len) };
}

/// Whether a socket that was made elsewhere is one of TCP.
pub fn is_tcp(fd: c_int) -> bool {
    let _errno = Kept::new();
    let option = |name| {
        let (mut value, mut len) = (0 as c_int, size_of::<c_int>() as libc::socklen_t);
        // SAFETY: room for an int, and its length.
        let result =
            unsafe { real::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) };
        if result == 0 { value } else { -1 }
    };
    matches!(option(libc::SO_DOMAIN), libc::AF_INET | libc::AF_INET6)
        && option(libc::SO_TYPE) == libc::SOCK_STREAM
        && option(libc::SO_PROTOCOL) == libc::IPPROTO_TCP
}
