//! `dprintf` and its variants: formatted output to a descriptor.
//!
//! A `va_list` is passed as an address. On x86-64 (psABI, 3.5.7) the reason is that it is an array. Elsewhere the reason is
//! that it is too large for registers.

use crate::state::sockets::SOCKETS;
use crate::system::errno::Errno;
use crate::system::real;
use libc::{c_char, c_int};
use std::ffi::c_void;

unsafe extern "C" {
    fn vasprintf(text: *mut *mut c_char, format: *const c_char, arguments: *mut c_void) -> c_int;
    fn __vasprintf_chk(
        text: *mut *mut c_char,
        flag: c_int,
        format: *const c_char,
        arguments: *mut c_void,
    ) -> c_int;
}

/// Writes the text that `format` makes, as the C library does. Returns the length of the text if all of it was written, and
/// otherwise -1 without a count.
fn write_formatted(fd: c_int, format: impl FnOnce(*mut *mut c_char) -> c_int) -> c_int {
    let mut text = std::ptr::null_mut();
    let len = format(&raw mut text);
    let Ok(all) = usize::try_from(len) else { return -1 };
    let mut written = 0;
    let mut result = len;
    while written < all {
        // SAFETY: the text has `all` bytes.
        let n = unsafe { crate::exports::io::write(fd, text.add(written).cast(), all - written) };
        match usize::try_from(n) {
            Ok(n) => written += n,
            Err(_) if Errno::last() == Errno(libc::EINTR) => {}
            Err(_) => {
                result = -1;
                break;
            }
        }
    }
    let errno = Errno::last();
    // SAFETY: the C library has allocated the text.
    unsafe { libc::free(text.cast()) };
    if result < 0 {
        errno.set();
    }
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int {
    if SOCKETS.get(fd).is_none() {
        // SAFETY: the program obeys the rules of the function.
        return unsafe { real::vdprintf(fd, format, arguments) };
    }
    // SAFETY: there is room for a pointer, and the program passes a format with a list of its arguments.
    write_formatted(fd, |text| unsafe { vasprintf(text, format, arguments) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __vdprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    if SOCKETS.get(fd).is_none() {
        // SAFETY: the program obeys the rules of the function.
        return unsafe { real::__vdprintf_chk(fd, flag, format, arguments) };
    }
    // SAFETY: there is room for a pointer, and the program passes a format with a list of its arguments.
    write_formatted(fd, |text| unsafe { __vasprintf_chk(text, flag, format, arguments) })
}

/// Defines a function with variable arguments. It saves the arguments that arrive in registers at the places where a `va_list`
/// expects them (psABI, 3.5.7), and calls `$function` with the `va_list` in place of `...`. The first `$named` bytes of the
/// saved registers belong to the named arguments.
#[cfg(target_arch = "x86_64")]
macro_rules! variadic {
    ($name:ident, $named:literal, $list:literal, $function:ident) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() {
            std::arch::naked_asm!(
                ".cfi_startproc",
                "push rbp",
                ".cfi_def_cfa_offset 16",
                ".cfi_offset rbp, -16",
                "mov rbp, rsp",
                ".cfi_def_cfa_register rbp",
                "sub rsp, 208",
                "mov [rsp + 32], rdi",
                "mov [rsp + 40], rsi",
                "mov [rsp + 48], rdx",
                "mov [rsp + 56], rcx",
                "mov [rsp + 64], r8",
                "mov [rsp + 72], r9",
                // AL has the number of vector registers that the caller has used.
                "test al, al",
                "je 2f",
                "movaps [rsp + 80], xmm0",
                "movaps [rsp + 96], xmm1",
                "movaps [rsp + 112], xmm2",
                "movaps [rsp + 128], xmm3",
                "movaps [rsp + 144], xmm4",
                "movaps [rsp + 160], xmm5",
                "movaps [rsp + 176], xmm6",
                "movaps [rsp + 192], xmm7",
                "2:",
                concat!("mov dword ptr [rsp], ", $named),
                "mov dword ptr [rsp + 4], 48",
                "lea rax, [rbp + 16]",
                "mov [rsp + 8], rax",
                "lea rax, [rsp + 32]",
                "mov [rsp + 16], rax",
                concat!("mov ", $list, ", rsp"),
                "call {function}",
                "leave",
                ".cfi_def_cfa rsp, 8",
                "ret",
                ".cfi_endproc",
                function = sym $function,
            )
        }
    };
}

#[cfg(target_arch = "x86_64")]
variadic!(dprintf, 16, "rdx", vdprintf);
#[cfg(target_arch = "x86_64")]
variadic!(__dprintf_chk, 24, "rcx", __vdprintf_chk);
