//! Detects QEMU's processor emulation.
#![allow(unsafe_code)] // `cpuid` is an instruction.

/// Returns whether QEMU emulates the processor (TCG). The emulation has no caches.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "compilers from 1.93 on call it safe")]
pub fn is_emulated() -> bool {
    use std::arch::x86_64::__cpuid;
    // SAFETY: every x86-64 processor has this instruction, which only reads.
    let (features, hypervisor) = unsafe { (__cpuid(1), __cpuid(0x4000_0000)) };
    let under_hypervisor = features.ecx & 1 << 31 != 0;
    let mut name = [0; 12];
    for (part, word) in name.chunks_exact_mut(4).zip([hypervisor.ebx, hypervisor.ecx, hypervisor.edx]) {
        part.copy_from_slice(&word.to_le_bytes());
    }
    under_hypervisor && &name == b"TCGTCGTCGTCG"
}

/// Returns whether QEMU emulates the processor, according to /proc/cpuinfo: there is no instruction for that here.
#[cfg(not(target_arch = "x86_64"))]
pub fn is_emulated() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("QEMU TCG"))
}
