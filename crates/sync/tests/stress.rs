//! Threads at full speed on one object, asleep on real eventfds whenever they have to wait, without the look every 100 ms: a
//! lost wake-up is a sleep that ends with the watchdog, and fails.
#![cfg(not(loom))]

mod world;

use ginnel_layout::sync::SyncKind;
use ginnel_ring::wait::WaitMode;
use ginnel_shmem::{Mapping, Memory};
use ginnel_sync::{Barrier, Condvar, Locked, Mutex, Patience, RwLock, Semaphore, SyncError};
use std::time::Duration;
use world::{Bed, Bells, Sound, page, user};

const USERS: usize = 4;
const MODES: [WaitMode; 2] = [WaitMode::Interrupt, WaitMode::Adaptive { budget: Duration::from_micros(5) }];

/// What is guarded: a word that is changed by a load and a store.
fn data() -> Mapping {
    Mapping::anonymous(4096).unwrap()
}

fn add(data: &Mapping) {
    data.store_relaxed_u64(0, data.load_relaxed_u64(0) + 1);
}

/// Each user in a thread of its own, once in each mode, with beds for two objects.
fn all(body: impl Fn(usize, &mut Sound, &mut Sound, Patience) + Sync) {
    for mode in MODES {
        let (bells, others) = (Bells::new(USERS), Bells::new(USERS));
        std::thread::scope(|scope| {
            for k in 0..USERS {
                let (body, bells, others) = (&body, &bells, &others);
                scope.spawn(move || {
                    let (mut bed, mut other) = (Sound(Bed::new(bells, k)), Sound(Bed::new(others, k)));
                    body(k, &mut bed, &mut other, Patience { mode, timeout: None });
                });
            }
        });
    }
}

#[test]
fn mutex() {
    let (object, data) = (page(SyncKind::MUTEX, 0, 0, USERS), data());
    all(|k, bed, _, how| {
        let mut mutex = Mutex::new(object.clone(), user(k));
        for n in 0..5_000 {
            // Some give up at once, and must hand on a wake that they were given.
            let brief = Patience { timeout: Some(Duration::ZERO), ..how };
            match mutex.lock(bed, if n % 3 == 0 { brief } else { how }) {
                Ok(locked) => assert_eq!(locked, Locked::Clean),
                Err(SyncError::TimedOut) => continue,
                Err(error) => panic!("{error}"),
            }
            add(&data);
            if n % 7 == 0 {
                std::thread::yield_now();
            }
            mutex.unlock(bed).unwrap();
            data.store_relaxed_u64(64 * (k + 1), data.load_relaxed_u64(64 * (k + 1)) + 1);
        }
    });
    let each: u64 = (1..=USERS).map(|k| data.load_relaxed_u64(64 * k)).sum();
    assert_eq!(data.load_relaxed_u64(0), each);
}

#[test]
fn rwlock() {
    let (object, data) = (page(SyncKind::RWLOCK, 0, 0, USERS), data());
    all(|k, bed, _, how| {
        let mut lock = RwLock::new(object.clone(), user(k));
        for n in 0..3_000 {
            if (n + k) % 3 == 0 {
                assert_eq!(lock.write(bed, how).unwrap(), Locked::Clean);
                data.store_relaxed_u64(64, 1);
                add(&data);
                data.store_relaxed_u64(64, 0);
            } else {
                lock.read(bed, how).unwrap();
                assert_eq!(data.load_relaxed_u64(64), 0, "a writer is at work");
            }
            if n % 5 == 0 {
                std::thread::yield_now();
            }
            lock.unlock(bed).unwrap();
        }
    });
    assert_eq!(data.load_relaxed_u64(0), (MODES.len() * USERS * 1_000) as u64);
}

#[test]
fn condvar() {
    // Turns in a ring: each signal is for whoever may go on, so all are woken.
    let (object, signal, data) =
        (page(SyncKind::MUTEX, 0, 0, USERS), page(SyncKind::CONDVAR, 0, 0, USERS), data());
    all(|k, bed, other, how| {
        let (mut mutex, mut condvar) =
            (Mutex::new(object.clone(), user(k)), Condvar::new(signal.clone(), user(k)));
        for _ in 0..500 {
            assert_eq!(mutex.lock(bed, how).unwrap(), Locked::Clean);
            while data.load_relaxed_u64(0) % USERS as u64 != k as u64 {
                assert!(condvar.wait(other, how, &mut mutex, bed, how).unwrap().signalled);
            }
            add(&data);
            condvar.notify_all(other);
            mutex.unlock(bed).unwrap();
        }
    });
}

#[test]
fn semaphore() {
    // Two give, two take; each side waits for the other.
    let (full, empty) = (page(SyncKind::SEMAPHORE, 2, 0, USERS), page(SyncKind::SEMAPHORE, 2, 2, USERS));
    all(|k, bed, other, how| {
        let mut full = Semaphore::new(full.clone(), user(k), 2);
        let mut empty = Semaphore::new(empty.clone(), user(k), 2);
        for _ in 0..2_000 {
            if k % 2 == 0 {
                empty.acquire(other, how).unwrap();
                full.release(bed, 1).unwrap();
            } else {
                full.acquire(bed, how).unwrap();
                empty.release(other, 1).unwrap();
            }
        }
    });
}

#[test]
fn barrier() {
    let (object, data) = (page(SyncKind::BARRIER, USERS as u32, 0, USERS), data());
    all(|k, bed, _, how| {
        let mut barrier = Barrier::new(object.clone(), user(k), USERS as u32);
        for round in 0..1_000 {
            data.store_relaxed_u64(64 * k, round);
            barrier.wait(bed, how).unwrap();
            assert!((0..USERS).all(|other| data.load_relaxed_u64(64 * other) == round));
            barrier.wait(bed, how).unwrap();
        }
    });
}
