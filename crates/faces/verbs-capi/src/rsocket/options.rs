//! The C functions for the options of an rsocket.
#![allow(unsafe_code)] // Values from C.

use super::calls::foreign;
use super::direction::locked;
use super::socket::Socket;
use super::table;
use crate::cm::{done, failed};
use crate::real;
use libc::socklen_t;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

/// The level of the options that only rsockets have, and these options (rdma/rsocket.h).
const SOL_RDMA: c_int = 0x10000;
const RDMA_SQSIZE: c_int = 0;
const RDMA_RQSIZE: c_int = 1;
const RDMA_INLINE: c_int = 2;
const RDMA_IOMAPSIZE: c_int = 3;
const RDMA_ROUTE: c_int = 4;

/// The limits of the ring size that a program can request, in bytes.
const SMALLEST: usize = 4096;
const LARGEST: usize = 4 << 20;
/// The ring size that is reported if the program has not requested one, in bytes.
const USUAL: usize = 128 << 10;

/// The options that the program has set. An accepted rsocket inherits those of its listener.
#[derive(Clone)]
pub struct Options {
    /// Sizes of the rings into which this side sends and from which it receives, in bytes; 0 means the default.
    pub sends: usize,
    pub receives: usize,
    /// Maximum number of I/O maps of the other side; 0 means that there are none.
    pub io_maps: u32,
    /// Options that have no effect here, and are only stored.
    kept: Vec<(c_int, c_int, c_int)>,
    lingers: libc::linger,
}

impl Default for Options {
    fn default() -> Self {
        let lingers = libc::linger { l_onoff: 0, l_linger: 0 };
        Self { sends: 0, receives: 0, io_maps: 0, kept: Vec::new(), lingers }
    }
}

/// Options that are only stored, each with its default. A connection needs none of them: it does not delay small pieces of data, has no
/// segments, detects the death of a peer, and frees a name at once.
const KEPT: [(c_int, c_int, c_int); 14] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR, 0),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT, 0),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 0),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE, 0),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY, 0),
    (libc::IPPROTO_TCP, libc::TCP_MAXSEG, 2048),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 7200),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 75),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 9),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0),
    (SOL_RDMA, RDMA_SQSIZE, 384),
    (SOL_RDMA, RDMA_RQSIZE, 384),
    (SOL_RDMA, RDMA_INLINE, 64),
    (SOL_RDMA, RDMA_ROUTE, 0),
];

fn set(socket: &Socket, level: c_int, name: c_int, value: &[u8]) -> Result<(), c_int> {
    // An adapter has to know these before there is a connection.
    if level == SOL_RDMA && !socket.is_new() {
        return Err(libc::EINVAL);
    }
    let mut options = locked(&socket.options);
    if (level, name) == (SOL_RDMA, RDMA_ROUTE) {
        // There is only one route.
        return Ok(());
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_LINGER) {
        let (first, rest) = value.split_first_chunk().ok_or(libc::EINVAL)?;
        let seconds = rest.first_chunk().ok_or(libc::EINVAL)?;
        options.lingers = libc::linger {
            l_onoff: c_int::from(c_int::from_ne_bytes(*first) != 0),
            l_linger: c_int::from_ne_bytes(*seconds),
        };
        return Ok(());
    }
    let value = c_int::from_ne_bytes(*value.first_chunk().ok_or(libc::EINVAL)?);
    let size = usize::try_from(value).unwrap_or(0).clamp(SMALLEST, LARGEST);
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => options.sends = size,
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => options.receives = size,
        (SOL_RDMA, RDMA_IOMAPSIZE) => {
            options.io_maps =
                u32::try_from(value).map_err(|_| libc::EINVAL)?.min(super::maps::ENTRIES as u32);
        }
        _ if KEPT.iter().any(|known| (known.0, known.1) == (level, name)) => {
            options.kept.retain(|known| (known.0, known.1) != (level, name));
            options.kept.push((level, name, value));
        }
        _ => return Err(libc::ENOPROTOOPT),
    }
    Ok(())
}

fn get(socket: &Socket, level: c_int, name: c_int) -> Result<Vec<u8>, c_int> {
    let or_usual = |size| if size == 0 { USUAL } else { size } as c_int;
    let number = |value: c_int| value.to_ne_bytes().to_vec();
    if (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR) {
        return Ok(number(socket.take_error()));
    }
    let options = locked(&socket.options);
    Ok(match (level, name) {
        (libc::SOL_SOCKET, libc::SO_TYPE) => number(libc::SOCK_STREAM),
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => number(socket.family),
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) => number(libc::IPPROTO_TCP),
        (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => number(socket.listens().into()),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => number(or_usual(options.sends)),
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => number(or_usual(options.receives)),
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            [options.lingers.l_onoff, options.lingers.l_linger].map(c_int::to_ne_bytes).concat()
        }
        (SOL_RDMA, RDMA_IOMAPSIZE) => number(options.io_maps.cast_signed()),
        (SOL_RDMA, RDMA_ROUTE) => Vec::new(),
        _ => {
            let is_it = |known: &&(c_int, c_int, c_int)| (known.0, known.1) == (level, name);
            let known = options.kept.iter().find(is_it).or_else(|| KEPT.iter().find(is_it));
            number(known.ok_or(libc::ENOPROTOOPT)?.2)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rsetsockopt(
    number: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let Some(socket) = table::get(number) else {
        // SAFETY: the caller's value.
        return unsafe { foreign(|| real::rsetsockopt(number, level, name, value, len)) };
    };
    if value.is_null() && len > 0 {
        return failed(libc::EFAULT);
    }
    let value = match len {
        0 => &[],
        // SAFETY: the caller's value has this length.
        _ => unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len as usize) },
    };
    done(set(&socket, level, name, value))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rgetsockopt(
    number: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let Some(socket) = table::get(number) else {
        // SAFETY: the caller's buffer and its length.
        return unsafe { foreign(|| real::rgetsockopt(number, level, name, value, len)) };
    };
    if value.is_null() || len.is_null() {
        return failed(libc::EFAULT);
    }
    done(get(&socket, level, name).map(|found| {
        // SAFETY: the caller's buffer is as long as `len` says.
        unsafe {
            let fits = found.len().min(*len as usize);
            std::ptr::copy_nonoverlapping(found.as_ptr(), value.cast(), fits);
            *len = fits as socklen_t;
        }
    }))
}

/// In C, this function is variadic. On this architecture, it gets the last argument in the same register.
#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rfcntl(number: c_int, command: c_int, argument: *mut c_void) -> c_int {
    let Some(socket) = table::get(number) else {
        // SAFETY: the caller's argument.
        return unsafe { foreign(|| real::rfcntl(number, command, argument)) };
    };
    match command {
        libc::F_GETFL if socket.waits() => libc::O_RDWR,
        libc::F_GETFL => libc::O_RDWR | libc::O_NONBLOCK,
        libc::F_SETFL => {
            let flags = argument.addr() as c_int;
            socket.is_nonblocking.store(flags & libc::O_NONBLOCK != 0, Ordering::Relaxed);
            0
        }
        // An rsocket does not survive execve(2) in any case.
        libc::F_GETFD => libc::FD_CLOEXEC,
        libc::F_SETFD => 0,
        _ => failed(libc::EINVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_stored_and_returned() {
        let socket = Socket::new(libc::AF_INET, false).unwrap();
        let (level, name) = (libc::IPPROTO_TCP, libc::TCP_NODELAY);
        assert_eq!(get(&socket, level, name).unwrap(), 0_i32.to_ne_bytes());
        for value in [1_i32, 0, 1] {
            set(&socket, level, name, &value.to_ne_bytes()).unwrap();
            assert_eq!(get(&socket, level, name).unwrap(), value.to_ne_bytes());
        }
        assert_eq!(locked(&socket.options).kept.len(), 1);
        set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUF, &1_i32.to_ne_bytes()).unwrap();
        assert_eq!(locked(&socket.options).sends, SMALLEST);
        set(&socket, SOL_RDMA, RDMA_IOMAPSIZE, &i32::MAX.to_ne_bytes()).unwrap();
        assert_eq!(locked(&socket.options).io_maps as usize, super::super::maps::ENTRIES);
        for (level, name, value, error) in [
            (SOL_RDMA, RDMA_IOMAPSIZE, &(-1_i32).to_ne_bytes()[..], libc::EINVAL),
            (level, name, &[1, 2], libc::EINVAL),
            (libc::SOL_SOCKET, libc::SO_LINGER, &[0; 4], libc::EINVAL),
            (libc::SOL_SOCKET, libc::SO_BINDTODEVICE, &[0; 4], libc::ENOPROTOOPT),
        ] {
            assert_eq!(set(&socket, level, name, value), Err(error), "{level} {name}");
        }
    }
}
