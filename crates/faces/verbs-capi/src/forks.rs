//! Locks of this library that must be free in the child of a fork. A parent's thread that holds one does not exist in the child.
//!
//! [`pages`](crate::pages) and [`rsocket`](crate::rsocket) have their own fork handlers, because their state is reset in the child.
#![allow(unsafe_code)] // Calls a C function.

use crate::{cm, context, devices, pages, rsocket};
use std::cell::Cell;
use std::sync::Once;

/// Guards of all of these locks. It uses no heap memory, because for a moment the child may share the heap's pages with the parent.
struct Held {
    _identifiers: cm::Held,
    _devices: devices::Held,
    _contexts: context::Held,
    _maps: rsocket::Held,
}

thread_local! {
    /// The guards that the forking thread holds during a fork.
    static FORKING: Cell<Option<Held>> = const { Cell::new(None) };
}

/// Makes each fork wait until these locks are free, from now on.
pub fn follow() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Registered first, so that it runs first in the child, which then has its own copies of the pages.
        pages::follow_forks();
        // SAFETY: the handlers are functions of this library.
        unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    });
}

extern "C" fn before() {
    // In the order in which the calls of this library take the locks.
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
