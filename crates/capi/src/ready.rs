//! Waiting for many channels with one thread.

use crate::boundary::{
    borrow_mut, checked, close, invalid, length, number, output_handle, return_handle, room, status, timeout,
};
use crate::channel::{Channel, ReceivingHalf, SendingHalf, directions, either_half, receiving, sending};
use crate::endpoint::wait_mode;
use crate::handle_table::handle;
use libc::{c_int, c_void, ssize_t};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Many channels, listeners and other descriptors, for which one thread waits. One thread at a time. Made by
/// ginnel_ready_set_new(), freed by ginnel_ready_set_close(). It belongs to the process that has made it.
pub struct ReadySet {
    set: ginnel::ReadySet,
    /// Keys that were too many for the caller.
    rest: Vec<u64>,
}
handle!(ReadySet, "set");

/// Makes an empty set. On success `*set` is the caller's, to be freed with ginnel_ready_set_close(); on failure it is NULL.
///
/// Does not block. Any thread. Errors: GINNEL_ERR_SYSTEM if there are no more file descriptors, of which it takes two.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_new(set: *mut *mut ReadySet) -> c_int {
    status(|| {
        let place = checked!(output_handle(set));
        return_handle(place, ReadySet { set: ginnel::ReadySet::new()?, rest: Vec::new() });
        Ok(())
    })
}

/// From now on operations in these directions of the channel never wait: they return GINNEL_ERR_WOULD_BLOCK, and the set
/// reports `key` when another try is worth it. It reports the key once at the beginning, too. What was reported is reported
/// again only after another GINNEL_ERR_WOULD_BLOCK, so work on a channel until it says that. A direction is in one set at a
/// time. The set may be closed before the channel and the channel before the set.
///
/// Counts as an operation in these directions and of the set (one thread at a time each). Asks the daemon for a readiness
/// board where those that the process has are full, each of which serves 24576 directions of an endpoint; then it blocks up
/// to some 10 s for a daemon that is being restarted. Errors: GINNEL_ERR_LIMIT, GINNEL_ERR_NO_MEMORY, GINNEL_ERR_NO_DAEMON.
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

/// Takes these directions of a channel out of their set. Their operations wait again, unless they are non-blocking.
///
/// Counts as an operation in these directions (one thread at a time each); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_leave_set(channel: *mut Channel, directions: c_int) -> c_int {
    status(|| {
        let (send, receive) = self::directions(directions)?;
        either_half!(channel, send, receive, half => half.deregister());
        Ok(())
    })
}

/// Reports `key` as long as `fd` is readable: ginnel_listener_fd(), a socket, a timer. A descriptor that is closed is no
/// longer watched; say ginnel_ready_set_unwatch() before you close one of which there are duplicates.
///
/// One thread at a time; does not block. Errors: GINNEL_ERR_SYSTEM, for example for a descriptor of a file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_watch(set: *mut ReadySet, fd: c_int, key: u64) -> c_int {
    status(|| {
        let fd = descriptor(fd)?;
        Ok(checked!(borrow_mut(set)).set.watch(fd, key)?)
    })
}

/// Reports a descriptor no more.
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
    // SAFETY: not -1; the kernel refuses one that is not open, and it is used for the call alone.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Waits until there is something to do, writes up to `most` keys to `keys`, in no order, and returns how many; 0 after the
/// timeout. What did not fit is returned by the next call.
///
/// One thread at a time. Blocks for at most `timeout_ns` nanoseconds: 0 means one look, a negative number for ever. Signals
/// do not interrupt it. Errors: GINNEL_ERR_INVALID if `most` is 0; GINNEL_ERR_SYSTEM in a fork's child of the process that
/// has made the set.
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

/// How ginnel_ready_set_wait() waits: one of GINNEL_WAIT_*. `budget_ns` is for GINNEL_WAIT_ADAPTIVE, as in
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

/// For programs with an event loop of their own: a file descriptor, the same each time. After a call of this function it
/// becomes readable (POLLIN) when ginnel_ready_set_wait() with a timeout of 0 has something to report, or for no reason; it
/// is readable at once if something is there already. Call this again after each ginnel_ready_set_wait(), before the next
/// poll(2). It belongs to the set: do not read or close it.
///
/// One thread at a time; does not block. In a VM without interrupts it never becomes readable: look from time to time.
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

/// Frees a set. Directions that are in it go on returning GINNEL_ERR_WOULD_BLOCK until they are closed, leave it or enter
/// another. NULL is allowed. No other thread may be using the handle. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ready_set_close(set: *mut ReadySet) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(set) }
}
