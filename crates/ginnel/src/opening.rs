//! Sessions that are being opened.

use crate::connection::Packet;
use crate::error::Error;
use crate::session::Session;
use std::fmt;
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;

/// What a session with the daemon becomes once the daemon has answered: a [`crate::Daemon`] or an [`crate::Endpoint`].
/// Dropping it before gives up.
///
/// Belongs to the process that has begun it, not to children of a fork.
#[must_use = "nothing is open until the daemon has answered"]
pub struct Opening<T> {
    /// None once it is open.
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

    /// What was to be opened, or `None` if the daemon has not answered yet. Never waits.
    ///
    /// An error if there is no daemon, or it refuses. A daemon that seems to be restarted just now is tried again, for as long as
    /// the caller likes.
    pub fn poll(&mut self) -> Result<Option<T>, Error> {
        let Some(answer) = self.session()?.welcome()? else { return Ok(None) };
        self.finish(answer).map(Some)
    }

    /// For poll and epoll: readable when [`Opening::poll`] has something to do.
    pub fn poll_fd(&mut self) -> Result<BorrowedFd<'_>, Error> {
        self.session()?.fd()
    }

    /// Waits for the daemon: a moment (3 seconds for a [`crate::Daemon`], 10 for an [`crate::Endpoint`]) if it is being restarted,
    /// not at all if there is none.
    pub fn wait(mut self) -> Result<T, Error> {
        let answer = self.session()?.wait_for_welcome()?;
        self.finish(answer)
    }

    /// The session, if it is this process's and there is still something to wait for.
    fn session(&mut self) -> Result<&mut Session, Error> {
        match &mut self.begun {
            Some(begun) if begun.session.is_own() => Ok(&mut begun.session),
            Some(_) => Err(misuse("opening what the parent of this process has begun to open")),
            None => Err(misuse("opening what is open already")),
        }
    }

    fn finish(&mut self, answer: Packet) -> Result<T, Error> {
        let Some(Begun { session, finish }) = self.begun.take() else {
            return Err(misuse("opening what is open already"));
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
