//! Something done once.

use super::handle::{Handle, common};
use crate::error::Error;
use ginnel_shmem::Mapping;
use ginnel_sync::Turn;

/// Something that is to be done once in the segment, by whoever comes first. See [`crate::sync`] for handles, waiting and
/// death.
pub struct Once {
    once: ginnel_sync::Once<Mapping>,
    handle: Handle,
}

common!(Once);

impl Once {
    pub(super) fn new(handle: Handle) -> Self {
        Self { once: ginnel_sync::Once::new(handle.page.clone(), handle.user), handle }
    }

    /// Whether it has been done; what was done is seen then.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.once.is_done()
    }

    /// Does it, unless it has been done; waits while somebody else is at it. True if it was done by this call. `run` is told
    /// whether somebody before has died in it, failed or panicked, and so may have done some of it. If `run` fails, that is
    /// the result, and the next caller has the turn.
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

    /// The turn to do it; `None` if it has been done. Waits while somebody else is at it.
    pub fn begin(&mut self) -> Result<Option<OnceTurn<'_>>, Error> {
        match self.once.begin(&mut self.handle.wakeups, self.handle.patience)? {
            Turn::Done => Ok(None),
            Turn::Mine { again } => Ok(Some(OnceTurn { once: self, again, done: false })),
        }
    }

    /// Ends a turn that was leaked ([`std::mem::forget`]): for bindings to languages without guards. `done`: it has been
    /// done; else the next caller has the turn. [`Error::NotOwner`] if this handle does not have it.
    pub fn force_end(&mut self, done: bool) -> Result<(), Error> {
        match done {
            true => self.once.complete(&mut self.handle.wakeups).map_err(Error::from),
            false => self.once.give_up(&mut self.handle.wakeups).map_err(Error::from),
        }
    }
}

/// The turn to do what is done once. Dropping it without [`OnceTurn::complete`] gives it to the next caller.
#[must_use = "dropping the turn gives it up"]
pub struct OnceTurn<'a> {
    once: &'a mut Once,
    again: bool,
    done: bool,
}

impl OnceTurn<'_> {
    /// Whether somebody before has died in it, failed or panicked, and so may have done some of it.
    pub fn is_again(&self) -> bool {
        self.again
    }

    /// It has been done.
    pub fn complete(mut self) -> Result<(), Error> {
        self.done = true;
        self.once.force_end(true)
    }
}

impl Drop for OnceTurn<'_> {
    fn drop(&mut self) {
        if !self.done && self.once.handle.is_ours() {
            // Not ours any more if this endpoint was declared dead; then there is nothing to give up.
            let _ = self.once.force_end(false);
        }
    }
}
