//! This library's own descriptors, which are hidden from the program.
//!
//! A program may close all descriptors that it does not know, and open files of its own afterwards. This library would then go on
//! to use the numbers of the program's files. A program may also expect the lowest free number for a file that it opens. So this
//! library's descriptors have high numbers, and `close` and related functions leave them alone, as if they were not open. The mark
//! of such a descriptor is kept on the open file itself: the file's signal number (`F_SETSIG`) is one that no program asks for, and
//! the file never sends a signal. So there is no list that could become wrong.
#![allow(unsafe_code)] // System calls of `fcntl` on descriptors by number.

use crate::system::confined::is_confined;
use crate::system::errno::Kept;
use crate::system::real;
use libc::c_int;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// The lowest number for hidden descriptors, unless the program's limit requires lower ones.
const FIRST: c_int = 4032;
/// The number of descriptors below the program's limit that suffice for this library.
const ROOM: c_int = 64;
/// The signal number that marks a hidden file: the last real-time signal.
const MARK: c_int = 64;
const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;

/// The range that contains all hidden descriptors.
static LOWEST: AtomicI32 = AtomicI32::new(c_int::MAX);
static HIGHEST: AtomicI32 = AtomicI32::new(-1);

fn fcntl(fd: c_int, command: c_int, argument: c_int) -> c_int {
    // SAFETY: these commands take a number as their argument.
    unsafe { real::fcntl(fd, command, argument as usize as *mut c_void) }
}

fn first() -> c_int {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` has room for a limit.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    c_int::try_from(limit.rlim_cur).map_or(FIRST, |limit| FIRST.min(limit - ROOM)).max(3)
}

/// The first address of this library's code, and the address after its end.
static CODE: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// Finds out where this library's code lies. Runs when the library is loaded.
pub fn load() {
    extern "C" fn look(info: *mut libc::dl_phdr_info, _: libc::size_t, _: *mut c_void) -> c_int {
        // SAFETY: `info` is valid for this call, and has that many headers.
        let (base, headers) = unsafe {
            let info = &*info;
            (info.dlpi_addr as usize, std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()))
        };
        let here = load as fn() as usize;
        let code = headers.iter().filter(|header| header.p_type == libc::PT_LOAD).find_map(|header| {
            let begin = base + header.p_vaddr as usize;
            let end = begin + header.p_memsz as usize;
            (begin..end).contains(&here).then_some([begin, end])
        });
        let Some(code) = code else { return 0 };
        CODE.iter().zip(code).for_each(|(word, at)| word.store(at, Ordering::Relaxed));
        1
    }
    // SAFETY: `look` keeps the rules for a callback of this function.
    unsafe { libc::dl_iterate_phdr(Some(look), std::ptr::null_mut()) };
}

/// Returns whether an address is in this library's code.
pub fn is_own_code(address: usize) -> bool {
    let [begin, end] = [0, 1].map(|i: usize| CODE[i].load(Ordering::Relaxed));
    (begin..end).contains(&address)
}

/// Moves a file to a high number, which the program cannot close. Returns the descriptor unchanged if there is no such number.
pub fn hide(fd: OwnedFd) -> OwnedFd {
    // On other architectures, this library could not close such a descriptor itself.
    if !cfg!(target_arch = "x86_64") {
        return fd;
    }
    let _errno = Kept::new();
    let high = fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, first());
    if high < 0 {
        return fd;
    }
    fcntl(high, F_SETSIG, MARK);
    LOWEST.fetch_min(high, Ordering::Relaxed);
    HIGHEST.fetch_max(high, Ordering::Relaxed);
    // SAFETY: the descriptor is new, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(high) }
}

/// Returns whether a descriptor is hidden, so that the program must not close it.
#[inline]
pub fn is_hidden(fd: c_int) -> bool {
    fd >= LOWEST.load(Ordering::Relaxed) && fd <= HIGHEST.load(Ordering::Relaxed) && is_marked(fd)
}

#[cold]
fn is_marked(fd: c_int) -> bool {
    // A program that has confined itself may not make the system call.
    if is_confined() {
        return false;
    }
    let _errno = Kept::new();
    fcntl(fd, F_GETSIG, 0) == MARK
}

/// Returns the parts of a range of numbers that the program may close.
pub fn others(first: u32, last: u32) -> impl Iterator<Item = (u32, u32)> {
    let number = |word: &AtomicI32| u32::try_from(word.load(Ordering::Relaxed)).unwrap_or(0);
    let hidden =
        (number(&LOWEST).max(first)..=number(&HIGHEST).min(last)).filter(|fd| is_hidden(*fd as c_int));
    let mut next = Some(first);
    hidden.map(Some).chain([None]).filter_map(move |hidden| {
        let begin = next?;
        let end = match hidden {
            Some(fd) => {
                next = fd.checked_add(1);
                fd.checked_sub(1)?
            }
            None => {
                next = None;
                last
            }
        };
        (begin <= end).then_some((begin, end))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_leave_out_hidden_descriptors() {
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let low = file();
        let (a, b) = (hide(file()), hide(file()));
        let (a, b) = (a.as_raw_fd() as u32, b.as_raw_fd() as u32);
        let (one, two) = (a.min(b), a.max(b));
        assert!(is_hidden(a as c_int) && is_hidden(b as c_int) && !is_hidden(low.as_raw_fd()));
        // Other tests hide descriptors too.
        let hidden = || (3..two + 64).filter(|&fd| is_hidden(fd as c_int)).collect::<Vec<_>>();
        let (known, all) = loop {
            let (before, all) = (hidden(), others(3, u32::MAX).collect::<Vec<_>>());
            if before == hidden() {
                break (before, all);
            }
        };
        let begins = std::iter::once(3).chain(known.iter().map(|fd| fd + 1));
        let ends = known.iter().map(|fd| fd - 1).chain([u32::MAX]);
        assert_eq!(all, begins.zip(ends).filter(|(first, last)| first <= last).collect::<Vec<_>>());
        assert_eq!(others(one, one).count(), 0);
        assert_eq!(others(3, 5).collect::<Vec<_>>(), [(3, 5)]);
        let next = (!known.contains(&(two + 1))).then_some((two + 1, two + 1));
        assert_eq!(others(two, two + 1).collect::<Vec<_>>(), Vec::from_iter(next));
    }
}
