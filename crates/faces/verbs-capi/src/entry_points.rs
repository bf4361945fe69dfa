//! The entry points of both libraries, which `build.rs` generates, and their path to the real libraries.
//!
//! A forwarded call arrives with its arguments in registers and on the stack, and this library does not know how many there are. So its
//! entry point touches none of them and jumps to an address in memory. As long as that address is zero, the entry point takes the slow
//! path: it first calls [`ginnel_verbs_resolve`], which finds the address.
#![allow(unsafe_code)] // Assembly, and functions that the assembly calls by name.

use crate::library;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "entry points exist for x86-64 alone: src/entry_points.rs and librdmacm.S need those of this machine"
);

// The macros that the output of `build.rs` uses.
//
// The slow path saves every register that carries arguments: six integer registers, rax (the number of vector registers of a variadic
// call), r10 (the static chain of a nested function) and eight vector registers. No function of these libraries takes wider vectors.
#[cfg(not(test))]
std::arch::global_asm!(
    r#"
    .macro ginnel_ours entry, target
    .text
    .p2align 4
    .globl \entry
    .type \entry, @function
\entry:
    .cfi_startproc
    jmp \target
    .cfi_endproc
    .size \entry, . - \entry
    .endm

    .macro ginnel_forward entry, name, node, missing, library
    .section .rodata
1:  .asciz "\name"
2:  .asciz "\node"
    .data
    .p2align 3
3:  .quad 0, 1b, 2b, ginnel_missing_\missing, \library
    .text
    .p2align 4
    .globl \entry
    .type \entry, @function
\entry:
    .cfi_startproc
    movq 3b(%rip), %r11
    testq %r11, %r11
    jz 4f
    jmp *%r11
4:  leaq 3b(%rip), %r11
    jmp ginnel_verbs_long_way
    .cfi_endproc
    .size \entry, . - \entry
    .endm

    .macro ginnel_object entry
    .bss
    .p2align 3
    .globl \entry
    .type \entry, @object
\entry:
    .zero 8
    .size \entry, 1
    .endm

    .text
    .p2align 4
    .type ginnel_verbs_long_way, @function
ginnel_verbs_long_way:
    .cfi_startproc
    pushq %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    movq %rsp, %rbp
    .cfi_def_cfa_register %rbp
    subq $192, %rsp
    movq %rdi, (%rsp)
    movq %rsi, 8(%rsp)
    movq %rdx, 16(%rsp)
    movq %rcx, 24(%rsp)
    movq %r8, 32(%rsp)
    movq %r9, 40(%rsp)
    movq %rax, 48(%rsp)
    movq %r10, 56(%rsp)
    movaps %xmm0, 64(%rsp)
    movaps %xmm1, 80(%rsp)
    movaps %xmm2, 96(%rsp)
    movaps %xmm3, 112(%rsp)
    movaps %xmm4, 128(%rsp)
    movaps %xmm5, 144(%rsp)
    movaps %xmm6, 160(%rsp)
    movaps %xmm7, 176(%rsp)
    movq %r11, %rdi
    call ginnel_verbs_resolve
    movq %rax, %r11
    movq (%rsp), %rdi
    movq 8(%rsp), %rsi
    movq 16(%rsp), %rdx
    movq 24(%rsp), %rcx
    movq 32(%rsp), %r8
    movq 40(%rsp), %r9
    movq 48(%rsp), %rax
    movq 56(%rsp), %r10
    movaps 64(%rsp), %xmm0
    movaps 80(%rsp), %xmm1
    movaps 96(%rsp), %xmm2
    movaps 112(%rsp), %xmm3
    movaps 128(%rsp), %xmm4
    movaps 144(%rsp), %xmm5
    movaps 160(%rsp), %xmm6
    movaps 176(%rsp), %xmm7
    leave
    .cfi_def_cfa %rsp, 8
    jmp *%r11
    .cfi_endproc
    .size ginnel_verbs_long_way, . - ginnel_verbs_long_way
    "#,
    include_str!(concat!(env!("OUT_DIR"), "/entries.s")),
    options(att_syntax, raw)
);

/// The data of an entry point, with the layout of the macro `ginnel_forward`.
#[repr(C)]
pub struct Entry {
    target: AtomicPtr<c_void>,
    name: *const c_char,
    node: *const c_char,
    missing: unsafe extern "C" fn(),
    library: usize,
}

/// Finds the function of the real library, and stores its address in the entry. Only the entry point calls this.
///
/// # Safety
///
/// The entry was laid out by `ginnel_forward`.
#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_verbs_resolve(entry: *const Entry) -> *const c_void {
    // SAFETY: the caller's promise. Entries are static, and only their first word changes, atomically.
    let entry = unsafe { &*entry };
    // SAFETY: name and node are static strings of the same macro.
    let found = unsafe { library::find(entry.library, entry.name, entry.node) };
    let target = found.unwrap_or(entry.missing as *mut c_void);
    // Two threads at the same time find the same address. No other data is published with it: the code is visible to all threads.
    entry.target.store(target, Ordering::Relaxed);
    target
}

fn no_library() {
    // SAFETY: each thread has its own errno.
    unsafe { *libc::__errno_location() = libc::ENOSYS }
}

// Substitutes for functions of the real library that do not exist, because the real library lacks them or is missing itself. The
// replaced function may have any arguments, so the substitutes read none.

#[unsafe(no_mangle)]
extern "C" fn ginnel_missing_null() -> *mut c_void {
    no_library();
    ptr::null_mut()
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_missing_errno() -> c_int {
    no_library();
    libc::ENOSYS
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_missing_minus() -> c_long {
    no_library();
    -1
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_missing_negative() -> c_long {
    no_library();
    -c_long::from(libc::ENOSYS)
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_missing_zero() -> c_long {
    no_library();
    0
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_missing_void() {
    no_library();
}
