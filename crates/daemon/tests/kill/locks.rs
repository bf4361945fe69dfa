//! Death with locks, while others wait for them.
//!
//! Two survivors use a mutex, a condition variable and a read-write lock all the time, and sleep when they have to wait. A third
//! comes, takes part in one of the three, and is killed. What the locks guard is a pair of words that are equal unless somebody
//! is at work on them: found unequal by one who was not told of a death, they are a failure, as is a wait that does not
//! end.

use crate::stepper::{fork, reap, until};
use crate::support::WATCHDOG;
use crate::{RUNNING, Stage, attach};
use ginnel::sync::{Condvar, Mutex, MutexGuard, RwLock};
use ginnel::{Endpoint, Error, Mapping, Memory};
use std::time::{Duration, Instant};

// In the shared page.
const STOP: usize = 8;
const MUTEX_PAIR: usize = 64;
const RWLOCK_PAIR: usize = 128;
/// What the condition variable is for. Changed with the mutex.
const TURN: usize = 192;
/// For each survivor: rounds, deaths it was told of, its longest wait in microseconds.
const ROUNDS: usize = 256;
const TOLD: usize = 8;
const LONGEST: usize = 16;
const SURVIVORS: usize = 2;

/// One who uses the locks.
struct Party {
    shared: Mapping,
    mutex: Mutex,
    condvar: Condvar,
    rwlock: RwLock,
    /// Where its numbers stand, if it is a survivor.
    own: Option<usize>,
}

impl Party {
    fn new(endpoint: &Endpoint, shared: &Mapping, own: Option<usize>) -> Self {
        let mut party = Self {
            shared: shared.clone(),
            mutex: endpoint.mutex("m").unwrap(),
            condvar: endpoint.condvar("c").unwrap(),
            rwlock: endpoint.rwlock("r").unwrap(),
            own: own.map(|k| ROUNDS + 64 * k),
        };
        party.mutex.set_timeout(Some(WATCHDOG));
        party.condvar.set_timeout(Some(WATCHDOG));
        party.rwlock.set_timeout(Some(WATCHDOG));
        party
    }

    fn lock_and_work(&mut self) {
        let begin = Instant::now();
        let mut guard = self.mutex.lock().unwrap();
        note(&self.shared, self.own, begin, guard.owner_died());
        mend(&self.shared, &mut guard);
        work(&self.shared, MUTEX_PAIR);
        guard.unlock().unwrap();
    }

    /// Changes the turn, and waits until another has.
    fn take_turns(&mut self) {
        let shared = &self.shared;
        let mut guard = self.mutex.lock().unwrap();
        mend(shared, &mut guard);
        let turn = shared.load_relaxed_u64(TURN) + 1;
        shared.store_relaxed_u64(TURN, turn);
        self.condvar.notify_all();
        let begin = Instant::now();
        while shared.load_relaxed_u64(TURN) == turn && shared.load_relaxed_u64(STOP) == 0 {
            let (again, signalled) = self.condvar.wait(guard).unwrap();
            assert!(signalled, "nobody gave the signal");
            guard = again;
            note(shared, self.own, begin, guard.owner_died());
            mend(shared, &mut guard);
        }
        guard.unlock().unwrap();
    }

    fn read_and_write(&mut self) {
        let shared = &self.shared;
        match self.rwlock.read() {
            Ok(_guard) => {
                assert!(is_whole(shared, RWLOCK_PAIR), "half-written, and nobody was told to have died")
            }
            // Until somebody who writes has repaired it.
            Err(error) => assert!(matches!(error, Error::OwnerDied), "{error}"),
        }
        let begin = Instant::now();
        let mut guard = self.rwlock.write().unwrap();
        note(shared, self.own, begin, guard.owner_died());
        if guard.owner_died() {
            repair(shared, RWLOCK_PAIR);
            guard.make_consistent().unwrap();
        }
        work(shared, RWLOCK_PAIR);
    }
}

fn is_whole(shared: &Mapping, pair: usize) -> bool {
    shared.load_relaxed_u64(pair) == shared.load_relaxed_u64(pair + 8)
}

fn repair(shared: &Mapping, pair: usize) {
    shared.store_relaxed_u64(pair + 8, shared.load_relaxed_u64(pair));
}

fn mend(shared: &Mapping, guard: &mut MutexGuard<'_>) {
    if guard.owner_died() {
        repair(shared, MUTEX_PAIR);
        guard.make_consistent().unwrap();
    }
}

/// Half of it, after a while the other half.
fn work(shared: &Mapping, pair: usize) {
    assert!(is_whole(shared, pair), "half-written, and nobody was told to have died");
    let next = shared.load_relaxed_u64(pair) + 1;
    shared.store_relaxed_u64(pair, next);
    (0..500).for_each(|_| std::hint::spin_loop());
    shared.store_relaxed_u64(pair + 8, next);
}

fn note(shared: &Mapping, own: Option<usize>, begin: Instant, told: bool) {
    let Some(own) = own else { return };
    let waited = begin.elapsed().as_micros() as u64;
    shared.store_relaxed_u64(own + LONGEST, waited.max(shared.load_relaxed_u64(own + LONGEST)));
    shared.store_relaxed_u64(own + TOLD, shared.load_relaxed_u64(own + TOLD) + u64::from(told));
}

fn survive(endpoint: &Endpoint, shared: &Mapping, k: usize) {
    let mut party = Party::new(endpoint, shared, Some(k));
    let own = ROUNDS + 64 * k;
    while shared.load_relaxed_u64(STOP) == 0 {
        party.lock_and_work();
        party.take_turns();
        party.read_and_write();
        shared.store_relaxed_u64(own, shared.load_relaxed_u64(own) + 1);
    }
    // The other may wait for its turn.
    let guard = party.mutex.lock().unwrap();
    party.condvar.notify_all();
    guard.unlock().unwrap();
}

/// What a victim does, again and again.
type Act = fn(&mut Party);

const ACTS: [(&str, Act); 3] = [
    ("mutex, others waiting", Party::lock_and_work),
    ("condition variable, others waiting", Party::take_turns),
    ("read-write lock, others waiting", Party::read_and_write),
];

pub fn at_random(stage: &mut Stage, kills: usize, wanted: &dyn Fn(&str) -> bool) {
    let shared = stage.shared.clone();
    shared.write(STOP, &[0; 512]);
    let survivors: Vec<_> = (0..SURVIVORS)
        .map(|k| {
            let (socket, shared) = (stage.daemon.socket(), &shared);
            fork(move || survive(&attach(socket, "survivor"), shared, k))
        })
        .collect();
    let rounds = || [0, 1].map(|k| shared.load_relaxed_u64(ROUNDS + 64 * k));
    let all_go_on = || {
        let before = rounds();
        until("the survivors to go on", 2 * WATCHDOG, || {
            let now = rounds();
            (now[0] > before[0] && now[1] > before[1]).then_some(())
        });
    };
    all_go_on();
    let now = stage.look();
    let base = std::mem::replace(&mut stage.base, now);
    for (name, act) in ACTS.iter().filter(|(name, _)| wanted(name)) {
        let begin = Instant::now();
        for _ in 0..2 * kills {
            stage.kill_at_random(Duration::from_millis(2), |endpoint, shared| {
                let mut party = Party::new(endpoint, shared, None);
                shared.store_release_u64(RUNNING, 1);
                loop {
                    act(&mut party);
                }
            });
            all_go_on();
            stage.buried();
            assert_eq!(stage.look(), stage.base, "{name}: after the death");
        }
        println!("test {name} ... ok: {} kills ({:.1} s)", 2 * kills, begin.elapsed().as_secs_f64());
    }
    shared.store_relaxed_u64(STOP, 1);
    for survivor in survivors {
        assert_eq!(reap(survivor), 0, "a survivor has failed");
    }
    let counts = &shared;
    let sum = |at: usize| (0..SURVIVORS).map(move |k| counts.load_relaxed_u64(ROUNDS + 64 * k + at));
    let (told, longest) = (sum(TOLD).sum::<u64>(), sum(LONGEST).max().unwrap_or(0));
    println!("survivors: {} rounds, told of {told} deaths, longest wait {longest} us", sum(0).sum::<u64>());
    assert!(told > 0 || stage.toll.kills < 100, "nobody has died with a lock: this test has tested nothing");
    stage.base = base;
    stage.buried();
    stage.all_is_well("survivors");
}
