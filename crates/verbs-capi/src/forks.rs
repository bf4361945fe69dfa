//! Locks of this library that the child of a fork must find free: a thread of its parent that holds one does not exist there.
//!
//! [`pages`](crate::pages) and [`rsocket`](crate::rsocket) follow forks by themselves, because their children begin anew.
#![allow(unsafe_code)] // A function of C.

use crate::{cm, context, devices, rsocket};
use std::any::Any;
use std::cell::Cell;
use std::sync::Once;

/// Of each lock, what holds it.
type Held = [Box<dyn Any>; 4];

thread_local! {
    /// What the thread that forks holds meanwhile.
    static FORKING: Cell<Option<Held>> = const { Cell::new(None) };
}

/// From now on, forks wait for whoever holds such a lock.
pub fn follow() {
    static ONCE: Once = Once::new();
    // SAFETY: functions of this library.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(Some(before), Some(after), Some(after));
    });
}

extern "C" fn before() {
    // In the order in which calls take them.
    FORKING.set(Some([
        Box::new(cm::hold()),
        Box::new(devices::hold()),
        Box::new(context::hold()),
        Box::new(rsocket::hold()),
    ]));
}

extern "C" fn after() {
    drop(FORKING.take());
}
