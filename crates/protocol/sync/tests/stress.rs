//! Threads at full speed on one object, which sleep on real eventfds whenever they have to wait, without the regular look
//! every 100 ms. If a wake-up is lost, a sleep ends with the watchdog, and the test fails. The data that the objects guard
//! are read and written by `memcpy`.
//!
//! `scripts/sanitize` runs these tests under ThreadSanitizer, which derives an order only from acquire and release. Like
//! `crates/protocol/ring/tests/threads.rs`, and for the reasons given there, this file has its own `main`, which runs the tests whose
//! names contain one of its arguments, or all.

mod world;

use ginnel_layout::sync::SyncKind;
use ginnel_ring::wait::WaitMode;
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_sync::{Barrier, Condvar, Locked, Mutex, Once, Patience, RwLock, Semaphore, SyncError, Turn};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use world::{Bells, EventSleeper, StrictSleeper, page, user};

const TESTS: [(&str, fn()); 6] = [
    ("mutex", mutex),
    ("rwlock", rwlock),
    ("condvar", condvar),
    ("semaphore", semaphore),
    ("barrier", barrier),
    ("once", once),
];

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    for (name, test) in TESTS {
        if wanted.is_empty() || wanted.iter().any(|w| name.contains(w.as_str())) {
            let start = Instant::now();
            test();
            println!("test {name} ... ok ({:.1} s)", start.elapsed().as_secs_f64());
        }
    }
    // This runs only if it is named in full.
    if wanted.iter().any(|w| w == "planted_race") {
        planted_race();
        println!("planted_race was not noticed");
    }
}

const USERS: usize = 4;
const MODES: [WaitMode; 2] = [WaitMode::Interrupt, WaitMode::Adaptive { budget: Duration::from_micros(5) }];

/// The guarded data: nine equal words, too many to be copied word by word. Only the lock orders the copies.
const WORDS: usize = 9;

fn data() -> Mapping {
    Mapping::anonymous(4096).unwrap()
}

/// Returns the value that all words of a place have.
fn value(data: &Mapping, at: usize) -> u64 {
    let mut bytes = [0; 8 * WORDS];
    data.read(at, &mut bytes);
    let words = bytes.as_chunks::<8>().0;
    assert!(words.iter().all(|word| word == &words[0]), "half-written");
    u64::from_le_bytes(words[0])
}

fn set(data: &Mapping, at: usize, value: u64) {
    data.write(at, value.to_le_bytes().repeat(WORDS).as_slice());
}

fn add(data: &Mapping) {
    set(data, 0, value(data, 0) + 1);
}

/// Runs `body` for each user in a thread of its own, once in each mode, with sleepers for two objects.
fn all(body: impl Fn(usize, &mut StrictSleeper, &mut StrictSleeper, Patience) + Send + Sync + 'static) {
    let body = Arc::new(body);
    for mode in MODES {
        let (bells, others) = (Bells::new(USERS), Bells::new(USERS));
        let threads: Vec<_> = (0..USERS)
            .map(|k| {
                let body = body.clone();
                let (mut sleeper, mut other) = (
                    StrictSleeper(EventSleeper::new(&bells, k)),
                    StrictSleeper(EventSleeper::new(&others, k)),
                );
                thread::spawn(move || body(k, &mut sleeper, &mut other, Patience { mode, timeout: None }))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

fn mutex() {
    let (object, data) = (page(SyncKind::MUTEX, 0, 0, USERS), data());
    let guarded = data.clone();
    all(move |k, sleeper, _, how| {
        let mut mutex = Mutex::new(object.clone(), user(k));
        for n in 0..5_000 {
            // Some give up at once, and must pass on a wake that they were given.
            let brief = Patience { timeout: Some(Duration::ZERO), ..how };
            match mutex.lock(sleeper, if n % 3 == 0 { brief } else { how }) {
                Ok(locked) => assert_eq!(locked, Locked::Clean),
                Err(SyncError::TimedOut) => continue,
                Err(error) => panic!("{error}"),
            }
            add(&guarded);
            if n % 7 == 0 {
                thread::yield_now();
            }
            mutex.unlock(sleeper).unwrap();
            guarded.store_relaxed_u64(128 * (k + 1), guarded.load_relaxed_u64(128 * (k + 1)) + 1);
        }
    });
    let each: u64 = (1..=USERS).map(|k| data.load_relaxed_u64(128 * k)).sum();
    assert_eq!(value(&data, 0), each);
}

fn rwlock() {
    let (object, data) = (page(SyncKind::RWLOCK, 0, 0, USERS), data());
    let guarded = data.clone();
    all(move |k, sleeper, _, how| {
        let mut lock = RwLock::new(object.clone(), user(k));
        let mut seen = 0;
        for n in 0..3_000 {
            if (n + k) % 3 == 0 {
                assert_eq!(lock.write(sleeper, how).unwrap(), Locked::Clean);
                add(&guarded);
            } else {
                lock.read(sleeper, how).unwrap();
                let now = value(&guarded, 0);
                assert!(now >= seen, "an old value");
                seen = now;
            }
            if n % 5 == 0 {
                thread::yield_now();
            }
            lock.unlock(sleeper).unwrap();
        }
    });
    assert_eq!(value(&data, 0), (MODES.len() * USERS * 1_000) as u64);
}

fn condvar() {
    // The users take turns in a ring: each signal is for the one that can go on, so all are woken.
    let (object, signal, data) =
        (page(SyncKind::MUTEX, 0, 0, USERS), page(SyncKind::CONDVAR, 0, 0, USERS), data());
    all(move |k, sleeper, other, how| {
        let (mut mutex, mut condvar) =
            (Mutex::new(object.clone(), user(k)), Condvar::new(signal.clone(), user(k)));
        for _ in 0..500 {
            assert_eq!(mutex.lock(sleeper, how).unwrap(), Locked::Clean);
            while value(&data, 0) % USERS as u64 != k as u64 {
                assert!(condvar.wait(other, how, &mut mutex, sleeper, how).unwrap().signalled);
            }
            add(&data);
            condvar.notify_all(other);
            mutex.unlock(sleeper).unwrap();
        }
    });
}

fn semaphore() {
    // Two users give and two take; each side waits for the other. A permit of a third semaphore serves as a lock, and orders
    // the data that it guards.
    let (full, empty) = (page(SyncKind::SEMAPHORE, 2, 0, USERS), page(SyncKind::SEMAPHORE, 2, 2, USERS));
    let (lock, data) = (page(SyncKind::SEMAPHORE, 1, 1, USERS), data());
    let (guarded, bells) = (data.clone(), Bells::new(USERS));
    all(move |k, sleeper, other, how| {
        let mut full = Semaphore::new(full.clone(), user(k), 2);
        let mut empty = Semaphore::new(empty.clone(), user(k), 2);
        let mut lock = Semaphore::new(lock.clone(), user(k), 1);
        let mut third = StrictSleeper(EventSleeper::new(&bells, k));
        for _ in 0..2_000 {
            if k % 2 == 0 {
                empty.acquire(other, how).unwrap();
                full.release(sleeper, 1).unwrap();
            } else {
                full.acquire(sleeper, how).unwrap();
                empty.release(other, 1).unwrap();
            }
            lock.acquire(&mut third, how).unwrap();
            add(&guarded);
            lock.release(&mut third, 1).unwrap();
        }
    });
    assert_eq!(value(&data, 0), (MODES.len() * USERS * 2_000) as u64);
}

fn barrier() {
    let (object, data) = (page(SyncKind::BARRIER, USERS as u32, 0, USERS), data());
    all(move |k, sleeper, _, how| {
        let mut barrier = Barrier::new(object.clone(), user(k), USERS as u32);
        for round in 0..1_000 {
            set(&data, 128 * k, round);
            barrier.wait(sleeper, how).unwrap();
            assert!((0..USERS).all(|other| value(&data, 128 * other) == round));
            barrier.wait(sleeper, how).unwrap();
        }
    });
}

fn once() {
    for _ in 0..50 {
        let (object, data) = (page(SyncKind::ONCE, 0, 0, USERS), data());
        all(move |k, sleeper, _, how| {
            let mut once = Once::new(object.clone(), user(k));
            if let Turn::Mine { again } = once.begin(sleeper, how).unwrap() {
                assert!(!again);
                add(&data);
                once.complete(sleeper).unwrap();
            }
            assert_eq!(value(&data, 0), 1);
        });
    }
}

/// Shows that ThreadSanitizer sees the data that locks guard: one user does not lock. Without a sanitizer nothing happens;
/// `scripts/sanitize` requires that this is reported.
fn planted_race() {
    let (object, data) = (page(SyncKind::MUTEX, 0, 0, USERS), data());
    all(move |k, sleeper, _, how| {
        let mut mutex = Mutex::new(object.clone(), user(k));
        for _ in 0..1_000 {
            if k > 0 {
                assert_eq!(mutex.lock(sleeper, how).unwrap(), Locked::Clean);
            }
            data.read(0, &mut [0; 8 * WORDS]);
            data.write(0, &[1; 8 * WORDS]);
            if k > 0 {
                mutex.unlock(sleeper).unwrap();
            }
        }
    });
}
