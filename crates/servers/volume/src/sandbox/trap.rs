//! Prints one clear line when the filter ends the process.
#![allow(unsafe_code)] // A signal handler.

use std::io;
use std::mem::zeroed;
use std::os::raw::{c_int, c_void};
use std::sync::OnceLock;

/// The name of the volume, for that line.
static NAME: OnceLock<Box<str>> = OnceLock::new();

/// The exit status with which a shell reports a process that SIGSYS has ended.
const STATUS: c_int = 128 + libc::SIGSYS;

/// Installs the handler that prints the line when a system call traps, and ends the process.
pub fn install(name: &str) -> io::Result<()> {
    let _ = NAME.set(name.into());
    // SAFETY: all zeros is a valid value of this plain structure.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = trapped as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the structure is valid, and the handler does only what a handler may.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The beginning of `siginfo_t` for SIGSYS (sigaction(2)); the library has no accessor for it.
#[repr(C)]
struct Info {
    _signal_errno_code: [c_int; 4],
    _call_address: *const c_void,
    system_call: c_int,
}

extern "C" fn trapped(_: c_int, info: *const libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a siginfo_t, which is larger, and for SIGSYS begins like this.
    let call = unsafe { (*info.cast::<Info>()).system_call };
    let mut line = Line { bytes: [0; 256], len: 0 };
    line.add("ginnel-volume ");
    line.add(NAME.get().map_or("", |name| name));
    line.add(": ended by its own sandbox at system call ");
    line.number(call.unsigned_abs());
    line.add(", which a volume does not use; unless an attack made it, report it, and write sandbox = \"off\" until then\n");
    // SAFETY: write and _exit are async-signal-safe; the buffer is ours.
    unsafe {
        libc::write(2, line.bytes.as_ptr().cast(), line.len);
        libc::_exit(STATUS)
    }
}

/// Text in a fixed buffer, because a signal handler must not use an allocator.
struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl Line {
    fn add(&mut self, text: &str) {
        for &byte in text.as_bytes() {
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = byte;
                self.len += 1;
            }
        }
    }

    fn number(&mut self, number: u32) {
        let mut digits = [0u8; 10];
        let (mut rest, mut first) = (number, digits.len());
        loop {
            first -= 1;
            digits[first] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.add(std::str::from_utf8(&digits[first..]).unwrap_or(""));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_and_not_overrun() {
        let mut line = Line { bytes: [0; 256], len: 0 };
        line.number(0);
        line.number(u32::MAX);
        assert_eq!(&line.bytes[..line.len], b"04294967295");
        line.add(&"x".repeat(300));
        assert_eq!(line.len, 256);
    }
}
