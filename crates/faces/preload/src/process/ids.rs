//! The numbers of this process and of its relatives.
#![allow(unsafe_code)] // Asks the kernel about processes.

use crate::system::confined::is_confined;
use crate::system::real;
use libc::c_long;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// This process's number, cached because every call needs it.
pub static PROCESS: AtomicI32 = AtomicI32::new(0);

pub fn process() -> i32 {
    match PROCESS.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: it cannot fail.
            let process = unsafe { libc::getpid() };
            PROCESS.store(process, Ordering::Relaxed);
            process
        }
        process => process,
    }
}

/// True in a child in another PID namespace than its parent, and in its children. The numbers of relatives mean nothing there.
pub static IS_ABROAD: AtomicBool = AtomicBool::new(false);

/// Returns whether a process or a thread of this number may exist.
#[cold]
pub fn exists(number: i32) -> bool {
    if IS_ABROAD.load(Ordering::Relaxed) {
        return true;
    }
    let _errno = crate::system::errno::Kept::new();
    // SAFETY: signal 0 does nothing.
    unsafe { libc::kill(number, 0) == 0 || *libc::__errno_location() != libc::ESRCH }
}

/// Returns whether a process of this number may exist and has not begun to end, as far as /proc says. This reads a file, so it takes ten
/// times as long as [`exists`].
#[cold]
pub fn lives(number: i32) -> bool {
    exists(number) && (is_confined() || IS_ABROAD.load(Ordering::Relaxed) || !is_ending(number))
}

/// Returns whether the kernel says that a process has begun to end. It keeps its number until its parent has waited for it, and closes its
/// descriptors long before.
fn is_ending(number: i32) -> bool {
    let mut text = [0; 512];
    read_stat(number, &mut text).and_then(says_ending).unwrap_or(false)
}

/// Reads as much of /proc/NUMBER/stat as there is room for. A signal handler may close a socket, so nothing is allocated here.
fn read_stat(number: i32, text: &mut [u8]) -> Option<&[u8]> {
    let mut path = [0; 32];
    // The last byte stays zero.
    let room = path.len() - 1;
    write!(&mut path[..room], "/proc/{number}/stat").ok()?;
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let [path, into] = [path.as_ptr() as c_long, text.as_mut_ptr() as c_long];
    let [open, read, close] = [libc::SYS_openat, libc::SYS_read, libc::SYS_close];
    // SAFETY: the path ends with a zero byte.
    let fd = unsafe { real::system_call(open, [c_long::from(libc::AT_FDCWD), path, flags.into(), 0, 0, 0]) };
    if fd < 0 {
        return None;
    }
    // SAFETY: `into` points to so many bytes.
    let n = unsafe { real::system_call(read, [fd, into, text.len() as c_long, 0, 0, 0]) };
    // SAFETY: the descriptor was opened here, and nobody else knows it.
    unsafe { real::system_call(close, [fd, 0, 0, 0, 0, 0]) };
    text.get(..usize::try_from(n).ok()?)
}

/// Returns whether such text (proc_pid_stat(5)) says that the process has begun to end. Its main thread may have ended long before the
/// others.
fn says_ending(text: &[u8]) -> Option<bool> {
    /// The kernel's flag of a task that ends (include/linux/sched.h).
    const PF_EXITING: u64 = 4;
    // The name may contain anything, but nothing behind it has a bracket.
    let behind = text.rsplit(|byte| *byte == b')').next()?;
    let mut words = std::str::from_utf8(behind).ok()?.split_ascii_whitespace();
    // The fields 9 and 20; the first word is field 3.
    let flags: u64 = words.nth(6)?.parse().ok()?;
    let threads: u64 = words.nth(10)?.parse().ok()?;
    Some(flags & PF_EXITING != 0 && threads <= 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_that_nobody_has_waited_for_does_not_live() {
        assert!(lives(std::process::id() as i32));
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let number = child.id() as i32;
        assert!(lives(number));
        drop(child.stdin.take());
        // SAFETY: all bits of the structure may be zero, and the call has room for it. It leaves the child to be waited for.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WEXITED | libc::WNOWAIT;
            assert_eq!(libc::waitid(libc::P_PID, number as libc::id_t, &raw mut info, options), 0);
        }
        assert!(exists(number) && !lives(number));
        child.wait().unwrap();
        assert!(!exists(number) && !lives(number));
    }

    #[test]
    fn a_main_thread_may_end_before_the_others() {
        let text =
            |flags, threads| format!("7 (a) R (b) Z 1 7 7 0 -1 {flags} 1 2 3 4 5 6 7 8 20 0 {threads} 0");
        assert_eq!(says_ending(text(4, 2).as_bytes()), Some(false));
        assert_eq!(says_ending(text(0x40_0104, 1).as_bytes()), Some(true));
        assert_eq!(says_ending(text(0x40_0100, 1).as_bytes()), Some(false));
        assert_eq!(says_ending(b"7 (a) Z 1"), None);
    }
}
