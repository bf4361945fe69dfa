//! The segment's file is truncated under objects in use. From then on the page reads as zeros, which look like a free lock, a
//! semaphore without permits and a barrier that has opened. No operation may mistake them for these.
#![cfg(not(loom))]

use ginnel_layout::sync::{SIZE, SLOT_EPOCH, slot};
use ginnel_ring::wait::Sleeper;
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use ginnel_sync::{Barrier, Condvar, Mutex, Once, Patience, RwLock, Semaphore, SyncError, User, World};
use kit::wait::WATCHDOG;
use std::fs::File;
use std::io;
use std::time::Instant;

const EPOCH: u16 = 3;
const PATIENCE: Patience = Patience { mode: ginnel_ring::wait::WaitMode::Interrupt, timeout: Some(WATCHDOG) };

/// Truncates the file when a user sleeps.
struct TruncateOnSleep<'a>(&'a File);

impl Sleeper for TruncateOnSleep<'_> {
    fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
        self.0.set_len(0)
    }
}

impl World for TruncateOnSleep<'_> {
    fn ring(&mut self, slot: usize) {
        panic!("slot {slot} is rung")
    }
}

/// Returns a page in which the user has slot 0.
fn page() -> (File, Mapping, User) {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(SIZE as u64).unwrap();
    let page = Mapping::of_file(&file, 0, SIZE, Protection::ReadWrite).unwrap();
    page.store_relaxed_u32(slot(0) + SLOT_EPOCH, EPOCH.into());
    (file, page, User::new(0, EPOCH, 1).unwrap())
}

/// Returns the result of `operation` on an object that `make` has made in a page which is then truncated.
fn after<T, R>(
    make: impl FnOnce(Mapping, User) -> T,
    operation: impl FnOnce(&mut T, &mut TruncateOnSleep<'_>) -> Result<R, SyncError>,
) -> Option<SyncError> {
    let (file, page, user) = page();
    let mut object = make(page, user);
    file.set_len(0).unwrap();
    operation(&mut object, &mut TruncateOnSleep(&file)).err()
}

macro_rules! gone {
    ($result:expr) => {
        let result = $result;
        assert!(matches!(result, Some(SyncError::Gone)), "{}: {result:?}", stringify!($result));
    };
}

#[test]
fn a_semaphore_gives_and_takes_no_permits() {
    let make = |page, user| Semaphore::new(page, user, 5);
    gone!(after(make, |s, world| s.release(world, 1)));
    gone!(after(make, |s, world| s.acquire(world, PATIENCE)));
    gone!(after(make, |s, _| s.try_acquire()));
    gone!(after(make, |s, _| s.permits()));
}

#[test]
fn a_barrier_does_not_open() {
    // The barrier has one party, so that the first to arrive would be the last.
    gone!(after(|page, user| Barrier::new(page, user, 1), |b, world| b.wait(world, PATIENCE)));
    gone!(after(|page, user| Barrier::new(page, user, 2), |b, world| b.wait(world, PATIENCE)));
    gone!(after(|page, user| Barrier::new(page, user, 2), |b, _| b.reset()));
    // The file is truncated during the wait.
    let (file, page, user) = page();
    let waited = Barrier::new(page, user, 2).wait(&mut TruncateOnSleep(&file), PATIENCE);
    assert!(matches!(waited, Err(SyncError::Gone)), "{waited:?}");
}

#[test]
fn a_lock_is_not_taken_or_given_back() {
    gone!(after(Mutex::new, |m, world| m.lock(world, PATIENCE)));
    gone!(after(Mutex::new, |m, _| m.try_lock()));
    gone!(after(RwLock::new, |l, world| l.read(world, PATIENCE)));
    gone!(after(RwLock::new, |l, world| l.write(world, PATIENCE)));
    gone!(after(RwLock::new, |l, world| l.try_read(world)));
    gone!(after(RwLock::new, |l, world| l.try_write(world)));
    gone!(after(Once::new, |o, world| o.begin(world, PATIENCE)));
    // The lock was held when the file was truncated.
    for write in [true, false] {
        let (file, page, user) = page();
        let mut world = TruncateOnSleep(&file);
        let mut lock = RwLock::new(page, user);
        match write {
            true => _ = lock.write(&mut world, PATIENCE).unwrap(),
            false => lock.read(&mut world, PATIENCE).unwrap(),
        }
        file.set_len(0).unwrap();
        let unlocked = lock.unlock(&mut world);
        assert!(matches!(unlocked, Err(SyncError::Gone)), "written: {write}: {unlocked:?}");
    }
    let (file, page, user) = page();
    let mut world = TruncateOnSleep(&file);
    let mut lock = Mutex::new(page, user);
    let _ = lock.lock(&mut world, PATIENCE).unwrap();
    file.set_len(0).unwrap();
    let unlocked = lock.unlock(&mut world);
    assert!(matches!(unlocked, Err(SyncError::Gone)), "{unlocked:?}");
}

#[test]
fn a_wait_for_a_signal_ends() {
    let (file, page, user) = page();
    let mutex_page = Mapping::anonymous(SIZE).unwrap();
    mutex_page.store_relaxed_u32(slot(0) + SLOT_EPOCH, EPOCH.into());
    let mut mutex = Mutex::new(mutex_page, user);
    let (mut world, mut other) = (TruncateOnSleep(&file), TruncateOnSleep(&file));
    let _ = mutex.lock(&mut other, PATIENCE).unwrap();
    let woken = Condvar::new(page, user).wait(&mut world, PATIENCE, &mut mutex, &mut other, PATIENCE);
    assert!(matches!(woken, Err(SyncError::Gone)), "{woken:?}");
}
