//! The real libraries: found in the folders of the system, and opened when the first call needs them.
//!
//! They have the names that ours have, and the dynamic linker knows a loaded library by its name (`DT_SONAME`). But it compares
//! that with a name without slashes only: a path is opened, unless it is a file that is open already. So a program has both, and
//! what others want by name (the providers of the real library, `DT_NEEDED`) is still ours, which sends them on.
//!
//! Nothing here holds a lock while it calls the dynamic linker, which has a lock of its own, and under it runs initializers that
//! may call us.
#![allow(unsafe_code)] // dlopen and its kin.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Where the real libraries are, if the user says so: a folder.
const PLACE: &str = "GINNEL_VERBS_REAL";

const FOLDERS: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/lib",
    "/usr/local/lib64",
    "/usr/local/lib",
];

/// A library: its file, and a name that only ours of the two has.
struct Library {
    file: &'static str,
    mark: &'static CStr,
    /// Null: nobody has looked. [`NONE`]: there is none.
    handle: AtomicPtr<c_void>,
}

const NONE: *mut c_void = ptr::without_provenance_mut(1);

static LIBRARIES: [Library; 2] = [
    Library {
        file: "libibverbs.so.1",
        mark: c"ginnel_is_libibverbs",
        handle: AtomicPtr::new(ptr::null_mut()),
    },
    Library { file: "librdmacm.so.1", mark: c"ginnel_is_librdmacm", handle: AtomicPtr::new(ptr::null_mut()) },
];

/// By this, a library is known to be one of ours, wherever it lies.
#[unsafe(no_mangle)]
extern "C" fn ginnel_is_libibverbs() {}

/// What a name stands for in a real library, if that is there and has it. `errno` stays.
///
/// # Safety
///
/// Both are strings of C.
pub unsafe fn find(library: usize, name: *const c_char, node: *const c_char) -> Option<*mut c_void> {
    let errno = Errno::keep();
    let found = handle(library).map_or(ptr::null_mut(), |handle| {
        // SAFETY: the handle is open for good; the caller's promise.
        unsafe { libc::dlvsym(handle, name, node) }
    });
    drop(errno);
    (!found.is_null()).then_some(found)
}

/// Is the real libibverbs open?
pub fn is_open() -> bool {
    let handle = LIBRARIES[0].handle.load(Ordering::Relaxed);
    !handle.is_null() && handle != NONE
}

fn handle(index: usize) -> Option<*mut c_void> {
    let library = &LIBRARIES[index];
    let mut handle = library.handle.load(Ordering::Relaxed);
    if handle.is_null() {
        handle = open(library).unwrap_or(NONE);
        // Another thread may have been here too: it got the same handle.
        let first = library.handle.swap(handle, Ordering::Relaxed).is_null();
        if index == 0 && first && handle != NONE {
            crate::drivers::hand_over();
        }
    }
    (handle != NONE).then_some(handle)
}

fn open(library: &Library) -> Option<*mut c_void> {
    // SAFETY: it has no conditions.
    let trusted = unsafe { libc::getauxval(libc::AT_SECURE) } == 0;
    // A program with more rights than its user does not let the user choose.
    if let Some(place) = std::env::var_os(PLACE).filter(|_| trusted) {
        return open_at(library, &place);
    }
    FOLDERS.iter().find_map(|folder| open_at(library, OsStr::new(folder)))
}

fn open_at(library: &Library, folder: &OsStr) -> Option<*mut c_void> {
    let path = PathBuf::from(folder).join(library.file);
    // Without a slash the dynamic linker would give us ourselves.
    if !path.is_absolute() || !path.exists() {
        return None;
    }
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: a string of C. The initializers of a system's library run, as they would without us.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: an open handle and a string of C.
    let ours = !unsafe { libc::dlsym(handle, library.mark.as_ptr()) }.is_null();
    if ours {
        // SAFETY: it was opened above, and nothing of it is in use.
        unsafe { libc::dlclose(handle) };
        return None;
    }
    Some(handle)
}

/// Puts `errno` back when it is dropped.
struct Errno(c_int);

impl Errno {
    fn keep() -> Self {
        // SAFETY: errno is the thread's own.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl Drop for Errno {
    fn drop(&mut self) {
        // SAFETY: errno is the thread's own.
        unsafe { *libc::__errno_location() = self.0 }
    }
}
