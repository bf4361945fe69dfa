//! A wake or a signal that reaches a user that does not need it is passed on; and a call has one deadline.
//!
//! Each test plays one order of events that threads rarely meet. The caller is real; the effects of other users are written
//! to the page when the caller goes to sleep.
#![cfg(not(loom))]

mod world;

use ginnel_layout::sync::{
    ARMED, OwnerWord, ReaderState, SLOT_READER, SLOT_SINCE, STATE, SyncKind, WAITING, slot,
};
use ginnel_ring::wait::{Sleeper, WaitMode};
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_sync::authority::{self, Left};
use ginnel_sync::{
    Barrier, Condvar, Locked, Mutex, Once, Patience, RwLock, Semaphore, SyncError, Turn, User, World,
};
use kit::wait::wait_for;
use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};
use world::{NoDoorbells, page, user};

/// What happens in a page while the caller sleeps.
type Step<'a> = Box<dyn FnMut(&Mapping) + 'a>;

/// A world in which each sleep is the next event of a script. After the last event, it sleeps to the deadline.
struct Script<'a> {
    page: &'a Mapping,
    steps: VecDeque<Step<'a>>,
    deadlines: Vec<Instant>,
    rung: Vec<usize>,
}

impl<'a> Script<'a> {
    fn new(page: &'a Mapping) -> Self {
        Self { page, steps: VecDeque::new(), deadlines: Vec::new(), rung: Vec::new() }
    }

    fn then(mut self, step: impl FnMut(&Mapping) + 'a) -> Self {
        self.steps.push_back(Box::new(step));
        self
    }
}

impl Sleeper for Script<'_> {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let deadline = deadline.expect("sleepers look from time to time");
        self.deadlines.push(deadline);
        match self.steps.pop_front() {
            Some(mut step) => step(self.page),
            None => std::thread::sleep(deadline.saturating_duration_since(Instant::now())),
        }
        Ok(())
    }
}

impl World for Script<'_> {
    fn ring(&mut self, slot: usize) {
        self.rung.push(slot);
    }
}

/// The caller, the holder, which has what the caller wants, and the sleeper, which sleeps for it and has been overlooked.
const CALLER: usize = 0;
const HOLDER: usize = 1;
const SLEEPER: usize = 2;

fn asleep(timeout: u64) -> Patience {
    Patience { mode: WaitMode::Interrupt, timeout: Some(Duration::from_millis(timeout)) }
}

/// Far longer than anything takes here.
const LONG: u64 = 60_000;
/// For calls that time out, after the script has come to its end, also on a busy machine.
const SHORT: u64 = 500;

fn take_bit(page: &Mapping, k: usize) {
    assert_ne!(page.fetch_and_u64(ARMED, !(1 << k)) & 1 << k, 0, "slot {k} is not armed");
}

/// Makes the page as if `SLEEPER` slept.
fn sleeps(page: &Mapping) {
    page.fetch_or_u64(ARMED, 1 << SLEEPER);
    page.store_relaxed_u64(slot(SLEEPER) + SLOT_SINCE, 1);
}

fn set_reader(page: &Mapping, k: usize, state: ReaderState) {
    page.swap_u64(slot(k) + SLOT_READER, state.0);
}

fn word(k: usize) -> u64 {
    OwnerWord::owned(k, 1, 7).0
}

/// The caller takes the free word and waits for a reader. The waker of another writer takes the caller's bit instead.
#[test]
fn a_writer_that_waits_for_readers_passes_on_the_wake_of_another() {
    let page = page(SyncKind::RWLOCK, 0, 0, 3);
    set_reader(&page, HOLDER, ReaderState::HELD);
    sleeps(&page);
    let mut lock = RwLock::new(page.clone(), user(CALLER));
    let mut script = Script::new(&page).then(|page| {
        take_bit(page, CALLER);
        set_reader(page, HOLDER, ReaderState::NONE);
    });
    assert_eq!(lock.write(&mut script, asleep(LONG)).unwrap(), Locked::Clean);
    lock.unlock(&mut script).unwrap();
    assert_eq!(script.rung, [SLEEPER]);
}

#[test]
fn a_writer_whose_time_is_up_among_readers_passes_on_the_wake_of_another() {
    let page = page(SyncKind::RWLOCK, 0, 0, 3);
    set_reader(&page, HOLDER, ReaderState::HELD);
    sleeps(&page);
    let mut lock = RwLock::new(page.clone(), user(CALLER));
    let mut script = Script::new(&page).then(|page| take_bit(page, CALLER));
    assert!(matches!(lock.write(&mut script, asleep(SHORT)), Err(SyncError::TimedOut)));
    assert_eq!(script.rung, [SLEEPER]);
}

/// The writer that ends takes the bit of the caller, which has come meanwhile, instead of a writer's. The caller lets itself
/// in; without passing the wake on, nothing would wake the writer.
#[test]
fn a_reader_that_lets_itself_in_passes_on_the_wake_of_a_writer() {
    let page = page(SyncKind::RWLOCK, 0, 0, 3);
    page.swap_u64(STATE, word(HOLDER));
    sleeps(&page);
    let mut lock = RwLock::new(page.clone(), user(CALLER));
    let mut script = Script::new(&page).then(|page| {
        page.swap_u64(STATE, OwnerWord::FREE.0);
        take_bit(page, CALLER);
    });
    lock.read(&mut script, asleep(LONG)).unwrap();
    assert_eq!(script.rung, [SLEEPER]);
}

/// A writer that steps down lets readers in although no user had asked it to wake anyone. A reader that it lets in may have
/// been given the wake of a writer before, so it must wake a writer itself.
#[test]
fn a_writer_that_lets_readers_in_also_wakes_a_writer() {
    let page = page(SyncKind::RWLOCK, 0, 0, 4);
    let reading = 3;
    set_reader(&page, reading, ReaderState::HELD);
    set_reader(&page, HOLDER, ReaderState::WANTED);
    sleeps(&page);
    let mut script = Script::new(&page);
    let outcome = RwLock::new(page.clone(), user(CALLER)).try_write(&mut script);
    assert!(matches!(outcome, Err(SyncError::Busy)), "{outcome:?}");
    assert_eq!(page.load_relaxed_u64(slot(HOLDER) + SLOT_READER), ReaderState::HELD.0);
    assert_eq!(script.rung, [SLEEPER]);
}

/// The earlier owner gave its turn up and woke the caller, but another user has taken the turn and completed it, and no user
/// had asked that one to be woken.
#[test]
fn a_once_that_is_found_done_passes_on_the_wake() {
    let page = page(SyncKind::ONCE, 0, 0, 3);
    page.swap_u64(STATE, word(HOLDER));
    sleeps(&page);
    let mut script = Script::new(&page).then(|page| {
        page.swap_u64(STATE, OwnerWord::DONE);
        take_bit(page, CALLER);
    });
    let turn = Once::new(page.clone(), user(CALLER)).begin(&mut script, asleep(LONG)).unwrap();
    assert_eq!(turn, Turn::Done);
    assert_eq!(script.rung, [SLEEPER]);
}

#[test]
fn a_user_that_times_out_passes_on_the_wake_for_a_mutex() {
    let page = page(SyncKind::MUTEX, 0, 0, 3);
    page.swap_u64(STATE, word(HOLDER));
    sleeps(&page);
    let mut script = Script::new(&page).then(|page| {
        take_bit(page, CALLER);
        page.swap_u64(STATE, word(HOLDER));
    });
    assert!(matches!(
        Mutex::new(page.clone(), user(CALLER)).lock(&mut script, asleep(SHORT)),
        Err(SyncError::TimedOut)
    ));
    assert!(script.rung.is_empty(), "the word is not free");
    assert!(OwnerWord(page.load_relaxed_u64(STATE)).has(OwnerWord::WAITERS), "its owner will wake a sleeper");
}

#[test]
fn a_wake_for_a_mutex_that_cannot_be_recovered_is_passed_on() {
    let page = page(SyncKind::MUTEX, 0, 0, 3);
    page.swap_u64(STATE, word(HOLDER));
    sleeps(&page);
    let mut script = Script::new(&page).then(|page| {
        page.swap_u64(STATE, OwnerWord::NOT_RECOVERABLE);
        take_bit(page, CALLER);
    });
    let outcome = Mutex::new(page.clone(), user(CALLER)).lock(&mut script, asleep(LONG));
    assert!(matches!(outcome, Err(SyncError::NotRecoverable)), "{outcome:?}");
    assert_eq!(script.rung, [SLEEPER]);
}

#[test]
fn a_permit_that_came_too_late_wakes_another() {
    let page = page(SyncKind::SEMAPHORE, 5, 0, 3);
    sleeps(&page);
    // The caller has its permit; with its wake comes a second permit.
    let mut script = Script::new(&page).then(|page| {
        page.swap_u64(STATE, 2);
        take_bit(page, CALLER);
    });
    Semaphore::new(page.clone(), user(CALLER), 5).acquire(&mut script, asleep(LONG)).unwrap();
    assert_eq!(script.rung, [SLEEPER]);
}

/// Returns a condition variable whose mutex the caller has locked. `SLEEPER` waits there, too.
fn waits_for_a_condition() -> (Mapping, Mapping, Mutex<Mapping>) {
    let mutex_page = page(SyncKind::MUTEX, 0, 0, 3);
    let page = page(SyncKind::CONDVAR, 0, 0, 3);
    page.fetch_or_u64(WAITING, 1 << SLEEPER);
    sleeps(&page);
    let mut mutex = Mutex::new(mutex_page.clone(), user(CALLER));
    assert_eq!(mutex.try_lock().unwrap(), Locked::Clean);
    (page, mutex_page, mutex)
}

fn signal(page: &Mapping, k: usize) {
    assert_ne!(page.fetch_and_u64(WAITING, !(1 << k)) & 1 << k, 0, "slot {k} does not wait");
    take_bit(page, k);
}

/// In these tests the mutex is not locked again, so another user must check the condition.
#[test]
fn a_user_that_does_not_get_the_mutex_again_passes_its_signal_on() {
    for (left, relock) in [(OwnerWord::NOT_RECOVERABLE, LONG), (word(HOLDER), SHORT)] {
        let (page, mutex_page, mut mutex) = waits_for_a_condition();
        let mut script = Script::new(&page).then(|page| {
            signal(page, CALLER);
            mutex_page.swap_u64(STATE, left);
        });
        let mut condvar = Condvar::new(page.clone(), user(CALLER));
        let outcome = condvar.wait(&mut script, asleep(LONG), &mut mutex, &mut NoDoorbells, asleep(relock));
        assert!(matches!(outcome, Err(SyncError::NotRecoverable | SyncError::TimedOut)), "{outcome:?}");
        assert_eq!(script.rung, [SLEEPER]);
        assert_eq!(page.load_relaxed_u64(WAITING), 0, "it is signalled");
    }
}

/// Without a signal there is nothing to pass on.
#[test]
fn a_waiter_that_times_out_signals_no_one() {
    let (page, mutex_page, mut mutex) = waits_for_a_condition();
    let mut script = Script::new(&page).then(|_| {
        mutex_page.swap_u64(STATE, word(HOLDER));
    });
    let mut condvar = Condvar::new(page.clone(), user(CALLER));
    let outcome = condvar.wait(&mut script, asleep(SHORT), &mut mutex, &mut NoDoorbells, asleep(SHORT));
    assert!(matches!(outcome, Err(SyncError::TimedOut)), "{outcome:?}");
    assert_eq!((script.rung, page.load_relaxed_u64(WAITING)), (vec![], 1 << SLEEPER));
}

/// A bit that a user has set after its slot was taken back must not count for the slot's next user, nor for users that
/// signal.
#[test]
fn late_bits_of_dead_users_take_no_signal_and_no_wake() {
    let page = page(SyncKind::CONDVAR, 0, 0, 3);
    let _ = authority::reclaim(&page, SyncKind::CONDVAR, HOLDER, Left::Died);
    page.fetch_or_u64(WAITING, 1 << HOLDER | 1 << SLEEPER);
    page.fetch_or_u64(ARMED, 1 << HOLDER);
    sleeps(&page);
    let mut script = Script::new(&page);
    Condvar::new(page.clone(), user(CALLER)).notify_one(&mut script);
    assert_eq!(script.rung, [SLEEPER]);
    page.fetch_or_u64(WAITING, 1 << HOLDER);
    authority::seat(&page, user(HOLDER), 2, 9);
    assert_eq!((page.load_relaxed_u64(WAITING), page.load_relaxed_u64(ARMED)), (0, 0));

    let page = world::page(SyncKind::SEMAPHORE, 5, 0, 3);
    let _ = authority::reclaim(&page, SyncKind::SEMAPHORE, HOLDER, Left::Died);
    page.fetch_or_u64(ARMED, 1 << HOLDER);
    sleeps(&page);
    let mut script = Script::new(&page);
    Semaphore::new(page.clone(), user(CALLER), 5).release(&mut script, 1).unwrap();
    assert_eq!(script.rung, [SLEEPER]);
}

/// The caller was declared dead while it slept, and its slot has another user, which sleeps now.
#[test]
fn a_user_that_was_declared_dead_leaves_its_slot_to_the_next_user() {
    let replaced = |kind| {
        move |page: &Mapping| {
            let _ = authority::reclaim(page, kind, CALLER, Left::Died);
            authority::seat(page, User::new(CALLER, 2, 8).unwrap(), 1, 0);
            page.fetch_or_u64(ARMED, 1 << CALLER);
            page.store_relaxed_u64(slot(CALLER) + SLOT_SINCE, 1);
        }
    };
    let sleeps_still = |page: &Mapping| {
        assert_eq!(page.load_relaxed_u64(ARMED), 1 << CALLER);
        assert_eq!(page.load_relaxed_u64(slot(CALLER) + SLOT_SINCE), 1);
    };
    let mutex = page(SyncKind::MUTEX, 0, 0, 2);
    mutex.swap_u64(STATE, word(HOLDER));
    let mut script = Script::new(&mutex).then(replaced(SyncKind::MUTEX));
    let outcome = Mutex::new(mutex.clone(), user(CALLER)).lock(&mut script, asleep(LONG));
    assert!(matches!(outcome, Err(SyncError::Stale)), "{outcome:?}");
    sleeps_still(&mutex);

    // It has the word and waits for a reader.
    let lock = page(SyncKind::RWLOCK, 0, 0, 2);
    set_reader(&lock, HOLDER, ReaderState::HELD);
    let mut script = Script::new(&lock).then(replaced(SyncKind::RWLOCK));
    let outcome = RwLock::new(lock.clone(), user(CALLER)).write(&mut script, asleep(LONG));
    assert!(matches!(outcome, Err(SyncError::Stale)), "{outcome:?}");
    sleeps_still(&lock);
}

/// The user that wakes the caller has written nonsense before.
#[test]
fn a_user_that_finds_corrupt_permits_wakes_the_others() {
    let page = page(SyncKind::SEMAPHORE, 5, 0, 3);
    sleeps(&page);
    let mut script = Script::new(&page).then(|page| {
        page.swap_u64(STATE, 6);
        take_bit(page, CALLER);
    });
    let outcome = Semaphore::new(page.clone(), user(CALLER), 5).acquire(&mut script, asleep(LONG));
    assert!(matches!(outcome, Err(SyncError::Corrupt(_))), "{outcome:?}");
    assert_eq!(script.rung, [SLEEPER]);
}

/// First another writer has the word, then a reader reads: the call has one deadline for both.
#[test]
fn a_writer_has_one_deadline_for_the_word_and_the_readers() {
    // On a busy machine the time may be up before the second sleep.
    let deadlines = wait_for("a call that sleeps for the word, then for the reader", || {
        let page = page(SyncKind::RWLOCK, 0, 0, 2);
        page.swap_u64(STATE, word(HOLDER));
        set_reader(&page, HOLDER, ReaderState::HELD);
        let mut script = Script::new(&page).then(|page| {
            page.swap_u64(STATE, OwnerWord::FREE.0);
        });
        // Shorter than the interval of the sleepers' looks, so that the deadlines are those of the call.
        let outcome = RwLock::new(page.clone(), user(CALLER)).write(&mut script, asleep(40));
        assert!(matches!(outcome, Err(SyncError::TimedOut)), "{outcome:?}");
        (script.deadlines.len() >= 2).then_some(script.deadlines)
    });
    assert!(deadlines.iter().all(|d| *d == deadlines[0]), "{deadlines:?}");
}

/// A party whose wait times out, and a barrier at which no other party waits.
#[test]
fn a_party_that_times_out_leaves_the_round_to_the_others() {
    let page = page(SyncKind::BARRIER, 3, 0, 3);
    page.swap_u64(STATE, 1 << SLEEPER);
    sleeps(&page);
    let mut script = Script::new(&page).then(|page| take_bit(page, CALLER));
    let outcome = Barrier::new(page.clone(), user(CALLER), 3).wait(&mut script, asleep(SHORT));
    assert!(matches!(outcome, Err(SyncError::TimedOut)), "{outcome:?}");
    assert_eq!((script.rung, page.load_relaxed_u64(STATE)), (vec![], 1 << SLEEPER));
}
