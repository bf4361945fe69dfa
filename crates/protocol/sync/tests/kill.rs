//! A user is killed at each instruction of an operation, while another user sleeps on the same object. Then the daemon's
//! `reclaim` runs, and the daemon rings the users that it returns. After that, no user may stay asleep, the object must be
//! usable, and data that may be half-written must be reported as such.
//!
//! The victim is a process of its own that is single-stepped with ptrace. A first pass finds the instructions at which
//! something changes that others can see: a word in shared memory, or a system call. Between two of them, the place of a
//! death makes no difference. Therefore the victim is killed before and after each of them, and then at other instructions
//! all over the operation, until it has been killed N times. In some operations it is instead declared dead there, continues
//! without knowing of it, and dies at the end:
//!
//!     cargo test -p ginnel-sync --test kill -- [NAME] [--kills N]           (for each operation; default 100)
//!
//! The sleepers here do not look every 100 ms, so a lost wake-up is noticed.
#![allow(unsafe_code)] // fork, ptrace, kill.

#[cfg(not(loom))]
mod world;

#[cfg(loom)]
fn main() {}

#[cfg(not(loom))]
fn main() {
    test::main();
}

#[cfg(not(loom))]
mod test {
    use super::world::{Bells, EventSleeper, StrictSleeper, user};
    use ginnel_layout::sync::{ARMED, OwnerWord, SIZE, STATE, SyncKind, TURN};
    use ginnel_ring::wait::{Sleeper, WaitMode};
    use ginnel_shmem::{Mapping, Protection, SharedMemory};
    use ginnel_sync::authority::{self, Left, reclaim};
    use ginnel_sync::{
        Barrier, Condvar, Locked, Mutex, Once, Patience, RwLock, Semaphore, SyncError, Turn, World,
    };
    use kit::stepper::{KillCount, Stepper, Trace, fork, leave, reap, start};
    use kit::wait::spin_for;
    use std::cell::RefCell;
    use std::io;
    use std::time::{Duration, Instant};

    /// How often the victim of each operation is killed.
    const KILLS: usize = 100;

    /// The users: the victim, the sleeper, and the heir, which tries the object afterwards.
    const VICTIM: usize = 0;
    const SLEEPER: usize = 1;
    const HEIR: usize = 2;

    const ASLEEP: Patience = Patience { mode: WaitMode::Interrupt, timeout: None };

    /// The memory that all processes share: two objects, and two words that are equal while no user works on them.
    struct Stage {
        first: Mapping,
        second: Mapping,
        data: Mapping,
        whole: Mapping,
        bells: Bells,
        kinds: (SyncKind, SyncKind),
        /// The lock that the heir holds.
        held: RefCell<Option<RwLock<Mapping>>>,
    }

    impl Stage {
        fn new() -> Self {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.set_len(3 * SIZE as u64).unwrap();
            let whole = Mapping::of_file(&file, 0, 3 * SIZE, Protection::ReadWrite).unwrap();
            let part = |n: usize| whole.part(n * SIZE, SIZE).unwrap();
            let kinds = (SyncKind(0), SyncKind(0));
            Self {
                first: part(0),
                second: part(1),
                data: part(2),
                bells: Bells::new(3),
                whole,
                kinds,
                held: RefCell::new(None),
            }
        }

        fn set(&mut self, case: &Case) {
            self.kinds = case.kinds;
            for (page, kind) in [(&self.first, case.kinds.0), (&self.second, case.kinds.1)] {
                authority::format(page, kind, case.limit, 0);
                (0..3).for_each(|k| authority::seat(page, user(k), 1, 0));
                // The victim is the next to be woken.
                page.swap_u64(TURN, 62);
            }
            self.data.write(0, &[0; SIZE]);
        }

        fn mutex(&self, k: usize) -> Mutex<Mapping> {
            Mutex::new(self.first.clone(), user(k))
        }
        fn rwlock(&self, k: usize) -> RwLock<Mapping> {
            RwLock::new(self.first.clone(), user(k))
        }
        fn condvar(&self, k: usize) -> Condvar<Mapping> {
            Condvar::new(self.second.clone(), user(k))
        }
        fn semaphore(&self, k: usize) -> Semaphore<Mapping> {
            Semaphore::new(self.first.clone(), user(k), 5)
        }
        fn barrier(&self, k: usize) -> Barrier<Mapping> {
            Barrier::new(self.first.clone(), user(k), 2)
        }
        fn once(&self, k: usize) -> Once<Mapping> {
            Once::new(self.first.clone(), user(k))
        }

        /// Does half of the work, then the other half.
        fn work(&self) {
            for at in [0, 8] {
                self.data.store_relaxed_u64(at, self.data.load_relaxed_u64(at) + 1);
            }
        }
        fn flag(&self) -> bool {
            self.data.load_relaxed_u64(0) > 0
        }
        fn check(&self, locked: Locked) {
            let halves = (self.data.load_relaxed_u64(0), self.data.load_relaxed_u64(8));
            assert!(locked == Locked::OwnerDied || halves.0 == halves.1, "half-written: {halves:?}");
            self.data.store_relaxed_u64(8, halves.0);
        }
    }

    fn sleeper(stage: &Stage, k: usize) -> StrictSleeper {
        StrictSleeper(EventSleeper::new(&stage.bells, k))
    }

    /// The victim's sleeper: it does not sleep but looks again. After a few times it counts as asleep and may be killed.
    struct Restless<'a>(&'a Stage, u32);

    impl Sleeper for Restless<'_> {
        fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
            self.1 += 1;
            if self.1 > 2 {
                leave(0);
            }
            Ok(())
        }
    }

    impl World for Restless<'_> {
        fn ring(&mut self, slot: usize) {
            self.0.bells.ring(slot);
        }
    }

    type Act = fn(&Stage);

    /// An operation in which a user dies.
    struct Case {
        name: &'static str,
        kinds: (SyncKind, SyncKind),
        limit: u32,
        /// What another user has done before.
        before: Act,
        /// What the victim does. It dies in the part after [`start`].
        victim: fn(&Stage, &mut Restless<'_>),
        /// What the sleeper does, and on which of the two objects it sleeps when the victim starts.
        sleeper: Option<(Act, usize)>,
        /// What another user does just before the victim dies.
        meanwhile: Act,
        /// What another user does after the daemon has cleaned up. After this, the sleeper must come to its end.
        after: Act,
    }

    fn nothing(_: &Stage) {}

    /// Checks that any user can lock the mutex, and is told if its data are half-written.
    fn mutex_works(stage: &Stage) {
        lock_and_work(stage, HEIR);
        let mut mutex = stage.mutex(HEIR);
        assert_eq!(mutex.lock(&mut sleeper(stage, HEIR), ASLEEP).unwrap(), Locked::Clean);
        mutex.unlock(&mut sleeper(stage, HEIR)).unwrap();
    }

    fn lock_and_work(stage: &Stage, k: usize) {
        let (mut mutex, mut sleeper) = (stage.mutex(k), sleeper(stage, k));
        let locked = mutex.lock(&mut sleeper, ASLEEP).unwrap();
        stage.check(locked);
        if locked == Locked::OwnerDied {
            mutex.make_consistent().unwrap();
        }
        stage.work();
        mutex.unlock(&mut sleeper).unwrap();
    }

    fn lock(stage: &Stage, k: usize) {
        let _ = stage.mutex(k).lock(&mut sleeper(stage, k), ASLEEP).unwrap();
    }

    fn wait_for_flag(stage: &Stage, k: usize, world: &mut impl World, again: &mut impl World) {
        let (mut mutex, mut condvar) = (stage.mutex(k), stage.condvar(k));
        let mut locked = mutex.lock(world, ASLEEP).unwrap();
        while !stage.flag() {
            if locked == Locked::OwnerDied {
                mutex.make_consistent().unwrap();
            }
            locked = condvar.wait(again, ASLEEP, &mut mutex, world, ASLEEP).unwrap().locked;
        }
        if locked == Locked::OwnerDied {
            mutex.make_consistent().unwrap();
        }
        mutex.unlock(world).unwrap();
    }

    fn sleep_for_flag(stage: &Stage) {
        wait_for_flag(stage, SLEEPER, &mut sleeper(stage, SLEEPER), &mut sleeper(stage, SLEEPER));
    }

    fn raise_flag(stage: &Stage, k: usize, world: &mut impl World) {
        let (mut mutex, mut condvar) = (stage.mutex(k), stage.condvar(k));
        if mutex.lock(world, ASLEEP).unwrap() == Locked::OwnerDied {
            mutex.make_consistent().unwrap();
        }
        stage.data.store_relaxed_u64(0, 1);
        condvar.notify_one(world);
        mutex.unlock(world).unwrap();
    }

    fn write(stage: &Stage, k: usize) {
        let (mut lock, mut sleeper) = (stage.rwlock(k), sleeper(stage, k));
        let locked = lock.write(&mut sleeper, ASLEEP).unwrap();
        stage.check(locked);
        if locked == Locked::OwnerDied {
            lock.make_consistent().unwrap();
        }
        stage.work();
        lock.unlock(&mut sleeper).unwrap();
    }

    fn read(stage: &Stage, k: usize) {
        let (mut lock, mut sleeper) = (stage.rwlock(k), sleeper(stage, k));
        match lock.read(&mut sleeper, ASLEEP) {
            Ok(()) => {
                stage.check(Locked::Clean);
                lock.unlock(&mut sleeper).unwrap();
            }
            Err(error) => assert!(matches!(error, SyncError::OwnerDied), "{error}"),
        }
    }

    fn do_once(stage: &Stage, k: usize, world: &mut impl World) {
        let mut once = stage.once(k);
        if let Turn::Mine { again } = once.begin(world, ASLEEP).unwrap() {
            stage.check(if again { Locked::OwnerDied } else { Locked::Clean });
            stage.work();
            once.complete(world).unwrap();
        }
    }

    fn heir_reads(stage: &Stage) {
        let mut lock = stage.rwlock(HEIR);
        lock.read(&mut sleeper(stage, HEIR), ASLEEP).unwrap();
        *stage.held.borrow_mut() = Some(lock);
    }

    fn heir_writes(stage: &Stage) {
        let mut lock = stage.rwlock(HEIR);
        assert_eq!(lock.write(&mut sleeper(stage, HEIR), ASLEEP).unwrap(), Locked::Clean);
        *stage.held.borrow_mut() = Some(lock);
    }

    fn heir_leaves(stage: &Stage) {
        stage.held.take().unwrap().unlock(&mut sleeper(stage, HEIR)).unwrap();
    }

    fn heir_unlocks(stage: &Stage) {
        stage.mutex(HEIR).unlock(&mut sleeper(stage, HEIR)).unwrap();
    }

    fn mutexes() -> Vec<Case> {
        let mutex = Case {
            name: "mutex: lock, work, unlock",
            kinds: (SyncKind::MUTEX, SyncKind::CONDVAR),
            limit: 0,
            before: nothing,
            victim: |stage, world| {
                start();
                let mut mutex = stage.mutex(VICTIM);
                let _ = mutex.lock(world, ASLEEP).unwrap();
                stage.work();
                mutex.unlock(world).unwrap();
            },
            sleeper: None,
            meanwhile: nothing,
            after: mutex_works,
        };
        vec![
            Case {
                name: "mutex: work, unlock with a sleeper",
                victim: |stage, world| {
                    let mut mutex = stage.mutex(VICTIM);
                    let _ = mutex.lock(world, ASLEEP).unwrap();
                    start();
                    stage.work();
                    mutex.unlock(world).unwrap();
                },
                sleeper: Some((|stage| lock_and_work(stage, SLEEPER), 0)),
                ..mutex
            },
            Case {
                name: "mutex: wait beside a sleeper, then it is free",
                before: |stage| lock(stage, HEIR),
                victim: |stage, world| {
                    start();
                    let _ = stage.mutex(VICTIM).lock(world, ASLEEP);
                },
                sleeper: Some((|stage| lock_and_work(stage, SLEEPER), 0)),
                meanwhile: heir_unlocks,
                ..mutex
            },
            Case {
                name: "mutex: time out beside a sleeper, then it is free",
                before: |stage| lock(stage, HEIR),
                victim: |stage, world| {
                    start();
                    let brief = Patience { timeout: Some(Duration::ZERO), ..ASLEEP };
                    let _ = stage.mutex(VICTIM).lock(world, brief);
                },
                sleeper: Some((|stage| lock_and_work(stage, SLEEPER), 0)),
                meanwhile: heir_unlocks,
                ..mutex
            },
            Case {
                name: "mutex: give up inconsistent",
                before: |stage| _ = stage.first.swap_u64(STATE, OwnerWord::OWNER_DIED),
                victim: |stage, world| {
                    let mut mutex = stage.mutex(VICTIM);
                    assert_eq!(mutex.lock(world, ASLEEP).unwrap(), Locked::OwnerDied);
                    start();
                    mutex.unlock(world).unwrap();
                },
                sleeper: Some((
                    |stage| match stage.mutex(SLEEPER).lock(&mut sleeper(stage, SLEEPER), ASLEEP) {
                        Ok(Locked::OwnerDied) | Err(SyncError::NotRecoverable) => {}
                        other => panic!("{other:?}"),
                    },
                    0,
                )),
                after: nothing,
                ..mutex
            },
            Case {
                name: "condvar: signal a sleeper",
                victim: |stage, world| {
                    start();
                    raise_flag(stage, VICTIM, world);
                },
                sleeper: Some((sleep_for_flag, 1)),
                after: |stage| raise_flag(stage, HEIR, &mut sleeper(stage, HEIR)),
                ..mutex
            },
            Case {
                name: "condvar: wait beside a sleeper, one signal",
                victim: |stage, world| {
                    start();
                    wait_for_flag(stage, VICTIM, world, &mut Restless(stage, 0));
                },
                sleeper: Some((sleep_for_flag, 1)),
                meanwhile: |stage| {
                    // Without the mutex, which the victim may have. The signal is for one of the two.
                    stage.data.store_relaxed_u64(0, 1);
                    stage.condvar(HEIR).notify_one(&mut sleeper(stage, HEIR));
                },
                after: nothing,
                ..mutex
            },
            mutex,
        ]
    }

    fn rwlocks() -> Vec<Case> {
        let rwlock = Case {
            name: "rwlock: write, work, unlock",
            kinds: (SyncKind::RWLOCK, SyncKind::CONDVAR),
            limit: 0,
            before: nothing,
            victim: |stage, world| {
                start();
                let mut lock = stage.rwlock(VICTIM);
                let _ = lock.write(world, ASLEEP).unwrap();
                stage.work();
                lock.unlock(world).unwrap();
            },
            sleeper: None,
            meanwhile: nothing,
            after: |stage| write(stage, HEIR),
        };
        vec![
            Case {
                name: "rwlock: work, unlock with a reader asleep",
                victim: |stage, world| {
                    let mut lock = stage.rwlock(VICTIM);
                    let _ = lock.write(world, ASLEEP).unwrap();
                    start();
                    stage.work();
                    lock.unlock(world).unwrap();
                },
                sleeper: Some((|stage| read(stage, SLEEPER), 0)),
                ..rwlock
            },
            Case {
                name: "rwlock: work, unlock with a writer asleep",
                victim: |stage, world| {
                    let mut lock = stage.rwlock(VICTIM);
                    let _ = lock.write(world, ASLEEP).unwrap();
                    start();
                    stage.work();
                    lock.unlock(world).unwrap();
                },
                sleeper: Some((|stage| write(stage, SLEEPER), 0)),
                ..rwlock
            },
            Case {
                name: "rwlock: end of reading with a writer asleep",
                victim: |stage, world| {
                    let mut lock = stage.rwlock(VICTIM);
                    lock.read(world, ASLEEP).unwrap();
                    start();
                    lock.unlock(world).unwrap();
                },
                sleeper: Some((|stage| write(stage, SLEEPER), 0)),
                ..rwlock
            },
            Case {
                name: "rwlock: read beside a writer that sleeps for another reader",
                before: heir_reads,
                victim: |stage, world| {
                    start();
                    let mut lock = stage.rwlock(VICTIM);
                    if lock.read(world, ASLEEP).is_ok() {
                        lock.unlock(world).unwrap();
                    }
                },
                sleeper: Some((|stage| write(stage, SLEEPER), 0)),
                meanwhile: heir_leaves,
                ..rwlock
            },
            Case {
                name: "rwlock: write beside a sleeping reader, then it is free",
                before: heir_writes,
                victim: |stage, world| {
                    start();
                    let _ = stage.rwlock(VICTIM).write(world, ASLEEP);
                },
                sleeper: Some((|stage| read(stage, SLEEPER), 0)),
                meanwhile: heir_leaves,
                ..rwlock
            },
            rwlock,
        ]
    }

    fn others() -> Vec<Case> {
        let acquire: Act =
            |stage| stage.semaphore(SLEEPER).acquire(&mut sleeper(stage, SLEEPER), ASLEEP).unwrap();
        let semaphore = Case {
            name: "semaphore: release with a sleeper",
            kinds: (SyncKind::SEMAPHORE, SyncKind::CONDVAR),
            limit: 5,
            before: nothing,
            victim: |stage, world| {
                start();
                stage.semaphore(VICTIM).release(world, 1).unwrap();
            },
            sleeper: Some((acquire, 0)),
            meanwhile: nothing,
            after: |stage| {
                // If the victim died before it gave the permit (or the sleeper has it already), another user gives one.
                if stage.semaphore(HEIR).permits().unwrap() == 0 {
                    stage.semaphore(HEIR).release(&mut sleeper(stage, HEIR), 1).unwrap();
                }
            },
        };
        vec![
            Case {
                name: "semaphore: acquire beside a sleeper, two permits",
                victim: |stage, world| {
                    start();
                    let _ = stage.semaphore(VICTIM).acquire(world, ASLEEP);
                },
                meanwhile: |stage| {
                    let mut sleeper = sleeper(stage, HEIR);
                    stage.semaphore(HEIR).release(&mut sleeper, 1).unwrap();
                    stage.semaphore(HEIR).release(&mut sleeper, 1).unwrap();
                },
                after: nothing,
                ..semaphore
            },
            Case {
                name: "barrier: arrive last",
                kinds: (SyncKind::BARRIER, SyncKind::CONDVAR),
                limit: 2,
                victim: |stage, world| {
                    start();
                    assert!(stage.barrier(VICTIM).wait(world, ASLEEP).unwrap());
                },
                sleeper: Some((
                    |stage| match stage.barrier(SLEEPER).wait(&mut sleeper(stage, SLEEPER), ASLEEP) {
                        Ok(false) | Err(SyncError::BarrierBroken) => {}
                        other => panic!("{other:?}"),
                    },
                    0,
                )),
                after: nothing,
                ..semaphore
            },
            Case {
                name: "once: do it with a sleeper",
                kinds: (SyncKind::ONCE, SyncKind::CONDVAR),
                limit: 0,
                victim: |stage, world| {
                    let mut once = stage.once(VICTIM);
                    assert_eq!(once.begin(world, ASLEEP).unwrap(), Turn::Mine { again: false });
                    start();
                    stage.work();
                    once.complete(world).unwrap();
                },
                sleeper: Some((|stage| do_once(stage, SLEEPER, &mut sleeper(stage, SLEEPER)), 0)),
                after: |stage| do_once(stage, HEIR, &mut sleeper(stage, HEIR)),
                ..semaphore
            },
            semaphore,
        ]
    }

    /// Operations at whose end the victim dies with the lock, unless it finds out before that it was declared dead.
    fn taking() -> Vec<Case> {
        let mutex = Case {
            name: "mutex: declared dead while it locks",
            kinds: (SyncKind::MUTEX, SyncKind::CONDVAR),
            limit: 0,
            before: nothing,
            victim: |stage, world| {
                start();
                if stage.mutex(VICTIM).lock(world, ASLEEP).is_ok() {
                    stage.data.store_relaxed_u64(0, 1);
                }
            },
            sleeper: None,
            meanwhile: nothing,
            after: mutex_works,
        };
        vec![
            Case {
                name: "mutex: declared dead while it locks in vain",
                before: |stage| lock(stage, HEIR),
                victim: |stage, world| {
                    start();
                    let _ = stage.mutex(VICTIM).lock(world, ASLEEP);
                },
                meanwhile: heir_unlocks,
                ..mutex
            },
            Case {
                name: "rwlock: declared dead while it locks for writing",
                kinds: (SyncKind::RWLOCK, SyncKind::CONDVAR),
                victim: |stage, world| {
                    start();
                    if stage.rwlock(VICTIM).write(world, ASLEEP).is_ok() {
                        stage.data.store_relaxed_u64(0, 1);
                    }
                },
                after: |stage| write(stage, HEIR),
                ..mutex
            },
            Case {
                name: "once: declared dead while it takes its turn",
                kinds: (SyncKind::ONCE, SyncKind::CONDVAR),
                victim: |stage, world| {
                    start();
                    let _ = stage.once(VICTIM).begin(world, ASLEEP);
                },
                after: |stage| do_once(stage, HEIR, &mut sleeper(stage, HEIR)),
                ..mutex
            },
            mutex,
        ]
    }

    /// A victim that is stopped before its first instruction, and the user that sleeps beside it.
    struct Scene<'a> {
        case: &'a Case,
        stage: &'a Stage,
        victim: Stepper,
        sleeper: Option<libc::pid_t>,
    }

    impl<'a> Scene<'a> {
        fn open(case: &'a Case, stage: &'a mut Stage) -> Self {
            stage.set(case);
            let stage = &*stage;
            (case.before)(stage);
            let victim = Stepper::fork(|| (case.victim)(stage, &mut Restless(stage, 0)));
            let sleeper = case.sleeper.map(|(act, object)| {
                let pid = fork(|| act(stage));
                let page = if object == 0 { &stage.first } else { &stage.second };
                let asleep = || (page.load_relaxed_u64(ARMED) & 1 << SLEEPER != 0).then_some(());
                spin_for("the sleeper to sleep", asleep);
                pid
            });
            Self { case, stage, victim, sleeper }
        }

        /// Another user acts, the victim dies, the daemon cleans up, and then all must be well. Returns true if the victim
        /// was killed, and had not ended before.
        fn close(mut self) -> bool {
            (self.case.meanwhile)(self.stage);
            let killed = self.victim.kill();
            assert!(
                killed || self.victim.ended == Some(0),
                "{}: the victim has failed by itself",
                self.case.name
            );
            self.bury();
            (self.case.after)(self.stage);
            if let Some(sleeper) = self.sleeper {
                assert_eq!(reap(sleeper), 0, "{}: the sleeper has failed", self.case.name);
            }
            killed
        }

        /// The daemon takes back what the victim has.
        fn bury(&self) {
            let (first, second) = self.stage.kinds;
            for (page, kind) in [(&self.stage.first, first), (&self.stage.second, second)] {
                self.stage.bells.ring_all(reclaim(page, kind, VICTIM, Left::Died));
            }
        }

        /// The victim is declared dead, continues, and dies at its end; then all must be well.
        fn outlive(mut self) {
            self.bury();
            (self.case.meanwhile)(self.stage);
            assert_eq!(self.victim.run(), 0, "{}: the victim has failed by itself", self.case.name);
            (self.case.after)(self.stage);
        }
    }

    /// Finds the instructions of a case.
    fn pass(case: &Case, stage: &mut Stage) -> Trace {
        let mut scene = Scene::open(case, stage);
        let whole = scene.stage.whole.clone();
        let trace = Trace::of(&mut scene.victim, || {
            let mut bytes = vec![0; 3 * SIZE];
            whole.read(0, &mut bytes);
            bytes
        });
        scene.close();
        trace
    }

    pub fn main() {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let kills = args.iter().position(|a| a == "--kills").and_then(|at| args.get(at + 1)?.parse().ok());
        // `make test-quick`.
        let kills = kills.or_else(|| std::env::var_os("GINNEL_QUICK").map(|_| 10));
        let wanted = args.first().filter(|a| !a.starts_with('-'));
        let mut stage = Stage::new();
        let cases: Vec<Case> = [mutexes(), rwlocks(), others()].into_iter().flatten().collect();
        let (begin, mut kill_count) = (Instant::now(), KillCount::default());
        for case in cases.iter().filter(|c| wanted.is_none_or(|w| c.name.contains(w.as_str()))) {
            let (begin, before) = (Instant::now(), kill_count.kills);
            let trace = pass(case, &mut stage);
            for k in trace.choose(kills.unwrap_or(KILLS)) {
                let mut scene = Scene::open(case, &mut stage);
                scene.victim.go_to(&trace, k);
                let at = scene.victim.at();
                if scene.close() {
                    kill_count.kills += 1;
                    kill_count.at.insert(at);
                }
            }
            println!(
                "test {} ... ok: {} instructions, {} at which something is seen; {} kills ({:.1} s)",
                case.name,
                trace.instructions(),
                trace.matters.len(),
                kill_count.kills - before,
                begin.elapsed().as_secs_f64()
            );
        }
        for case in taking().iter().filter(|c| wanted.is_none_or(|w| c.name.contains(w.as_str()))) {
            let trace = pass(case, &mut stage);
            let chosen = trace.choose(kills.unwrap_or(KILLS));
            for &k in &chosen {
                let mut scene = Scene::open(case, &mut stage);
                scene.victim.go_to(&trace, k);
                scene.outlive();
            }
            println!(
                "test {} ... ok: {} instructions, at {} of them",
                case.name,
                trace.instructions(),
                chosen.len()
            );
        }
        println!(
            "killed while it locks, unlocks, waits, signals: {} times, before {} different instructions ({:.1} s)",
            kill_count.kills,
            kill_count.at.len(),
            begin.elapsed().as_secs_f64()
        );
        // If its path depends on what others do at the time, a victim may come to its end before it can be killed.
        let least = cases.len() * KILLS * 9 / 10;
        assert!(kills.is_some() || wanted.is_some() || kill_count.kills >= least, "fewer than {least} kills");
    }
}
