//! `socket`, `connect`, `listen`, `accept`, `shutdown` and socket options.

use crate::calls::descriptors;
use crate::carrying::output::Finished;
use crate::carrying::{closing, disconnecting, look, lowat, output, returning, room};
use crate::daemon::session;
use crate::process::settings;
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::{Socket, Stage};
use crate::state::sockets;
use crate::state::sockets::SOCKETS;
use crate::system::errno::{Errno, Kept, Result, tell_int};
use crate::system::memory::{can_write, is_there};
use crate::system::{kernel, real};
use ginnel_tcp::{Connecting, Role};
use libc::{c_int, sockaddr, socklen_t};
use std::ffi::c_void;
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, Ordering};

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: the function takes only numbers.
    let fd = unsafe { real::socket(domain, kind, protocol) };
    if fd >= 0 && settings::is_on() {
        let is_tcp = matches!(domain, libc::AF_INET | libc::AF_INET6)
            && kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == libc::SOCK_STREAM
            && matches!(protocol, 0 | libc::IPPROTO_TCP);
        if is_tcp {
            let socket = descriptors::add_socket(fd);
            socket.set_nonblocking(Some(kind & libc::SOCK_NONBLOCK != 0));
        } else {
            descriptors::forget(fd);
        }
    }
    fd
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::connect(fd, address, len) };
    let Some(call) = SOCKETS.call(fd) else { return native() };
    let socket = call.what();
    let stage = socket.stage();
    let may_have_rings = matches!(stage, Stage::Native | Stage::Reported | Stage::Joined);
    // A connection that has carried nothing has no rings that would have to be marked first. Programs that do not wait for `connect` call
    // it again when it has succeeded, and should not pay for that.
    let has_carried = stage != Stage::Native
        || socket.may_be_shared()
        || socket.sending.kernels() + socket.receiving.kernels() > 0;
    if may_have_rings && has_carried && kernel::names_nobody(address, len) {
        return disconnecting::disconnect(socket, fd, native);
    }
    // The kernel sends the SYN within the call, even if the call does not wait for the answer.
    let before = ginnel_clock::monotonic();
    let result = native();
    let errno = Errno::last();
    // SAFETY: the kernel has just read an address from there, which begins with its family.
    let disconnects = result == 0 && unsafe { kernel::is_unspecified(address) };
    match stage {
        Stage::New if !disconnects => {}
        Stage::Listening if disconnects => {
            socket.set_stage(Stage::New);
            return result;
        }
        Stage::Native if disconnects => {
            disconnecting::disconnect(socket, fd, || 0);
            errno.set();
            return result;
        }
        // The kernel begins another connection if an earlier call could not make one. Otherwise it only says what has become of that.
        Stage::Native | Stage::Reported | Stage::Joined
            if result != 0 && errno == Errno(libc::EINPROGRESS) =>
        {
            disconnecting::disconnect(socket, fd, || 0);
        }
        _ => {
            if disconnects {
                socket.cache.renew();
            }
            errno.set();
            return result;
        }
    }
    if result == 0 || errno == Errno(libc::EINPROGRESS) || errno == Errno(libc::EINTR) {
        socket.connected(Role::Connector, Connecting { before, after: ginnel_clock::monotonic() });
        // SAFETY: the kernel has just read an address from there.
        let found = unsafe { port(address, len) };
        if let Some((port, address)) = found.filter(|_| !sockets::has_standard_stream(socket)) {
            crate::served::begin::connected(socket, port, address);
        }
    }
    errno.set();
    result
}

/// Returns the port of an address, and those bytes of the address that identify the destination.
unsafe fn port<'a>(address: *const sockaddr, len: socklen_t) -> Option<(u16, &'a [u8])> {
    // IPv4 and IPv6 addresses have the port at the same place.
    let len = (len as usize).min(size_of::<libc::sockaddr_in6>());
    if address.is_null() || len < size_of::<libc::sockaddr_in>() {
        return None;
    }
    // SAFETY: the caller guarantees an address of this length.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) };
    let family = c_int::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
    let len = match family {
        // The bytes from `sin_zero` on may have any value.
        libc::AF_INET => offset_of!(libc::sockaddr_in, sin_zero),
        libc::AF_INET6 => len,
        _ => return None,
    };
    Some((u16::from_be_bytes([bytes[2], bytes[3]]), &bytes[..len]))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn listen(fd: c_int, backlog: c_int) -> c_int {
    if let Some(socket) = listener(fd) {
        let _errno = Kept::new();
        // If the kernel does not save the SYN, connections from other kernels and namespaces stay on TCP.
        let _ = ginnel_tcp::save_syn(kernel::borrow(fd));
        socket.set_stage(Stage::Listening);
    }
    // SAFETY: the function takes only numbers.
    unsafe { real::listen(fd, backlog) }
}

/// Returns the entry of a TCP socket that is not connected, even if the socket was made before this library was loaded.
fn listener(fd: c_int) -> Option<&'static Socket> {
    if !settings::is_on() {
        return None;
    }
    match SOCKETS.get(fd) {
        Some(socket) => Some(socket).filter(|socket| matches!(socket.stage(), Stage::New | Stage::Listening)),
        None => kernel::is_tcp(fd).then(|| descriptors::add_socket(fd)),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    let accepted_fd = unsafe { real::accept(fd, address, len) };
    accepted(fd, accepted_fd, 0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    let accepted_fd = unsafe { real::accept4(fd, address, len, flags) };
    accepted(fd, accepted_fd, flags)
}

/// Handles the result of `accept`. It makes no system call for a listener that it knows.
fn accepted(listener: c_int, fd: c_int, flags: c_int) -> c_int {
    if fd < 0 || !settings::is_on() {
        return fd;
    }
    // For a listener that was made before this library was loaded, the kernel is asked once whether it is a TCP socket.
    let is_tcp = match SOCKETS.get(listener) {
        Some(_) => true,
        None => {
            kernel::is_tcp(listener) && {
                descriptors::add_socket(listener).set_stage(Stage::Listening);
                true
            }
        }
    };
    if is_tcp {
        let socket = descriptors::add_socket(fd);
        socket.set_nonblocking(Some(flags & libc::SOCK_NONBLOCK != 0));
        let now = ginnel_clock::monotonic();
        socket.connected(Role::Acceptor, Connecting { before: now, after: now });
        crate::carrying::settle::wait(socket);
    } else {
        descriptors::forget(fd);
    }
    fd
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    // SAFETY: the function takes only numbers.
    let native = |how| unsafe { real::shutdown(fd, how) };
    let Some(call) = SOCKETS.call(fd) else { return native(how) };
    let socket = call.what();
    // There is no connection yet that could stay on TCP, and the kernel refuses the call.
    if !matches!(socket.stage(), Stage::New | Stage::Listening) {
        session::stays(socket, "it was shut down");
    }
    let receives_no_more = matches!(how, libc::SHUT_RD | libc::SHUT_RDWR);
    let sends_no_more = matches!(how, libc::SHUT_WR | libc::SHUT_RDWR);
    if !socket.is_joined() {
        let result = native(how);
        // A relative may have rings already, and has to know this before it begins with them.
        if result == 0 && socket.may_be_shared() {
            if receives_no_more {
                socket.note(Fact::ShutDownReceiving);
            }
            if sends_no_more {
                socket.note(Fact::ShutDownSending);
            }
        }
        return result;
    }
    // Before the call, which wakes threads that sleep in the kernel to receive.
    let before = socket.has(Fact::ShutDownReceiving);
    let now = before || receives_no_more;
    if now {
        socket.note(Fact::ShutDownReceiving);
    }
    let is_both = now && (sends_no_more || room::has_shut_down(socket));
    let finished = if sends_no_more { output::finish(socket, fd) } else { Finished::Nowhere };
    if is_both {
        returning::await_repeated(socket, fd);
        // Bytes that come after the call break the connection. So the ring says it first, where the peer looks when the call wakes it.
        closing::take_no_more(socket);
    }
    let result = match how {
        // The end of the stream is recorded in the ring. The kernel's connection stays open for wake bytes.
        libc::SHUT_WR if finished == Finished::InRing && !is_both => 0,
        libc::SHUT_RD | libc::SHUT_WR if is_both => native(libc::SHUT_RDWR),
        how => native(how),
    };
    // A late wake byte may have broken the kernel's connection, but not the program's.
    let result = if finished == Finished::InRingOfDeaf { 0 } else { result };
    if result != 0 {
        if !before {
            socket.forget(Fact::ShutDownReceiving);
        }
        return result;
    }
    if sends_no_more {
        socket.note(Fact::ShutDownSending);
    }
    // As in the kernel, this is an event.
    socket.watchers.changed(socket);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::setsockopt(fd, level, name, value, len) };
    let Some(call) = SOCKETS.call(fd) else { return native() };
    let socket = call.what();
    if let Some(delay) = delay(socket, level, name)
        && len as usize >= size_of::<c_int>()
        && is_there(value.cast::<c_int>())
    {
        // SAFETY: the program passes `len` bytes.
        delay.store(unsafe { value.cast::<c_int>().read_unaligned() } != 0, Ordering::Relaxed);
        return 0;
    }
    if is_unusual(level, name) {
        session::stays(socket, "a socket option that works on the kernel's bytes");
        if socket.is_joined() {
            Errno(libc::ENOPROTOOPT).set();
            return -1;
        }
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        return lowat::set(socket, fd, native);
    }
    let result = native();
    let noted = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | RCVTIMEO_NEW | SNDTIMEO_NEW) => {
            socket.may_have_timeouts();
            return result;
        }
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => &socket.gives_up,
        (libc::IPPROTO_TCP, libc::TCP_INQ) => &socket.tells_inq,
        _ => return result,
    };
    if result == 0 {
        // SAFETY: the kernel has just read an int from there.
        noted.store(unsafe { value.cast::<c_int>().read_unaligned() } != 0, Ordering::Relaxed);
    }
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    if (level, name) == (libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE)
        && let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.is_joined())
        && socket.receiving.carrier() != Carrier::Kernel
    {
        // SAFETY: the program says that there is a length, and room for that many bytes.
        return tell_int(unsafe { mapped_nothing(socket, fd, value, len) });
    }
    // SAFETY: the program obeys the rules of the function.
    let result = unsafe { real::getsockopt(fd, level, name, value, len) };
    if result == 0
        && let Some(set) = SOCKETS.get(fd).and_then(|socket| set_by_program(socket, level, name))
    {
        // SAFETY: the kernel has just filled `*len` bytes, which the code checks to be an int.
        unsafe {
            if *len as usize == size_of::<c_int>() {
                value.cast::<c_int>().write_unaligned(set);
            }
        }
    }
    if result == 0
        && (level, name) == (libc::IPPROTO_TCP, libc::TCP_INFO)
        && let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.is_joined())
    {
        // SAFETY: the call has succeeded, so there is a length, and the kernel has filled that many bytes.
        unsafe {
            if *len > 0 {
                let state = value.cast::<u8>();
                state.write(state_for_program(socket, state.read()));
            }
        }
    }
    if result == 0
        && (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR)
        && let Some(socket) = SOCKETS.get(fd)
    {
        // SAFETY: the call has succeeded, so there is a length, and there is room for that many bytes.
        unsafe {
            if *len as usize == size_of::<c_int>() {
                let error = value.cast::<c_int>();
                error.write_unaligned(error_for_program(socket, fd, error.read_unaligned()));
            }
        }
    }
    result
}

/// The kernel's pages with received bytes (`struct tcp_zerocopy_receive`).
const TCP_ZEROCOPY_RECEIVE: c_int = 35;

/// Says that nothing was mapped, and that the bytes which are there can be received by other calls. The kernel says so of bytes that
/// do not fill a page.
///
/// # Safety
///
/// The pointers are those of a call of `getsockopt`.
unsafe fn mapped_nothing(
    socket: &'static Socket,
    fd: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> Result<c_int> {
    /// The offsets of the numbers of mapped bytes, of others that can be received, of all of these, of the error, and of copied bytes.
    const LENGTH: usize = 8;
    const SKIP_HINT: usize = 12;
    const INQ: usize = 16;
    const ERROR: usize = 20;
    const COPIED: usize = 32;
    if !is_there(len) {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: the length is there, as just checked.
    let room = unsafe { len.read_unaligned() } as usize;
    if room < LENGTH + size_of::<u32>() {
        return Err(Errno(libc::EINVAL));
    }
    if !can_write(value, room.min(64)) {
        return Err(Errno(libc::EFAULT));
    }
    let there = look::available(socket, fd).unwrap_or_else(|| kernel::unread(fd)) as u32;
    for (at, number) in [(LENGTH, 0), (SKIP_HINT, there), (INQ, there), (ERROR, 0), (COPIED, 0)] {
        if at + size_of::<u32>() <= room {
            // SAFETY: there are `room` bytes, of which the first 64 can be written.
            unsafe { value.cast::<u8>().add(at).cast::<u32>().write_unaligned(number) };
        }
    }
    Ok(0)
}

/// The timeouts of programs that were compiled with times of 64 bits for processors of 32 (`asm-generic/socket.h`).
const RCVTIMEO_NEW: c_int = 66;
const SNDTIMEO_NEW: c_int = 67;

/// The states of a TCP connection that its ends decide (`enum tcp_state`).
const ESTABLISHED: u8 = 1;
const FIN_WAIT2: u8 = 5;
const CLOSE: u8 = 7;
const CLOSE_WAIT: u8 = 8;

/// Returns the state of a connection that TCP_INFO is to say, where the kernel has said `kernels`. The kernel does not know of ends
/// that are in a ring.
fn state_for_program(socket: &'static Socket, kernels: u8) -> u8 {
    // The kernel may know the peer's end, and not the program's own, which is in a ring.
    if ![ESTABLISHED, CLOSE_WAIT].contains(&kernels) {
        return kernels;
    }
    match (room::has_shut_down(socket), kernels == CLOSE_WAIT || look::has_peer_finished(socket)) {
        (false, false) => ESTABLISHED,
        (false, true) => CLOSE_WAIT,
        (true, false) => FIN_WAIT2,
        (true, true) => CLOSE,
    }
}

/// Returns what SO_ERROR is to say, where the kernel has said `kernels`.
fn error_for_program(socket: &'static Socket, fd: c_int, kernels: c_int) -> c_int {
    let has_rings = socket.receiving.is_ring() && socket.sending.is_ring();
    if kernels == 0 {
        let untold = if has_rings { Some(look::take_error(socket)) } else { socket.take_error() };
        return untold.map_or(0, |Errno(errno)| errno);
    }
    // An error that passes leaves the connection as it is.
    let is_over = kernel::poll_now(fd, 0) & (libc::POLLHUP | libc::POLLERR) != 0;
    if !has_rings || !is_over {
        return kernels;
    }
    // The kernel's connection may break where TCP's would not, because of wake bytes that nobody has read.
    socket.set_error(Errno(kernels));
    look::take_error(socket).0
}

/// Returns the program's value of an option, if this library has set its own value in the kernel.
fn set_by_program(socket: &'static Socket, level: c_int, name: c_int) -> Option<c_int> {
    if (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        return lowat::of_program(socket);
    }
    delay(socket, level, name).map(|delay| c_int::from(delay.load(Ordering::Relaxed)))
}

/// Returns the place where the program's value of an option is stored, if this library has set its own value in the kernel.
fn delay(socket: &'static Socket, level: c_int, name: c_int) -> Option<&'static AtomicBool> {
    if level == libc::IPPROTO_TCP && socket.sending.common().is_some() {
        // A relative may have returned to the kernel.
        drop(socket.sending.lock());
    }
    if level != libc::IPPROTO_TCP || socket.sending.carrier() != Carrier::Ring {
        return None;
    }
    if socket.sending.is_superseded() {
        disconnecting::follow(socket);
        return None;
    }
    let i = crate::carrying::delays::DELAYS.iter().position(|(option, _)| *option == name)?;
    Some(&crate::state::family::delays(socket)[i])
}

/// Returns whether an option makes the kernel change or inspect the bytes.
fn is_unusual(level: c_int, name: c_int) -> bool {
    match level {
        libc::IPPROTO_TCP => matches!(name, libc::TCP_ULP | libc::TCP_REPAIR),
        libc::SOL_SOCKET => matches!(
            name,
            libc::SO_ZEROCOPY
                | libc::SO_TIMESTAMPING
                | libc::SO_TIMESTAMP
                | libc::SO_TIMESTAMPNS
                | libc::SO_ATTACH_FILTER
                | libc::SO_ATTACH_BPF
                | libc::SO_PEEK_OFF
        ),
        _ => false,
    }
}

/// Returns how many bytes a call can receive (FIONREAD), or how many the peer has not taken (TIOCOUTQ). Returns `None` if the
/// kernel must answer the request.
pub fn queued(fd: c_int, request: libc::c_ulong) -> Option<usize> {
    let socket = SOCKETS.get(fd).filter(|socket| socket.is_joined())?;
    disconnecting::follow_if_due(socket);
    match request {
        libc::FIONREAD => crate::carrying::look::available(socket, fd),
        libc::TIOCOUTQ => room::queued(socket, fd),
        _ => None,
    }
}
