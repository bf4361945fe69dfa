//! One-time initialisation.

use super::handle::{Handle, common};
use crate::error::Error;
use ginnel_shmem::Mapping;
use ginnel_sync::Turn;

/// An initialisation that is to be executed once in the segment, by the first endpoint that comes. See [`crate::sync`]
/// for handles, waiting and death.
pub struct Once {
    once: ginnel_sync::Once<Mapping>,
    handle: Handle,
}

common!(Once);

impl Once {
    pub(super) fn new(handle: Handle) -> Self {
        Self { once: ginnel_sync::Once::new(handle.page.clone(), handle.user), handle }
    }

    /// Returns whether the initialisation is complete. If it returns true, the caller sees all its effects. Never
    /// blocks.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.once.is_done()
    }

    /// Executes `run` unless the initialisation is complete, and returns whether this call has executed it. Waits while
    /// another handle executes it.
    ///
    /// `run` gets true if an earlier attempt died, failed or panicked, and so may have done a part of the work.
    ///
    /// # Errors
    ///
    /// An error of `run` is returned as it is, and the next caller gets the turn. Otherwise the errors of
    /// [`Once::begin`].
    pub fn call<E: From<Error>>(&mut self, run: impl FnOnce(bool) -> Result<(), E>) -> Result<bool, E> {
        match self.begin()? {
            None => Ok(false),
            Some(turn) => {
                run(turn.again)?;
                turn.complete()?;
                Ok(true)
            }
        }
    }

    /// Takes the turn to execute the initialisation; returns `None` if it is complete. Waits while another handle has
    /// the turn.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] after this handle's timeout, [`Error::Deadlock`] if this handle has the turn already.
    pub fn begin(&mut self) -> Result<Option<OnceTurn<'_>>, Error> {
        match self.once.begin(&mut self.handle.wakeups, self.handle.patience)? {
            Turn::Done => Ok(None),
            Turn::Mine { again } => Ok(Some(OnceTurn { once: self, again, done: false })),
        }
    }

    /// Ends a turn that was leaked with [`std::mem::forget`]. If `done` is true the initialisation is complete;
    /// otherwise the next caller gets the turn. Never blocks. Meant for bindings to languages without guards.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwner`] if this handle does not have the turn.
    pub fn force_end(&mut self, done: bool) -> Result<(), Error> {
        match done {
            true => self.once.complete(&mut self.handle.wakeups).map_err(Error::from),
            false => self.once.give_up(&mut self.handle.wakeups).map_err(Error::from),
        }
    }
}

/// The turn to execute the initialisation of a [`Once`]. Dropping it without [`OnceTurn::complete`] gives the turn to
/// the next caller.
#[must_use = "dropping the turn gives it up"]
pub struct OnceTurn<'a> {
    once: &'a mut Once,
    again: bool,
    done: bool,
}

impl OnceTurn<'_> {
    /// Returns whether an earlier attempt died, failed or panicked, and so may have done a part of the work.
    pub fn is_again(&self) -> bool {
        self.again
    }

    /// Marks the initialisation as complete and wakes all waiters. Never blocks.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwner`] if this handle does not have the turn any more, because its endpoint was declared dead.
    pub fn complete(mut self) -> Result<(), Error> {
        self.done = true;
        self.once.force_end(true)
    }
}

impl Drop for OnceTurn<'_> {
    fn drop(&mut self) {
        if !self.done && self.once.handle.is_ours() {
            // This handle does not have the turn any more if its endpoint was declared dead; then there is nothing to
            // give up.
            let _ = self.once.force_end(false);
        }
    }
}
