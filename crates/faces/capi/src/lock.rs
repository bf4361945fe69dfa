//! Locks: mutexes, read-write locks, condition variables, semaphores, barriers and onces.

use crate::boundary::{
    Growing, Outcome, borrow_mut, checked, close, number, output, output_handle, read_options, return_handle,
    share, status, text, timeout,
};
use crate::endpoint::{Endpoint, wait_mode};
use crate::handle_table::handle;
use ginnel::{Error, WaitMode, sync};
use libc::c_int;
use std::ffi::c_char;

/// The result of ginnel_mutex_lock(), ginnel_rwlock_wrlock() and ginnel_condvar_wait() if the caller holds the lock now
/// and its previous owner died while it held it, so that the data may be half-written. Repair the data and call
/// ginnel_mutex_consistent() or ginnel_rwlock_consistent() before unlocking; otherwise every later lock fails with
/// GINNEL_ERR_NOT_RECOVERABLE.
pub const GINNEL_OWNER_DIED: c_int = 1;

/// The result of ginnel_once_begin() if the caller must do the work and then call ginnel_once_end().
pub const GINNEL_ONCE_BEGIN: c_int = 1;

/// Like GINNEL_ONCE_BEGIN, if an earlier caller died in its turn or gave it up, and so may have done a part of the
/// work.
pub const GINNEL_ONCE_AGAIN: c_int = 2;

/// Options for opening a lock. Fill the structure with zeros, set `size`, then the members that should differ from the
/// default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LockOptions {
    /// sizeof(ginnel_lock_options).
    pub size: usize,
    /// 1: the lock must exist (otherwise GINNEL_ERR_NOT_FOUND). 0: it is created if it does not exist.
    pub existing: u32,
    /// 1: the lock must not exist (otherwise GINNEL_ERR_IN_USE).
    pub exclusive: u32,
    /// 1: if this call creates the lock, it stays until it is unlinked. 0: it is removed with its last handle.
    pub persistent: u32,
    /// 1: `wait` and `budget_ns` count. 0: the handle waits as the endpoint's channels do.
    pub set_wait: u32,
    /// How the handle waits: one of GINNEL_WAIT_*.
    pub wait: c_int,
    /// For GINNEL_WAIT_ADAPTIVE: how long to spin, in nanoseconds. 0: the default, 100000.
    pub budget_ns: u64,
}
// SAFETY: the structure is as the trait requires.
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

/// A handle of a robust mutex in a segment: if the mutex's owner dies, the next owner gets it and learns of the death.
/// One thread at a time may use a handle; other threads open their own. Created by ginnel_mutex_open(), freed by
/// ginnel_mutex_close().
pub struct Mutex(sync::Mutex);
handle!(Mutex, "mutex");

/// Opens a mutex of the segment of `endpoint` by name, and creates it if it does not exist. `options` may be NULL. On
/// success the caller must free the handle with ginnel_mutex_close(); on failure it is NULL. A mutex has at most 63
/// handles.
///
/// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
/// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
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
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.mutex_with(checked!(text(name)), &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, Mutex(opened));
        Ok(())
    })
}

/// Locks the mutex. Waits for up to `timeout_ns` nanoseconds; 0 means not at all, a negative number for ever. Returns 0
/// or GINNEL_OWNER_DIED; in both cases the caller holds the mutex. Errors: GINNEL_ERR_TIMED_OUT,
/// GINNEL_ERR_NOT_RECOVERABLE, GINNEL_ERR_DEADLOCK if this handle already holds it, GINNEL_ERR_FENCED,
/// GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_mutex_lock(mutex: *mut Mutex, timeout_ns: i64) -> c_int {
    number(|| {
        let Mutex(mutex) = checked!(borrow_mut(mutex));
        mutex.set_timeout(timeout(timeout_ns));
        let guard = mutex.lock()?;
        Ok(held(guard.owner_died(), guard))
    })
}

/// Unlocks the mutex. Does not block. Errors: GINNEL_ERR_NOT_OWNER, GINNEL_ERR_CORRUPT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_mutex_unlock(mutex: *mut Mutex) -> c_int {
    status(|| {
        let Mutex(mutex) = checked!(borrow_mut(mutex));
        Ok(mutex.force_unlock()?)
    })
}

/// Marks the data as consistent again, after GINNEL_OWNER_DIED. Does not block. Errors: GINNEL_ERR_NOT_OWNER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_mutex_consistent(mutex: *mut Mutex) -> c_int {
    status(|| {
        let Mutex(mutex) = checked!(borrow_mut(mutex));
        Ok(mutex.force_consistent()?)
    })
}

/// Frees a handle. If it still holds the mutex, the mutex is handed on as if its owner had died. NULL is allowed. No
/// other thread may be using the handle. May inform the daemon, which takes at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_mutex_close(mutex: *mut Mutex) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(mutex) }
}

/// A handle of a read-write lock in a segment: many readers or one writer. Writers have priority, and a writer's death
/// is reported to the next user. One thread at a time may use a handle; other threads open their own. Created by
/// ginnel_rwlock_open(), freed by ginnel_rwlock_close().
pub struct RwLock(sync::RwLock);
handle!(RwLock, "read-write lock");

/// Opens a read-write lock of the segment of `endpoint` by name, and creates it if it does not exist. `options` may be
/// NULL. On success the caller must free the handle with ginnel_rwlock_close(); on failure it is NULL. A lock has at
/// most 63 handles.
///
/// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
/// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
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
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.rwlock_with(checked!(text(name)), &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, RwLock(opened));
        Ok(())
    })
}

/// Locks for reading. Waits for up to `timeout_ns` nanoseconds; 0 means not at all, a negative number for ever. Errors:
/// GINNEL_ERR_TIMED_OUT, GINNEL_ERR_OWNER_DIED if a writer died while it held the lock (then lock it for writing),
/// GINNEL_ERR_NOT_RECOVERABLE, GINNEL_ERR_DEADLOCK, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_rdlock(lock: *mut RwLock, timeout_ns: i64) -> c_int {
    status(|| {
        let RwLock(lock) = checked!(borrow_mut(lock));
        lock.set_timeout(timeout(timeout_ns));
        std::mem::forget(lock.read()?);
        Ok(())
    })
}

/// Locks for writing; otherwise like ginnel_mutex_lock().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_wrlock(lock: *mut RwLock, timeout_ns: i64) -> c_int {
    number(|| {
        let RwLock(lock) = checked!(borrow_mut(lock));
        lock.set_timeout(timeout(timeout_ns));
        let guard = lock.write()?;
        Ok(held(guard.owner_died(), guard))
    })
}

/// Unlocks, whether the lock is held for reading or for writing. Does not block. Errors: GINNEL_ERR_NOT_OWNER,
/// GINNEL_ERR_CORRUPT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_unlock(lock: *mut RwLock) -> c_int {
    status(|| {
        let RwLock(lock) = checked!(borrow_mut(lock));
        Ok(lock.force_unlock()?)
    })
}

/// Marks the data as consistent again, after GINNEL_OWNER_DIED. Does not block. Errors: GINNEL_ERR_NOT_OWNER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_consistent(lock: *mut RwLock) -> c_int {
    status(|| {
        let RwLock(lock) = checked!(borrow_mut(lock));
        Ok(lock.force_consistent()?)
    })
}

/// Frees a handle. If it still holds the lock, the lock is handed on as if its owner had died. NULL is allowed. No
/// other thread may be using the handle. May inform the daemon, which takes at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rwlock_close(lock: *mut RwLock) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(lock) }
}

/// A handle of a condition variable in a segment, used together with a mutex. One thread at a time may use a handle;
/// other threads open their own. Created by ginnel_condvar_open(), freed by ginnel_condvar_close().
pub struct Condvar(sync::Condvar);
handle!(Condvar, "condition variable");

/// Opens a condition variable of the segment of `endpoint` by name, and creates it if it does not exist. `options` may
/// be NULL. On success the caller must free the handle with ginnel_condvar_close(); on failure it is NULL. A condition
/// variable has at most 63 handles.
///
/// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
/// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
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
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.condvar_with(checked!(text(name)), &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, Condvar(opened));
        Ok(())
    })
}

/// Unlocks the mutex, waits for a signal for up to `timeout_ns` nanoseconds (a negative number means for ever), and
/// locks the mutex again, for which it waits for ever. Returns 0, or GINNEL_OWNER_DIED as ginnel_mutex_lock() does.
/// After these and after GINNEL_ERR_TIMED_OUT the caller holds the mutex; after other errors it does not. Check the
/// condition in every case. Errors: those of ginnel_mutex_lock(), and GINNEL_ERR_NOT_OWNER if the caller did not hold
/// the mutex.
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

/// Wakes one waiter, if there is one. The condition must have been changed while the mutex was held; the mutex need not
/// be held for this call. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_condvar_signal(condvar: *mut Condvar) -> c_int {
    status(|| {
        let Condvar(condvar) = checked!(borrow_mut(condvar));
        condvar.notify_one();
        Ok(())
    })
}

/// Wakes all waiters. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_condvar_broadcast(condvar: *mut Condvar) -> c_int {
    status(|| {
        let Condvar(condvar) = checked!(borrow_mut(condvar));
        condvar.notify_all();
        Ok(())
    })
}

/// Frees a handle. NULL is allowed. No other thread may be using the handle. May inform the daemon, which takes at most
/// a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_condvar_close(condvar: *mut Condvar) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(condvar) }
}

/// A handle of a counting semaphore in a segment. Permits that were acquired by a process that dies are not returned.
/// One thread at a time may use a handle; other threads open their own. Created by ginnel_semaphore_open(), freed by
/// ginnel_semaphore_close().
pub struct Semaphore(sync::Semaphore);
handle!(Semaphore, "semaphore");

/// Opens a semaphore of the segment of `endpoint` by name. If it does not exist, creates it with `initial` permits and
/// a maximum of `limit`; an existing one must have the same limit, unless `limit` is 0. `options` may be NULL. On
/// success the caller must free the handle with ginnel_semaphore_close(); on failure it is NULL. A semaphore has at
/// most 63 handles.
///
/// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
/// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
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
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.semaphore_with(checked!(text(name)), limit, initial, &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, Semaphore(opened));
        Ok(())
    })
}

/// Acquires one permit. Waits for up to `timeout_ns` nanoseconds; 0 means not at all, a negative number for ever.
/// Errors: GINNEL_ERR_TIMED_OUT, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_semaphore_wait(semaphore: *mut Semaphore, timeout_ns: i64) -> c_int {
    status(|| {
        let Semaphore(semaphore) = checked!(borrow_mut(semaphore));
        semaphore.set_timeout(timeout(timeout_ns));
        Ok(semaphore.acquire()?)
    })
}

/// Releases `count` permits. Does not block. Errors: GINNEL_ERR_OVERFLOW if the semaphore would have more than its
/// limit, after which none is released; GINNEL_ERR_CORRUPT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_semaphore_post(semaphore: *mut Semaphore, count: u32) -> c_int {
    status(|| {
        let Semaphore(semaphore) = checked!(borrow_mut(semaphore));
        Ok(semaphore.release(count)?)
    })
}

/// Stores the current number of permits in `*permits`. Does not block. Errors: GINNEL_ERR_CORRUPT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_semaphore_get(semaphore: *mut Semaphore, permits: *mut u64) -> c_int {
    status(|| {
        let to = checked!(output(permits));
        let Semaphore(semaphore) = checked!(borrow_mut(semaphore));
        to.write(semaphore.permits()?);
        Ok(())
    })
}

/// Frees a handle. Permits that were acquired through it are not returned. NULL is allowed. No other thread may be
/// using the handle. May inform the daemon, which takes at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_semaphore_close(semaphore: *mut Semaphore) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(semaphore) }
}

/// A handle of a barrier in a segment, at which a fixed number of parties wait for each other. One thread at a time may
/// use a handle; other threads open their own. Created by ginnel_barrier_open(), freed by ginnel_barrier_close().
pub struct Barrier(sync::Barrier);
handle!(Barrier, "barrier");

/// Opens a barrier of the segment of `endpoint` by name, for `parties` parties (1 to 63), each with a handle of its
/// own. Creates it if it does not exist. `options` may be NULL. On success the caller must free the handle with
/// ginnel_barrier_close(); on failure it is NULL. A barrier has at most 63 handles.
///
/// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
/// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
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
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.barrier_with(checked!(text(name)), parties, &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, Barrier(opened));
        Ok(())
    })
}

/// Arrives at the barrier and waits until all parties have arrived, for up to `timeout_ns` nanoseconds; a negative
/// number means for ever. Returns 1 to exactly one of the parties and 0 to the others. Errors: GINNEL_ERR_TIMED_OUT,
/// GINNEL_ERR_BARRIER_BROKEN if a party has died, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_barrier_wait(barrier: *mut Barrier, timeout_ns: i64) -> c_int {
    number(|| {
        let Barrier(barrier) = checked!(borrow_mut(barrier));
        barrier.set_timeout(timeout(timeout_ns));
        Ok(barrier.wait()?.into())
    })
}

/// Makes a broken barrier usable again. Does not block. Errors: GINNEL_ERR_WOULD_BLOCK while some waiting parties have
/// not yet noticed that it is broken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_barrier_reset(barrier: *mut Barrier) -> c_int {
    status(|| {
        let Barrier(barrier) = checked!(borrow_mut(barrier));
        Ok(barrier.reset()?)
    })
}

/// Frees a handle. NULL is allowed. No other thread may be using the handle. May inform the daemon, which takes at most
/// a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_barrier_close(barrier: *mut Barrier) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(barrier) }
}

/// A handle of a one-time initialisation in a segment. One thread at a time may use a handle; other threads open their
/// own. Created by ginnel_once_open(), freed by ginnel_once_close().
pub struct Once(sync::Once);
handle!(Once, "once");

/// Opens a once of the segment of `endpoint` by name, and creates it if it does not exist. `options` may be NULL. On
/// success the caller must free the handle with ginnel_once_close(); on failure it is NULL. A once has at most 63
/// handles.
///
/// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
/// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
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
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let (options, wait) = in_rust(checked!(read_options(options)))?;
        let mut opened = endpoint.once_with(checked!(text(name)), &options)?;
        if let Some(mode) = wait {
            opened.set_mode(mode);
        }
        return_handle(place, Once(opened));
        Ok(())
    })
}

/// Asks for the turn to do the work. Waits while another handle has the turn, for up to `timeout_ns` nanoseconds; a
/// negative number means for ever. Returns 0 if the work is done already, and GINNEL_ONCE_BEGIN or GINNEL_ONCE_AGAIN if
/// the caller must do it. Errors: GINNEL_ERR_TIMED_OUT, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
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

/// Ends a turn. `done` is 1 if the work is done; with 0 the next caller gets the turn. Does not block. Errors:
/// GINNEL_ERR_NOT_OWNER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_once_end(once: *mut Once, done: c_int) -> c_int {
    status(|| {
        let Once(once) = checked!(borrow_mut(once));
        Ok(once.force_end(done != 0)?)
    })
}

/// Frees a handle. If it still has the turn, the turn is handed on as if its owner had died. NULL is allowed. No other
/// thread may be using the handle. May inform the daemon, which takes at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_once_close(once: *mut Once) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(once) }
}

/// Removes the name of a lock. Existing handles stay usable; the next open of the name creates another lock. Only the
/// member that has created the lock may call it. Blocks until the daemon answers. Any thread may call it. Errors:
/// GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_lock_unlink(endpoint: *const Endpoint, name: *const c_char) -> c_int {
    status(|| {
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        Ok(endpoint.unlink_sync(checked!(text(name)))?)
    })
}

/// Keeps a lock held although its Rust guard ends, and returns whether its previous owner died.
fn held<G>(owner_died: bool, guard: G) -> c_int {
    std::mem::forget(guard);
    if owner_died { GINNEL_OWNER_DIED } else { 0 }
}
