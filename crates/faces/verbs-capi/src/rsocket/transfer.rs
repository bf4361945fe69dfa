//! The C functions that send and receive.
#![allow(unsafe_code)] // Buffers from C.

use super::calls::{foreign, write};
use super::socket::Socket;
use super::{given, table};
use crate::real;
use libc::{iovec, msghdr, sockaddr, socklen_t, ssize_t};
use std::ffi::{c_int, c_void};
use std::slice;

/// The flags that a program may pass when it receives, and when it sends. No call raises SIGPIPE.
const RECEIVES: c_int = libc::MSG_DONTWAIT | libc::MSG_PEEK | libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
const SENDS: c_int =
    libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_MORE | libc::MSG_EOR | libc::MSG_WAITALL;
/// Maximum number of bytes of one call, as everywhere in Linux.
const MOST: usize = 0x7fff_f000;
/// Maximum number of parts of one call (IOV_MAX).
const PARTS: usize = 1024;

/// Returns the parts of a program's buffer. Fails if their total length is too large for C.
///
/// # Safety
///
/// The list has this many parts.
unsafe fn parts<'a>(list: *const iovec, count: usize) -> Result<&'a [iovec], c_int> {
    if count > PARTS {
        return Err(libc::EMSGSIZE);
    }
    let parts = match count {
        0 => &[],
        _ if list.is_null() => return Err(libc::EFAULT),
        // SAFETY: the caller's promise.
        _ => unsafe { slice::from_raw_parts(list, count) },
    };
    let total = parts.iter().try_fold(0_usize, |total, part| total.checked_add(part.iov_len));
    match total {
        Some(total) if isize::try_from(total).is_ok() => Ok(parts),
        _ => Err(libc::EINVAL),
    }
}

/// Receives into the parts of a buffer, like recvmsg.
///
/// # Safety
///
/// The program promises that the buffers exist.
unsafe fn receive(socket: &Socket, parts: &[iovec], flags: c_int) -> Result<usize, c_int> {
    if flags & !RECEIVES != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let stream = socket.stream()?;
    let has = |flag| flags & flag != 0;
    let waits = socket.waits() && !has(libc::MSG_DONTWAIT);
    let mut done = 0;
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        let mut at = 0;
        while at < part.iov_len {
            // SAFETY: the caller's promise. The old contents are never read.
            let rest = unsafe {
                let start = part.iov_base.cast::<u8>().add(at);
                slice::from_raw_parts_mut(start, (part.iov_len - at).min(MOST - done))
            };
            if rest.is_empty() {
                return Ok(done);
            }
            if has(libc::MSG_PEEK) {
                return stream.peek(rest, waits);
            }
            // The call waits for the first bytes only, unless the program wants all of them.
            let waits = waits && (done == 0 || has(libc::MSG_WAITALL));
            match stream.receive(rest, waits) {
                Ok(0) => return Ok(done),
                Ok(len) => (at, done) = (at + len, done + len),
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
            // If a part is not filled, there is no more data at the moment.
            if at < part.iov_len && !has(libc::MSG_WAITALL) {
                return Ok(done);
            }
        }
    }
    Ok(done)
}

/// Sends the parts of a buffer, like sendmsg: all of them, unless it must not wait.
///
/// # Safety
///
/// The program promises that the buffers exist.
unsafe fn send(socket: &Socket, parts: &[iovec], flags: c_int) -> Result<usize, c_int> {
    if flags & !SENDS != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let stream = socket.stream()?;
    let waits = socket.waits() && flags & libc::MSG_DONTWAIT == 0;
    let mut done = 0;
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        let mut at = 0;
        while at < part.iov_len {
            // SAFETY: the caller's promise.
            let rest = unsafe {
                let start = part.iov_base.cast::<u8>().cast_const().add(at);
                slice::from_raw_parts(start, (part.iov_len - at).min(MOST - done))
            };
            if rest.is_empty() {
                return Ok(done);
            }
            match stream.send(rest, waits) {
                Ok(len) => (at, done) = (at + len, done + len),
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(done)
}

fn part(buffer: *const c_void, len: usize) -> iovec {
    iovec { iov_base: buffer.cast_mut(), iov_len: len.min(MOST) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rrecv(number: c_int, buffer: *mut c_void, len: usize, flags: c_int) -> ssize_t {
    // SAFETY: the caller's buffer.
    unsafe {
        match table::get(number) {
            Some(socket) => given(receive(&socket, &[part(buffer, len)], flags)),
            None => foreign(|| real::rrecv(number, buffer, len, flags)),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rrecvfrom(
    number: c_int,
    buffer: *mut c_void,
    len: usize,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the caller's buffer, address and length.
    unsafe {
        let Some(socket) = table::get(number) else {
            return foreign(|| real::rrecvfrom(number, buffer, len, flags, from, from_len));
        };
        let received = receive(&socket, &[part(buffer, len)], flags);
        if received.is_ok()
            && let Ok(peer) = socket.peer()
        {
            write(peer, from, from_len);
        }
        given(received)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rrecvmsg(number: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's message.
    unsafe {
        let Some(socket) = table::get(number) else {
            return foreign(|| real::rrecvmsg(number, message, flags));
        };
        let Some(message) = message.as_mut() else { return given(Err(libc::EFAULT)) };
        let received = parts(message.msg_iov, message.msg_iovlen)
            .and_then(|parts| receive(&socket, parts, flags))
            .inspect(|_| {
                (message.msg_namelen, message.msg_controllen, message.msg_flags) = (0, 0, 0);
            });
        given(received)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rread(number: c_int, buffer: *mut c_void, len: usize) -> ssize_t {
    // SAFETY: the caller's buffer.
    unsafe {
        match table::get(number) {
            Some(socket) => given(receive(&socket, &[part(buffer, len)], 0)),
            None => foreign(|| real::rread(number, buffer, len)),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rreadv(number: c_int, list: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller's parts.
    unsafe {
        let Some(socket) = table::get(number) else { return foreign(|| real::rreadv(number, list, count)) };
        let count = usize::try_from(count).map_err(|_| libc::EINVAL);
        given(count.and_then(|count| parts(list, count)).and_then(|parts| receive(&socket, parts, 0)))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rsend(number: c_int, buffer: *const c_void, len: usize, flags: c_int) -> ssize_t {
    // SAFETY: the caller's buffer.
    unsafe {
        match table::get(number) {
            Some(socket) => given(send(&socket, &[part(buffer, len)], flags)),
            None => foreign(|| real::rsend(number, buffer, len, flags)),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rsendto(
    number: c_int,
    buffer: *const c_void,
    len: usize,
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> ssize_t {
    // SAFETY: the caller's buffer and address.
    unsafe {
        match table::get(number) {
            Some(_) if !to.is_null() || to_len > 0 => given(Err(libc::EISCONN)),
            Some(socket) => given(send(&socket, &[part(buffer, len)], flags)),
            None => foreign(|| real::rsendto(number, buffer, len, flags, to, to_len)),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rsendmsg(number: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's message.
    unsafe {
        let Some(socket) = table::get(number) else {
            return foreign(|| real::rsendmsg(number, message, flags));
        };
        let Some(message) = message.as_ref() else { return given(Err(libc::EFAULT)) };
        if !message.msg_control.is_null() && message.msg_controllen > 0 {
            return given(Err(libc::EOPNOTSUPP));
        }
        let parts = parts(message.msg_iov, message.msg_iovlen);
        given(parts.and_then(|parts| send(&socket, parts, flags)))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rwrite(number: c_int, buffer: *const c_void, len: usize) -> ssize_t {
    // SAFETY: the caller's buffer.
    unsafe {
        match table::get(number) {
            Some(socket) => given(send(&socket, &[part(buffer, len)], 0)),
            None => foreign(|| real::rwrite(number, buffer, len)),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rwritev(number: c_int, list: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller's parts.
    unsafe {
        let Some(socket) = table::get(number) else { return foreign(|| real::rwritev(number, list, count)) };
        let count = usize::try_from(count).map_err(|_| libc::EINVAL);
        given(count.and_then(|count| parts(list, count)).and_then(|parts| send(&socket, parts, 0)))
    }
}
