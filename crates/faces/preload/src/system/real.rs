//! The functions of the C library that this library interposes.
//!
//! They are looked up once, when this library is loaded. Earlier calls (an allocator may read files while the loader is still
//! working) go to the kernel directly, because a lookup may allocate.
#![allow(unsafe_code)] // Calls the C library.
#![allow(
    clippy::missing_safety_doc,
    reason = "each is the C function of its name, with that function's rules"
)]

use libc::{
    c_char, c_int, c_long, c_uint, c_ulong, epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off64_t,
    pollfd, sighandler_t, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};

/// An argument that can be converted to the word which the kernel expects.
trait Word {
    fn word(self) -> c_long;
}

macro_rules! words {
    ($($t:ty),*) => {$(
        impl Word for $t {
            fn word(self) -> c_long {
                self as c_long
            }
        }
    )*};
}
words!(c_int, c_uint, c_long, c_ulong, usize);

impl<T> Word for *const T {
    fn word(self) -> c_long {
        self as c_long
    }
}
impl<T> Word for *mut T {
    fn word(self) -> c_long {
        self as c_long
    }
}

macro_rules! real {
    ($($slot:ident: $name:ident($($arg:ident: $t:ty),*) -> $r:ty $(= $number:ident)?;)*) => {
        $(
            static $slot: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

            pub unsafe fn $name($($arg: $t),*) -> $r {
                let found = $slot.load(Ordering::Relaxed);
                let number: Option<c_long> = None$(.or(Some(libc::$number)))?;
                if let (true, Some(number)) = (found.is_null(), number) {
                    // SAFETY: the function of this name makes this system call with the same arguments.
                    return unsafe { early(number, &[$($arg.word()),*]) } as $r;
                }
                let found = if found.is_null() { look_up(&$slot, concat!(stringify!($name), "\0")) } else { found };
                // SAFETY: the C library's function of this name has this type.
                let function = unsafe {
                    std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($t),*) -> $r>(found)
                };
                // SAFETY: the caller obeys the rules of that function.
                unsafe { function($($arg),*) }
            }
        )*

        /// Looks up all of these functions.
        pub fn find_all() {
            $(look_up(&$slot, concat!(stringify!($name), "\0"));)*
        }
    };
}

real! {
    READ: read(fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t = SYS_read;
    READV: readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t = SYS_readv;
    RECV: recv(fd: c_int, buffer: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    RECVFROM: recvfrom(fd: c_int, buffer: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> ssize_t = SYS_recvfrom;
    RECVMSG: recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t = SYS_recvmsg;
    RECVMMSG: recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int = SYS_recvmmsg;
    WRITE: write(fd: c_int, buffer: *const c_void, len: size_t) -> ssize_t = SYS_write;
    WRITEV: writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t = SYS_writev;
    SEND: send(fd: c_int, buffer: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    SENDTO: sendto(fd: c_int, buffer: *const c_void, len: size_t, flags: c_int, address: *const sockaddr, address_len: socklen_t) -> ssize_t = SYS_sendto;
    SENDMSG: sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t = SYS_sendmsg;
    SENDMMSG: sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int = SYS_sendmmsg;
    PREADV64V2: preadv64v2(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    PWRITEV64V2: pwritev64v2(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    SENDFILE64: sendfile64(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t = SYS_sendfile;
    SIGACTION: sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    SIGNAL: signal(signal: c_int, function: sighandler_t) -> sighandler_t;
    SYSV_SIGNAL: __sysv_signal(signal: c_int, function: sighandler_t) -> sighandler_t;
    SIGSET: sigset(signal: c_int, function: sighandler_t) -> sighandler_t;
    PRCTL: prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int = SYS_prctl;
    FORK: fork() -> libc::pid_t;
    ADDDUP2: posix_spawn_file_actions_adddup2(actions: *mut libc::posix_spawn_file_actions_t, from: c_int, to: c_int) -> c_int;
    SPAWN: posix_spawn(process: *mut libc::pid_t, path: *const c_char, actions: *const libc::posix_spawn_file_actions_t, attributes: *const libc::posix_spawnattr_t, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    SPAWNP: posix_spawnp(process: *mut libc::pid_t, file: *const c_char, actions: *const libc::posix_spawn_file_actions_t, attributes: *const libc::posix_spawnattr_t, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    SYSTEM: system(command: *const c_char) -> c_int;
    POPEN: popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE;
    EXECVE: execve(path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int = SYS_execve;
    EXECVPE: execvpe(file: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    EXECVEAT: execveat(folder: c_int, path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char, flags: c_int) -> c_int = SYS_execveat;
    FEXECVE: fexecve(fd: c_int, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    SPLICE: splice(from: c_int, from_offset: *mut off64_t, to: c_int, to_offset: *mut off64_t, len: size_t, flags: c_uint) -> ssize_t = SYS_splice;
    SOCKET: socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int = SYS_socket;
    CONNECT: connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int = SYS_connect;
    LISTEN: listen(fd: c_int, backlog: c_int) -> c_int = SYS_listen;
    ACCEPT: accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int = SYS_accept;
    ACCEPT4: accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int = SYS_accept4;
    SHUTDOWN: shutdown(fd: c_int, how: c_int) -> c_int = SYS_shutdown;
    SETSOCKOPT: setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int = SYS_setsockopt;
    GETSOCKOPT: getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int = SYS_getsockopt;
    IOCTL: ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int = SYS_ioctl;
    FCNTL: fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int = SYS_fcntl;
    FCNTL64: fcntl64(fd: c_int, command: c_int, argument: *mut c_void) -> c_int = SYS_fcntl;
    FDOPEN: fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE;
    FREOPEN: freopen(path: *const c_char, mode: *const c_char, stream: *mut libc::FILE) -> *mut libc::FILE;
    FREOPEN64: freopen64(path: *const c_char, mode: *const c_char, stream: *mut libc::FILE) -> *mut libc::FILE;
    VDPRINTF: vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    VDPRINTF_CHK: __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    AIO_READ: aio_read(control: *mut libc::aiocb) -> c_int;
    AIO_WRITE: aio_write(control: *mut libc::aiocb) -> c_int;
    AIO_READ64: aio_read64(control: *mut libc::aiocb) -> c_int;
    AIO_WRITE64: aio_write64(control: *mut libc::aiocb) -> c_int;
    LIO_LISTIO: lio_listio(mode: c_int, list: *const *mut libc::aiocb, count: c_int, event: *mut libc::sigevent) -> c_int;
    LIO_LISTIO64: lio_listio64(mode: c_int, list: *const *mut libc::aiocb, count: c_int, event: *mut libc::sigevent) -> c_int;
    CLOSE: close(fd: c_int) -> c_int = SYS_close;
    CLOSE_RANGE: close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int = SYS_close_range;
    DUP: dup(fd: c_int) -> c_int = SYS_dup;
    DUP2: dup2(from: c_int, to: c_int) -> c_int = SYS_dup2;
    DUP3: dup3(from: c_int, to: c_int, flags: c_int) -> c_int = SYS_dup3;
    POLL: poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int = SYS_poll;
    PPOLL: ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    SELECT: select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int = SYS_select;
    PSELECT: pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    EPOLL_CREATE: epoll_create(size: c_int) -> c_int = SYS_epoll_create;
    EPOLL_CREATE1: epoll_create1(flags: c_int) -> c_int = SYS_epoll_create1;
    EPOLL_CTL: epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int = SYS_epoll_ctl;
    EPOLL_WAIT: epoll_wait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: c_int) -> c_int = SYS_epoll_wait;
    EPOLL_PWAIT: epoll_pwait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: c_int, mask: *const sigset_t) -> c_int;
    EPOLL_PWAIT2: epoll_pwait2(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int;
}

/// Makes a system call before the functions of the C library have been looked up.
#[cold]
unsafe fn early(number: c_long, arguments: &[c_long]) -> c_long {
    let at = |i: usize| arguments.get(i).copied().unwrap_or(0);
    // SAFETY: the caller passes the arguments of the system call, and the kernel ignores further ones.
    unsafe { system_call(number, [at(0), at(1), at(2), at(3), at(4), at(5)]) }
}

/// Makes a system call in the way of the C library's `syscall`, which itself is not usable here because this library interposes it.
#[cfg(target_arch = "x86_64")]
pub unsafe fn system_call(number: c_long, arguments: [c_long; 6]) -> c_long {
    let [a, b, c, d, e, f] = arguments;
    let result: c_long;
    // SAFETY: the caller obeys the rules of the system call. Besides the result, the kernel changes RCX and R11 (the x86-64
    // psABI, A.2.1).
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    told(result)
}

#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn system_call(number: c_long, arguments: [c_long; 6]) -> c_long {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the caller obeys the rules of the system call.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

/// Converts the kernel's result to that of a C function: for an error, sets errno and returns -1.
#[cfg(target_arch = "x86_64")]
pub extern "C" fn told(result: c_long) -> c_long {
    match result {
        -4095..0 => {
            crate::system::errno::Errno(-result as c_int).set();
            -1
        }
        result => result,
    }
}

/// Looks up a function in the libraries behind this one. If none of them has it, the result is [`missing`], which fails with
/// ENOSYS like a system call on an older kernel.
#[cold]
pub fn look_up(slot: &AtomicPtr<c_void>, name: &'static str) -> *mut c_void {
    // SAFETY: all callers pass a `name` that ends with a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast::<c_char>()) };
    let found = if found.is_null() { missing as *mut c_void } else { found };
    slot.store(found, Ordering::Relaxed);
    found
}

/// Replaces a function that the C library does not have.
pub extern "C-unwind" fn missing() -> c_long {
    crate::system::errno::Errno(libc::ENOSYS).set();
    -1
}
