//! Descriptors of this library, which are none of the program's business.
//!
//! A program may close all descriptors that it does not know, and then opens files of its own: this library would go on to use their
//! numbers. And it may expect the lowest number for what it opens. So this library's descriptors have high numbers, and `close` and its kin
//! leave them alone, as if they were not open. Which they are is written on the open file itself: it would send a signal (`F_SETSIG`) that no
//! program asks for, if it sent any. So there is no list that could be wrong.
#![allow(unsafe_code)] // fcntl, with numbers.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use libc::c_int;

use crate::confined::is_confined;
use crate::errno::Kept;
use crate::real;

/// Numbers are from here on, or from a little below the program's limit.
const FIRST: c_int = 4032;
/// Numbers below the limit that are enough.
const ROOM: c_int = 64;
/// The last real-time signal.
const MARK: c_int = 64;
const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;

/// All of them are between these two.
static LOWEST: AtomicI32 = AtomicI32::new(c_int::MAX);
static HIGHEST: AtomicI32 = AtomicI32::new(-1);

fn fcntl(fd: c_int, command: c_int, argument: c_int) -> c_int {
    // SAFETY: these commands take a number.
    unsafe { real::fcntl(fd, command, argument as usize as *mut c_void) }
}

fn first() -> c_int {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: room for a limit.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    c_int::try_from(limit.rlim_cur).map_or(FIRST, |limit| FIRST.min(limit - ROOM)).max(3)
}

/// Where the code of this library lies.
static CODE: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// Finds out where this library's code lies. Runs when the library is loaded.
pub fn load() {
    extern "C" fn look(info: *mut libc::dl_phdr_info, _: libc::size_t, _: *mut c_void) -> c_int {
        // SAFETY: valid for this call, with so many headers.
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
    // SAFETY: a function that keeps the rules.
    unsafe { libc::dl_iterate_phdr(Some(look), std::ptr::null_mut()) };
}

/// Whether an address is in this library's code.
pub fn is_own_code(address: usize) -> bool {
    let [begin, end] = [0, 1].map(|i: usize| CODE[i].load(Ordering::Relaxed));
    (begin..end).contains(&address)
}

/// The same file under a high number, which the program cannot close. If there is none, it is returned as it is.
pub fn hide(fd: OwnedFd) -> OwnedFd {
    // Elsewhere this library could not close it either.
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
    // SAFETY: new, and nobody else's.
    unsafe { OwnedFd::from_raw_fd(high) }
}

/// Whether the program must not close it.
#[inline]
pub fn is_hidden(fd: c_int) -> bool {
    fd >= LOWEST.load(Ordering::Relaxed) && fd <= HIGHEST.load(Ordering::Relaxed) && is_marked(fd)
}

#[cold]
fn is_marked(fd: c_int) -> bool {
    // A program that has confined itself may not ask.
    if is_confined() {
        return false;
    }
    let _errno = Kept::new();
    fcntl(fd, F_GETSIG, 0) == MARK
}

/// The parts of a range of numbers that the program may close.
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
    fn what_is_hidden_is_left_out_of_ranges() {
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let low = file();
        let (a, b) = (hide(file()), hide(file()));
        let (a, b) = (a.as_raw_fd() as u32, b.as_raw_fd() as u32);
        let (one, two) = (a.min(b), a.max(b));
        assert!(is_hidden(a as c_int) && is_hidden(b as c_int) && !is_hidden(low.as_raw_fd()));
        let all: Vec<_> = others(3, u32::MAX).collect();
        let mut expected = vec![(3, one - 1), (one + 1, two - 1), (two + 1, u32::MAX)];
        expected.retain(|(first, last)| first <= last);
        assert_eq!(all, expected);
        assert_eq!(others(one, one).count(), 0);
        assert_eq!(others(3, 5).collect::<Vec<_>>(), [(3, 5)]);
        assert_eq!(others(two, two + 1).collect::<Vec<_>>(), [(two + 1, two + 1)]);
    }
}
