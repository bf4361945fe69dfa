//! Device registers: the doorbell register of an ivshmem device.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

/// Offset of the doorbell register in BAR0 (QEMU, ivshmem device specification, "The BAR0 registers").
const DOORBELL: usize = 12;
/// Offset of the IVPosition register.
const IV_POSITION: usize = 8;
const PAGE: usize = 4096;

/// The mapped registers (BAR0) of an ivshmem-doorbell device.
pub struct Registers {
    page: NonNull<u8>,
}

// SAFETY: register accesses are single volatile instructions, which any thread may do.
unsafe impl Send for Registers {}
// SAFETY: threads that share the registers access them by single volatile instructions only, and nothing else changes.
unsafe impl Sync for Registers {}

impl Registers {
    /// Maps the first page of `bar0` (sysfs `resource0`).
    pub fn map(bar0: impl AsFd) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
        let page = unsafe {
            mmap(std::ptr::null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, bar0, 0)
        }?;
        let page = NonNull::new(page.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(Self { page })
    }

    /// Rings vector `value & 0xffff` of the peer `value >> 16`.
    pub fn ring(&self, value: u32) {
        // SAFETY: the register lies in the mapped page and is aligned.
        unsafe { self.page.as_ptr().add(DOORBELL).cast::<u32>().write_volatile(value) };
    }

    /// Returns this device's peer id. It is all ones until the ivshmem server has sent one.
    pub fn position(&self) -> u32 {
        // SAFETY: the register lies in the mapped page and is aligned.
        unsafe { self.page.as_ptr().add(IV_POSITION).cast::<u32>().read_volatile() }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and not used any more.
        let _ = unsafe { munmap(self.page.as_ptr().cast(), PAGE) };
    }
}
