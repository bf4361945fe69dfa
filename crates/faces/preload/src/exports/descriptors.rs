//! `close`, `dup`, `fcntl`, `ioctl` and their variants.

use crate::calls::descriptors;
use crate::carrying::{passing, stdio};
use crate::epoll::EPOLLS;
use crate::process::{hidden, owner};
use crate::state::inherited;
use crate::state::sockets::SOCKETS;
use crate::system::memory::can_write;
use crate::system::{errno, kernel, real};
use libc::{c_int, c_uint, c_ulong};
use std::ffi::c_void;
use std::sync::atomic::Ordering;

/// Makes a system call that closes a descriptor or gives its number to another file, and removes the descriptor from the
/// tables. A child of `vfork` uses its parent's tables, so this function does not change them there.
pub(super) fn closing<R>(fd: c_int, call: impl FnOnce() -> R) -> R {
    let is_ours = match SOCKETS.get(fd) {
        // Most connections end here, and the system call of `owns_tables` would be a noticeable cost for them.
        Some(socket) if socket.is_plain() && !owner::may_be_child() => true,
        None if EPOLLS.get(fd).is_none() => false,
        _ => crate::process::owner::owns_tables(),
    };
    if is_ours {
        return descriptors::replace(fd, call);
    }
    call()
}

/// Returns whether `dup2` or `dup3` would close the second descriptor.
fn is_replaced(from: c_int, to: c_int, flags: c_int) -> bool {
    from != to
        && flags & !libc::O_CLOEXEC == 0
        && (SOCKETS.get(to).is_some() || EPOLLS.get(to).is_some())
        && kernel::is_open(from)
}

/// Records that the kernel has made `copy`, which is a copy of another descriptor. Returns `copy`.
fn copied(fd: c_int, copy: c_int) -> c_int {
    if copy < 0 {
        return copy;
    }
    if crate::process::owner::owns_tables() {
        if let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.is_joined()) {
            inherited::copied(socket, copy);
        }
        descriptors::duplicate(fd, copy);
    } else if let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.may_change()) {
        // If it has changed over, the library looks for it when this child of `vfork` executes a program.
        crate::exports::process::also_has(socket);
    }
    copy
}

/// Does the same for a copy with the lowest free number.
fn copied_to_free(fd: c_int, copy: c_int) -> c_int {
    let copy = copied(fd, copy);
    if copy >= 0
        && let Some(socket) = SOCKETS.get(copy)
        && crate::process::owner::owns_tables()
        && !stdio::prepare(socket, copy, copy)
    {
        // SAFETY: `close` takes only a number.
        unsafe { close_for_program(copy) };
        return errno::fail(libc::EBUSY);
    }
    copy
}

/// Copies a descriptor to a given number by `call`.
fn copy_to(from: c_int, to: c_int, flags: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if hidden::is_hidden(to) {
        return errno::fail(libc::EBUSY);
    }
    if from != to
        && flags & !libc::O_CLOEXEC == 0
        && let Some(socket) = SOCKETS.get(from)
        && crate::process::owner::owns_tables()
        && !stdio::prepare(socket, from, to)
    {
        return errno::fail(libc::EBUSY);
    }
    let call = || copied(from, call());
    if is_replaced(from, to, flags) { closing(to, call) } else { call() }
}

/// Does what `close` does when the program calls it. Fails with EBADF for the library's own descriptors.
pub unsafe extern "C-unwind" fn close_for_program(fd: c_int) -> c_int {
    if hidden::is_hidden(fd) {
        return errno::fail(libc::EBADF);
    }
    // SAFETY: `close` takes only a number.
    closing(fd, || unsafe { real::close(fd) })
}

/// Closes a descriptor. The Rust standard library, which is linked into this library, also calls this function to close this
/// library's own descriptors. So the function checks whether its caller's address lies in this library.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    extern "C-unwind" fn close_by(fd: c_int, caller: usize) -> c_int {
        if hidden::is_own_code(caller) {
            // SAFETY: `close` takes only a number.
            return unsafe { real::close(fd) };
        }
        // SAFETY: the function takes only a number.
        unsafe { close_for_program(fd) }
    }
    std::arch::naked_asm!("mov rsi, [rsp]", "jmp {close_by}", close_by = sym close_by)
}

#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    // SAFETY: the function takes only a number.
    unsafe { close_for_program(fd) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // The kernel refuses flags that it does not know.
    let known = (libc::CLOSE_RANGE_CLOEXEC | libc::CLOSE_RANGE_UNSHARE) as c_int;
    if flags & !known != 0 {
        // SAFETY: the function takes only numbers.
        return unsafe { real::close_range(first, last, flags) };
    }
    // With CLOSE_RANGE_CLOEXEC, the call closes nothing now.
    if flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 {
        SOCKETS.used(first, last).for_each(|fd| inherited::set_inherited(fd, false));
    } else if first <= last {
        for fd in SOCKETS.used(first, last).chain(EPOLLS.used(first, last)) {
            closing(fd, || {
                if flags == 0 {
                    // SAFETY: `close` takes only a number. `close_range` does not report its error.
                    unsafe { real::close(fd) };
                }
            });
        }
    }
    if first > last {
        // SAFETY: the function takes only numbers.
        return unsafe { real::close_range(first, last, flags) };
    }
    for (first, last) in hidden::others(first, last) {
        // SAFETY: the function takes only numbers.
        let result = unsafe { real::close_range(first, last, flags) };
        if result != 0 {
            return result;
        }
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn closefrom(first: c_int) {
    // SAFETY: the function takes only numbers.
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: the function takes only a number.
    copied_to_free(fd, unsafe { real::dup(fd) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup2(from: c_int, to: c_int) -> c_int {
    // SAFETY: the function takes only numbers.
    copy_to(from, to, 0, || unsafe { real::dup2(from, to) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: the function takes only numbers.
    copy_to(from, to, flags, || unsafe { real::dup3(from, to, flags) })
}

/// The C function has variable arguments. In the calling convention of this machine, a third one lies where that of this
/// function lies.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    after_fcntl(fd, command, argument, unsafe { real::fcntl(fd, command, argument) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    after_fcntl(fd, command, argument, unsafe { real::fcntl64(fd, command, argument) })
}

/// Returns whether the kernel will close a descriptor at `exec` although the program wants executed programs to inherit it.
fn is_withheld(fd: c_int) -> bool {
    SOCKETS.get(fd).is_some_and(|socket| socket.is_joined()) && inherited::is_inherited(fd)
}

/// Records whether the program wants executed programs to inherit a descriptor. They inherit a connection that has changed over
/// only after it has returned to TCP.
fn leave_to_children(fd: c_int, inherited: bool) {
    if let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.is_joined())
        && crate::process::owner::owns_tables()
    {
        inherited::set_inherited(fd, inherited);
        if !socket.is_back.load(Ordering::Relaxed) {
            kernel::close_on_exec(fd);
        }
    }
}

fn after_fcntl(fd: c_int, command: c_int, argument: *mut c_void, result: c_int) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => return copied_to_free(fd, result),
        libc::F_SETFD if result >= 0 => {
            leave_to_children(fd, argument as usize & libc::FD_CLOEXEC as usize == 0);
        }
        // The result is the flag that the program has set. The kernel's flag differs.
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

/// The request of `ioctl` that sets or clears O_ASYNC (`asm-generic/ioctls.h`).
const FIOASYNC: c_ulong = 0x5452;

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if let Some(queued) = crate::exports::sockets::queued(fd, request) {
        if !can_write(argument, size_of::<c_int>()) {
            return errno::fail(libc::EFAULT);
        }
        // SAFETY: these requests fill an int, and the kernel accepts any address for it.
        unsafe { argument.cast::<c_int>().write_unaligned(c_int::try_from(queued).unwrap_or(c_int::MAX)) };
        return 0;
    }
    // SAFETY: the program obeys the rules of the function.
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
        // SAFETY: these requests take an int, and the kernel accepts any address for it.
        let on = unsafe { argument.cast::<c_int>().read_unaligned() } != 0;
        if request == libc::FIONBIO {
            socket.set_nonblocking(Some(on));
        } else if on {
            passing::signalled(socket, fd);
        }
    }
    result
}
