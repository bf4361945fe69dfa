//! Death with a mutex, a condition variable or a read-write lock, while others wait for them.

use crate::survivors::{Act, Party, Shared};
use ginnel::sync::{Condvar, Mutex, MutexGuard, RwLock};
use ginnel::{Endpoint, Error, SharedMemory};
use kit::wait::WATCHDOG;
use std::time::Instant;

// Offsets in the shared page.
const MUTEX_PAIR: usize = 64;
const RWLOCK_PAIR: usize = 128;
/// The word for which processes wait at the condition variable. Changed under the mutex.
const TURN: usize = 192;

/// A process that uses the locks.
pub struct Locks {
    shared: Shared,
    mutex: Mutex,
    condvar: Condvar,
    rwlock: RwLock,
}

impl Locks {
    fn lock_and_work(&mut self) {
        let begin = Instant::now();
        let mut guard = self.mutex.lock().unwrap();
        self.shared.note(begin, guard.owner_died());
        mend(&self.shared, &mut guard);
        self.shared.work(MUTEX_PAIR);
        guard.unlock().unwrap();
    }

    /// Changes the turn, and waits until another process has changed it again.
    fn take_turns(&mut self) {
        let shared = &self.shared;
        let mut guard = self.mutex.lock().unwrap();
        mend(shared, &mut guard);
        let turn = shared.page.load_relaxed_u64(TURN) + 1;
        shared.page.store_relaxed_u64(TURN, turn);
        self.condvar.notify_all();
        let begin = Instant::now();
        while shared.page.load_relaxed_u64(TURN) == turn && !shared.is_over() {
            let (again, signalled) = self.condvar.wait(guard).unwrap();
            assert!(signalled, "nobody gave the signal");
            guard = again;
            shared.note(begin, guard.owner_died());
            mend(shared, &mut guard);
        }
        guard.unlock().unwrap();
    }

    fn read_and_write(&mut self) {
        let shared = &self.shared;
        match self.rwlock.read() {
            Ok(_guard) => {
                assert!(shared.is_whole(RWLOCK_PAIR), "half-written, and nobody was told to have died")
            }
            // Readers get this error until a writer has repaired the data.
            Err(error) => assert!(matches!(error, Error::OwnerDied), "{error}"),
        }
        let begin = Instant::now();
        let mut guard = self.rwlock.write().unwrap();
        shared.note(begin, guard.owner_died());
        if guard.owner_died() {
            shared.repair(RWLOCK_PAIR);
            guard.make_consistent().unwrap();
        }
        shared.work(RWLOCK_PAIR);
    }
}

fn mend(shared: &Shared, guard: &mut MutexGuard<'_>) {
    if guard.owner_died() {
        shared.repair(MUTEX_PAIR);
        guard.make_consistent().unwrap();
    }
}

impl Party for Locks {
    const ACTS: &[(&str, Act<Self>)] = &[
        ("mutex, others waiting", Self::lock_and_work),
        ("condition variable, others waiting", Self::take_turns),
        ("read-write lock, others waiting", Self::read_and_write),
    ];

    fn new(endpoint: &Endpoint, shared: &Shared) -> Self {
        let mut party = Self {
            shared: shared.clone(),
            mutex: endpoint.mutex("m").unwrap(),
            condvar: endpoint.condvar("c").unwrap(),
            rwlock: endpoint.rwlock("r").unwrap(),
        };
        party.mutex.set_timeout(Some(WATCHDOG));
        party.condvar.set_timeout(Some(WATCHDOG));
        party.rwlock.set_timeout(Some(WATCHDOG));
        party
    }

    fn round(&mut self) {
        self.lock_and_work();
        self.take_turns();
        self.read_and_write();
    }

    fn leave(mut self) {
        // The other survivor may wait for its turn.
        let guard = self.mutex.lock().unwrap();
        self.condvar.notify_all();
        guard.unlock().unwrap();
    }
}
