//! Locks in shared memory whose users sleep instead of spinning, and that survive the death of an owner.
//!
//! [`ginnel_layout::sync`] describes the memory: a page with a few words and 63 slots, one for each open handle. This crate
//! has the operations of the users ([`Mutex`], [`RwLock`], [`Condvar`], [`Semaphore`], [`Barrier`], [`Once`]), and those of
//! the daemon when a user has died ([`authority`]). It knows nothing about endpoints and daemons: the caller's [`World`] says
//! how to sleep and how to ring a user.
//!
//! # Waking
//!
//! All users wait as [`ginnel_ring::wait`] describes: spin for the budget, arm, look again, sleep. A user arms by setting its
//! own bit in the page's `armed` word. A waker takes a sleeper's bit away and rings that sleeper. Therefore two wakers never
//! wake the same sleeper, and a sleeper that finds its bit gone knows that it was given a wake. A sleeper that does not need
//! its wake passes it on: because its time is up, it leaves with an error, it has already found what it wanted, or it slept
//! for something else. A waker wakes no more sleepers than can go on, except where all can (a barrier, `notify_all`) and
//! after a death.
//!
//! # Death
//!
//! Each change of an object is one atomic instruction, and a user may die between any two of them. Then one of these is left:
//!
//! - A word that names the dead user as the owner: [`authority::reclaim`] replaces it with [`OWNER_DIED`].
//! - Bits of the dead user: `reclaim` clears them.
//! - A user that should have been rung and was not: `reclaim` returns all users that sleep, and the daemon rings them. They
//!   look, and those that still have to wait sleep again.
//!
//! A user that was only declared dead may still be running. A word that it writes after its slot was taken back names an
//! owner that the slots do not have, and the next user that finds the word replaces it with [`OWNER_DIED`].
//!
//! Sleepers also look on their own every [`LOOK_EVERY`]. This is for wakers that cannot ring, because their daemon is gone
//! and they have no doorbell for that sleeper yet. It also limits the harm that a hostile member can do by clearing bits.
//!
//! # Hostile members
//!
//! Every member that may write to the segment can write everywhere in the page. Each word is loaded once and checked; a value
//! that no correct user writes is [`Corrupt`]. A plausible lie (a lock that seems to be held) causes a wait that ends with
//! the caller's timeout. Loops that retry because another user changed the word are bounded. Whatever this crate reads, it
//! does not panic or hang.
//!
//! [`OWNER_DIED`]: ginnel_layout::sync::OwnerWord::OWNER_DIED
#![forbid(unsafe_code)]

pub mod authority;
mod barrier;
mod condvar;
mod error;
mod mutex;
mod once;
mod owner;
mod rwlock;
mod seat;
mod semaphore;

pub use barrier::Barrier;
pub use condvar::{Condvar, Woken};
pub use error::{Corrupt, SyncError};
pub use mutex::Mutex;
pub use once::{Once, Turn};
pub use owner::Locked;
pub use rwlock::RwLock;
pub use seat::{LOOK_EVERY, Patience, User, World};
pub use semaphore::Semaphore;
