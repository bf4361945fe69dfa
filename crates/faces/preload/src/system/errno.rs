//! Errors in the form in which C functions report them.
#![allow(unsafe_code)] // Accesses the C library's errno.

use libc::c_int;

/// An error number of the C library, for example EAGAIN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub c_int);

/// The result of a call, with an [`Errno`] as its error.
pub type Result<T> = std::result::Result<T, Errno>;

impl Errno {
    /// Returns the error number of this thread's last failed call.
    pub fn last() -> Self {
        // SAFETY: the C library gives each thread a valid address.
        Self(unsafe { *libc::__errno_location() })
    }

    /// Sets this thread's `errno`, which the program reads.
    pub fn set(self) {
        // SAFETY: the C library gives each thread a valid address.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

/// Converts the result of a C function that returns -1 and sets errno if it fails.
pub fn check(result: isize) -> Result<usize> {
    usize::try_from(result).map_err(|_| Errno::last())
}

/// Converts a result to that of a C function: for an error, sets errno and returns -1.
pub fn tell(result: Result<usize>) -> isize {
    match result {
        Ok(n) => n as isize,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

/// Does the same for functions that return an `int`.
pub fn tell_int(result: Result<c_int>) -> c_int {
    result.unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}

/// Sets errno and returns -1, the result of a call that fails with this error.
pub fn fail(errno: c_int) -> c_int {
    Errno(errno).set();
    -1
}

/// Restores errno when it is dropped, so that the program does not notice the work in between.
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
