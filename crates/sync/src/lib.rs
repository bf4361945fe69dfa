//! Locks in shared memory that neither spin for ever nor die with their owner.
//!
//! What lies in memory is drawn in [`ginnel_layout::sync`]: a page with a few words and 63 slots, one for each open
//! handle. This crate is what users do with it ([`Mutex`], [`RwLock`], [`Condvar`], [`Semaphore`], [`Barrier`],
//! [`Once`]), and what the daemon does when a user has died ([`authority`]). It knows nothing of endpoints and daemons:
//! where to sleep and how to ring somebody is the caller's [`World`].
//!
//! # Waking
//!
//! Everybody waits as [`ginnel_ring::wait`] says: spin for the budget, arm, look again, sleep. To arm is to set one's bit
//! in the page's `armed` word. A waker takes a sleeper's bit away and rings it; so two wakers never wake the same one,
//! and a sleeper that finds its bit gone knows that it was given a wake. If it does not need it (its time is up, it leaves
//! with an error, it has found what it wanted by itself, or it slept for something else), it passes the wake on. Nobody wakes more sleepers than can go on, except where all can
//! (a barrier, `notify_all`) and after a death.
//!
//! # Death
//!
//! Each change of an object is one atomic instruction; between any two of them a user may die. What is then left is one of:
//!
//! - a word that names the dead as owner: [`authority::reclaim`] puts [`OWNER_DIED`] in its place;
//! - bits of the dead: reclaim clears them;
//! - somebody who should have been rung and was not: reclaim names everybody who sleeps, and the daemon rings them; they
//!   look, and those who still have to wait sleep again.
//!
//! A user that is only declared dead may still be at work: a word that it writes after its slot was taken back names an
//! owner that the slots do not have, and whoever comes upon it hands it on as [`OWNER_DIED`].
//!
//! Sleepers also look on their own every [`LOOK_EVERY`]. That is for wakers who cannot ring (their daemon is gone, and they
//! have no doorbell for that sleeper yet), and bounds what a neighbour can do by clearing bits.
//!
//! # Hostile neighbours
//!
//! Everybody in the segment can write everywhere in the page. Each word is loaded once and checked; what no correct user
//! writes is [`Corrupt`]. A plausible lie (a lock that says it is held) is a wait that ends with the caller's timeout.
//! Loops that retry because somebody else changed the word are bounded. Nothing here panics or hangs for what it reads.
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
