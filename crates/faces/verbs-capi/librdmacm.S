/* librdmacm.so.1: each name jumps to the implementation in libibverbs.so.1. The Makefile generates names.inc from librdmacm.map. */

#ifndef __x86_64__
#error jumps exist for x86-64 alone: write those of this machine
#endif

        .section .note.GNU-stack, "", @progbits
        .text

#define JUMP(name)                                      \
        .p2align 4;                                     \
        .globl name;                                    \
        .type name, @function;                          \
name:   jmp *ginnel_cm_##name@GOTPCREL(%rip);           \
        .size name, . - name;

#include "names.inc"

/* Identifies the library as ours, wherever it is installed. */
        .globl ginnel_is_librdmacm
        .type ginnel_is_librdmacm, @function
ginnel_is_librdmacm:
        ret
        .size ginnel_is_librdmacm, . - ginnel_is_librdmacm
