//! `syscall`: system calls by their numbers.
//!
//! If this library has a function for a system call, the call goes to that function and has its results and errors. All other
//! calls go to the kernel with all six arguments.
//!
//! The C function has variable arguments. On x86-64, the integers and addresses of such a call lie where those of a function
//! with seven arguments lie. The system call does not use the arguments that its caller has not passed.

use crate::exports::{births, descriptors, io, polling, process, sockets, splice};
use crate::process::settings;
use crate::system::errno::Errno;
use crate::system::real;
use crate::system::real::told;
use libc::c_long;

/// Makes a system call. A call that makes another process or thread also returns in that one, possibly on a new stack without
/// the frames of this library. So this function makes such calls directly, as the C library does, and passes all others to
/// `call`. Those also are others that make a process with memory of its own, which includes the frames.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn syscall() {
    std::arch::naked_asm!(
        "cmp rdi, {clone}",
        "je 2f",
        "cmp rdi, {fork}",
        "je 2f",
        "cmp rdi, {vfork}",
        "je 2f",
        "cmp rdi, {clone3}",
        "je 2f",
        "jmp {call}",
        "2:",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "call {is_like_fork}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test al, al",
        "jne {call}",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "cmp rax, -4095",
        "jae 3f",
        "ret",
        "3:",
        "mov rdi, rax",
        "jmp {told}",
        clone = const libc::SYS_clone,
        fork = const libc::SYS_fork,
        vfork = const libc::SYS_vfork,
        clone3 = const libc::SYS_clone3,
        is_like_fork = sym births::is_like_fork_by_number,
        call = sym call,
        told = sym told,
    )
}

/// Calls a function with words of the system call as its arguments.
macro_rules! to {
    ($words:ident, $module:ident::$name:ident($($i:literal: $t:ty),*)) => {{
        // SAFETY: the program obeys the rules of the system call, which are those of the function.
        (unsafe { $module::$name($($words[$i] as $t),*) }) as c_long
    }};
}

extern "C-unwind" fn call(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    let words = [a, b, c, d, e, f];
    match number {
        libc::SYS_read => to!(words, io::read(0: _, 1: *mut _, 2: _)),
        libc::SYS_readv => to!(words, io::readv(0: _, 1: *const _, 2: _)),
        libc::SYS_recvfrom => to!(words, io::recvfrom(0: _, 1: *mut _, 2: _, 3: _, 4: *mut _, 5: *mut _)),
        libc::SYS_recvmsg => to!(words, io::recvmsg(0: _, 1: *mut _, 2: _)),
        libc::SYS_recvmmsg => to!(words, io::recvmmsg(0: _, 1: *mut _, 2: _, 3: _, 4: *mut _)),
        libc::SYS_write => to!(words, io::write(0: _, 1: *const _, 2: _)),
        libc::SYS_writev => to!(words, io::writev(0: _, 1: *const _, 2: _)),
        libc::SYS_sendto => to!(words, io::sendto(0: _, 1: *const _, 2: _, 3: _, 4: *const _, 5: _)),
        libc::SYS_sendmsg => to!(words, io::sendmsg(0: _, 1: *const _, 2: _)),
        libc::SYS_sendmmsg => to!(words, io::sendmmsg(0: _, 1: *mut _, 2: _, 3: _)),
        // The kernel takes an offset as two words. The second word is the upper half on systems with 32-bit words.
        libc::SYS_preadv2 => to!(words, io::preadv64v2(0: _, 1: *const _, 2: _, 3: _, 5: _)),
        libc::SYS_pwritev2 => to!(words, io::pwritev64v2(0: _, 1: *const _, 2: _, 3: _, 5: _)),
        libc::SYS_sendfile => to!(words, splice::sendfile64(0: _, 1: _, 2: *mut _, 3: _)),
        libc::SYS_splice => to!(words, splice::splice(0: _, 1: *mut _, 2: _, 3: *mut _, 4: _, 5: _)),
        libc::SYS_socket => to!(words, sockets::socket(0: _, 1: _, 2: _)),
        libc::SYS_connect => to!(words, sockets::connect(0: _, 1: *const _, 2: _)),
        libc::SYS_listen => to!(words, sockets::listen(0: _, 1: _)),
        libc::SYS_accept => to!(words, sockets::accept(0: _, 1: *mut _, 2: *mut _)),
        libc::SYS_accept4 => to!(words, sockets::accept4(0: _, 1: *mut _, 2: *mut _, 3: _)),
        libc::SYS_shutdown => to!(words, sockets::shutdown(0: _, 1: _)),
        libc::SYS_setsockopt => to!(words, sockets::setsockopt(0: _, 1: _, 2: _, 3: *const _, 4: _)),
        libc::SYS_getsockopt => to!(words, sockets::getsockopt(0: _, 1: _, 2: _, 3: *mut _, 4: *mut _)),
        libc::SYS_close => to!(words, descriptors::close_for_program(0: _)),
        libc::SYS_close_range => to!(words, descriptors::close_range(0: _, 1: _, 2: _)),
        libc::SYS_dup => to!(words, descriptors::dup(0: _)),
        libc::SYS_dup2 => to!(words, descriptors::dup2(0: _, 1: _)),
        libc::SYS_dup3 => to!(words, descriptors::dup3(0: _, 1: _, 2: _)),
        libc::SYS_fcntl => to!(words, descriptors::fcntl(0: _, 1: _, 2: *mut _)),
        libc::SYS_ioctl => to!(words, descriptors::ioctl(0: _, 1: _, 2: *mut _)),
        libc::SYS_poll => to!(words, polling::poll(0: *mut _, 1: _, 2: _)),
        libc::SYS_ppoll => to!(words, polling::ppoll(0: *mut _, 1: _, 2: *const _, 3: *const _)),
        libc::SYS_select => to!(words, polling::select(0: _, 1: *mut _, 2: *mut _, 3: *mut _, 4: *mut _)),
        libc::SYS_pselect6 => {
            // The last word is the address of a structure that has the mask's address and its length.
            let mask = f as *const *const libc::sigset_t;
            // SAFETY: the program obeys the rules of the system call.
            let mask = if mask.is_null() { std::ptr::null() } else { unsafe { *mask } };
            // SAFETY: the program obeys the rules of the system call, which are those of the function, except for the mask,
            // which has just been read.
            (unsafe { polling::pselect(a as _, b as *mut _, c as *mut _, d as *mut _, e as *const _, mask) })
                as c_long
        }
        libc::SYS_epoll_create => to!(words, polling::epoll_create(0: _)),
        libc::SYS_epoll_create1 => to!(words, polling::epoll_create1(0: _)),
        libc::SYS_epoll_ctl => to!(words, polling::epoll_ctl(0: _, 1: _, 2: _, 3: *mut _)),
        libc::SYS_epoll_wait => to!(words, polling::epoll_wait(0: _, 1: *mut _, 2: _, 3: _)),
        libc::SYS_epoll_pwait => {
            to!(words, polling::epoll_pwait(0: _, 1: *mut _, 2: _, 3: _, 4: *const _))
        }
        libc::SYS_epoll_pwait2 => {
            to!(words, polling::epoll_pwait2(0: _, 1: *mut _, 2: _, 3: *const _, 4: *const _))
        }
        libc::SYS_execve => to!(words, process::execve(0: *const _, 1: *const _, 2: *const _)),
        libc::SYS_execveat => {
            to!(words, process::execveat(0: _, 1: *const _, 2: *const _, 3: *const _, 4: _))
        }
        libc::SYS_fork | libc::SYS_clone | libc::SYS_clone3 => {
            // SAFETY: the program obeys the rules of the system call.
            process::birth(|| unsafe { real::system_call(number, words) })
        }
        // The library cannot follow what a program does through io_uring. Programs continue without it, as on older kernels.
        libc::SYS_io_uring_setup if settings::is_on() => {
            Errno(libc::ENOSYS).set();
            -1
        }
        libc::SYS_prctl => to!(words, process::prctl(0: _, 1: _, 2: _, 3: _, 4: _)),
        libc::SYS_seccomp => {
            let installs = [libc::SECCOMP_SET_MODE_STRICT, libc::SECCOMP_SET_MODE_FILTER];
            // SAFETY: the program obeys the rules of the system call.
            let call = || unsafe { real::system_call(number, words) };
            process::confining(installs.contains(&(a as libc::c_uint)), call)
        }
        // SAFETY: the program obeys the rules of the system call.
        _ => unsafe { real::system_call(number, words) },
    }
}
