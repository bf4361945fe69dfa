//! Which numbers are rsockets of ours.
#![allow(unsafe_code)] // A table that is never freed, and descriptors.

use super::socket::Socket;
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Once, PoisonError, RwLock};

type Table = RwLock<Vec<Option<Arc<Socket>>>>;

/// The table of this process; null if it has made no rsocket.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(ptr::null_mut());
/// Forks between the process that made the first rsocket and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The child of a fork has no rsockets. Its parent's table is left as it is: a thread of the parent may have been at work on it, and
/// the connections in it are the parent's.
extern "C" fn in_child() {
    TABLE.store(ptr::null_mut(), Ordering::Relaxed);
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Tells what a thread has made in this process from what its parent has made.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

fn table() -> Option<&'static Table> {
    // ORDER rsocket.table: the address before the table. Pairs with: `table_or_new`.
    // SAFETY: tables are never freed.
    unsafe { TABLE.load(Ordering::Acquire).as_ref() }
}

fn table_or_new() -> &'static Table {
    static ONCE: Once = Once::new();
    // SAFETY: a function of this library, which takes no lock.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
    if let Some(table) = table() {
        return table;
    }
    let new = Box::into_raw(Box::<Table>::default());
    // ORDER rsocket.table: the table before its address. Pairs with: `table`.
    match TABLE.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: tables are never freed.
        Ok(_) => unsafe { &*new },
        Err(other) => {
            // SAFETY: nobody else has seen it.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: another thread's, which is never freed.
            unsafe { &*other }
        }
    }
}

/// A descriptor that stands for an rsocket, so that nobody else gets its number.
pub fn reserve() -> io::Result<OwnedFd> {
    // SAFETY: it takes numbers, and gives a new descriptor or an error.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Gives an rsocket its number.
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

/// The rsocket of ours that has this number.
#[inline]
pub fn get(number: c_int) -> Option<Arc<Socket>> {
    let table = table()?.read().unwrap_or_else(PoisonError::into_inner);
    table.get(usize::try_from(number).ok()?)?.clone()
}

/// Takes a number away.
pub fn remove(number: c_int) -> Option<Arc<Socket>> {
    let mut table = table()?.write().unwrap_or_else(PoisonError::into_inner);
    table.get_mut(usize::try_from(number).ok()?)?.take()
}
