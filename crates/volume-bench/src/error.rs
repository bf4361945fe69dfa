//! What can go wrong between a front end and its server.

use ginnel_layout::vhost_user::Request;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use thiserror::Error;

/// Why an operation failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Nobody takes connections there.
    #[error("connecting to {}: {source}; is the server running?", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The server has closed the connection, or has died.
    #[error("the server has closed the connection")]
    Gone,
    /// The server has not answered in time.
    #[error("the server has not answered {request:?} within {patience:?}")]
    Silent {
        /// What it was asked.
        request: Request,
        /// How long we have waited.
        patience: Duration,
    },
    /// The server has answered what no server may.
    #[error("the server's answer to {request:?} is malformed: {what}")]
    Malformed {
        /// What it was asked.
        request: Request,
        /// What is wrong with the answer.
        what: &'static str,
    },
    /// The server has refused.
    #[error("the server refuses {0:?}")]
    Refused(Request),
    /// What was asked for and the server, or the disk, cannot do.
    #[error("{0}")]
    Unsupported(String),
    /// A request that makes no sense for this disk or this queue; nothing was sent.
    #[error("{0}")]
    Invalid(String),
    /// The ring has no room for the request's descriptors now; the slot is claimed still. A larger ring has, or indirect
    /// descriptors.
    #[error(
        "the ring has no room for another request; connect with a larger one, or with indirect descriptors"
    )]
    Full,
    /// A request was not completed in time. It is still with the server.
    #[error("no completion within {0:?}")]
    TimedOut(Duration),
    /// The server has answered a request with an error.
    #[error("{operation} failed: {status}")]
    Failed {
        /// What it was asked to do, and where.
        operation: String,
        /// Its answer.
        status: crate::Status,
    },
    /// The ring holds what no device may write.
    #[error("the server has broken the ring of queue {queue}: {what}")]
    Corrupt {
        /// Which.
        queue: usize,
        /// How.
        what: String,
    },
    /// A block does not hold what it must.
    #[error(transparent)]
    Wrong(#[from] crate::verify::Wrong),
    /// The operating system.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

impl Error {
    /// Wraps what the operating system says.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Io { what, source: errno.into() }
    }
}
