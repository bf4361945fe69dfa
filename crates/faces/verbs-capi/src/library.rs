//! The real libraries. They are searched for in the system's library folders, and opened when the first call needs them.
//!
//! The real libraries have the same names as ours, and the dynamic linker identifies a loaded library by its name (`DT_SONAME`). But it
//! compares that name only with names that contain no slash: a path is opened as a new library, unless that file is already open. So a
//! program has both libraries. Other libraries that ask for one by name (the providers of the real library, `DT_NEEDED`) get ours, which
//! forwards their calls.
//!
//! Nothing in this module holds a lock while it calls the dynamic linker, because the linker has a lock of its own, under which it runs
//! initializers that may call this library.
#![allow(unsafe_code)] // `dlopen` and related functions.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Environment variable with the folder of the real libraries; it replaces the search.
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

/// A real library: its file name, and a symbol that only our library of that name has.
struct Library {
    file: &'static str,
    mark: &'static CStr,
    /// Null: not searched yet. [`NONE`]: not found.
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

/// Identifies a library file as ours, wherever it is installed.
#[unsafe(no_mangle)]
extern "C" fn ginnel_is_libibverbs() {}

/// Returns the address of a symbol of a real library, if the library exists and has it. Keeps `errno`.
///
/// # Safety
///
/// `name` and `node` are C strings.
pub unsafe fn find(library: usize, name: *const c_char, node: *const c_char) -> Option<*mut c_void> {
    let errno = Errno::keep();
    let found = handle(library).map_or(ptr::null_mut(), |handle| {
        // SAFETY: the handle is never closed, and the caller promises that both are C strings.
        unsafe { libc::dlvsym(handle, name, node) }
    });
    drop(errno);
    (!found.is_null()).then_some(found)
}

/// Returns whether the real libibverbs is open.
pub fn is_open() -> bool {
    let handle = LIBRARIES[0].handle.load(Ordering::Relaxed);
    !handle.is_null() && handle != NONE
}

fn handle(index: usize) -> Option<*mut c_void> {
    let library = &LIBRARIES[index];
    let mut handle = library.handle.load(Ordering::Relaxed);
    if handle.is_null() {
        handle = open(library).unwrap_or(NONE);
        // Another thread may have opened it at the same time. It got the same handle.
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
    // A program with more rights than its user must not let the user choose a library.
    if let Some(place) = std::env::var_os(PLACE).filter(|_| trusted) {
        return open_at(library, &place);
    }
    FOLDERS.iter().find_map(|folder| open_at(library, OsStr::new(folder)))
}

fn open_at(library: &Library, folder: &OsStr) -> Option<*mut c_void> {
    let path = PathBuf::from(folder).join(library.file);
    // Without a slash in the path, the dynamic linker would return our own library.
    if !path.is_absolute() || !path.exists() {
        return None;
    }
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: the path is a C string. The initializers of a system library run, as they would without this library.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: the handle is open, and the symbol is a C string.
    let ours = !unsafe { libc::dlsym(handle, library.mark.as_ptr()) }.is_null();
    if ours {
        // SAFETY: it was opened above, and nothing in it is in use.
        unsafe { libc::dlclose(handle) };
        return None;
    }
    Some(handle)
}

/// Restores `errno` when it is dropped.
struct Errno(c_int);

impl Errno {
    fn keep() -> Self {
        // SAFETY: each thread has its own errno.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl Drop for Errno {
    fn drop(&mut self) {
        // SAFETY: each thread has its own errno.
        unsafe { *libc::__errno_location() = self.0 }
    }
}
