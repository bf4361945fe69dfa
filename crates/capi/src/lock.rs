//! Locks: mutex, read-write lock, condition variable, semaphore, barrier, once.

use crate::boundary::{
    Growing, Outcome, borrow, borrow_mut, checked, close, number, output, output_handle, read_options,
    return_handle, status, text, timeout,
};
use crate::endpoint::{Endpoint, wait_mode};
use crate::handle_table::handle;
use ginnel::{Error, WaitMode, sync};
use libc::c_int;
use std::ffi::c_char;

/// What ginnel_mutex_lock(), ginnel_rwlock_wrlock() and ginnel_condvar_wait() return when the caller has the lock and its last
/// owner has died in it: the data may be half-written. Repair them and call ginnel_mutex_consistent() or
/// ginnel_rwlock_consistent() before unlocking; without that, the lock is GINNEL_ERR_NOT_RECOVERABLE for all.
pub const GINNEL_OWNER_DIED: c_int = 1;

/// What ginnel_once_begin() returns when the caller has to do it, and then to call ginnel_once_end().
pub const GINNEL_ONCE_BEGIN: c_int = 1;

/// The same, when somebody before has died in it or given it up, and so may have done some of it.
pub const GINNEL_ONCE_AGAIN: c_int = 2;

/// How to open a lock. Fill it with zeros, set `size`, then what you want otherwise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LockOptions {
    /// sizeof(ginnel_lock_options).
    pub size: usize,
    /// 1: it must be there (GINNEL_ERR_NOT_FOUND). 0: it is made if it is not.
    pub existing: u32,
    /// 1: it must not be there (GINNEL_ERR_IN_USE).
    pub exclusive: u32,
    /// 1: if it is made by this, it stays until it is unlinked. 0: it goes with its last handle.
    pub persistent: u32,
    /// 1: `wait` and `budget_ns` count. 0: it waits as the endpoint's channels do.
    pub set_wait: u32,
    /// How to wait: one of GINNEL_WAIT_*.
    pub wait: c_int,
    /// For GINNEL_WAIT_ADAPTIVE: how long to look, in nanoseconds. 0: the default, 100000.
    pub budget_ns: u64,
}
// SAFETY: as the trait asks.
unsafe impl Growing for LockOptions {}

fn in_rust(asked: LockOptions) -> Outcome<(sync::SyncOptions, Option<WaitMode>)> {
    let options = sync::SyncOptions {
        create: asked.existing == 0,
        exclusive: asked.exclusive != 0,
        persistent: asked.persistent != 0,
    };
    let wait = if asked.set_wait != 0 { Some(wait_mode(asked.wait, asked.budget_ns)?) } else { None };
    Ok((options, wait))
}

/// A mutex of a segment, robust: if its owner dies, the next one gets it and is told. A handle is used by one
/// thread at a time; others open their own. Made by ginnel_mutex_open(), freed by ginnel_mutex_close().
pub struct Mutex(sync::Mutex);
handle!(Mutex, "mutex");

/// Opens a mutex of the segment of `endpoint` by name. `options` may be NULL. On success the handle is the
/// caller's, to be freed with ginnel_mutex_close(); on failure it is NULL. A lock has 63 handles at most.
///
/// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
/// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
/// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_mutex_open(
    endpoint: *const Endpoint,
    name: *const c_char,
    options: *const LockOptions,
    mutex: *mut *mut Mutex,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(mutex));
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.mutex_with(checked!(text(name)), &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, Mutex(opened));
        Ok(())
    })
}

/// Locks. Waits up to `timeout_ns`; 0: not at all; negative: for ever. Returns 0, or GINNEL_OWNER_DIED: in both cases the
/// caller has it. Errors: GINNEL_ERR_TIMED_OUT, GINNEL_ERR_NOT_RECOVERABLE, GINNEL_ERR_DEADLOCK if this handle has it
/// already, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_mutex_lock(mutex: *mut Mutex, timeout_ns: i64) -> c_int {
    number(|| {
        let Mutex(mutex) = checked!(borrow_mut(mutex));
        mutex.set_timeout(timeout(timeout_ns));
        let guard = mutex.lock()?;
        Ok(held(guard.owner_died(), guard))
    })
}

/// Unlocks. Errors: GINNEL_ERR_NOT_OWNER, GINNEL_ERR_CORRUPT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_mutex_unlock(mutex: *mut Mutex) -> c_int {
    status(|| {
        let Mutex(mutex) = checked!(borrow_mut(mutex));
        Ok(mutex.force_unlock()?)
    })
}

/// Says that the data are consistent again, after GINNEL_OWNER_DIED. Errors: GINNEL_ERR_NOT_OWNER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_mutex_consistent(mutex: *mut Mutex) -> c_int {
    status(|| {
        let Mutex(mutex) = checked!(borrow_mut(mutex));
        Ok(mutex.force_consistent()?)
    })
}

/// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
/// the handle. May tell the daemon, for at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_mutex_close(mutex: *mut Mutex) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(mutex) }
}

/// A read-write lock of a segment: many readers or one writer, who goes first. Robust as to writers. A handle is used by one
/// thread at a time; others open their own. Made by ginnel_rwlock_open(), freed by ginnel_rwlock_close().
pub struct RwLock(sync::RwLock);
handle!(RwLock, "read-write lock");

/// Opens a read-write lock of the segment of `endpoint` by name. `options` may be NULL. On success the handle is the
/// caller's, to be freed with ginnel_rwlock_close(); on failure it is NULL. A lock has 63 handles at most.
///
/// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
/// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
/// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_open(
    endpoint: *const Endpoint,
    name: *const c_char,
    options: *const LockOptions,
    lock: *mut *mut RwLock,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(lock));
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.rwlock_with(checked!(text(name)), &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, RwLock(opened));
        Ok(())
    })
}

/// Locks for reading. Waits up to `timeout_ns`; 0: not at all; negative: for ever. Errors: GINNEL_ERR_TIMED_OUT,
/// GINNEL_ERR_OWNER_DIED if a writer has died in it: then take it for writing, GINNEL_ERR_NOT_RECOVERABLE,
/// GINNEL_ERR_DEADLOCK, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_rdlock(lock: *mut RwLock, timeout_ns: i64) -> c_int {
    status(|| {
        let RwLock(lock) = checked!(borrow_mut(lock));
        lock.set_timeout(timeout(timeout_ns));
        std::mem::forget(lock.read()?);
        Ok(())
    })
}

/// Locks for writing. Otherwise as ginnel_mutex_lock().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_wrlock(lock: *mut RwLock, timeout_ns: i64) -> c_int {
    number(|| {
        let RwLock(lock) = checked!(borrow_mut(lock));
        lock.set_timeout(timeout(timeout_ns));
        let guard = lock.write()?;
        Ok(held(guard.owner_died(), guard))
    })
}

/// Unlocks, whichever way it was locked. Errors: GINNEL_ERR_NOT_OWNER, GINNEL_ERR_CORRUPT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_unlock(lock: *mut RwLock) -> c_int {
    status(|| {
        let RwLock(lock) = checked!(borrow_mut(lock));
        Ok(lock.force_unlock()?)
    })
}

/// Says that the data are consistent again, after GINNEL_OWNER_DIED. Errors: GINNEL_ERR_NOT_OWNER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_consistent(lock: *mut RwLock) -> c_int {
    status(|| {
        let RwLock(lock) = checked!(borrow_mut(lock));
        Ok(lock.force_consistent()?)
    })
}

/// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
/// the handle. May tell the daemon, for at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_close(lock: *mut RwLock) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(lock) }
}

/// A condition variable of a segment, beside a mutex. A handle is used by one
/// thread at a time; others open their own. Made by ginnel_condvar_open(), freed by ginnel_condvar_close().
pub struct Condvar(sync::Condvar);
handle!(Condvar, "condition variable");

/// Opens a condvar of the segment of `endpoint` by name. `options` may be NULL. On success the handle is the
/// caller's, to be freed with ginnel_condvar_close(); on failure it is NULL. A lock has 63 handles at most.
///
/// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
/// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
/// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_condvar_open(
    endpoint: *const Endpoint,
    name: *const c_char,
    options: *const LockOptions,
    condvar: *mut *mut Condvar,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(condvar));
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.condvar_with(checked!(text(name)), &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, Condvar(opened));
        Ok(())
    })
}

/// Unlocks the mutex, waits for a signal up to `timeout_ns` (negative: for ever), and locks again, for which it waits for ever.
/// Returns 0, or GINNEL_OWNER_DIED as ginnel_mutex_lock(); after these and after GINNEL_ERR_TIMED_OUT the caller has the
/// mutex, after other errors not. Look at the condition in every case. Errors: those of ginnel_mutex_lock(), and
/// GINNEL_ERR_NOT_OWNER if the caller did not have the mutex.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_condvar_wait(
    condvar: *mut Condvar,
    mutex: *mut Mutex,
    timeout_ns: i64,
) -> c_int {
    number(|| {
        let Condvar(condvar) = checked!(borrow_mut(condvar));
        let Mutex(mutex) = checked!(borrow_mut(mutex));
        condvar.set_timeout(timeout(timeout_ns));
        mutex.set_timeout(None);
        let (guard, signalled) = condvar.wait(mutex.assume_locked())?;
        match held(guard.owner_died(), guard) {
            0 if !signalled => Err(Error::TimedOut.into()),
            result => Ok(result),
        }
    })
}

/// Signals one waiter, if there is one. The condition must have been changed with the mutex; this may be called without.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_condvar_signal(condvar: *mut Condvar) -> c_int {
    status(|| {
        let Condvar(condvar) = checked!(borrow_mut(condvar));
        condvar.notify_one();
        Ok(())
    })
}

/// Signals all waiters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_condvar_broadcast(condvar: *mut Condvar) -> c_int {
    status(|| {
        let Condvar(condvar) = checked!(borrow_mut(condvar));
        condvar.notify_all();
        Ok(())
    })
}

/// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
/// the handle. May tell the daemon, for at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_condvar_close(condvar: *mut Condvar) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(condvar) }
}

/// A counting semaphore of a segment. What a process that dies has acquired is not given back. A handle is used by one
/// thread at a time; others open their own. Made by ginnel_semaphore_open(), freed by ginnel_semaphore_close().
pub struct Semaphore(sync::Semaphore);
handle!(Semaphore, "semaphore");

/// Opens a semaphore of the segment of `endpoint` by name. A new one has `initial` permits, of at most `limit`; an existing one must have the same limit, or `limit` is 0. `options` may be NULL. On success the handle is the
/// caller's, to be freed with ginnel_semaphore_close(); on failure it is NULL. A lock has 63 handles at most.
///
/// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
/// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
/// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_semaphore_open(
    endpoint: *const Endpoint,
    name: *const c_char,
    limit: u32,
    initial: u32,
    options: *const LockOptions,
    semaphore: *mut *mut Semaphore,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(semaphore));
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.semaphore_with(checked!(text(name)), limit, initial, &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, Semaphore(opened));
        Ok(())
    })
}

/// Acquires one permit. Waits up to `timeout_ns`; 0: not at all; negative: for ever. Errors: GINNEL_ERR_TIMED_OUT,
/// GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_semaphore_wait(semaphore: *mut Semaphore, timeout_ns: i64) -> c_int {
    status(|| {
        let Semaphore(semaphore) = checked!(borrow_mut(semaphore));
        semaphore.set_timeout(timeout(timeout_ns));
        Ok(semaphore.acquire()?)
    })
}

/// Releases `count` permits. Errors: GINNEL_ERR_OVERFLOW if it would have more than its limit, GINNEL_ERR_CORRUPT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_semaphore_post(semaphore: *mut Semaphore, count: u32) -> c_int {
    status(|| {
        let Semaphore(semaphore) = checked!(borrow_mut(semaphore));
        Ok(semaphore.release(count)?)
    })
}

/// How many permits are left just now, in `*permits`. Errors: GINNEL_ERR_CORRUPT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_semaphore_get(semaphore: *mut Semaphore, permits: *mut u64) -> c_int {
    status(|| {
        let to = checked!(output(permits));
        let Semaphore(semaphore) = checked!(borrow_mut(semaphore));
        to.write(semaphore.permits()?);
        Ok(())
    })
}

/// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
/// the handle. May tell the daemon, for at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_semaphore_close(semaphore: *mut Semaphore) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(semaphore) }
}

/// A barrier of a segment: a number of parties wait for each other. A handle is used by one
/// thread at a time; others open their own. Made by ginnel_barrier_open(), freed by ginnel_barrier_close().
pub struct Barrier(sync::Barrier);
handle!(Barrier, "barrier");

/// Opens a barrier of the segment of `endpoint` by name. It is for `parties` (1 to 63), each with a handle of its own. `options` may be NULL. On success the handle is the
/// caller's, to be freed with ginnel_barrier_close(); on failure it is NULL. A lock has 63 handles at most.
///
/// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
/// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
/// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_barrier_open(
    endpoint: *const Endpoint,
    name: *const c_char,
    parties: u32,
    options: *const LockOptions,
    barrier: *mut *mut Barrier,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(barrier));
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.barrier_with(checked!(text(name)), parties, &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, Barrier(opened));
        Ok(())
    })
}

/// Waits until all parties have come, up to `timeout_ns`; negative: for ever. Returns 1 to one of them, 0 to the others.
/// Errors: GINNEL_ERR_TIMED_OUT, GINNEL_ERR_BARRIER_BROKEN if a party has died, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_barrier_wait(barrier: *mut Barrier, timeout_ns: i64) -> c_int {
    number(|| {
        let Barrier(barrier) = checked!(borrow_mut(barrier));
        barrier.set_timeout(timeout(timeout_ns));
        Ok(barrier.wait()?.into())
    })
}

/// Makes a broken barrier usable again. Errors: GINNEL_ERR_WOULD_BLOCK while some of those who waited have not found out yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_barrier_reset(barrier: *mut Barrier) -> c_int {
    status(|| {
        let Barrier(barrier) = checked!(borrow_mut(barrier));
        Ok(barrier.reset()?)
    })
}

/// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
/// the handle. May tell the daemon, for at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_barrier_close(barrier: *mut Barrier) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(barrier) }
}

/// Something that is done once in a segment. A handle is used by one
/// thread at a time; others open their own. Made by ginnel_once_open(), freed by ginnel_once_close().
pub struct Once(sync::Once);
handle!(Once, "once");

/// Opens a once of the segment of `endpoint` by name. `options` may be NULL. On success the handle is the
/// caller's, to be freed with ginnel_once_close(); on failure it is NULL. A lock has 63 handles at most.
///
/// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
/// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
/// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_once_open(
    endpoint: *const Endpoint,
    name: *const c_char,
    options: *const LockOptions,
    once: *mut *mut Once,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(once));
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.once_with(checked!(text(name)), &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, Once(opened));
        Ok(())
    })
}

/// The turn to do it. Waits while somebody else is at it, up to `timeout_ns`; negative: for ever. Returns 0 if it has been done,
/// GINNEL_ONCE_BEGIN or GINNEL_ONCE_AGAIN if the caller has to. Errors: GINNEL_ERR_TIMED_OUT, GINNEL_ERR_FENCED,
/// GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_once_begin(once: *mut Once, timeout_ns: i64) -> c_int {
    number(|| {
        let Once(once) = checked!(borrow_mut(once));
        once.set_timeout(timeout(timeout_ns));
        let Some(turn) = once.begin()? else { return Ok(0) };
        let result = if turn.is_again() { GINNEL_ONCE_AGAIN } else { GINNEL_ONCE_BEGIN };
        std::mem::forget(turn);
        Ok(result)
    })
}

/// Ends a turn. `done` is 1 if it has been done; with 0 the next caller has the turn. Errors: GINNEL_ERR_NOT_OWNER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_once_end(once: *mut Once, done: c_int) -> c_int {
    status(|| {
        let Once(once) = checked!(borrow_mut(once));
        Ok(once.force_end(done != 0)?)
    })
}

/// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
/// the handle. May tell the daemon, for at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_once_close(once: *mut Once) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(once) }
}

/// Removes the name of a lock. Those who have it open keep it; the next open of the name makes another. For members that have
/// made it. Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_lock_unlink(endpoint: *const Endpoint, name: *const c_char) -> c_int {
    status(|| {
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        Ok(endpoint.unlink_sync(checked!(text(name)))?)
    })
}

/// Keeps a lock held although its guard goes, and says how it was found.
fn held<G>(owner_died: bool, guard: G) -> c_int {
    std::mem::forget(guard);
    if owner_died { GINNEL_OWNER_DIED } else { 0 }
}
