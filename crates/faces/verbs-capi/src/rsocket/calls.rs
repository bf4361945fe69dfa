//! The C functions that create, connect and close rsockets, and those of I/O maps.
#![allow(unsafe_code)] // C structures and functions.

use super::maps::Maps;
use super::socket::Socket;
use super::table;
use crate::cm::{addresses, done, failed, is_here};
use crate::context::fail;
use crate::real;
use libc::{off_t, sockaddr, socklen_t};
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the real library has created an rsocket for the program.
static ARE_FOREIGN: AtomicBool = AtomicBool::new(false);

/// Returns whether there may be rsockets of the real library.
pub fn are_foreign() -> bool {
    ARE_FOREIGN.load(Ordering::Relaxed)
}

/// Calls the real library for a number that is not ours, if the real library has created any rsocket: it does not check whether a number
/// is one of its own.
pub fn foreign<T: From<i8>>(call: impl FnOnce() -> T) -> T {
    if are_foreign() {
        return call();
    }
    fail(libc::EBADF);
    T::from(-1)
}

/// Reads an address from C that has this length.
unsafe fn read(address: *const sockaddr, len: socklen_t) -> Result<SocketAddr, c_int> {
    if address.is_null() {
        return Err(libc::EFAULT);
    }
    if (len as usize) < size_of::<libc::sa_family_t>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's address is long enough to have its family.
    let least = match c_int::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => return Err(libc::EAFNOSUPPORT),
    };
    if (len as usize) < least {
        return Err(libc::EINVAL);
    }
    // SAFETY: the address is as long as its family requires.
    unsafe { addresses::read(address) }.ok_or(libc::EAFNOSUPPORT)
}

/// Copies an address to C, truncated to the room that there is. `len` becomes its full length.
///
/// # Safety
///
/// Either pointer is null, or there is room for as many bytes as `len` says.
pub unsafe fn write(address: SocketAddr, to: *mut sockaddr, len: *mut socklen_t) {
    if to.is_null() || len.is_null() {
        return;
    }
    let (storage, full) = addresses::storage(address);
    // SAFETY: the caller's promise.
    unsafe {
        ptr::copy_nonoverlapping((&raw const storage).cast::<u8>(), to.cast(), full.min(*len) as usize);
        *len = full;
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if !is_here() {
        // SAFETY: the arguments are numbers only.
        let number = unsafe { real::rsocket(domain, kind, protocol) };
        if number >= 0 {
            ARE_FOREIGN.store(true, Ordering::Relaxed);
        }
        return number;
    }
    if !matches!(domain, libc::AF_INET | libc::AF_INET6) {
        return failed(libc::EAFNOSUPPORT);
    }
    let flags = kind & (libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    if kind & !flags != libc::SOCK_STREAM || !matches!(protocol, 0 | libc::IPPROTO_TCP) {
        return failed(libc::EPROTONOSUPPORT);
    }
    match Socket::new(domain, flags & libc::SOCK_NONBLOCK != 0) {
        Ok(socket) => table::add(socket),
        Err(error) => failed(error),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rbind(number: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the caller's address.
    unsafe {
        match table::get(number) {
            Some(socket) => done(read(address, len).and_then(|address| socket.bind(address))),
            None => foreign(|| real::rbind(number, address, len)),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rlisten(number: c_int, backlog: c_int) -> c_int {
    match table::get(number) {
        Some(socket) => done(socket.listen(backlog)),
        // SAFETY: the arguments are numbers only.
        None => unsafe { foreign(|| real::rlisten(number, backlog)) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_raccept(number: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(socket) = table::get(number) else {
        // SAFETY: the caller's buffer and its length.
        return unsafe { foreign(|| real::raccept(number, address, len)) };
    };
    match socket.accept() {
        Ok(accepted) => {
            if let Ok(peer) = accepted.peer() {
                // SAFETY: the caller's buffer and its length.
                unsafe { write(peer, address, len) };
            }
            table::add(accepted)
        }
        Err(error) => failed(error),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rconnect(number: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the caller's address.
    unsafe {
        match table::get(number) {
            Some(socket) => done(read(address, len).and_then(|address| socket.connect(address))),
            None => foreign(|| real::rconnect(number, address, len)),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rshutdown(number: c_int, how: c_int) -> c_int {
    match table::get(number) {
        Some(socket) => done(socket.shut_down(how)),
        // SAFETY: the arguments are numbers only.
        None => unsafe { foreign(|| real::rshutdown(number, how)) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rclose(number: c_int) -> c_int {
    match table::remove(number) {
        Some(socket) => {
            socket.close();
            0
        }
        // SAFETY: the argument is a number only.
        None => unsafe { foreign(|| real::rclose(number)) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rgetpeername(
    number: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's buffer and its length.
    unsafe {
        match table::get(number) {
            Some(socket) => done(socket.peer().map(|peer| write(peer, address, len))),
            None => foreign(|| real::rgetpeername(number, address, len)),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rgetsockname(
    number: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's buffer and its length.
    unsafe {
        match table::get(number) {
            Some(socket) => {
                write(socket.local(), address, len);
                0
            }
            None => foreign(|| real::rgetsockname(number, address, len)),
        }
    }
}

fn with_maps<T>(socket: &Socket, act: impl FnOnce(&Maps) -> Result<T, c_int>) -> Result<T, c_int> {
    act(socket.stream()?.maps.as_ref().ok_or(libc::EOPNOTSUPP)?)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_riomap(
    number: c_int,
    buffer: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    offset: off_t,
) -> off_t {
    let Some(socket) = table::get(number) else {
        // SAFETY: the caller's buffer.
        return unsafe { foreign(|| real::riomap(number, buffer, len, protection, flags, offset)) };
    };
    let is_shared = protection & libc::PROT_WRITE != 0;
    let mapped = match protection & !libc::PROT_WRITE {
        0 => with_maps(&socket, |maps| maps.map(buffer.addr() as u64, len, is_shared, offset)),
        _ => Err(libc::EINVAL),
    };
    mapped.unwrap_or_else(|error| {
        fail(error);
        -1
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_riounmap(number: c_int, buffer: *mut c_void, len: usize) -> c_int {
    match table::get(number) {
        Some(socket) => done(with_maps(&socket, |maps| maps.unmap(buffer.addr() as u64, len))),
        // SAFETY: the caller's buffer.
        None => unsafe { foreign(|| real::riounmap(number, buffer, len)) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_riowrite(
    number: c_int,
    buffer: *const c_void,
    count: usize,
    offset: off_t,
    flags: c_int,
) -> usize {
    let Some(socket) = table::get(number) else {
        // SAFETY: the caller's buffer.
        return unsafe { foreign(|| real::riowrite(number, buffer, count, offset, flags).cast_signed()) }
            .cast_unsigned();
    };
    let from = buffer.expose_provenance() as u64;
    let write = |maps: &Maps| {
        let mut written = 0;
        while written < count {
            let at = offset.checked_add_unsigned(written as u64).ok_or(libc::EINVAL)?;
            match maps.write_at(from.wrapping_add(written as u64), count - written, at) {
                Ok(len) => written += len,
                // The rest lies behind the mapped memory.
                Err(_) if written > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(written)
    };
    super::given(with_maps(&socket, write)).cast_unsigned()
}
