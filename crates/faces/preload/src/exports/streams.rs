//! Streams of the C library over descriptors. This library does not see the reads and writes that the C library makes for a
//! stream. So `fdopen` makes a stream with functions of this library if a connection has changed over.

use crate::table::SOCKETS;
use crate::{daemon, real};
use libc::{FILE, c_char, c_int, ssize_t};
use std::ffi::c_void;

/// The functions of a stream with a cookie (`cookie_io_functions_t` of glibc).
#[repr(C)]
struct Functions {
    read: extern "C-unwind" fn(*mut c_void, *mut c_char, usize) -> ssize_t,
    write: extern "C-unwind" fn(*mut c_void, *const c_char, usize) -> ssize_t,
    seek: *const c_void,
    close: extern "C-unwind" fn(*mut c_void) -> c_int,
}

/// The offset in bytes of the descriptor in a stream of glibc, which `fileno` returns (`_fileno` of `struct _IO_FILE` in
/// `bits/types/struct_FILE.h`, on 64-bit systems).
const FILENO: usize = 112;

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if let Some(socket) = SOCKETS.get(fd) {
        daemon::stays(socket, "a stream of the C library has its descriptor");
        if socket.is_joined() || socket.cache.has_answers() {
            let functions = Functions {
                read: stream_read,
                write: stream_write,
                seek: std::ptr::null(),
                close: stream_close,
            };
            // SAFETY: the functions are those of this library, and they expect the descriptor's number as the cookie.
            let stream = unsafe { fopencookie(fd as usize as *mut c_void, mode, functions) };
            if !stream.is_null() {
                // SAFETY: the structure of a stream has an int at this offset.
                unsafe { stream.cast::<u8>().add(FILENO).cast::<c_int>().write(fd) };
            }
            return stream;
        }
    }
    // SAFETY: the program obeys the rules of the function.
    unsafe { real::fdopen(fd, mode) }
}

extern "C-unwind" fn stream_read(cookie: *mut c_void, buffer: *mut c_char, len: usize) -> ssize_t {
    // SAFETY: the C library passes a buffer with room for `len` bytes.
    unsafe { super::io::read(cookie as usize as c_int, buffer.cast(), len) }
}

extern "C-unwind" fn stream_write(cookie: *mut c_void, bytes: *const c_char, len: usize) -> ssize_t {
    // SAFETY: the C library passes `len` bytes. Its streams treat the result 0 as an error.
    unsafe { super::io::write(cookie as usize as c_int, bytes.cast(), len) }.max(0)
}

extern "C-unwind" fn stream_close(cookie: *mut c_void) -> c_int {
    // SAFETY: `close` takes only a number.
    unsafe { super::descriptors::close_for_program(cookie as usize as c_int) }
}
