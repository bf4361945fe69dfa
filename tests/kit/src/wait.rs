//! Waits for conditions of which nobody sends a notification.
//!
//! A watchdog watches progress, not a whole run: on a busy machine a run may take any time, but whoever still works gets on a little
//! within a minute.

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, Instant};

/// The longest time without progress. It is far longer than anything takes, also on a busy machine; what has not happened by then
/// never will.
pub const WATCHDOG: Duration = Duration::from_secs(60);

/// Calls `done` until it returns a value, and returns that value. Panics after [`WATCHDOG`]; `what` is for the message.
pub fn wait_for<T>(what: &str, done: impl FnMut() -> Option<T>) -> T {
    wait_at_most(WATCHDOG, what, done)
}

/// Calls `condition` until it returns true. Panics after [`WATCHDOG`].
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// As [`wait_for`], with another limit, for what takes long by itself.
pub fn wait_at_most<T>(limit: Duration, what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {limit:?} in vain for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// As [`wait_for`], but does not sleep between two looks. For a test that must act as soon as it can, such as one that kills a process
/// within a millisecond of what it does, and for thousands of waits that are each shorter than a sleep.
pub fn spin_for<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WATCHDOG;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {WATCHDOG:?} in vain for {what}");
        thread::yield_now();
    }
}

/// Checks a bound on time: one of at most ten attempts must take less than `limit`. A busy machine may delay any process, but not each
/// time, whereas somebody who waits for what he should not wait for is late each time.
pub fn takes_less_than(limit: Duration, mut attempt: impl FnMut() -> Duration) {
    let mut took = Vec::new();
    while took.last().is_none_or(|&last| last >= limit) {
        assert!(took.len() < 10, "never less than {limit:?}: {took:?}");
        took.push(attempt());
    }
}

/// Repeats what may fail because the machine is busy, until it succeeds. Panics with the last reason if ten attempts have failed, and a
/// minute has passed.
pub fn retry<T>(mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let (begun, mut attempts) = (Instant::now(), 0);
    loop {
        attempts += 1;
        match attempt() {
            Ok(value) => return value,
            Err(reason) => {
                assert!(attempts < 10 || begun.elapsed() < WATCHDOG, "{attempts} attempts: {reason}");
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Watches somebody's progress, which is a number or anything else that changes.
#[derive(Debug)]
pub struct Watchdog<T> {
    what: String,
    limit: Duration,
    last: Option<T>,
    since: Instant,
}

impl<T: PartialEq + Debug> Watchdog<T> {
    /// Watches that something gets on within each [`WATCHDOG`].
    pub fn new(what: &str) -> Self {
        Self::within(WATCHDOG, what)
    }

    /// As [`Watchdog::new`], with another limit.
    pub fn within(limit: Duration, what: &str) -> Self {
        Self { what: what.to_owned(), limit, last: None, since: Instant::now() }
    }

    /// Looks at the progress so far. Panics if it has been the same for too long.
    pub fn look(&mut self, progress: T) {
        if self.last.as_ref() == Some(&progress) {
            let Self { what, limit, .. } = self;
            assert!(self.since.elapsed() < *limit, "{what}: {progress:?} for {limit:?}");
        } else {
            self.last = Some(progress);
            self.since = Instant::now();
        }
    }
}

/// Calls a function when it is dropped, also when the test panics. For a test whose threads work until they are told to stop: a scope
/// waits for them, so a test that only panicked would hang instead of failing.
pub struct AtEnd<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        self.0();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::catch_unwind;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_wait_ends_with_the_value_or_at_the_limit() {
        let mut looks = 0;
        let third = || {
            looks += 1;
            (looks == 3).then_some("value")
        };
        assert_eq!(wait_for("the third look", third), "value");
        assert_eq!(looks, 3);
        assert_eq!(spin_for("the first look", || Some("value")), "value");
        assert!(catch_unwind(|| wait_at_most(Duration::from_millis(1), "a miracle", || None::<()>)).is_err());
    }

    #[test]
    fn a_bound_on_time_holds_if_one_attempt_keeps_it() {
        let limit = Duration::from_millis(5);
        let mut times = [9, 5, 4, 0].map(Duration::from_millis).into_iter();
        takes_less_than(limit, || times.next().unwrap());
        assert_eq!(times.len(), 1, "goes on after a success");
        assert!(catch_unwind(|| takes_less_than(limit, || limit)).is_err());
    }

    #[test]
    fn threads_are_told_to_stop_when_a_test_panics() {
        let over = AtomicBool::new(false);
        let failed = catch_unwind(|| {
            thread::scope(|scope| {
                let _stop = AtEnd(|| over.store(true, Ordering::Relaxed));
                scope.spawn(|| wait_until("the end", || over.load(Ordering::Relaxed)));
                panic!("on purpose");
            })
        });
        assert!(failed.is_err() && over.load(Ordering::Relaxed));
    }

    #[test]
    fn an_attempt_is_repeated_until_it_succeeds() {
        let mut attempts = 0;
        let third = || {
            attempts += 1;
            if attempts == 3 { Ok("value") } else { Err(format!("attempt {attempts}")) }
        };
        assert_eq!(retry(third), "value");
        assert_eq!(attempts, 3);
    }

    #[test]
    fn a_watchdog_bites_only_without_progress() {
        let mut dog = Watchdog::within(Duration::from_millis(20), "a counter");
        for count in 0..8 {
            dog.look(count);
            thread::sleep(Duration::from_millis(5));
        }
        let bitten = catch_unwind(move || {
            (0..10).for_each(|_| {
                dog.look(99);
                thread::sleep(Duration::from_millis(5));
            });
        });
        assert!(bitten.is_err());
    }
}
