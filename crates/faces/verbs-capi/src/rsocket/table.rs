//! The numbers of this library's rsockets.
#![allow(unsafe_code)] // Contains a table that is never freed, and descriptors.

use super::socket::Socket;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Once, PoisonError, RwLock};
use std::{io, ptr};

type Table = RwLock<Vec<Option<Arc<Socket>>>>;

/// The table of this process; null if the process has created no rsocket.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(ptr::null_mut());
/// Number of forks between the process that created the first rsocket and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Gives the child of a fork an empty table. The parent's table is left as it is, because a thread of the parent may have been changing
/// it, and its connections are the parent's.
extern "C" fn in_child() {
    TABLE.store(ptr::null_mut(), Ordering::Relaxed);
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Returns a number that distinguishes what a thread has created in this process from what its parent has created.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

fn table() -> Option<&'static Table> {
    // ORDER rsocket.table: the table's address is loaded before the table. Pairs with: `table_or_new`.
    // SAFETY: tables are never freed.
    unsafe { TABLE.load(Ordering::Acquire).as_ref() }
}

fn table_or_new() -> &'static Table {
    static ONCE: Once = Once::new();
    // SAFETY: the handler is a function of this library, and takes no lock.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
    if let Some(table) = table() {
        return table;
    }
    let new = Box::into_raw(Box::<Table>::default());
    // ORDER rsocket.table: the table is visible before its address. Pairs with: `table`.
    match TABLE.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: tables are never freed.
        Ok(_) => unsafe { &*new },
        Err(other) => {
            // SAFETY: no other thread has seen it.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: the table is another thread's, and is never freed.
            unsafe { &*other }
        }
    }
}

/// Returns a descriptor that reserves a number for an rsocket.
pub fn reserve() -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers only, and returns a new descriptor or an error.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Enters an rsocket into the table. Returns its number.
pub fn add(socket: Arc<Socket>) -> c_int {
    let number = socket.number().as_raw_fd();
    let mut table = table_or_new().write().unwrap_or_else(PoisonError::into_inner);
    let index = number as usize;
    if table.len() <= index {
        table.resize_with(index + 1, || None);
    }
    table[index] = Some(socket);
    number
}

/// Returns this library's rsocket with this number.
#[inline]
pub fn get(number: c_int) -> Option<Arc<Socket>> {
    let table = table()?.read().unwrap_or_else(PoisonError::into_inner);
    table.get(usize::try_from(number).ok()?)?.clone()
}

/// Removes a number, and returns its rsocket.
pub fn remove(number: c_int) -> Option<Arc<Socket>> {
    let mut table = table()?.write().unwrap_or_else(PoisonError::into_inner);
    table.get_mut(usize::try_from(number).ok()?)?.take()
}
