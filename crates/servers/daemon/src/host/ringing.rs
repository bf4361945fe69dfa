//! Doorbells that threads ring. The kernel wakes all who wait for a doorbell within the call that rings it, and a hostile program that
//! holds the doorbell can add as many waiters as it likes. So each doorbell in use has a thread of its own. Rings that come while
//! the thread is at work become one.

use ginnel_doorbell::Ringer;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};
use tracing::warn;

/// The time after which a thread without work ends.
const IDLE: Duration = Duration::from_secs(10);
/// The stack of a thread, in bytes.
const STACK: usize = 128 << 10;

/// A doorbell: an eventfd that others hold too.
#[derive(Debug)]
pub struct Doorbell(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    event: Arc<OwnedFd>,
    state: Mutex<State>,
    /// The thread has something to do.
    work: Condvar,
    /// The thread has rung.
    done: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// There is a thread.
    started: bool,
    /// The doorbell must be rung.
    pending: bool,
    /// The thread is ringing.
    at_work: bool,
    /// The thread must end.
    ending: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Doorbell {
    /// Makes a doorbell of an eventfd. It has no thread before the first ring.
    pub fn new(event: Arc<OwnedFd>) -> Self {
        let (state, work, done) = Default::default();
        Self(Arc::new(Shared { event, state, work, done }))
    }

    /// Returns the eventfd.
    pub fn event(&self) -> &Arc<OwnedFd> {
        &self.0.event
    }

    /// Rings, soon. Does not block, whatever other holders of the eventfd do to it.
    pub fn ring(&self) {
        let mut state = self.0.lock();
        state.pending = true;
        if state.started {
            // A thread that is at work looks again before it sleeps.
            if !state.at_work {
                self.0.work.notify_one();
            }
            return;
        }
        let shared = self.0.clone();
        match Builder::new().name("ringer".into()).stack_size(STACK).spawn(move || run(&shared)) {
            Ok(_) => state.started = true,
            Err(error) => {
                warn!(%error, "no thread can be started to ring a doorbell, so the daemon rings it itself");
                state.pending = false;
                ginnel_doorbell::ring(self.0.event.as_fd());
            }
        }
    }

    /// Waits until it has rung, at most until this time.
    pub fn finish(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let busy = |state: &mut State| state.started && (state.at_work || state.pending);
        drop(self.0.done.wait_timeout_while(self.0.lock(), left, busy));
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        self.0.lock().ending = true;
        self.0.work.notify_one();
    }
}

fn run(shared: &Shared) {
    let ringer = Ringer::new();
    let mut state = shared.lock();
    loop {
        if state.pending {
            (state.pending, state.at_work) = (false, true);
            drop(state);
            ringer.ring(shared.event.as_fd());
            state = shared.lock();
            state.at_work = false;
            continue;
        }
        shared.done.notify_all();
        let idle = |state: &mut State| !state.pending && !state.ending;
        let waited = shared.work.wait_timeout_while(state, IDLE, idle);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if !state.pending {
            state.started = false;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn event() -> Arc<OwnedFd> {
        Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap())
    }

    /// Waits for a ring, and returns how many there were.
    fn heard(event: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(event, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn each_ring_is_heard_and_several_may_become_one() {
        let doorbell = Doorbell::new(event());
        for _ in 0..1000 {
            doorbell.ring();
            assert!(heard(doorbell.event()) >= 1);
        }
        for _ in 0..100 {
            doorbell.ring();
        }
        doorbell.finish(Instant::now() + Duration::from_secs(60));
        assert!((1..=100).contains(&heard(doorbell.event())));
    }

    #[test]
    fn the_end_comes_after_the_last_ring() {
        let event = event();
        for _ in 0..100 {
            let doorbell = Doorbell::new(event.clone());
            doorbell.ring();
            drop(doorbell);
            assert_eq!(heard(&event), 1);
        }
        let begin = Instant::now();
        Doorbell::new(event).finish(begin + Duration::from_secs(600));
        assert!(begin.elapsed() < Duration::from_secs(60), "there was nothing to ring");
    }
}
