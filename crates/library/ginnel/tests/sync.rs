//! Named locks, used through the library with a real daemon: exclusion, sleep, death, and wrong use.

use ginnel::sync::SyncOptions;
use ginnel::{AttachOptions, Endpoint, Error, ErrorCode, SharedMemory, WaitMode};
use kit::daemon::*;
use kit::wait::{WATCHDOG, wait_for};
use std::process::Child;
use std::time::{Duration, Instant};

const WEB: &str = "[segment.web]\nsize = \"8M\"\npage = \"4K\"\nmembers = [\"host\"]\n";
/// The offset in the segment where the tests count, far behind what the daemon allocates.
const DATA: usize = 5 << 20;

fn attach_to(socket: &std::path::Path, name: &str) -> Endpoint {
    let options = AttachOptions {
        socket: socket.into(),
        name: Some(name.into()),
        // A caller that has to wait must sleep and be woken.
        mode: WaitMode::Interrupt,
    };
    Endpoint::attach_with("web", &options).unwrap()
}

fn attach(daemon: &Daemon, name: &str) -> Endpoint {
    attach_to(&daemon.socket(), name)
}

fn code<T>(outcome: Result<T, Error>) -> Option<ErrorCode> {
    outcome.err().and_then(|error| error.code())
}

fn count(endpoint: &Endpoint) -> u64 {
    endpoint.memory().load_relaxed_u64(DATA)
}

fn add(endpoint: &Endpoint) {
    endpoint.memory().store_relaxed_u64(DATA, count(endpoint) + 1);
}

#[test]
fn a_mutex_excludes_and_wakes() {
    let daemon = Daemon::start_new(WEB);
    let rounds = 20_000;
    let threads: Vec<_> = ["a", "b", "c"]
        .map(|name| {
            let endpoint = attach(&daemon, name);
            std::thread::spawn(move || {
                let mut mutex = endpoint.mutex("m").unwrap();
                mutex.set_timeout(Some(WATCHDOG));
                for _ in 0..rounds {
                    let guard = mutex.lock().unwrap();
                    assert!(!guard.owner_died());
                    add(&endpoint);
                    guard.unlock().unwrap();
                }
                endpoint
            })
        })
        .into();
    let endpoints: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    assert_eq!(count(&endpoints[0]), 3 * rounds);
}

#[test]
fn a_condition_variable_hands_over_turns() {
    let daemon = Daemon::start_new(WEB);
    let threads: Vec<_> = [0, 1]
        .map(|me| {
            let endpoint = attach(&daemon, "player");
            std::thread::spawn(move || {
                let (mut mutex, mut condvar) = (endpoint.mutex("m").unwrap(), endpoint.condvar("c").unwrap());
                condvar.set_timeout(Some(WATCHDOG));
                for _ in 0..2_000 {
                    let mut guard = mutex.lock().unwrap();
                    while count(&endpoint) % 2 != me {
                        let (again, signalled) = condvar.wait(guard).unwrap();
                        assert!(signalled, "nobody gave the signal");
                        guard = again;
                    }
                    add(&endpoint);
                    condvar.notify_one();
                }
            })
        })
        .into();
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(count(&attach(&daemon, "c")), 4_000);
}

#[test]
fn semaphore_barrier_once_and_rwlock() {
    let daemon = Daemon::start_new(WEB);
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let endpoint = attach(&daemon, "party");
            std::thread::spawn(move || {
                let mut once = endpoint.once("o").unwrap();
                let did = once
                    .call(|again| {
                        assert!(!again);
                        add(&endpoint);
                        Ok::<_, Error>(())
                    })
                    .unwrap();
                assert_eq!(count(&endpoint), 1);
                let mut barrier = endpoint.barrier("b", 3).unwrap();
                barrier.set_timeout(Some(WATCHDOG));
                let last = (0..100).filter(|_| barrier.wait().unwrap()).count();
                let mut lock = endpoint.rwlock("l").unwrap();
                for _ in 0..100 {
                    let before = count(&endpoint);
                    drop(lock.read().unwrap());
                    let guard = lock.write().unwrap();
                    assert!(count(&endpoint) >= before && !guard.owner_died());
                    add(&endpoint);
                }
                barrier.wait().unwrap();
                assert_eq!(count(&endpoint), 301);
                let mut semaphore = endpoint.semaphore("s", 2, 0).unwrap();
                semaphore.set_timeout(Some(WATCHDOG));
                match last {
                    _ if did => (0..200).for_each(|_| {
                        while semaphore.release(1).is_err() {
                            std::thread::yield_now();
                        }
                    }),
                    _ => (0..100).for_each(|_| semaphore.acquire().unwrap()),
                }
                (did, last)
            })
        })
        .collect();
    let outcomes: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    assert_eq!(outcomes.iter().filter(|(did, _)| *did).count(), 1);
    assert_eq!(outcomes.iter().map(|(_, last)| last).sum::<usize>(), 100);
}

kit::program! {
    /// Takes all locks and waits to be killed.
    fn holder() {
        let endpoint = attach_to(&program_socket(), "child");
        let (mut mutex, mut lock) = (endpoint.mutex("m").unwrap(), endpoint.rwlock("l").unwrap());
        let (mut once, _barrier) = (endpoint.once("o").unwrap(), endpoint.barrier("b", 2).unwrap());
        let _locked = (mutex.lock().unwrap(), lock.write().unwrap(), once.begin().unwrap());
        add(&endpoint);
        loop {
            std::thread::park();
        }
    }
}

fn start_holder(daemon: &Daemon, endpoint: &Endpoint) -> Child {
    let child = daemon.start_program(holder);
    wait_for("its locks", || (count(endpoint) == 1).then_some(()));
    child
}

#[test]
fn objects_of_a_dead_process_are_handed_on() {
    let daemon = Daemon::start_new(WEB);
    let endpoint = attach(&daemon, "heir");
    let (mut mutex, mut lock) = (endpoint.mutex("m").unwrap(), endpoint.rwlock("l").unwrap());
    let mut once = endpoint.once("o").unwrap();
    let mut child = start_holder(&daemon, &endpoint);
    assert!(matches!(mutex.try_lock().err(), Some(Error::WouldBlock)));
    mutex.set_timeout(Some(Duration::from_millis(30)));
    assert!(matches!(mutex.lock().err(), Some(Error::TimedOut)));
    mutex.set_timeout(Some(WATCHDOG));

    // A sleeper at the time of the death is woken and told of it.
    let sleeping = attach(&daemon, "sleeper");
    let sleeper = std::thread::spawn(move || {
        let mut barrier = sleeping.barrier("b", 2).unwrap();
        barrier.set_timeout(Some(WATCHDOG));
        let begin = Instant::now();
        (barrier.wait().err(), begin.elapsed(), barrier)
    });
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        child.kill().unwrap();
        child.wait().unwrap();
        Instant::now()
    });
    let mut guard = mutex.lock().unwrap();
    let (died, told) = (killer.join().unwrap(), Instant::now());
    assert!(guard.owner_died());
    assert!(told.saturating_duration_since(died) < WATCHDOG / 2, "{:?}", told - died);
    guard.make_consistent().unwrap();
    drop(guard);
    assert!(!mutex.lock().unwrap().owner_died());
    let (error, _, mut barrier) = sleeper.join().unwrap();
    assert!(matches!(error, Some(Error::BarrierBroken)), "{error:?}");
    barrier.reset().unwrap();

    assert!(matches!(lock.read().err(), Some(Error::OwnerDied)));
    let guard = lock.write().unwrap();
    assert!(guard.owner_died());
    // The lock is released without being made consistent.
    drop(guard);
    assert!(matches!(lock.write().err(), Some(Error::NotRecoverable)));
    assert!(matches!(lock.read().err(), Some(Error::NotRecoverable)));

    let turn = once.begin().unwrap().unwrap();
    assert!(turn.is_again());
    turn.complete().unwrap();
    assert!(once.is_done());
}

#[test]
fn each_mistake_is_an_error_of_its_own() {
    let daemon = Daemon::start_new(WEB);
    let endpoint = attach(&daemon, "a");
    let there_only = SyncOptions { create: false, ..SyncOptions::default() };
    let new_only = SyncOptions { exclusive: true, ..SyncOptions::default() };
    assert_eq!(code(endpoint.mutex_with("m", &there_only)), Some(ErrorCode::NOT_FOUND));
    let mut mutex = endpoint.mutex_with("m", &new_only).unwrap();
    assert_eq!(code(endpoint.mutex_with("m", &new_only)), Some(ErrorCode::IN_USE));
    assert_eq!(code(endpoint.condvar("m")), Some(ErrorCode::KIND));
    assert!(matches!(endpoint.mutex(&"n".repeat(64)).err(), Some(Error::Name { .. })));
    assert_eq!(code(endpoint.barrier("b", 64)), Some(ErrorCode::INVALID));
    assert!(matches!(mutex.force_unlock(), Err(Error::NotOwner)));
    std::mem::forget(mutex.lock().unwrap());
    assert!(matches!(mutex.lock().err(), Some(Error::Deadlock)));
    let mut other = mutex.try_clone().unwrap();
    assert!(matches!(other.force_unlock(), Err(Error::NotOwner)));
    assert!(matches!(other.try_lock().err(), Some(Error::WouldBlock)));
    mutex.force_unlock().unwrap();
    drop(other.lock().unwrap());
    let mut semaphore = endpoint.semaphore("s", 2, 1).unwrap();
    assert!(matches!(semaphore.release(2), Err(Error::Overflow { limit: 2 })));
    assert_eq!(semaphore.permits().unwrap(), 1);
    semaphore.acquire().unwrap();
    assert!(matches!(semaphore.try_acquire(), Err(Error::WouldBlock)));

    // 63 handles are possible, and no more.
    let handles: Vec<_> = (0..61).map(|_| mutex.try_clone().unwrap()).collect();
    assert_eq!(code(mutex.try_clone()), Some(ErrorCode::BUSY));
    drop(handles);
    drop(mutex.try_clone().unwrap());

    // An unlinked object stays with those that have it open; the name then means a new object.
    endpoint.unlink_sync("m").unwrap();
    assert_eq!(code(endpoint.unlink_sync("m")), Some(ErrorCode::NOT_FOUND));
    let held = mutex.lock().unwrap();
    drop(endpoint.mutex("m").unwrap().lock().unwrap());
    drop(held);
}

#[test]
fn locks_outlive_the_daemon() {
    let mut daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let (mut mine, mut other) = (a.mutex("m").unwrap(), b.mutex("m").unwrap());
    other.set_timeout(Some(WATCHDOG));
    let guard = mine.lock().unwrap();
    daemon.kill();
    // The waker does not know this waiter's doorbell and cannot ask for it, but the waiter looks by itself from time to time.
    let waiter = std::thread::spawn(move || {
        drop(other.lock().unwrap());
        other
    });
    std::thread::sleep(Duration::from_millis(20));
    drop(guard);
    let other = waiter.join().unwrap();
    daemon.start();
    assert_eq!(other.name(), "m");
    let mut third = a.mutex("m").unwrap();
    let guard = mine.lock().unwrap();
    assert!(matches!(third.try_lock().err(), Some(Error::WouldBlock)), "the same object");
    drop(guard);
    drop(third.lock().unwrap());
}
