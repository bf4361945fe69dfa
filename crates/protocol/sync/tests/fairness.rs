//! No user starves: where that is promised, users that wait are let in before users that come later, and sleepers are woken
//! in turn.
#![cfg(not(loom))]

mod world;

use ginnel_layout::sync::{ARMED, OwnerWord, ReaderState, SLOT_READER, STATE, SyncKind, WAITING, slot};
use ginnel_ring::wait::{Sleeper, WaitMode};
use ginnel_shmem::SharedMemory;
use ginnel_sync::{Condvar, Locked, Patience, RwLock, Semaphore, SyncError, World};
use std::io;
use std::time::{Duration, Instant};
use world::{NoDoorbells, page, user};

/// Records which users are rung.
#[derive(Default)]
struct Rung(Vec<usize>);

impl Sleeper for Rung {
    fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
        Ok(())
    }
}

impl World for Rung {
    fn ring(&mut self, slot: usize) {
        self.0.push(slot);
    }
}

const HOW: Patience = Patience { mode: WaitMode::Interrupt, timeout: Some(Duration::from_millis(1)) };

#[test]
fn readers_that_wait_are_let_in_by_the_writer_that_ends() {
    let page = page(SyncKind::RWLOCK, 0, 0, 4);
    let mut writer = RwLock::new(page.clone(), user(0));
    assert_eq!(writer.write(&mut NoDoorbells, HOW).unwrap(), Locked::Clean);
    // Two readers and a writer sleep: the page is as they leave it then.
    for k in [1, 2] {
        page.swap_u64(slot(k) + SLOT_READER, ReaderState::WANTED.0);
    }
    page.fetch_or_u64(ARMED, 0b1110);
    page.fetch_or_u64(STATE, OwnerWord::WAITERS);
    let mut rung = Rung::default();
    writer.unlock(&mut rung).unwrap();
    rung.0.sort();
    assert_eq!(rung.0, [1, 2, 3], "all readers and one writer");
    for k in [1, 2] {
        assert_eq!(page.load_relaxed_u64(slot(k) + SLOT_READER), ReaderState::HELD.0);
    }
    // However quick the next writer is, it gets the lock after them.
    assert!(matches!(writer.try_write(&mut NoDoorbells), Err(SyncError::Busy)));
    assert!(matches!(writer.write(&mut NoDoorbells, HOW), Err(SyncError::TimedOut)));
}

#[test]
fn readers_that_come_wait_behind_a_writer_that_waits() {
    let page = page(SyncKind::RWLOCK, 0, 0, 3);
    let mut reader = RwLock::new(page.clone(), user(0));
    reader.read(&mut NoDoorbells, HOW).unwrap();
    // A writer has the word and waits for the reader.
    page.swap_u64(STATE, OwnerWord::owned(1, 1, 7).0);
    let mut late = RwLock::new(page.clone(), user(2));
    assert!(matches!(late.try_read(&mut NoDoorbells), Err(SyncError::Busy)));
    assert!(matches!(late.read(&mut NoDoorbells, HOW), Err(SyncError::TimedOut)));
    assert_eq!(page.load_relaxed_u64(slot(2) + SLOT_READER), ReaderState::NONE.0);
    reader.unlock(&mut NoDoorbells).unwrap();
}

#[test]
fn signals_and_permits_go_round() {
    let signals = page(SyncKind::CONDVAR, 0, 0, 4);
    let permits = page(SyncKind::SEMAPHORE, 100, 0, 4);
    let mut condvar = Condvar::new(signals.clone(), user(0));
    let mut semaphore = Semaphore::new(permits.clone(), user(0), 100);
    let (mut signalled, mut permitted) = (Rung::default(), Rung::default());
    for _ in 0..6 {
        // All three wait, again and again.
        signals.fetch_or_u64(WAITING, 0b1110);
        signals.fetch_or_u64(ARMED, 0b1110);
        permits.fetch_or_u64(ARMED, 0b1110);
        condvar.notify_one(&mut signalled);
        semaphore.release(&mut permitted, 1).unwrap();
    }
    assert_eq!(signalled.0, [1, 2, 3, 1, 2, 3]);
    assert_eq!(permitted.0, [1, 2, 3, 1, 2, 3]);
}
