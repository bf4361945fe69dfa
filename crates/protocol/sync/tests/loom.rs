//! Models of the locks: loom runs the real code in every order of threads, and with every old value that the stated orderings
//! allow a load to return. The models include deaths: a user that holds a lock, or is about to be woken, stops, and the
//! daemon's `reclaim` runs beside the users that wait.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release -p ginnel-sync --test loom        (or: scripts/loom)
//!
//! A sleeper that is never woken is a deadlock, which loom reports: in the models, sleepers do not look every 100 ms. Two
//! users that are in a lock at the same time copy to the same bytes without an order between them, which the memory reports.
#![cfg(loom)]

use ginnel_layout::sync::{
    ARMED, OwnerWord, SEATED, SIZE, SLOT_ENDPOINT, SLOT_EPOCH, SLOT_READER, SLOT_SINCE, STATE, SyncKind,
    TURN, WAITING, slot,
};
use ginnel_ring::wait::{Sleeper, WaitMode};
use ginnel_shmem::{LoomMemory, Order, SharedMemory};
use ginnel_sync::authority::{Left, reclaim};
use ginnel_sync::{
    Barrier, Condvar, Locked, Mutex, Once, Patience, RwLock, Semaphore, SyncError, Turn, User, World,
};
use loom::sync::{Condvar as LoomCondvar, Mutex as LoomMutex};
use loom::thread;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Explores `model` with at most this many preemptions, or the number in LOOM_MAX_PREEMPTIONS.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(model);
}

/// Offset of the data under the lock, which lie behind the page.
const DATA: usize = SIZE;

/// Returns a page with this many users, and a word of data.
fn page(users: usize) -> LoomMemory {
    let header = [STATE, ARMED, WAITING, TURN, SEATED, DATA];
    let of_slot = |k| [SLOT_EPOCH, SLOT_READER, SLOT_SINCE, SLOT_ENDPOINT].map(|at| slot(k) + at);
    let page = LoomMemory::new(SIZE + 8, header.into_iter().chain((0..users).flat_map(of_slot)));
    for k in 0..users {
        page.store_relaxed_u32(slot(k) + SLOT_ENDPOINT, 7);
        page.store_relaxed_u32(slot(k) + SLOT_EPOCH, 1);
    }
    page.store_relaxed_u64(SEATED, (1 << users) - 1);
    page
}

fn user(k: usize) -> User {
    User::new(k, 1, 7).unwrap()
}

/// The parking places of all users, and the number of the user that sleeps in its own.
#[derive(Clone)]
struct Parkers {
    rung: Arc<Vec<(LoomMutex<bool>, LoomCondvar)>>,
    own: usize,
}

impl Parkers {
    fn new(users: usize) -> Self {
        let parker = |_| (LoomMutex::new(false), LoomCondvar::new());
        Self { rung: Arc::new((0..users).map(parker).collect()), own: 0 }
    }
    fn of(&self, own: usize) -> Self {
        Self { own, ..self.clone() }
    }
    fn ring_all(&mut self, slots: u64) {
        (0..self.rung.len()).filter(|k| slots & 1 << k != 0).for_each(|k| self.ring(k));
    }
}

impl Sleeper for Parkers {
    fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
        let (rung, condvar) = &self.rung[self.own];
        let mut rung = rung.lock().unwrap();
        while !*rung {
            rung = condvar.wait(rung).unwrap();
        }
        *rung = false;
        Ok(())
    }
}

impl World for Parkers {
    fn ring(&mut self, slot: usize) {
        let (rung, condvar) = &self.rung[slot];
        *rung.lock().unwrap() = true;
        condvar.notify_one();
    }
}

const ASLEEP: Patience = Patience { mode: WaitMode::Interrupt, timeout: None };

/// Adds one to the word of data. If another user is in the lock too, an addition is lost or the copies race.
fn work(memory: &LoomMemory) {
    let mut word = [0; 8];
    memory.read(DATA, &mut word);
    memory.write(DATA, &(u64::from_ne_bytes(word) + 1).to_ne_bytes());
}

fn done(memory: &LoomMemory) -> u64 {
    memory.load_relaxed_u64(DATA)
}

/// Runs `body` for each user, in a thread of its own, with its handle's memory, its number and its parking place.
fn with_users(memories: Vec<LoomMemory>, body: impl Fn(LoomMemory, usize, Parkers) + Copy + Send + 'static) {
    let parkers = Parkers::new(memories.len());
    let mut threads = Vec::new();
    let mut memories = memories.into_iter().enumerate();
    let first = memories.next().unwrap();
    for (k, memory) in memories {
        let parkers = parkers.of(k);
        threads.push(thread::spawn(move || body(memory, k, parkers)));
    }
    body(first.1, 0, parkers.of(0));
    threads.into_iter().for_each(|t| t.join().unwrap());
}

fn same(memory: &LoomMemory, users: usize) -> Vec<LoomMemory> {
    vec![memory.clone(); users]
}

fn lock_and_work(memory: LoomMemory, k: usize, mut parkers: Parkers) {
    let mut mutex = Mutex::new(memory.clone(), user(k));
    assert_eq!(mutex.lock(&mut parkers, ASLEEP).unwrap(), Locked::Clean);
    work(&memory);
    mutex.unlock(&mut parkers).unwrap();
}

#[test]
fn two_lock_a_mutex_and_nobody_stays_asleep() {
    explore(4, || {
        let memory = page(2);
        with_users(same(&memory, 2), lock_and_work);
        assert_eq!(done(&memory), 2);
    });
}

#[test]
fn three_lock_a_mutex_and_nobody_stays_asleep() {
    explore(2, || {
        let memory = page(3);
        with_users(same(&memory, 3), lock_and_work);
        assert_eq!(done(&memory), 3);
    });
}

#[test]
fn one_locks_a_mutex_twice_and_another_once() {
    explore(3, || {
        let memory = page(2);
        with_users(same(&memory, 2), |memory, k, parkers| {
            for _ in 0..2 - k {
                lock_and_work(memory.clone(), k, parkers.clone());
            }
        });
        assert_eq!(done(&memory), 3);
    });
}

/// The daemon declares user 0 dead.
fn bury(memory: &LoomMemory, kind: SyncKind, parkers: &mut Parkers) {
    let rung = reclaim(memory, kind, 0, Left::Died);
    parkers.ring_all(rung);
}

#[test]
fn an_owner_dies_while_two_come() {
    explore(2, || {
        let memory = page(3);
        let mut parkers = Parkers::new(3);
        assert_eq!(Mutex::new(memory.clone(), user(0)).lock(&mut parkers, ASLEEP).unwrap(), Locked::Clean);
        let told = Arc::new(LoomMutex::new(0));
        let threads: Vec<_> = [1, 2]
            .map(|k| {
                let (memory, mut parkers, told) = (memory.clone(), parkers.of(k), told.clone());
                thread::spawn(move || {
                    let mut mutex = Mutex::new(memory.clone(), user(k));
                    if mutex.lock(&mut parkers, ASLEEP).unwrap() == Locked::OwnerDied {
                        *told.lock().unwrap() += 1;
                        mutex.make_consistent().unwrap();
                    }
                    work(&memory);
                    mutex.unlock(&mut parkers).unwrap();
                })
            })
            .into();
        bury(&memory, SyncKind::MUTEX, &mut parkers);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(
            (done(&memory), *told.lock().unwrap()),
            (2, 1),
            "one user is told of the death, and both have worked"
        );
    });
}

/// A sleeper that sleeps until it is rung, or until its regular look, which may be at any moment.
struct WakesByItself(Parkers);

impl Sleeper for WakesByItself {
    fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
        thread::yield_now();
        Ok(())
    }
}

impl World for WakesByItself {
    fn ring(&mut self, slot: usize) {
        self.0.ring(slot);
    }
}

/// User 0 takes the lock while it is declared dead, and dies when it has the lock (or finds out that it is dead).
fn taken_by_the_dead(
    kind: SyncKind,
    take: fn(LoomMemory, WakesByItself) -> Result<Locked, SyncError>,
    heir: fn(LoomMemory, WakesByItself) -> Locked,
) {
    explore(2, move || {
        let memory = page(2);
        let mut parkers = Parkers::new(2);
        let (theirs, their_beds) = (memory.clone(), WakesByItself(parkers.of(0)));
        let dying = thread::spawn(move || match take(theirs, their_beds) {
            Ok(_) => true,
            Err(error) => {
                assert!(matches!(error, SyncError::Stale), "{error}");
                false
            }
        });
        let (theirs, their_beds) = (memory.clone(), WakesByItself(parkers.of(1)));
        let heir = thread::spawn(move || heir(theirs, their_beds));
        bury(&memory, kind, &mut parkers);
        let (taken, locked) = (dying.join().unwrap(), heir.join().unwrap());
        // If it has come after its heir, no user has noticed it so far.
        let left = OwnerWord(memory.load_relaxed_u64(STATE));
        let heard = locked == Locked::OwnerDied || left != OwnerWord::FREE;
        assert!(heard || !taken, "it died in the lock, and no user is told");
    });
}

#[test]
fn a_user_that_is_declared_dead_takes_a_mutex_and_dies() {
    let take = |memory, mut parkers: WakesByItself| Mutex::new(memory, user(0)).lock(&mut parkers, ASLEEP);
    taken_by_the_dead(SyncKind::MUTEX, take, |memory, mut parkers| {
        let mut mutex = Mutex::new(memory, user(1));
        let locked = mutex.lock(&mut parkers, ASLEEP).unwrap();
        if locked == Locked::OwnerDied {
            mutex.make_consistent().unwrap();
        }
        mutex.unlock(&mut parkers).unwrap();
        locked
    });
}

#[test]
fn a_user_that_is_declared_dead_takes_a_rwlock_and_dies() {
    let take = |memory, mut parkers: WakesByItself| RwLock::new(memory, user(0)).write(&mut parkers, ASLEEP);
    taken_by_the_dead(SyncKind::RWLOCK, take, |memory, mut parkers| {
        let mut lock = RwLock::new(memory, user(1));
        match lock.read(&mut parkers, ASLEEP) {
            Ok(()) => {
                lock.unlock(&mut parkers).unwrap();
                Locked::Clean
            }
            Err(error) => {
                assert!(matches!(error, SyncError::OwnerDied), "{error}");
                Locked::OwnerDied
            }
        }
    });
}

#[test]
fn a_mutex_given_up_inconsistent_wakes_all_with_the_error() {
    explore(2, || {
        let memory = page(3);
        memory.store_relaxed_u64(STATE, OwnerWord::OWNER_DIED);
        let parkers = Parkers::new(3);
        let mut first = Mutex::new(memory.clone(), user(0));
        assert_eq!(first.lock(&mut parkers.of(0), ASLEEP).unwrap(), Locked::OwnerDied);
        let threads: Vec<_> = [1, 2]
            .map(|k| {
                let (memory, mut parkers) = (memory.clone(), parkers.of(k));
                thread::spawn(move || {
                    let outcome = Mutex::new(memory, user(k)).lock(&mut parkers, ASLEEP);
                    assert!(matches!(outcome, Err(SyncError::NotRecoverable)), "{outcome:?}");
                })
            })
            .into();
        first.unlock(&mut parkers.of(0)).unwrap();
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

/// A world in which the user dies at its n-th action: it rings no one any more.
struct Dying(Parkers);

impl Sleeper for Dying {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.0.sleep(deadline)
    }
}

impl World for Dying {
    fn ring(&mut self, _: usize) {}
}

#[test]
fn an_owner_dies_between_unlocking_and_ringing() {
    explore(3, || {
        let memory = page(2);
        let mut parkers = Parkers::new(2);
        let mut dying = Mutex::new(memory.clone(), user(0));
        assert!(dying.try_lock().is_ok());
        let (theirs, their_beds) = (memory.clone(), parkers.of(1));
        let other = thread::spawn(move || lock_and_work(theirs, 1, their_beds));
        dying.unlock(&mut Dying(parkers.of(0))).unwrap();
        bury(&memory, SyncKind::MUTEX, &mut parkers);
        other.join().unwrap();
    });
}

#[test]
fn a_sleeper_dies_with_the_wake_that_it_was_given() {
    explore(2, || {
        let memory = page(3);
        let mut parkers = Parkers::new(3);
        // User 0 has slept, was selected, and is dead: its bit is armed until the daemon notices.
        memory.store_relaxed_u64(ARMED, 1);
        memory.store_relaxed_u64(slot(0) + SLOT_SINCE, 1);
        let mut owner = Mutex::new(memory.clone(), user(1));
        assert!(owner.try_lock().is_ok());
        let (theirs, their_beds) = (memory.clone(), parkers.of(2));
        let other = thread::spawn(move || lock_and_work(theirs, 2, their_beds));
        let mut own_beds = parkers.of(1);
        owner.unlock(&mut own_beds).unwrap();
        bury(&memory, SyncKind::MUTEX, &mut parkers);
        other.join().unwrap();
    });
}

fn read_or_write(memory: LoomMemory, k: usize, mut parkers: Parkers) {
    let mut lock = RwLock::new(memory.clone(), user(k));
    if k == 0 {
        assert_eq!(lock.write(&mut parkers, ASLEEP).unwrap(), Locked::Clean);
        work(&memory);
    } else {
        lock.read(&mut parkers, ASLEEP).unwrap();
        memory.read(DATA, &mut [0; 8]);
    }
    lock.unlock(&mut parkers).unwrap();
}

#[test]
fn a_writer_and_a_reader() {
    explore(3, || {
        let memory = page(2);
        with_users(same(&memory, 2), read_or_write);
    });
}

#[test]
fn a_writer_and_two_readers() {
    explore(2, || {
        let memory = page(3);
        with_users(same(&memory, 3), read_or_write);
    });
}

#[test]
fn two_writers_and_a_reader() {
    explore(2, || {
        let memory = page(3);
        with_users(same(&memory, 3), |memory, k, parkers| match k {
            2 => read_or_write(memory, 2, parkers),
            k => {
                let mut parkers = parkers;
                let mut lock = RwLock::new(memory.clone(), user(k));
                assert_eq!(lock.write(&mut parkers, ASLEEP).unwrap(), Locked::Clean);
                work(&memory);
                lock.unlock(&mut parkers).unwrap();
            }
        });
        assert_eq!(done(&memory), 2);
    });
}

/// A writer that gives up frees the word while another sleeps for it. A third takes the free word and sleeps until the reader
/// leaves; it may be given the wake of the one that sleeps for the word, and then has to pass it on.
#[test]
fn three_writers_and_a_reader() {
    explore(2, || {
        let memory = page(4);
        let parkers = Parkers::new(4);
        let mut reader = RwLock::new(memory.clone(), user(3));
        reader.read(&mut parkers.of(3), ASLEEP).unwrap();
        let threads: Vec<_> = [1, 2]
            .map(|k| {
                let (memory, mut parkers) = (memory.clone(), parkers.of(k));
                thread::spawn(move || {
                    let mut lock = RwLock::new(memory, user(k));
                    assert_eq!(lock.write(&mut parkers, ASLEEP).unwrap(), Locked::Clean);
                    lock.unlock(&mut parkers).unwrap();
                })
            })
            .into();
        let outcome = RwLock::new(memory, user(0)).try_write(&mut parkers.of(0));
        assert!(matches!(outcome, Err(SyncError::Busy)), "{outcome:?}");
        reader.unlock(&mut parkers.of(3)).unwrap();
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn a_reader_dies_while_a_writer_comes() {
    explore(3, || {
        let memory = page(2);
        let mut parkers = Parkers::new(2);
        RwLock::new(memory.clone(), user(0)).read(&mut parkers, ASLEEP).unwrap();
        let (theirs, mut their_beds) = (memory.clone(), parkers.of(1));
        let writer = thread::spawn(move || {
            let mut lock = RwLock::new(theirs, user(1));
            assert_eq!(lock.write(&mut their_beds, ASLEEP).unwrap(), Locked::Clean);
            lock.unlock(&mut their_beds).unwrap();
        });
        bury(&memory, SyncKind::RWLOCK, &mut parkers);
        writer.join().unwrap();
    });
}

#[test]
fn a_writer_dies_while_a_reader_and_a_writer_come() {
    explore(2, || {
        let memory = page(3);
        let mut parkers = Parkers::new(3);
        let mut dead = RwLock::new(memory.clone(), user(0));
        assert_eq!(dead.write(&mut parkers, ASLEEP).unwrap(), Locked::Clean);
        let (theirs, mut their_beds) = (memory.clone(), parkers.of(1));
        let writer = thread::spawn(move || {
            let mut lock = RwLock::new(theirs, user(1));
            assert_eq!(lock.write(&mut their_beds, ASLEEP).unwrap(), Locked::OwnerDied);
            lock.make_consistent().unwrap();
            lock.unlock(&mut their_beds).unwrap();
        });
        let (theirs, mut their_beds) = (memory.clone(), parkers.of(2));
        let reader = thread::spawn(move || {
            let mut lock = RwLock::new(theirs, user(2));
            match lock.read(&mut their_beds, ASLEEP) {
                Ok(()) => lock.unlock(&mut their_beds).unwrap(),
                Err(error) => assert!(matches!(error, SyncError::OwnerDied), "{error}"),
            }
        });
        bury(&memory, SyncKind::RWLOCK, &mut parkers);
        writer.join().unwrap();
        reader.join().unwrap();
    });
}

/// Returns the mutex and the condition variable of a pair, which guard a flag.
fn pair(users: usize) -> (LoomMemory, LoomMemory) {
    (page(users), page(users))
}

fn await_flag(mutex: LoomMemory, condvar: LoomMemory, k: usize, mut mutex_beds: Parkers) {
    let mut parkers = mutex_beds.clone();
    let mut guard = Mutex::new(mutex.clone(), user(k));
    let mut condvar = Condvar::new(condvar, user(k));
    let _ = guard.lock(&mut mutex_beds, ASLEEP).unwrap();
    while done(&mutex) == 0 {
        let woken = condvar.wait(&mut parkers, ASLEEP, &mut guard, &mut mutex_beds, ASLEEP).unwrap();
        assert!(woken.signalled);
    }
    guard.unlock(&mut mutex_beds).unwrap();
}

fn raise_flag(
    mutex: LoomMemory,
    condvar: LoomMemory,
    k: usize,
    mut parkers: Parkers,
    all: bool,
    early: bool,
) {
    let mut guard = Mutex::new(mutex.clone(), user(k));
    let mut condvar = Condvar::new(condvar, user(k));
    let _ = guard.lock(&mut parkers, ASLEEP).unwrap();
    work(&mutex);
    if early {
        guard.unlock(&mut parkers).unwrap();
    }
    match all {
        true => condvar.notify_all(&mut parkers),
        false => condvar.notify_one(&mut parkers),
    }
    if !early {
        guard.unlock(&mut parkers).unwrap();
    }
}

#[test]
fn a_signal_with_or_without_the_mutex_reaches_the_waiter() {
    for early in [false, true] {
        explore(2, move || {
            let (mutex, condvar) = pair(2);
            let parkers = Parkers::new(2);
            let (m, c, b) = (mutex.clone(), condvar.clone(), parkers.of(1));
            let waiter = thread::spawn(move || await_flag(m, c, 1, b));
            raise_flag(mutex, condvar, 0, parkers.of(0), false, early);
            waiter.join().unwrap();
        });
    }
}

#[test]
fn a_signal_for_all_reaches_all() {
    explore(1, || {
        let (mutex, condvar) = pair(3);
        let parkers = Parkers::new(3);
        let threads: Vec<_> = [1, 2]
            .map(|k| {
                let (m, c, b) = (mutex.clone(), condvar.clone(), parkers.of(k));
                thread::spawn(move || await_flag(m, c, k, b))
            })
            .into();
        raise_flag(mutex, condvar, 0, parkers.of(0), true, false);
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn a_notifier_dies_between_signalling_and_ringing() {
    explore(2, || {
        let (mutex, condvar) = pair(2);
        let mut parkers = Parkers::new(2);
        // The flag is set and the mutex is free; only the signal is missing. This waits once more, as a user does that has
        // looked too early.
        let (m, c, b) = (mutex.clone(), condvar.clone(), parkers.of(1));
        let waiter = thread::spawn(move || await_flag(m, c, 1, b));
        let mut guard = Mutex::new(mutex.clone(), user(0));
        let mut own = parkers.of(0);
        let _ = guard.lock(&mut own, ASLEEP).unwrap();
        work(&mutex);
        guard.unlock(&mut own).unwrap();
        Condvar::new(condvar.clone(), user(0)).notify_one(&mut Dying(parkers.of(0)));
        bury(&condvar, SyncKind::CONDVAR, &mut parkers);
        waiter.join().unwrap();
    });
}

#[test]
fn a_waiter_dies_with_the_signal_that_it_was_given() {
    explore(2, || {
        let (mutex, condvar) = pair(3);
        let mut parkers = Parkers::new(3);
        // User 0 waits, asleep, and dies. The only signal may be for it or for user 1.
        condvar.store_relaxed_u64(WAITING, 1);
        condvar.store_relaxed_u64(ARMED, 1);
        condvar.store_relaxed_u64(slot(0) + SLOT_SINCE, 1);
        let (m, c, b) = (mutex.clone(), condvar.clone(), parkers.of(1));
        let waiter = thread::spawn(move || await_flag(m, c, 1, b));
        raise_flag(mutex, condvar.clone(), 2, parkers.of(2), false, false);
        bury(&condvar, SyncKind::CONDVAR, &mut parkers);
        waiter.join().unwrap();
    });
}

/// User 1 waits without having the mutex, which is an error. A signal that it gets meanwhile must go to user 2.
#[test]
fn a_user_without_the_mutex_passes_its_signal_on() {
    explore(2, || {
        let (mutex, condvar) = pair(3);
        let parkers = Parkers::new(3);
        let (m, c, mut b) = (mutex.clone(), condvar.clone(), parkers.of(1));
        let wrong = thread::spawn(move || {
            let mut mutex = Mutex::new(m, user(1));
            let outcome = Condvar::new(c, user(1)).wait(&mut b.clone(), ASLEEP, &mut mutex, &mut b, ASLEEP);
            assert!(matches!(outcome, Err(SyncError::NotOwner)), "{outcome:?}");
        });
        let (m, c, b) = (mutex.clone(), condvar.clone(), parkers.of(2));
        let waiter = thread::spawn(move || await_flag(m, c, 2, b));
        raise_flag(mutex, condvar, 0, parkers.of(0), false, false);
        wrong.join().unwrap();
        waiter.join().unwrap();
    });
}

#[test]
fn permits_wake_those_who_wait_for_them() {
    explore(2, || {
        let memory = page(3);
        with_users(same(&memory, 3), |memory, k, mut parkers| {
            let mut semaphore = Semaphore::new(memory, user(k), 5);
            match k {
                0 => {
                    semaphore.release(&mut parkers, 1).unwrap();
                    semaphore.release(&mut parkers, 1).unwrap();
                }
                _ => semaphore.acquire(&mut parkers, ASLEEP).unwrap(),
            }
        });
        assert_eq!(memory.load_relaxed_u64(STATE), 0);
    });
}

#[test]
fn two_who_release_wake_two() {
    explore(1, || {
        let memory = page(4);
        with_users(same(&memory, 4), |memory, k, mut parkers| {
            let mut semaphore = Semaphore::new(memory, user(k), 5);
            match k {
                0 | 1 => semaphore.release(&mut parkers, 1).unwrap(),
                _ => semaphore.acquire(&mut parkers, ASLEEP).unwrap(),
            }
        });
    });
}

#[test]
fn a_barrier_frees_all_in_each_round() {
    explore(3, || {
        let memory = page(2);
        let last = Arc::new(LoomMutex::new(0));
        let parkers = Parkers::new(2);
        let party = |k: usize| {
            let (memory, mut parkers, last) = (memory.clone(), parkers.of(k), last.clone());
            move || {
                let mut barrier = Barrier::new(memory, user(k), 2);
                for _ in 0..2 {
                    if barrier.wait(&mut parkers, ASLEEP).unwrap() {
                        *last.lock().unwrap() += 1;
                    }
                }
            }
        };
        let other = thread::spawn(party(1));
        party(0)();
        other.join().unwrap();
        assert_eq!(*last.lock().unwrap(), 2, "one was last in each round");
    });
}

#[test]
fn a_party_that_dies_breaks_the_barrier_for_those_who_wait() {
    explore(2, || {
        let memory = page(3);
        let mut parkers = Parkers::new(3);
        let threads: Vec<_> = [1, 2]
            .map(|k| {
                let (memory, mut parkers) = (memory.clone(), parkers.of(k));
                thread::spawn(move || {
                    let outcome = Barrier::new(memory, user(k), 3).wait(&mut parkers, ASLEEP);
                    assert!(matches!(outcome, Err(SyncError::BarrierBroken)), "{outcome:?}");
                })
            })
            .into();
        bury(&memory, SyncKind::BARRIER, &mut parkers);
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn once_is_done_once_and_seen_by_all() {
    explore(2, || {
        let memory = page(3);
        with_users(same(&memory, 3), |memory, k, mut parkers| {
            let mut once = Once::new(memory.clone(), user(k));
            match once.begin(&mut parkers, ASLEEP).unwrap() {
                Turn::Mine { again } => {
                    assert!(!again);
                    work(&memory);
                    once.complete(&mut parkers).unwrap();
                }
                Turn::Done => {}
            }
            let mut word = [0; 8];
            memory.read(DATA, &mut word);
            assert_eq!(u64::from_ne_bytes(word), 1);
        });
    });
}

#[test]
fn a_once_whose_owner_dies_is_done_by_another() {
    explore(2, || {
        let memory = page(3);
        let mut parkers = Parkers::new(3);
        assert_eq!(
            Once::new(memory.clone(), user(0)).begin(&mut parkers, ASLEEP).unwrap(),
            Turn::Mine { again: false }
        );
        let threads: Vec<_> = [1, 2]
            .map(|k| {
                let (memory, mut parkers) = (memory.clone(), parkers.of(k));
                thread::spawn(move || {
                    let mut once = Once::new(memory.clone(), user(k));
                    if let Turn::Mine { again } = once.begin(&mut parkers, ASLEEP).unwrap() {
                        assert!(again);
                        work(&memory);
                        once.complete(&mut parkers).unwrap();
                    }
                })
            })
            .into();
        bury(&memory, SyncKind::ONCE, &mut parkers);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(done(&memory), 1);
    });
}

// The following tests must fail: each takes one ordering away from one user, and loom must find what that breaks.

/// A sleeper that is never woken.
const LOST: &[&str] = &["deadlock"];
/// Two users in the lock at the same time, or old data.
const RACE: &[&str] = &["Causality violation", "assertion"];

/// Runs `model`, which must fail with a panic whose message contains one of `how`.
fn must_fail(how: &[&str], preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let failure = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| explore(preemptions, model)));
    let panic = failure.expect_err("the model passes although an ordering is missing");
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default();
    assert!(how.iter().any(|how| text.contains(how)), "expected {how:?}, failed with {text:?}");
}

#[test]
fn without_release_or_acquire_two_are_in_the_mutex() {
    for order in [Order::Release, Order::Acquire] {
        must_fail(RACE, 3, move || {
            let memory = page(2);
            with_users(vec![memory.without(order), memory.clone()], lock_and_work);
        });
    }
}

#[test]
fn without_a_fence_a_reader_and_a_writer_meet() {
    for k in 0..2 {
        must_fail(RACE, 3, move || {
            let memory = page(2);
            let mut memories = same(&memory, 2);
            memories[k] = memory.without(Order::Fence);
            with_users(memories, read_or_write);
        });
    }
}

#[test]
fn without_the_fence_of_release_a_permit_wakes_no_sleeper() {
    must_fail(LOST, 3, || {
        let memory = page(2);
        with_users(vec![memory.without(Order::Fence), memory.clone()], |memory, k, mut parkers| {
            let mut semaphore = Semaphore::new(memory, user(k), 5);
            match k {
                0 => semaphore.release(&mut parkers, 1).unwrap(),
                _ => semaphore.acquire(&mut parkers, ASLEEP).unwrap(),
            }
        });
    });
}
