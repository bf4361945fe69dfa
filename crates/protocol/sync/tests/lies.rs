//! One test for each malformed value that a hostile member can write into an object, named by the rule that the value breaks.
//! The test expects the exact error, within the caller's timeout, and that refusing the value does not change the page.
#![cfg(not(loom))]

mod world;

use ginnel_layout::sync::{
    ARMED, BARRIER_BROKEN, OwnerWord, SEATED, SIZE, SLOT_EPOCH, SLOT_READER, STATE, SyncKind, TURN, WAITING,
    slot,
};
use ginnel_ring::wait::WaitMode;
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use ginnel_sync::authority::{self, Left, reclaim};
use ginnel_sync::{
    Barrier, Condvar, Corrupt, Locked, Mutex, Once, Patience, RwLock, Semaphore, SyncError, Turn,
};
use kit::random::Random;
use std::time::{Duration, Instant};
use world::{NoDoorbells, page, user};

const MODES: [WaitMode; 3] =
    [WaitMode::Poll, WaitMode::Interrupt, WaitMode::Adaptive { budget: Duration::from_micros(10) }];

fn short(mode: WaitMode) -> Patience {
    Patience { mode, timeout: Some(Duration::from_millis(5)) }
}

fn patient() -> Patience {
    Patience { mode: WaitMode::Interrupt, timeout: None }
}

fn everything(page: &Mapping) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    page.read(0, &mut bytes);
    bytes
}

/// Owner words that no correct user writes.
fn impossible() -> Vec<u64> {
    let owned = OwnerWord::owned(3, 1, 9).0;
    vec![
        64 | 1 << 16,                         // a slot that does not exist
        255 | 1 << 16,                        // another such slot
        1,                                    // a slot without epoch
        1 << 16,                              // an epoch without slot
        7 << 32,                              // an endpoint without slot
        owned | 1 << 12,                      // an unknown flag
        owned | 1 << 15,                      // another
        owned | OwnerWord::NOT_RECOVERABLE,   // ended, and owned
        owned | OwnerWord::DONE,              // the same
        OwnerWord::DONE | OwnerWord::WAITERS, // a lock that has ended has no waiters
        OwnerWord::DONE | OwnerWord::NOT_RECOVERABLE,
        u64::MAX,
    ]
}

#[test]
fn impossible_owners_are_corrupt() {
    for word in impossible() {
        let page = page(SyncKind::MUTEX, 0, 0, 2);
        page.swap_u64(STATE, word);
        let before = everything(&page);
        let corrupt = |error: SyncError| matches!(error, SyncError::Corrupt(Corrupt::Owner(w)) if w == word);
        let mut mutex = Mutex::new(page.clone(), user(0));
        assert!(corrupt(mutex.try_lock().unwrap_err()), "{word:#x}");
        assert!(corrupt(mutex.lock(&mut NoDoorbells, patient()).unwrap_err()), "{word:#x}");
        assert!(corrupt(mutex.unlock(&mut NoDoorbells).unwrap_err()), "{word:#x}");
        assert!(corrupt(mutex.make_consistent().unwrap_err()), "{word:#x}");
        let mut lock = RwLock::new(page.clone(), user(0));
        assert!(corrupt(lock.write(&mut NoDoorbells, patient()).unwrap_err()), "{word:#x}");
        assert!(corrupt(lock.read(&mut NoDoorbells, patient()).unwrap_err()), "{word:#x}");
        assert!(corrupt(lock.try_read(&mut NoDoorbells).unwrap_err()), "{word:#x}");
        assert!(
            corrupt(Once::new(page.clone(), user(0)).begin(&mut NoDoorbells, patient()).unwrap_err()),
            "{word:#x}"
        );
        assert_eq!(everything(&page), before, "{word:#x}");
    }
}

#[test]
fn a_mutex_is_never_done() {
    let page = page(SyncKind::MUTEX, 0, 0, 1);
    page.swap_u64(STATE, OwnerWord::DONE);
    let outcome = Mutex::new(page.clone(), user(0)).lock(&mut NoDoorbells, patient());
    assert!(matches!(outcome, Err(SyncError::Corrupt(Corrupt::Owner(_)))), "{outcome:?}");
}

/// Owners that do not have the slot that the word names, as in the word of a user that was declared dead before it wrote the
/// word.
#[test]
fn an_owner_that_does_not_exist_has_died() {
    let gone = [
        OwnerWord::owned(62, 5, 9).0,                     // a slot without user
        OwnerWord::owned(1, 2, 7).0,                      // another epoch of the slot
        OwnerWord::owned(1, 1, 8).0,                      // another endpoint
        OwnerWord::owned(1, 2, 7).0 | OwnerWord::WAITERS, // another user has slept for it
    ];
    for word in gone {
        let page = |kind| {
            let page = page(kind, 0, 0, 2);
            page.swap_u64(STATE, word);
            page
        };
        let mut mutex = Mutex::new(page(SyncKind::MUTEX), user(0));
        assert_eq!(mutex.try_lock().unwrap(), Locked::OwnerDied, "{word:#x}");
        let mut mutex = Mutex::new(page(SyncKind::MUTEX), user(0));
        assert_eq!(mutex.lock(&mut NoDoorbells, patient()).unwrap(), Locked::OwnerDied, "{word:#x}");
        mutex.make_consistent().unwrap();
        mutex.unlock(&mut NoDoorbells).unwrap();
        let mut lock = RwLock::new(page(SyncKind::RWLOCK), user(0));
        assert!(matches!(lock.try_read(&mut NoDoorbells), Err(SyncError::OwnerDied)), "{word:#x}");
        assert!(matches!(lock.read(&mut NoDoorbells, patient()), Err(SyncError::OwnerDied)), "{word:#x}");
        assert_eq!(lock.write(&mut NoDoorbells, patient()).unwrap(), Locked::OwnerDied, "{word:#x}");
        let mut once = Once::new(page(SyncKind::ONCE), user(0));
        assert_eq!(once.begin(&mut NoDoorbells, patient()).unwrap(), Turn::Mine { again: true }, "{word:#x}");
    }
}

#[test]
fn an_owner_that_has_not_taken_the_lock_costs_the_timeout() {
    let page = page(SyncKind::MUTEX, 0, 0, 2);
    page.swap_u64(STATE, OwnerWord::owned(1, 1, 7).0);
    for mode in MODES {
        let begin = Instant::now();
        let outcome = Mutex::new(page.clone(), user(0)).lock(&mut NoDoorbells, short(mode));
        assert!(matches!(outcome, Err(SyncError::TimedOut)), "{outcome:?}");
        assert!(begin.elapsed() >= Duration::from_millis(5));
    }
    assert_eq!(page.load_relaxed_u64(ARMED), 0, "the wait ends disarmed");
}

#[test]
fn locks_that_are_taken_away_are_not_unlocked() {
    let page = page(SyncKind::MUTEX, 0, 0, 2);
    let mut mutex = Mutex::new(page.clone(), user(0));
    for word in [0, OwnerWord::owned(1, 1, 7).0, OwnerWord::owned(0, 2, 7).0, OwnerWord::owned(0, 1, 8).0] {
        assert_eq!(mutex.try_lock().unwrap(), Locked::Clean);
        page.swap_u64(STATE, word);
        assert!(matches!(mutex.unlock(&mut NoDoorbells), Err(SyncError::NotOwner)));
        assert!(matches!(mutex.make_consistent(), Err(SyncError::NotOwner)));
        assert_eq!(page.swap_u64(STATE, 0), word, "another's word stays");
    }
}

#[test]
fn a_lock_that_already_names_us_is_not_taken() {
    let page = page(SyncKind::MUTEX, 0, 0, 1);
    page.swap_u64(STATE, OwnerWord::owned(0, 1, 7).0);
    assert!(matches!(Mutex::new(page, user(0)).lock(&mut NoDoorbells, patient()), Err(SyncError::Deadlock)));
}

#[test]
fn impossible_readers_are_corrupt() {
    let page = page(SyncKind::RWLOCK, 0, 0, 2);
    // A writer that never ends. The reader's own word is overwritten while it waits, with a value that no writer stores.
    page.swap_u64(STATE, OwnerWord::owned(1, 1, 7).0);
    struct Scribble<'a>(&'a Mapping);
    impl ginnel_ring::wait::Sleeper for Scribble<'_> {
        fn sleep(&mut self, _: Option<Instant>) -> std::io::Result<()> {
            self.0.swap_u64(slot(0) + SLOT_READER, 77);
            Ok(())
        }
    }
    impl ginnel_sync::World for Scribble<'_> {
        fn ring(&mut self, _: usize) {}
    }
    let outcome = RwLock::new(page.clone(), user(0)).read(&mut Scribble(&page), patient());
    assert!(matches!(outcome, Err(SyncError::Corrupt(Corrupt::Reader(77)))), "{outcome:?}");
    assert_eq!(page.load_relaxed_u64(slot(0) + SLOT_READER), 0, "and does not wait for the lock any more");
}

#[test]
fn a_reader_that_never_leaves_costs_the_writer_its_timeout() {
    for mode in MODES {
        let page = page(SyncKind::RWLOCK, 0, 0, 2);
        page.swap_u64(slot(1) + SLOT_READER, 1);
        let outcome = RwLock::new(page.clone(), user(0)).write(&mut NoDoorbells, short(mode));
        assert!(matches!(outcome, Err(SyncError::TimedOut)), "{outcome:?}");
        assert_eq!(page.load_relaxed_u64(STATE), 0, "the word is given back");
    }
}

#[test]
fn a_read_lock_that_is_taken_away_is_not_unlocked() {
    let page = page(SyncKind::RWLOCK, 0, 0, 2);
    let mut lock = RwLock::new(page.clone(), user(0));
    lock.read(&mut NoDoorbells, patient()).unwrap();
    page.swap_u64(slot(0) + SLOT_READER, 0);
    assert!(matches!(lock.unlock(&mut NoDoorbells), Err(SyncError::NotOwner)));
}

#[test]
fn permits_beyond_the_limit_are_corrupt() {
    let page = page(SyncKind::SEMAPHORE, 3, 0, 1);
    for permits in [4, u64::MAX, 1 << 32] {
        page.swap_u64(STATE, permits);
        let mut semaphore = Semaphore::new(page.clone(), user(0), 3);
        let corrupt =
            |e| matches!(e, SyncError::Corrupt(Corrupt::Permits { limit: 3, permits: p }) if p == permits);
        assert!(corrupt(semaphore.acquire(&mut NoDoorbells, patient()).unwrap_err()));
        assert!(corrupt(semaphore.try_acquire().unwrap_err()));
        assert!(corrupt(semaphore.release(&mut NoDoorbells, 1).unwrap_err()));
        assert_eq!(page.load_relaxed_u64(STATE), permits);
    }
}

#[test]
fn armed_bits_without_users_ring_no_one() {
    let page = page(SyncKind::CONDVAR, 0, 0, 1);
    for waiting in [u64::MAX, 1 << 63, 1 << 62, 2] {
        for turn in [0, 62, 63, 64, u64::MAX] {
            page.swap_u64(WAITING, waiting);
            page.swap_u64(ARMED, u64::MAX);
            page.swap_u64(TURN, turn);
            let mut condvar = Condvar::new(page.clone(), user(0));
            condvar.notify_one(&mut NoDoorbells);
            condvar.notify_all(&mut NoDoorbells);
        }
    }
}

#[test]
fn forged_arrivals_do_not_hold_a_barrier_for_ever() {
    let page = page(SyncKind::BARRIER, 2, 0, 2);
    let mut barrier = Barrier::new(page.clone(), user(0), 2);
    page.swap_u64(STATE, u64::MAX >> 1);
    assert!(barrier.wait(&mut NoDoorbells, patient()).unwrap(), "more parties than there are have arrived");
    page.swap_u64(STATE, BARRIER_BROKEN | 2);
    assert!(matches!(barrier.wait(&mut NoDoorbells, patient()), Err(SyncError::BarrierBroken)));
    assert!(matches!(barrier.reset(), Err(SyncError::Busy)), "one party has not noticed");
    page.swap_u64(STATE, BARRIER_BROKEN);
    barrier.reset().unwrap();
    assert!(matches!(barrier.wait(&mut NoDoorbells, short(WaitMode::Interrupt)), Err(SyncError::TimedOut)));
    assert_eq!(page.load_relaxed_u64(STATE), 0, "a party that gives up has not arrived");
}

/// A party that was declared dead arrives after its slot was taken back.
#[test]
fn arrivals_of_dead_users_do_not_count() {
    let page = page(SyncKind::BARRIER, 2, 0, 1);
    let mut barrier = Barrier::new(page.clone(), user(0), 2);
    page.swap_u64(STATE, BARRIER_BROKEN | 2);
    barrier.reset().unwrap();
    page.swap_u64(STATE, 2);
    let outcome = barrier.wait(&mut NoDoorbells, short(WaitMode::Interrupt));
    assert!(matches!(outcome, Err(SyncError::TimedOut)), "{outcome:?}");
}

#[test]
fn a_handle_whose_slot_is_gone_takes_nothing() {
    for epoch in [0, 2, u32::MAX] {
        let page = page(SyncKind::MUTEX, 0, 0, 1);
        page.store_relaxed_u32(slot(0) + SLOT_EPOCH, epoch);
        let before = everything(&page);
        let stale =
            |outcome: Result<(), SyncError>| assert!(matches!(outcome, Err(SyncError::Stale)), "{outcome:?}");
        stale(Mutex::new(page.clone(), user(0)).lock(&mut NoDoorbells, patient()).map(|_| ()));
        stale(Mutex::new(page.clone(), user(0)).try_lock().map(|_| ()));
        stale(RwLock::new(page.clone(), user(0)).read(&mut NoDoorbells, patient()));
        stale(RwLock::new(page.clone(), user(0)).write(&mut NoDoorbells, patient()).map(|_| ()));
        stale(Semaphore::new(page.clone(), user(0), 3).acquire(&mut NoDoorbells, patient()));
        stale(Barrier::new(page.clone(), user(0), 2).wait(&mut NoDoorbells, patient()).map(|_| ()));
        stale(Once::new(page.clone(), user(0)).begin(&mut NoDoorbells, patient()).map(|_| ()));
        assert_eq!(everything(&page), before);
    }
}

#[test]
fn lost_memory_is_reported() {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(SIZE as u64).unwrap();
    let page = Mapping::of_file(&file, 0, SIZE, Protection::ReadWrite).unwrap();
    authority::format(&page, SyncKind::MUTEX, 0, 0);
    authority::seat(&page, user(0), 1, 0);
    let mut mutex = Mutex::new(page.clone(), user(0));
    assert_eq!(mutex.try_lock().unwrap(), Locked::Clean);
    mutex.unlock(&mut NoDoorbells).unwrap();
    file.set_len(0).unwrap();
    assert!(matches!(mutex.lock(&mut NoDoorbells, patient()), Err(SyncError::Gone)));
    assert!(matches!(mutex.try_lock(), Err(SyncError::Gone)));
}

/// The daemon's operations on a page of noise: they end, and leave no trace of the dead user.
#[test]
fn the_daemon_takes_back_a_slot_of_any_page() {
    let noise = |seed: u64| {
        let page = page(SyncKind::MUTEX, 0, 0, 0);
        let mut random = Random::new(seed);
        for at in (0..SIZE).step_by(8) {
            page.swap_u64(at, random.next());
        }
        page
    };
    for kind in (0..8).map(SyncKind) {
        for seed in 1..200 {
            let page = noise(seed);
            let k = seed as usize % 63;
            page.swap_u64(SEATED, u64::MAX);
            page.swap_u64(STATE, page.load_relaxed_u64(STATE) & !0xff | (k as u64 + 1));
            let rung = reclaim(&page, kind, k, Left::Died);
            assert_eq!(rung & (1 << k | 1 << 63), 0, "neither the dead user nor a slot that does not exist");
            assert_eq!(page.load_relaxed_u64(ARMED) & 1 << k, 0);
            assert_eq!(page.load_relaxed_u32(slot(k) + SLOT_EPOCH), 0);
            if matches!(kind, SyncKind::MUTEX | SyncKind::RWLOCK | SyncKind::ONCE) {
                assert_eq!(page.load_relaxed_u64(STATE), OwnerWord::OWNER_DIED);
            }
            let _ = authority::look(&page, kind);
        }
    }
}
