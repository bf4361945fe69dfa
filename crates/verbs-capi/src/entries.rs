//! The entry points of both libraries, which `build.rs` writes down, and the way from there to the real ones.
//!
//! A forwarded call arrives with its arguments in registers and on the stack, and nobody here knows how many they are. So its
//! entry point touches none of them: it jumps to an address in memory. As long as that is zero, it takes the long way through
//! [`ginnel_verbs_resolve`] first, which finds the address.
#![allow(unsafe_code)] // Assembly, and functions that it knows by name.

use crate::library;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "entry points exist for x86-64 alone: src/entries.rs and librdmacm.S need those of this machine"
);

// What `build.rs` calls.
//
// The long way saves every register that carries arguments: six of integers, rax (the number of vector registers of a variadic
// call), r10 (a nested function's frame) and eight of vectors. No function of these libraries takes vectors that are wider.
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

/// What an entry point knows of itself. The macro `ginnel_forward` lays it out.
#[repr(C)]
pub struct Entry {
    target: AtomicPtr<c_void>,
    name: *const c_char,
    node: *const c_char,
    missing: unsafe extern "C" fn(),
    library: usize,
}

/// Finds what a name stands for in the real library, and keeps it. Called by the entry point alone.
///
/// # Safety
///
/// The entry is one that `ginnel_forward` laid out.
#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_verbs_resolve(entry: *const Entry) -> *const c_void {
    // SAFETY: the caller's promise; entries are static, and only their first word changes, atomically.
    let entry = unsafe { &*entry };
    // SAFETY: name and node are static strings of the same macro.
    let found = unsafe { library::find(entry.library, entry.name, entry.node) };
    let target = found.unwrap_or(entry.missing as *mut c_void);
    // Two threads that come at once find the same. Nothing else is published with it: code is there for everybody.
    entry.target.store(target, Ordering::Relaxed);
    target
}

fn no_library() {
    // SAFETY: errno is the thread's own.
    unsafe { *libc::__errno_location() = libc::ENOSYS }
}

// What stands in for a function that the real library does not have, or that has no real library. Such a function may
// have any arguments: these look at none.

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
