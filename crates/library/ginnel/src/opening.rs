//! Sessions with the daemon that are being opened.

use crate::connection::Packet;
use crate::error::Error;
use crate::session::Session;
use std::fmt;
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;

/// A [`crate::Daemon`] or [`crate::Endpoint`] that is being opened and needs the daemon's answer. Dropping it gives up.
///
/// It belongs to the process that has begun it, and not to children of a fork.
#[must_use = "nothing is open until the daemon has answered"]
pub struct Opening<T> {
    /// `None` once the object is open.
    begun: Option<Begun<T>>,
}

struct Begun<T> {
    session: Session,
    finish: Box<Finish<T>>,
}

type Finish<T> = dyn FnOnce(Session, Packet) -> Result<T, Error> + Send;

impl<T> Opening<T> {
    pub(crate) fn new(
        session: Session,
        finish: impl FnOnce(Session, Packet) -> Result<T, Error> + Send + 'static,
    ) -> Self {
        Self { begun: Some(Begun { session, finish: Box::new(finish) }) }
    }

    /// Returns the opened object, or `None` if the daemon has not answered yet. Never waits.
    ///
    /// A daemon that seems to be in the middle of a restart is tried again, without a limit; the caller decides how
    /// long to poll.
    ///
    /// # Errors
    ///
    /// [`Error::NoDaemon`] if there is no daemon, [`Error::Refused`] if the daemon refuses, [`Error::Protocol`] if its
    /// answer is invalid, [`Error::Broken`] if the segment's memory is gone, [`Error::System`] if the object is open
    /// already, if a parent of this process has begun to open it, or if a system call fails.
    pub fn poll(&mut self) -> Result<Option<T>, Error> {
        let Some(answer) = self.session()?.welcome()? else { return Ok(None) };
        self.finish(answer).map(Some)
    }

    /// Returns a descriptor for poll and epoll that is readable when [`Opening::poll`] has something to do.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the descriptor cannot be created, or as for [`Opening::poll`].
    pub fn poll_fd(&mut self) -> Result<BorrowedFd<'_>, Error> {
        self.session()?.fd()
    }

    /// Waits for the daemon and returns the opened object. Waits up to 3 seconds for a [`crate::Daemon`], or 10 for an
    /// [`crate::Endpoint`], if the daemon is being restarted or is slow, and not at all if there is none.
    ///
    /// # Errors
    ///
    /// As for [`Opening::poll`].
    pub fn wait(mut self) -> Result<T, Error> {
        let answer = self.session()?.wait_for_welcome()?;
        self.finish(answer)
    }

    /// Returns the session, if this process has begun it and the object is not open yet.
    fn session(&mut self) -> Result<&mut Session, Error> {
        match &mut self.begun {
            Some(begun) if begun.session.is_own() => Ok(&mut begun.session),
            Some(_) => Err(misuse("using an opening that the parent of this process has begun")),
            None => Err(misuse("using an opening whose result was returned already")),
        }
    }

    fn finish(&mut self, answer: Packet) -> Result<T, Error> {
        let Some(Begun { session, finish }) = self.begun.take() else {
            return Err(misuse("using an opening whose result was returned already"));
        };
        finish(session, answer)
    }
}

impl<T> fmt::Debug for Opening<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.begun.as_ref().map(|begun| begun.session.path());
        f.debug_struct("Opening").field("path", &path).finish_non_exhaustive()
    }
}

fn misuse(what: &'static str) -> Error {
    Error::System { what, source: ErrorKind::InvalidInput.into() }
}
