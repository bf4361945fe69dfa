//! close, dup, fcntl, ioctl and their kin.

use std::ffi::c_void;

use libc::{c_int, c_uint, c_ulong};

use super::births;
use crate::errno;
use crate::table::{self, EPOLLS, SOCKETS};
use crate::{hidden, kernel, passing, real};

/// Makes a call of the kernel that closes a descriptor, or gives its number to another file. The table of a child of `vfork` is its parent's,
/// and stays as it is.
fn closing<R>(fd: c_int, call: impl FnOnce() -> R) -> R {
    let is_ours = match SOCKETS.get(fd) {
        // Most connections end so, and a system call would be much for them.
        Some(socket) if socket.is_plain() && !births::may_be_child() => true,
        None if EPOLLS.get(fd).is_none() => false,
        _ => super::process::owns_tables(),
    };
    if is_ours {
        return table::replace(fd, call);
    }
    call()
}

/// Whether `dup2` and its kin would close the second descriptor.
fn is_replaced(from: c_int, to: c_int, flags: c_int) -> bool {
    from != to
        && flags & !libc::O_CLOEXEC == 0
        && (SOCKETS.get(to).is_some() || EPOLLS.get(to).is_some())
        && kernel::is_open(from)
}

/// After the kernel has made a descriptor that is a copy of another one.
fn copied(fd: c_int, copy: c_int) -> c_int {
    // A child of `vfork` has the connections of the program that it executes looked for when it does.
    if copy >= 0 && super::process::owns_tables() {
        if SOCKETS.get(fd).is_some_and(|socket| socket.is_joined()) {
            passing::withhold(copy);
        }
        table::duplicate(fd, copy);
    }
    copy
}

/// `close`, called by the program.
pub unsafe extern "C-unwind" fn close_for_program(fd: c_int) -> c_int {
    if hidden::is_hidden(fd) {
        return errno::fail(libc::EBADF);
    }
    // SAFETY: it takes a number.
    closing(fd, || unsafe { real::close(fd) })
}

/// Descriptors of this library too are closed by the C function: by the standard library, which is a part of this one. So it is told who
/// calls it.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    extern "C-unwind" fn close_by(fd: c_int, caller: usize) -> c_int {
        if hidden::is_own_code(caller) {
            // SAFETY: it takes a number.
            return unsafe { real::close(fd) };
        }
        // SAFETY: as above.
        unsafe { close_for_program(fd) }
    }
    std::arch::naked_asm!("mov rsi, [rsp]", "jmp {close_by}", close_by = sym close_by)
}

#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    // SAFETY: it takes a number.
    unsafe { close_for_program(fd) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // CLOSE_RANGE_CLOEXEC closes nothing now.
    if flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 {
        SOCKETS.used(first, last).for_each(|fd| passing::set_inherited(fd, false));
    } else if first <= last {
        for fd in SOCKETS.used(first, last).chain(EPOLLS.used(first, last)) {
            closing(fd, || {
                if flags == 0 {
                    // SAFETY: it takes a number. Its error is none of this call's.
                    unsafe { real::close(fd) };
                }
            });
        }
    }
    if first > last {
        // SAFETY: it takes numbers.
        return unsafe { real::close_range(first, last, flags) };
    }
    for (first, last) in hidden::others(first, last) {
        // SAFETY: as above.
        let result = unsafe { real::close_range(first, last, flags) };
        if result != 0 {
            return result;
        }
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn closefrom(first: c_int) {
    // SAFETY: it takes numbers.
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: it takes a number.
    copied(fd, unsafe { real::dup(fd) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup2(from: c_int, to: c_int) -> c_int {
    if hidden::is_hidden(to) {
        return errno::fail(libc::EBUSY);
    }
    // SAFETY: it takes numbers.
    let call = || copied(from, unsafe { real::dup2(from, to) });
    if is_replaced(from, to, 0) { closing(to, call) } else { call() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    if hidden::is_hidden(to) {
        return errno::fail(libc::EBUSY);
    }
    // SAFETY: it takes numbers.
    let call = || copied(from, unsafe { real::dup3(from, to, flags) });
    if is_replaced(from, to, flags) { closing(to, call) } else { call() }
}

/// The C function takes any arguments; on this machine's calling convention, a third is where it would be.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the program keeps the rules.
    after_fcntl(fd, command, argument, unsafe { real::fcntl(fd, command, argument) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the program keeps the rules.
    after_fcntl(fd, command, argument, unsafe { real::fcntl64(fd, command, argument) })
}

/// Whether the kernel does not leave a descriptor to programs that are executed although the program means it to.
fn is_withheld(fd: c_int) -> bool {
    SOCKETS.get(fd).is_some_and(|socket| socket.is_joined()) && passing::is_inherited(fd)
}

/// The program has said whether programs that it executes get a descriptor. A connection that has changed over they get only once it has
/// gone back.
fn leave_to_children(fd: c_int, inherited: bool) {
    if let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.is_joined())
        && super::process::owns_tables()
    {
        passing::set_inherited(fd, inherited);
        if !socket.is_back.load(std::sync::atomic::Ordering::Relaxed) {
            kernel::close_on_exec(fd);
        }
    }
}

fn after_fcntl(fd: c_int, command: c_int, argument: *mut c_void, result: c_int) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => return copied(fd, result),
        libc::F_SETFD if result >= 0 => {
            leave_to_children(fd, argument as usize & libc::FD_CLOEXEC as usize == 0);
        }
        // What the program has set, which is not what the kernel has.
        libc::F_GETFD if result >= 0 && is_withheld(fd) => return result & !libc::FD_CLOEXEC,
        libc::F_SETFL if result == 0 => {
            if let Some(socket) = SOCKETS.get(fd) {
                socket.set_nonblocking(Some(argument as usize & libc::O_NONBLOCK as usize != 0));
                if argument as usize & libc::O_ASYNC as usize != 0 {
                    passing::signalled(socket, fd);
                }
            }
        }
        _ => {}
    }
    result
}

/// Sets O_ASYNC.
const FIOASYNC: c_ulong = 0x5452;

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if let Some(queued) = super::sockets::queued(fd, request) {
        // SAFETY: these requests fill an int, which the kernel takes at any address.
        unsafe { argument.cast::<c_int>().write_unaligned(c_int::try_from(queued).unwrap_or(c_int::MAX)) };
        return 0;
    }
    // SAFETY: the program keeps the rules.
    let result = unsafe { real::ioctl(fd, request, argument) };
    if request == libc::FIONREAD
        && result == 0
        && let Some(socket) = SOCKETS.get(fd)
        && socket.cache.has_answers()
    {
        let answers = c_int::try_from(socket.cache.queued()).unwrap_or(c_int::MAX);
        // SAFETY: the kernel has just filled an int.
        unsafe {
            let queued = argument.cast::<c_int>();
            queued.write_unaligned(queued.read_unaligned().saturating_add(answers));
        }
    }
    if [libc::FIOCLEX, libc::FIONCLEX].contains(&request) && result == 0 {
        leave_to_children(fd, request == libc::FIONCLEX);
    }
    if [libc::FIONBIO, FIOASYNC].contains(&request)
        && result == 0
        && let Some(socket) = SOCKETS.get(fd)
    {
        // SAFETY: these requests take an int, which the kernel takes at any address.
        let on = unsafe { argument.cast::<c_int>().read_unaligned() } != 0;
        if request == libc::FIONBIO {
            socket.set_nonblocking(Some(on));
        } else if on {
            passing::signalled(socket, fd);
        }
    }
    result
}
