//! `epoll`.
//!
//! A socket that the kernel no longer carries alone stays in the program's epoll instance, but this library replaces its
//! registration there: it asks for edge-triggered events about the bytes and the end of the kernel's connection, with data of its
//! own. So a wake byte from the peer, or the peer's end, wakes exactly that instance. [`watch`] keeps the events and data that
//! the program asked for. The sockets that were busy last are *hot*: `epoll_wait` looks at their rings. All others are armed, and
//! cost nothing until the peer wakes this side. A socket stays hot until the looks that have found nothing cost about as much as
//! one wake-up. However the load is spread over sockets, looks and wake-ups together therefore cost at most twice as much as the
//! better of the two would.
//!
//! `EPOLL_CTL_DEL` leaves the kernel's registration in place, and `EPOLL_CTL_ADD` finds it there: a program that waits for input
//! and for output in turns makes no system call for that.

mod control;
mod edge;
mod hot;
pub mod instance;
pub mod native;
pub mod registration;
mod wait;
mod watch;

use crate::epoll::instance::Instance;
use crate::state::table::Table;

pub static EPOLLS: Table<Instance> = Table::new();

/// Frees the locks of the parent's threads in the child of a fork.
pub fn in_child() {
    EPOLLS.free_in_child();
}
