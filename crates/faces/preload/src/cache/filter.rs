//! What the library knows of one served connection: the requests that are under way, and the answers that it has queued.

use crate::cache::queue::Queue;
use crate::cache::{Cache, State, find};
use crate::process::lock::Guard;
use ginnel_cache_protocol::Protocol;
use ginnel_cache_protocol::follow::{Answers, Requests};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

/// The library's knowledge of one connection.
pub struct Filter {
    pub cache: &'static find::Cache,
    pub protocol: Protocol,
    pub requests: Requests,
    pub answers: Answers,
    pub queue: Queue,
    /// Whether the last request was a quiet one that the library answered.
    pub was_quiet: bool,
    /// Whether a thread is in the kernel to receive.
    pub is_receiving: bool,
    /// Whether a thread works on the filter. A thread that takes the lock and finds this set has itself left a call in the
    /// middle, or runs a signal handler that has interrupted one.
    is_busy: bool,
}

impl Filter {
    pub fn new(cache: &'static find::Cache, protocol: Protocol) -> Self {
        Self {
            cache,
            protocol,
            requests: Requests::default(),
            answers: Answers::new(protocol),
            queue: Queue::new(),
            was_quiet: false,
            is_receiving: false,
            is_busy: false,
        }
    }
}

impl Filter {
    pub fn is_busy(&self) -> bool {
        self.is_busy
    }
}

/// A filter on which the calling thread works, with the lock held.
pub struct Entered {
    cache: &'static Cache,
    guard: Guard<'static, Option<Box<Filter>>>,
}

impl Cache {
    /// Locks the filter. Returns `None` if there is no filter any more, or if an interrupted call works on it; then the library gives
    /// the connection up.
    #[inline]
    pub fn enter(&'static self) -> Option<Entered> {
        let mut guard = self.filter.lock();
        match guard.as_mut() {
            Some(filter) if !filter.is_busy => {
                filter.is_busy = true;
                Some(Entered { cache: self, guard })
            }
            _ => {
                self.lose();
                None
            }
        }
    }

    /// Gives the connection up at once, with what is queued.
    #[cold]
    fn lose(&self) {
        self.set(State::None);
        self.queued.store(0, Ordering::Release);
    }

    /// Leaves the connection to the server, because something happens to it that the library cannot follow.
    #[inline]
    pub fn leave(&'static self) {
        if self.is_there() {
            self.leave_now();
        }
    }

    #[cold]
    fn leave_now(&'static self) {
        match self.state() {
            State::Fresh => drop(self.change(State::Fresh, State::None)),
            State::Served => {
                if let Some(mut filter) = self.enter() {
                    filter.leave();
                }
            }
            _ => {}
        }
    }
}

impl Entered {
    /// Publishes how many bytes are queued.
    #[inline]
    pub fn tell_queued(&self) {
        self.cache.queued.store(self.queue.len(), Ordering::Release);
    }

    /// Leaves the connection to the server, once the program has received what is queued.
    #[cold]
    pub fn leave(&mut self) {
        let next = if self.queue.len() > 0 { State::Left } else { State::None };
        self.cache.set(next);
    }
}

impl Deref for Entered {
    type Target = Filter;
    #[inline]
    fn deref(&self) -> &Filter {
        #[expect(clippy::unwrap_used, reason = "entered")]
        self.guard.as_ref().unwrap()
    }
}

impl DerefMut for Entered {
    #[inline]
    fn deref_mut(&mut self) -> &mut Filter {
        #[expect(clippy::unwrap_used, reason = "entered")]
        self.guard.as_mut().unwrap()
    }
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        if let Some(filter) = self.guard.as_mut() {
            filter.is_busy = false;
        }
    }
}
