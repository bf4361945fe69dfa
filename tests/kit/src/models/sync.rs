//! Runs operations of a few users on one lock, and compares them with an oracle. It also runs them without an oracle, while a scribbler
//! writes to the page. The first argument of an operation is its user.

use super::Op;
use ginnel_layout::sync::{SIZE, STATE, SyncKind};
use ginnel_ring::wait::{Sleeper, WaitMode};
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_sync::authority::{self, Left};
use ginnel_sync::{
    Barrier, Condvar, Locked, Mutex, Once, Patience, RwLock, Semaphore, SyncError, Turn, User, World,
};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Number of users of the object.
const USERS: usize = 3;
/// Maximum permits of a semaphore, or parties of a barrier.
const LIMIT: u32 = 3;

/// Returns the kind of lock that a byte selects.
pub fn kind(choice: u8) -> SyncKind {
    SyncKind(u32::from(choice) % 6 + 1)
}

/// A world without other users: it rings no one, and does not sleep longer than it must.
struct Alone;

impl Sleeper for Alone {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let left = deadline.map_or(Duration::ZERO, |d| d.saturating_duration_since(Instant::now()));
        std::thread::sleep(left.min(Duration::from_micros(100)));
        Ok(())
    }
}

impl World for Alone {
    fn ring(&mut self, slot: usize) {
        assert!(slot < ginnel_layout::sync::SLOTS, "a slot that does not exist was rung");
    }
}

/// Does not wait, but goes through all the code that waits.
fn at_once(b: u16) -> Patience {
    let mode = match b % 3 {
        0 => WaitMode::Poll,
        1 => WaitMode::Interrupt,
        _ => WaitMode::Adaptive { budget: Duration::ZERO },
    };
    Patience { mode, timeout: Some(Duration::ZERO) }
}

/// All handles of one user. Only those of the object's kind are used, except under scribbles.
struct Handles {
    mutex: Mutex<Mapping>,
    rwlock: RwLock<Mapping>,
    condvar: Condvar<Mapping>,
    semaphore: Semaphore<Mapping>,
    barrier: Barrier<Mapping>,
    once: Once<Mapping>,
}

struct Object {
    page: Mapping,
    kind: SyncKind,
    epochs: [u16; USERS],
    users: Vec<Handles>,
}

impl Object {
    fn new(kind: SyncKind) -> Self {
        let page = Mapping::anonymous(SIZE).unwrap();
        let limit = if kind == SyncKind::SEMAPHORE || kind == SyncKind::BARRIER { LIMIT } else { 0 };
        authority::format(&page, kind, limit, 1);
        let mut object = Self { page, kind, epochs: [0; USERS], users: Vec::new() };
        object.users = (0..USERS).map(|k| object.seat(k)).collect();
        object
    }

    fn seat(&mut self, k: usize) -> Handles {
        self.epochs[k] += 1;
        let user = User::new(k, self.epochs[k], 7).unwrap();
        authority::seat(&self.page, user, 1, 0);
        let page = || self.page.clone();
        Handles {
            mutex: Mutex::new(page(), user),
            rwlock: RwLock::new(page(), user),
            condvar: Condvar::new(page(), user),
            semaphore: Semaphore::new(page(), user, LIMIT),
            barrier: Barrier::new(page(), user, LIMIT),
            once: Once::new(page(), user),
        }
    }

    /// The user dies, and another one gets its slot.
    fn bury(&mut self, k: usize) {
        let _ = authority::reclaim(&self.page, self.kind, k, Left::Died);
        self.users[k] = self.seat(k);
    }
}

/// The state of a lock, without memory.
#[derive(Debug, Default)]
struct Oracle {
    owner: Option<usize>,
    readers: [bool; USERS],
    died: bool,
    ended: bool,
    done: bool,
    permits: u32,
}

/// The result of an operation, in words that fit all kinds.
#[derive(Debug, PartialEq)]
enum Outcome {
    Yes,
    AfterDeath,
    NotNow,
    OwnerDied,
    Ended,
    NotOwner,
    Deadlock,
    Overflow,
    Done,
}

fn said<T>(outcome: Result<T, SyncError>, yes: impl FnOnce(T) -> Outcome) -> Outcome {
    match outcome {
        Ok(value) => yes(value),
        Err(SyncError::Busy | SyncError::TimedOut) => Outcome::NotNow,
        Err(SyncError::OwnerDied) => Outcome::OwnerDied,
        Err(SyncError::NotRecoverable) => Outcome::Ended,
        Err(SyncError::NotOwner) => Outcome::NotOwner,
        Err(SyncError::Deadlock) => Outcome::Deadlock,
        Err(SyncError::Overflow { limit: LIMIT }) => Outcome::Overflow,
        Err(error) => panic!("{error}"),
    }
}

fn locked(locked: Locked) -> Outcome {
    if locked == Locked::Clean { Outcome::Yes } else { Outcome::AfterDeath }
}

impl Oracle {
    fn take(&mut self, k: usize) -> Outcome {
        if self.ended {
            Outcome::Ended
        } else if self.owner == Some(k) || self.readers[k] {
            Outcome::Deadlock
        } else if self.owner.is_some() || self.readers.contains(&true) {
            Outcome::NotNow
        } else {
            self.owner = Some(k);
            if self.died { Outcome::AfterDeath } else { Outcome::Yes }
        }
    }
    fn read(&mut self, k: usize) -> Outcome {
        if self.owner == Some(k) || self.readers[k] {
            Outcome::Deadlock
        } else if self.ended {
            Outcome::Ended
        } else if self.owner.is_some() {
            Outcome::NotNow
        } else if self.died {
            Outcome::OwnerDied
        } else {
            self.readers[k] = true;
            Outcome::Yes
        }
    }
    fn leave(&mut self, k: usize) -> Outcome {
        if std::mem::take(&mut self.readers[k]) {
            return Outcome::Yes;
        }
        if self.owner != Some(k) {
            return Outcome::NotOwner;
        }
        self.owner = None;
        self.ended = std::mem::take(&mut self.died);
        Outcome::Yes
    }
    fn repair(&mut self, k: usize) -> Outcome {
        if self.owner != Some(k) {
            return Outcome::NotOwner;
        }
        self.died = false;
        Outcome::Yes
    }
    fn bury(&mut self, k: usize) {
        self.readers[k] = false;
        if self.owner == Some(k) {
            self.owner = None;
            self.died = true;
        }
    }
}

/// Checks that any list of operations on a mutex, a rwlock, a semaphore or a once gives the oracle's results.
pub fn run(kind: SyncKind, ops: &[Op]) {
    let (mut object, mut oracle) = (Object::new(kind), Oracle { permits: 1, ..Oracle::default() });
    let yes = |()| Outcome::Yes;
    for (n, op) in ops.iter().enumerate() {
        let k = usize::from(op.a) % USERS;
        let how = at_once(op.b);
        let h = &mut object.users[k];
        let (real, model) = match (kind, op.code % 8) {
            (SyncKind::MUTEX | SyncKind::RWLOCK | SyncKind::ONCE, 7) => {
                object.bury(k);
                oracle.bury(k);
                continue;
            }
            (SyncKind::MUTEX, 0 | 1) => (said(h.mutex.lock(&mut Alone, how), locked), oracle.take(k)),
            (SyncKind::MUTEX, 2) => (said(h.mutex.try_lock(), locked), oracle.take(k)),
            (SyncKind::MUTEX, 3 | 4) => (said(h.mutex.unlock(&mut Alone), yes), oracle.leave(k)),
            (SyncKind::MUTEX, _) => (said(h.mutex.make_consistent(), yes), oracle.repair(k)),
            (SyncKind::RWLOCK, 0) => (said(h.rwlock.write(&mut Alone, how), locked), oracle.take_rw(k)),
            (SyncKind::RWLOCK, 1) => (said(h.rwlock.try_write(&mut Alone), locked), oracle.take_rw(k)),
            (SyncKind::RWLOCK, 2) => (said(h.rwlock.read(&mut Alone, how), yes), oracle.read(k)),
            (SyncKind::RWLOCK, 3) => (said(h.rwlock.try_read(&mut Alone), yes), oracle.read(k)),
            (SyncKind::RWLOCK, 4 | 5) => (said(h.rwlock.unlock(&mut Alone), yes), oracle.leave(k)),
            (SyncKind::RWLOCK, _) => (said(h.rwlock.make_consistent(), yes), oracle.repair(k)),
            (SyncKind::ONCE, 0..4) => {
                let turn = |turn| match turn {
                    Turn::Done => Outcome::Done,
                    Turn::Mine { again: false } => Outcome::Yes,
                    Turn::Mine { again: true } => Outcome::AfterDeath,
                };
                let model = if oracle.done { Outcome::Done } else { oracle.take(k) };
                (said(h.once.begin(&mut Alone, how), turn), model)
            }
            (SyncKind::ONCE, 4) => {
                let model = oracle.repair(k);
                if model == Outcome::Yes {
                    (oracle.done, oracle.owner) = (true, None);
                }
                (said(h.once.complete(&mut Alone), yes), model)
            }
            (SyncKind::ONCE, _) => {
                let model = oracle.repair(k);
                if model == Outcome::Yes {
                    oracle.bury(k);
                }
                (said(h.once.give_up(&mut Alone), yes), model)
            }
            (SyncKind::SEMAPHORE, 0..4) => {
                let model = if oracle.permits > 0 { Outcome::Yes } else { Outcome::NotNow };
                oracle.permits = oracle.permits.saturating_sub(1);
                let real = match op.code % 2 {
                    0 => h.semaphore.acquire(&mut Alone, how),
                    _ => h.semaphore.try_acquire(),
                };
                (said(real, yes), model)
            }
            (SyncKind::SEMAPHORE, _) => {
                let count = u32::from(op.b % 4);
                let model = if oracle.permits + count > LIMIT { Outcome::Overflow } else { Outcome::Yes };
                oracle.permits += if model == Outcome::Yes { count } else { 0 };
                (said(h.semaphore.release(&mut Alone, count), yes), model)
            }
            _ => return,
        };
        assert_eq!(real, model, "operation {n}, {op:?} by {k}: {oracle:?}");
    }
}

impl Oracle {
    /// A writer is told about readers before its own mistakes.
    fn take_rw(&mut self, k: usize) -> Outcome {
        if self.owner == Some(k) || self.readers[k] { Outcome::Deadlock } else { self.take(k) }
    }
}

/// Runs one operation of any kind, whatever its result is.
fn whatever(h: &mut Handles, op: Op) {
    let how = at_once(op.b);
    match op.code % 16 {
        0 => _ = h.mutex.lock(&mut Alone, how),
        1 => _ = h.mutex.try_lock(),
        2 => _ = h.mutex.unlock(&mut Alone),
        3 => _ = h.mutex.make_consistent(),
        4 => _ = h.rwlock.write(&mut Alone, how),
        5 => _ = h.rwlock.read(&mut Alone, how),
        6 => _ = h.rwlock.try_read(&mut Alone),
        7 => _ = h.rwlock.unlock(&mut Alone),
        8 => _ = h.condvar.wait(&mut Alone, how, &mut h.mutex, &mut Alone, how),
        9 => h.condvar.notify_one(&mut Alone),
        10 => h.condvar.notify_all(&mut Alone),
        11 => _ = h.semaphore.acquire(&mut Alone, how),
        12 => _ = h.semaphore.release(&mut Alone, u32::from(op.b)),
        13 => _ = h.barrier.wait(&mut Alone, how),
        14 => _ = h.once.begin(&mut Alone, how),
        _ => _ = (h.once.complete(&mut Alone), h.once.give_up(&mut Alone), h.barrier.reset()),
    }
}

/// Stores a value into a word: one that has a meaning, or noise.
fn scribble(page: &Mapping, op: Op) {
    // Half of the scribbles hit the first 48 bytes, which matter most.
    let at = if op.a & 0x8000 == 0 { usize::from(op.a) % 48 } else { usize::from(op.a) % SIZE } & !7;
    let value = match op.code % 8 {
        0 => 0,
        1 => u64::MAX,
        2 => u64::from(op.b),
        3 => u64::from(op.b % 64 + 1) | 1 << 16 | 7 << 32,
        4 => page.load_relaxed_u64(STATE) ^ 1 << (op.b % 64),
        5 => 1 << (op.b % 64),
        6 => u64::from(op.b % 3 + 1) | u64::from(op.b >> 8) << 8 | 1 << 16 | 7 << 32,
        _ => u64::from(op.b).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    };
    page.swap_u64(at, value);
}

/// Runs scribbles (codes with the top bit) between the operations. Nothing may panic or hang, and the object must work after
/// the daemon has made the page anew.
pub fn alone(kind: SyncKind, ops: &[Op]) {
    let mut object = Object::new(kind);
    for op in ops {
        match op.code & 0x80 {
            0 if op.code % 32 == 31 => object.bury(usize::from(op.a) % USERS),
            0 => whatever(&mut object.users[usize::from(op.a) % USERS], *op),
            _ => scribble(&object.page, *op),
        }
        let _ = authority::look(&object.page, kind);
    }
    after(&mut object);
}

/// Runs scribbles at the same time, again and again, in a thread of their own.
pub fn beside(kind: SyncKind, ops: &[Op], scribbles: &[Op]) {
    let mut object = Object::new(kind);
    let (page, over) = (object.page.clone(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                scribbles.iter().for_each(|op| scribble(&page, *op));
                std::thread::yield_now();
            }
        });
        for op in ops {
            match op.code % 32 {
                31 => object.bury(usize::from(op.a) % USERS),
                _ => whatever(&mut object.users[usize::from(op.a) % USERS], *op),
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    after(&mut object);
}

/// Checks that the daemon can make the page anew and give it to other users.
fn after(object: &mut Object) {
    authority::format(&object.page, SyncKind::MUTEX, 0, 0);
    for k in 0..USERS {
        let mut user = object.seat(k);
        assert_eq!(user.mutex.lock(&mut Alone, at_once(0)).unwrap(), Locked::Clean);
        user.mutex.unlock(&mut Alone).unwrap();
    }
}
