//! Locks of this library that the child of a fork must find free: a thread of its parent that holds one does not exist there.
//!
//! [`pages`](crate::pages) and [`rsocket`](crate::rsocket) follow forks by themselves, because their children begin anew.
#![allow(unsafe_code)] // A function of C.

use crate::{cm, context, devices, pages, rsocket};
use std::cell::Cell;
use std::sync::Once;

/// Holds all of these locks. Nothing in it is on the heap, whose pages may be the parent's, too, for a moment.
struct Held {
    _identifiers: cm::Held,
    _devices: devices::Held,
    _contexts: context::Held,
    _maps: rsocket::Held,
}

thread_local! {
    /// What the thread that forks holds meanwhile.
    static FORKING: Cell<Option<Held>> = const { Cell::new(None) };
}

/// From now on, forks wait for whoever holds such a lock.
pub fn follow() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // First, so that it comes first in the child, which then has pages of its own.
        pages::follow_forks();
        // SAFETY: functions of this library.
        unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    });
}

extern "C" fn before() {
    // In the order in which calls take them.
    FORKING.set(Some(Held {
        _identifiers: cm::hold(),
        _devices: devices::hold(),
        _contexts: context::hold(),
        _maps: rsocket::hold(),
    }));
}

extern "C" fn after() {
    drop(FORKING.take());
}
