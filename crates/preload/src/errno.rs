//! Errors as C functions tell them.
#![allow(unsafe_code)] // The C library's errno.

use libc::c_int;

/// An errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub c_int);

/// What a call returns.
pub type Result<T> = std::result::Result<T, Errno>;

impl Errno {
    /// That of this thread's last call.
    pub fn last() -> Self {
        // SAFETY: the C library gives each thread a valid one.
        Self(unsafe { *libc::__errno_location() })
    }

    /// Tells the program.
    pub fn set(self) {
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

/// The result of a C call that returns -1 and sets errno.
pub fn check(result: isize) -> Result<usize> {
    usize::try_from(result).map_err(|_| Errno::last())
}

/// A result as C has it.
pub fn tell(result: Result<usize>) -> isize {
    match result {
        Ok(n) => n as isize,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

/// The same for calls that return an `int`.
pub fn tell_int(result: Result<c_int>) -> c_int {
    result.unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}

/// The result of a call that fails with this errno.
pub fn fail(errno: c_int) -> c_int {
    Errno(errno).set();
    -1
}

/// Restores errno when it is dropped: for work that the program must not notice.
pub struct Kept(Errno);

impl Kept {
    pub fn new() -> Self {
        Self(Errno::last())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.set();
    }
}
