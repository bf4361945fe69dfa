//! Locks by name, in a segment: between processes, between VMs, and between both.
//!
//! An object is opened by name (one for all kinds) and is there for all endpoints of the segment. It is made at the first
//! open and goes with its last handle, unless [`SyncOptions`] say otherwise, or its last user has died: then it stays for
//! the next one, who is told.
//!
//! ```no_run
//! let endpoint = ginnel::Endpoint::attach("web")?;
//! let mut mutex = endpoint.mutex("table")?;
//! let mut guard = mutex.lock()?;
//! if guard.owner_died() {
//!     // ... repair what the lock guards ...
//!     guard.make_consistent()?;
//! }
//! # Ok::<(), ginnel::Error>(())
//! ```
//!
//! # Handles and threads
//!
//! A handle is for one thread at a time; each further thread needs one of its own ([`Mutex::try_clone`] and so on). An object has
//! 63 handles at most. Opening and closing asks the daemon; using does not. Whoever is the first to wake a user asks the daemon
//! how to ring it, but does not wait for the answer: the daemon rings meanwhile.
//!
//! # Waiting
//!
//! Uncontended, an operation is one atomic instruction or two. Else it spins, sleeps, or both in turn, as the mode of the
//! handle says ([`crate::WaitMode`]); it is the endpoint's unless set. With a timeout ([`Mutex::set_timeout`] and so on) it ends
//! with [`Error::TimedOut`]; the timeout is that of the whole call. A sleeper that is woken need not get the lock: others may
//! come first. A sleeper also looks ten times a second by itself, in case nobody could ring it: the daemon may be away when it
//! is to be woken for the first time.
//!
//! # Death
//!
//! When an endpoint dies (its process ends, its VM ends, it is declared dead), what it had is handed on within 100 ms: see
//! each object. A handle whose endpoint was declared dead while its process still runs is [`Error::Fenced`].

mod barrier;
mod condvar;
mod handle;
mod mutex;
mod once;
mod rwlock;
mod semaphore;

pub use barrier::Barrier;
pub use condvar::Condvar;
pub use handle::SyncOptions;
pub use mutex::{Mutex, MutexGuard};
pub use once::{Once, OnceTurn};
pub use rwlock::{ReadGuard, RwLock, WriteGuard};
pub use semaphore::Semaphore;

use crate::endpoint::Endpoint;
use crate::error::Error;
use ginnel_layout::sync::SyncKind;

impl Endpoint {
    /// Opens a mutex of the segment, making it if it is not there.
    pub fn mutex(&self, name: &str) -> Result<Mutex, Error> {
        self.mutex_with(name, &SyncOptions::default())
    }

    /// Opens a mutex as `options` say.
    pub fn mutex_with(&self, name: &str, options: &SyncOptions) -> Result<Mutex, Error> {
        handle::Handle::open(self, name, SyncKind::MUTEX, (0, 0), options).map(Mutex::new)
    }

    /// Opens a read-write lock of the segment, making it if it is not there.
    pub fn rwlock(&self, name: &str) -> Result<RwLock, Error> {
        self.rwlock_with(name, &SyncOptions::default())
    }

    /// Opens a read-write lock as `options` say.
    pub fn rwlock_with(&self, name: &str, options: &SyncOptions) -> Result<RwLock, Error> {
        handle::Handle::open(self, name, SyncKind::RWLOCK, (0, 0), options).map(RwLock::new)
    }

    /// Opens a condition variable of the segment, making it if it is not there.
    pub fn condvar(&self, name: &str) -> Result<Condvar, Error> {
        self.condvar_with(name, &SyncOptions::default())
    }

    /// Opens a condition variable as `options` say.
    pub fn condvar_with(&self, name: &str, options: &SyncOptions) -> Result<Condvar, Error> {
        handle::Handle::open(self, name, SyncKind::CONDVAR, (0, 0), options).map(Condvar::new)
    }

    /// Opens a semaphore of the segment. If it is not there it is made, for at most `limit` permits, of which it has
    /// `initial`. An existing one must have the same limit; a limit of 0 takes any.
    pub fn semaphore(&self, name: &str, limit: u32, initial: u32) -> Result<Semaphore, Error> {
        self.semaphore_with(name, limit, initial, &SyncOptions::default())
    }

    /// Opens a semaphore as `options` say.
    pub fn semaphore_with(
        &self,
        name: &str,
        limit: u32,
        initial: u32,
        options: &SyncOptions,
    ) -> Result<Semaphore, Error> {
        handle::Handle::open(self, name, SyncKind::SEMAPHORE, (limit, initial), options).map(Semaphore::new)
    }

    /// Opens a barrier of the segment for `parties`, each with a handle of its own; makes it if it is not there.
    pub fn barrier(&self, name: &str, parties: u32) -> Result<Barrier, Error> {
        self.barrier_with(name, parties, &SyncOptions::default())
    }

    /// Opens a barrier as `options` say.
    pub fn barrier_with(&self, name: &str, parties: u32, options: &SyncOptions) -> Result<Barrier, Error> {
        handle::Handle::open(self, name, SyncKind::BARRIER, (parties, 0), options).map(Barrier::new)
    }

    /// Opens a once of the segment, making it if it is not there.
    pub fn once(&self, name: &str) -> Result<Once, Error> {
        self.once_with(name, &SyncOptions::default())
    }

    /// Opens a once as `options` say.
    pub fn once_with(&self, name: &str, options: &SyncOptions) -> Result<Once, Error> {
        handle::Handle::open(self, name, SyncKind::ONCE, (0, 0), options).map(Once::new)
    }

    /// Removes a synchronisation object's name. Those who have it open keep it; the next open of the name makes another.
    pub fn unlink_sync(&self, name: &str) -> Result<(), Error> {
        handle::unlink(self, name)
    }
}
