//! Named synchronisation objects in a segment: locks that work between processes, between VMs, and between both.
//!
//! All kinds of object share one name space, and every endpoint of the segment can open an object by name. The first
//! open creates it. It is removed when its last handle is closed, unless [`SyncOptions`] say otherwise. If the last
//! user died instead of closing its handle, the object stays for the next user, which learns of the death.
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
//! A handle belongs to one thread at a time; each further thread needs a handle of its own ([`Mutex::try_clone`] and so
//! on). An object has at most 63 handles. Opening and closing a handle asks the daemon; operations do not. The first
//! time that a handle has to wake another user, it asks the daemon for that user's doorbell but does not wait for the
//! answer: the daemon rings the doorbell itself.
//!
//! # Waiting
//!
//! An uncontended operation costs one or two atomic instructions. A contended one spins, sleeps, or does both in turn,
//! depending on the handle's [`crate::WaitMode`], which is the endpoint's unless it is set. A timeout
//! ([`Mutex::set_timeout`] and so on) limits the whole call, which then fails with [`Error::TimedOut`]. A waiter that
//! is woken does not necessarily get the lock: another user may take it first. A sleeping waiter also checks the object
//! ten times a second, in case nobody could ring its doorbell, for example because the daemon was away when the waiter
//! had to be woken for the first time.
//!
//! # Death
//!
//! When an endpoint dies (its process or its VM ends, or it is declared dead), whatever it held is handed on within 100
//! ms; each object's documentation says how. If the process of an endpoint that was declared dead still runs, its
//! handles fail with [`Error::Fenced`].
//!
//! # Errors
//!
//! Functions that open an object wait for the daemon for at most 10 seconds. They fail with [`Error::Name`] for an
//! invalid name, [`Error::ReadOnly`] if this member may only read the segment, [`Error::Refused`] if the daemon
//! refuses, and [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers. Every operation of an open object can
//! fail with [`Error::Fenced`], with [`Error::CorruptLock`] if another member has corrupted the object, and with
//! [`Error::Broken`] if the segment's memory is gone; the documentation of an operation names only its other errors.

mod barrier;
mod condvar;
mod handle;
mod mutex;
mod once;
mod rwlock;
mod semaphore;

use crate::endpoint::Endpoint;
use crate::error::Error;
pub use barrier::Barrier;
pub use condvar::Condvar;
use ginnel_layout::sync::SyncKind;
pub use handle::SyncOptions;
pub use mutex::{Mutex, MutexGuard};
pub use once::{Once, OnceTurn};
pub use rwlock::{ReadGuard, RwLock, WriteGuard};
pub use semaphore::Semaphore;

impl Endpoint {
    /// Opens the mutex `name`, and creates it if it does not exist. Blocks for the daemon.
    ///
    /// # Errors
    ///
    /// As for every open: see [`crate::sync`].
    pub fn mutex(&self, name: &str) -> Result<Mutex, Error> {
        self.mutex_with(name, &SyncOptions::default())
    }

    /// Opens a mutex with the given options; otherwise like [`Endpoint::mutex`].
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::mutex`]; also [`Error::Refused`] as [`SyncOptions`] describe.
    pub fn mutex_with(&self, name: &str, options: &SyncOptions) -> Result<Mutex, Error> {
        handle::Handle::open(self, name, SyncKind::MUTEX, (0, 0), options).map(Mutex::new)
    }

    /// Opens the read-write lock `name`, and creates it if it does not exist. Blocks for the daemon.
    ///
    /// # Errors
    ///
    /// As for every open: see [`crate::sync`].
    pub fn rwlock(&self, name: &str) -> Result<RwLock, Error> {
        self.rwlock_with(name, &SyncOptions::default())
    }

    /// Opens a read-write lock with the given options; otherwise like [`Endpoint::rwlock`].
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::rwlock`]; also [`Error::Refused`] as [`SyncOptions`] describe.
    pub fn rwlock_with(&self, name: &str, options: &SyncOptions) -> Result<RwLock, Error> {
        handle::Handle::open(self, name, SyncKind::RWLOCK, (0, 0), options).map(RwLock::new)
    }

    /// Opens the condition variable `name`, and creates it if it does not exist. Blocks for the daemon.
    ///
    /// # Errors
    ///
    /// As for every open: see [`crate::sync`].
    pub fn condvar(&self, name: &str) -> Result<Condvar, Error> {
        self.condvar_with(name, &SyncOptions::default())
    }

    /// Opens a condition variable with the given options; otherwise like [`Endpoint::condvar`].
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::condvar`]; also [`Error::Refused`] as [`SyncOptions`] describe.
    pub fn condvar_with(&self, name: &str, options: &SyncOptions) -> Result<Condvar, Error> {
        handle::Handle::open(self, name, SyncKind::CONDVAR, (0, 0), options).map(Condvar::new)
    }

    /// Opens the semaphore `name`. If it does not exist, creates it with `initial` permits and a maximum of `limit`.
    /// Blocks for the daemon.
    ///
    /// An existing semaphore must have the same limit; a `limit` of 0 accepts any.
    ///
    /// # Errors
    ///
    /// As for every open: see [`crate::sync`].
    pub fn semaphore(&self, name: &str, limit: u32, initial: u32) -> Result<Semaphore, Error> {
        self.semaphore_with(name, limit, initial, &SyncOptions::default())
    }

    /// Opens a semaphore with the given options; otherwise like [`Endpoint::semaphore`].
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::semaphore`]; also [`Error::Refused`] as [`SyncOptions`] describe.
    pub fn semaphore_with(
        &self,
        name: &str,
        limit: u32,
        initial: u32,
        options: &SyncOptions,
    ) -> Result<Semaphore, Error> {
        handle::Handle::open(self, name, SyncKind::SEMAPHORE, (limit, initial), options).map(Semaphore::new)
    }

    /// Opens the barrier `name` for `parties` parties, each of which needs a handle of its own. Creates it if it does
    /// not exist. Blocks for the daemon.
    ///
    /// # Errors
    ///
    /// As for every open: see [`crate::sync`].
    pub fn barrier(&self, name: &str, parties: u32) -> Result<Barrier, Error> {
        self.barrier_with(name, parties, &SyncOptions::default())
    }

    /// Opens a barrier with the given options; otherwise like [`Endpoint::barrier`].
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::barrier`]; also [`Error::Refused`] as [`SyncOptions`] describe.
    pub fn barrier_with(&self, name: &str, parties: u32, options: &SyncOptions) -> Result<Barrier, Error> {
        handle::Handle::open(self, name, SyncKind::BARRIER, (parties, 0), options).map(Barrier::new)
    }

    /// Opens the once `name`, and creates it if it does not exist. Blocks for the daemon.
    ///
    /// # Errors
    ///
    /// As for every open: see [`crate::sync`].
    pub fn once(&self, name: &str) -> Result<Once, Error> {
        self.once_with(name, &SyncOptions::default())
    }

    /// Opens a once with the given options; otherwise like [`Endpoint::once`].
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::once`]; also [`Error::Refused`] as [`SyncOptions`] describe.
    pub fn once_with(&self, name: &str, options: &SyncOptions) -> Result<Once, Error> {
        handle::Handle::open(self, name, SyncKind::ONCE, (0, 0), options).map(Once::new)
    }

    /// Removes the name of a synchronisation object. Existing handles stay usable; the next open of the name creates a
    /// new object. Blocks for the daemon, for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::Name`] for an invalid name, [`Error::Refused`] if the daemon refuses, for example because there is no
    /// such object, [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn unlink_sync(&self, name: &str) -> Result<(), Error> {
        handle::unlink(self, name)
    }
}
