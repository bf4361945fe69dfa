//! Streams of the C library (stdio) over connections.
//!
//! The C library makes the system calls of its streams without this library's functions, so their bytes would go past the ring. But
//! it finds the functions that make them in tables, one table for each kind of stream (`_IO_jump_t` of glibc). When this library is
//! loaded, it puts functions of its own into these tables. For a connection they do what `read`, `write` and `close` of this library
//! do, and for all other files they call the C library's.
//!
//! If the C library has other tables than expected, `fdopen` makes a stream with functions of this library if a connection has
//! changed over, and other streams are not followed.

use crate::calls::descriptors;
use crate::carrying::stdio;
use crate::daemon::session;
use crate::process::settings;
use crate::state::socket::Socket;
use crate::state::sockets::SOCKETS;
use crate::system::confined::is_confined;
use crate::system::errno::Kept;
use crate::system::{kernel, real};
use libc::{FILE, c_char, c_int, dl_phdr_info, size_t, ssize_t};
use std::ffi::c_void;
use std::mem::transmute;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The functions of a stream with a cookie (`cookie_io_functions_t` of glibc).
#[repr(C)]
struct Functions {
    read: extern "C-unwind" fn(*mut c_void, *mut c_char, usize) -> ssize_t,
    write: extern "C-unwind" fn(*mut c_void, *const c_char, usize) -> ssize_t,
    seek: *const c_void,
    close: extern "C-unwind" fn(*mut c_void) -> c_int,
}

/// The offset in bytes of the descriptor in a stream of glibc, which `fileno` returns (`_fileno` of `struct _IO_FILE` in
/// `bits/types/struct_FILE.h`, on 64-bit systems),
const FILENO: usize = 112;
/// and that of the position in the file, or -1 (`_offset`). The flags are the first member.
const OFFSET: usize = 144;
/// The flag that says that an error has occurred (`_IO_ERR_SEEN`).
const ERROR_SEEN: c_int = 0x20;

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if let Some(socket) = SOCKETS.get(fd) {
        session::stays(socket, "a stream of the C library has its descriptor");
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
    unsafe { crate::exports::io::read(cookie as usize as c_int, buffer.cast(), len) }
}

extern "C-unwind" fn stream_write(cookie: *mut c_void, bytes: *const c_char, len: usize) -> ssize_t {
    // SAFETY: the C library passes `len` bytes. Its streams treat the result 0 as an error.
    unsafe { crate::exports::io::write(cookie as usize as c_int, bytes.cast(), len) }.max(0)
}

extern "C-unwind" fn stream_close(cookie: *mut c_void) -> c_int {
    // SAFETY: `close` takes only a number.
    unsafe { crate::exports::descriptors::close_for_program(cookie as usize as c_int) }
}

/// The C library's functions for streams over files.
static READ: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static WRITE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static CLOSE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Read = unsafe extern "C-unwind" fn(*mut FILE, *mut c_void, ssize_t) -> ssize_t;
type Write = unsafe extern "C-unwind" fn(*mut FILE, *const c_void, ssize_t) -> ssize_t;
type Close = unsafe extern "C-unwind" fn(*mut FILE) -> c_int;

/// Returns the descriptor of this library's tables by which a stream's bytes have to go, or `None` if the stream has no connection.
unsafe fn connection(stream: *mut FILE) -> Option<c_int> {
    // SAFETY: the structure of a stream has an int at this offset.
    let fd = unsafe { stream.cast::<u8>().add(FILENO).cast::<c_int>().read() };
    let is_same = |socket: &Socket| kernel::cookie(fd) == Some(socket.cookie());
    match SOCKETS.get(fd) {
        // A program that has confined itself cannot ask the kernel.
        Some(socket) if socket.is_joined() && !is_confined() && !is_same(socket) => {
            // A call that this library does not see has given the number to another file.
            if crate::process::owner::owns_tables() {
                let _errno = Kept::new();
                descriptors::forget(fd);
            }
            None
        }
        Some(_) => Some(fd),
        // `perror` makes a stream over a copy of standard error.
        None => SOCKETS
            .get(libc::STDERR_FILENO)
            .filter(|socket| socket.is_joined() && !is_confined() && is_same(socket))
            .map(|_| libc::STDERR_FILENO),
    }
}

unsafe extern "C-unwind" fn file_read(stream: *mut FILE, buffer: *mut c_void, len: ssize_t) -> ssize_t {
    // SAFETY: the C library passes a stream, and a buffer with room for `len` bytes.
    unsafe {
        match connection(stream) {
            Some(fd) => crate::exports::io::read(fd, buffer, len as size_t),
            None => transmute::<*mut c_void, Read>(READ.load(Ordering::Relaxed))(stream, buffer, len),
        }
    }
}

/// Writes all bytes, as the C library's function does. After an error, the result is the number of bytes written before.
unsafe extern "C-unwind" fn file_write(stream: *mut FILE, bytes: *const c_void, len: ssize_t) -> ssize_t {
    // SAFETY: the C library passes a stream and `len` bytes, and the structure of a stream has these members.
    unsafe {
        let Some(fd) = connection(stream) else {
            return transmute::<*mut c_void, Write>(WRITE.load(Ordering::Relaxed))(stream, bytes, len);
        };
        let mut written = 0;
        while written < len {
            let n = crate::exports::io::write(fd, bytes.byte_offset(written), (len - written) as size_t);
            if n < 0 {
                *stream.cast::<c_int>() |= ERROR_SEEN;
                break;
            }
            written += n;
        }
        let offset = stream.cast::<u8>().add(OFFSET).cast::<i64>();
        if *offset >= 0 {
            *offset += written as i64;
        }
        written
    }
}

unsafe extern "C-unwind" fn file_close(stream: *mut FILE) -> c_int {
    // SAFETY: the C library passes a stream, and the structure of a stream has an int at this offset.
    unsafe {
        let fd = stream.cast::<u8>().add(FILENO).cast::<c_int>().read();
        match SOCKETS.get(fd) {
            Some(_) => crate::exports::descriptors::close_for_program(fd),
            None => transmute::<*mut c_void, Close>(CLOSE.load(Ordering::Relaxed))(stream),
        }
    }
}

/// The flag of a stream over a file (`_IO_IS_FILEBUF`).
const IS_FILE: c_int = 0x2000;

/// Gives a stream another file by `call`. The C library closes the stream's file, and gives its number to the other one.
unsafe fn reopen(stream: *mut FILE, call: impl FnOnce() -> *mut FILE) -> *mut FILE {
    // SAFETY: the program passes a stream, whose structure has these members.
    let (flags, fd) =
        unsafe { (*stream.cast::<c_int>(), stream.cast::<u8>().add(FILENO).cast::<c_int>().read()) };
    if flags & IS_FILE == 0 || SOCKETS.get(fd).is_none() {
        return call();
    }
    // What the stream still has is the connection's. As in the C library, an error does not matter.
    // SAFETY: the program passes a stream.
    unsafe { libc::fflush(stream) };
    crate::exports::descriptors::closing(fd, call)
}

macro_rules! reopens {
    ($($name:ident),*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            path: *const c_char,
            mode: *const c_char,
            stream: *mut FILE,
        ) -> *mut FILE {
            // SAFETY: the program obeys the rules of the function.
            let call = || unsafe { real::$name(path, mode, stream) };
            // SAFETY: the program passes a stream.
            unsafe { reopen(stream, call) }
        }
    )*};
}

reopens!(freopen, freopen64);

/// Puts this library's functions into the C library's tables of functions of streams. Runs when this library is loaded.
pub fn load() {
    let names = [(&READ, "_IO_file_read\0"), (&WRITE, "_IO_file_write\0"), (&CLOSE, "_IO_file_close\0")];
    for (slot, name) in names {
        if real::look_up(slot, name) == real::missing as *mut c_void {
            return;
        }
    }
    if settings::is_on() {
        // SAFETY: the function has the type that `dl_iterate_phdr` expects, and takes no data.
        unsafe { libc::dl_iterate_phdr(Some(in_object), std::ptr::null_mut()) };
    }
}

/// The tables lie in memory that the loader has made read-only after it has relocated it (`PT_GNU_RELRO`). Returns 1 for the object
/// that has the C library's functions, so that no further object is looked at.
unsafe extern "C" fn in_object(info: *mut dl_phdr_info, _: size_t, _: *mut c_void) -> c_int {
    // SAFETY: the loader passes the headers of an object.
    let (base, headers) = unsafe {
        let info = &*info;
        (info.dlpi_addr as usize, std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum as usize))
    };
    let range = |header: &libc::Elf64_Phdr| {
        let begin = base + header.p_vaddr as usize;
        begin..begin + header.p_memsz as usize
    };
    let function = READ.load(Ordering::Relaxed).addr();
    let has_functions =
        |header: &libc::Elf64_Phdr| header.p_type == libc::PT_LOAD && range(header).contains(&function);
    if !headers.iter().any(has_functions) {
        return 0;
    }
    for header in headers.iter().filter(|header| header.p_type == libc::PT_GNU_RELRO) {
        // SAFETY: the range is that of the loader.
        unsafe { replace(range(header)) };
    }
    1
}

/// Replaces the functions in memory that the loader has made read-only.
unsafe fn replace(memory: std::ops::Range<usize>) {
    const WORD: usize = size_of::<usize>();
    // SAFETY: it takes only a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    // The loader protects whole pages only.
    let (begin, end) = (memory.start & !(page - 1), memory.end & !(page - 1));
    let words = memory.start.next_multiple_of(WORD)..end;
    if words.end < words.start + 4 * WORD {
        return;
    }
    let protect = |protection| {
        // SAFETY: the pages are those that the loader protects, and nobody executes them.
        unsafe { libc::mprotect(begin as *mut c_void, end - begin, protection) == 0 }
    };
    if !protect(libc::PROT_READ | libc::PROT_WRITE) {
        return;
    }
    let is = |at: usize, slot: &AtomicPtr<c_void>| {
        // SAFETY: the word lies in the range. Other threads may read it.
        unsafe { AtomicPtr::from_ptr(at as *mut *mut c_void) }.load(Ordering::Relaxed)
            == slot.load(Ordering::Relaxed)
    };
    let set = |at: usize, function: *mut c_void| {
        // SAFETY: the word lies in the range, which can be written by now. Other threads may read it.
        unsafe { AtomicPtr::from_ptr(at as *mut *mut c_void) }.store(function, Ordering::Relaxed);
    };
    // A table has one after the other: read, write, seek, close.
    for at in (words.start..words.end - 3 * WORD).step_by(WORD) {
        if is(at, &READ) && is(at + WORD, &WRITE) {
            set(at, file_read as *mut c_void);
            set(at + WORD, file_write as *mut c_void);
            if is(at + 3 * WORD, &CLOSE) {
                set(at + 3 * WORD, file_close as *mut c_void);
            }
            stdio::follow();
        }
    }
    protect(libc::PROT_READ);
}
