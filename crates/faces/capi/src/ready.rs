//! Ready sets: waiting for many channels with one thread.

use crate::boundary::{
    borrow_mut, checked, close, invalid, length, number, output_handle, return_handle, room, status, timeout,
};
use crate::channel::{Channel, ReceivingHalf, SendingHalf, directions, either_half, receiving, sending};
use crate::endpoint::wait_mode;
use crate::handle_table::handle;
use libc::{c_int, c_void, ssize_t};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// A set of many channels, listeners and other descriptors for which one thread waits. One thread at a time may use it.
/// Created by ginnel_ready_set_new(), freed by ginnel_ready_set_close(). It belongs to the process that has created it.
pub struct ReadySet {
    set: ginnel::ReadySet,
    /// Keys that did not fit into the caller's array.
    rest: Vec<u64>,
}
handle!(ReadySet, "set");

/// Creates an empty set. On success the caller must free `*set` with ginnel_ready_set_close(); on failure it is NULL.
///
/// Does not block. Any thread may call it. Errors: GINNEL_ERR_SYSTEM if there are no more file descriptors, of which a
/// set needs two.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_new(set: *mut *mut ReadySet) -> c_int {
    status(|| {
        let place = checked!(output_handle(set));
        return_handle(place, ReadySet { set: ginnel::ReadySet::new()?, rest: Vec::new() });
        Ok(())
    })
}

/// Adds these directions of the channel to the set. From now on their operations never wait: they return
/// GINNEL_ERR_WOULD_BLOCK, and the set reports `key` when another attempt is worthwhile. It also reports the key once
/// at the beginning. It reports the key again only after another GINNEL_ERR_WOULD_BLOCK, so use a reported channel
/// until it returns that. A direction is in at most one set at a time. The set and the channel may be closed in any
/// order.
///
/// Counts as an operation in these directions and on the set (one thread at a time in each). Asks the daemon for a
/// readiness board if the boards of this process are full, each of which serves 24576 directions of an endpoint; then
/// it blocks for up to 10 s if the daemon is being restarted. Errors: GINNEL_ERR_LIMIT, GINNEL_ERR_NO_MEMORY,
/// GINNEL_ERR_NO_DAEMON.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_add(
    set: *mut ReadySet,
    channel: *mut Channel,
    directions: c_int,
    key: u64,
) -> c_int {
    status(|| {
        let (send, receive) = self::directions(directions)?;
        let set = &checked!(borrow_mut(set)).set;
        either_half!(channel, send, receive, half => half.register(set, key)?);
        Ok(())
    })
}

/// Removes these directions of a channel from their set. Their operations wait again, unless they are non-blocking.
///
/// Counts as an operation in these directions (one thread at a time in each); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_leave_set(channel: *mut Channel, directions: c_int) -> c_int {
    status(|| {
        let (send, receive) = self::directions(directions)?;
        either_half!(channel, send, receive, half => half.deregister());
        Ok(())
    })
}

/// Reports `key` as long as `fd` is readable. It may be the descriptor of ginnel_listener_fd(), a socket or a timer,
/// for example. A descriptor that is closed is no longer watched; if it has duplicates, call ginnel_ready_set_unwatch()
/// before closing it.
///
/// One thread at a time; does not block. Errors: GINNEL_ERR_SYSTEM, for example for the descriptor of a regular file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_watch(set: *mut ReadySet, fd: c_int, key: u64) -> c_int {
    status(|| {
        let fd = descriptor(fd)?;
        Ok(checked!(borrow_mut(set)).set.watch(fd, key)?)
    })
}

/// Stops watching a descriptor.
///
/// One thread at a time; does not block. Errors: GINNEL_ERR_SYSTEM if it was not watched.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_unwatch(set: *mut ReadySet, fd: c_int) -> c_int {
    status(|| {
        let fd = descriptor(fd)?;
        Ok(checked!(borrow_mut(set)).set.unwatch(fd)?)
    })
}

fn descriptor<'a>(fd: c_int) -> crate::boundary::Outcome<BorrowedFd<'a>> {
    if fd < 0 {
        return Err(invalid(format!("{fd} is no file descriptor")));
    }
    // SAFETY: not -1. The kernel refuses a descriptor that is not open, and it is used only for this call.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Waits until there is something to do, writes up to `most` keys to `keys`, in no particular order, and returns how
/// many; 0 after the timeout. Keys that do not fit are returned by the next call.
///
/// One thread at a time. Blocks for at most `timeout_ns` nanoseconds: 0 means that it checks once, a negative number
/// that it waits for ever. Signals do not interrupt it. Errors: GINNEL_ERR_INVALID if `most` is 0; GINNEL_ERR_SYSTEM in
/// the child of a fork while the process that has created the set lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_wait(
    set: *mut ReadySet,
    keys: *mut u64,
    most: usize,
    timeout_ns: i64,
) -> ssize_t {
    length(|| {
        let ReadySet { set, rest } = checked!(borrow_mut(set));
        let size = most.checked_mul(size_of::<u64>()).filter(|size| *size > 0);
        let size = size.ok_or_else(|| invalid(format!("most is {most}: there must be room for one key")))?;
        let buffer = keys.cast::<c_void>();
        let room = checked!(room(buffer, size));
        if rest.is_empty() {
            set.wait(rest, timeout(timeout_ns))?;
        }
        let count = most.min(rest.len());
        for (place, key) in room.chunks_exact_mut(size_of::<u64>()).zip(rest.drain(..count)) {
            place.copy_from_slice(&key.to_ne_bytes());
        }
        Ok(count)
    })
}

/// Sets how ginnel_ready_set_wait() waits: one of GINNEL_WAIT_*. `budget_ns` is for GINNEL_WAIT_ADAPTIVE, as in
/// ginnel_channel_set_wait(). The default is adaptive.
///
/// One thread at a time; does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_set_wait(set: *mut ReadySet, wait: c_int, budget_ns: u64) -> c_int {
    status(|| {
        let mode = wait_mode(wait, budget_ns)?;
        checked!(borrow_mut(set)).set.set_mode(mode);
        Ok(())
    })
}

/// Arms the set and returns a file descriptor for programs with an event loop of their own, the same each time. After
/// this call the descriptor becomes readable (POLLIN) when ginnel_ready_set_wait() with a timeout of 0 has something to
/// report; it may also become readable without need, and is readable at once if there is something already. Call this
/// function again after each ginnel_ready_set_wait(), before the next poll(2). The descriptor belongs to the set: do
/// not read or close it.
///
/// One thread at a time; does not block. In a VM without interrupts the descriptor never becomes readable, so call
/// ginnel_ready_set_wait() at intervals.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_fd(set: *mut ReadySet) -> c_int {
    number(|| {
        let ReadySet { set, rest } = checked!(borrow_mut(set));
        if !rest.is_empty() || set.arm()? {
            set.nudge();
        }
        Ok(set.as_fd().as_raw_fd())
    })
}

/// Frees a set. Directions that are in it continue to return GINNEL_ERR_WOULD_BLOCK until they are closed, leave the
/// set or enter another one. NULL is allowed. No other thread may be using the handle. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_close(set: *mut ReadySet) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(set) }
}
