//! Errors between a front end and its server.

use ginnel_layout::vhost_user::Request;
use ginnel_vfio_user::client;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use thiserror::Error;

/// Why an operation failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// No server accepts connections at this socket.
    #[error("connecting to {}: {source}; is the server running?", path.display())]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The server has closed the connection, or has died.
    #[error("the server has closed the connection")]
    Gone,
    /// The server has not answered in time.
    #[error("the server has not answered {request:?} within {patience:?}")]
    Silent {
        /// The request.
        request: Request,
        /// How long the client has waited.
        patience: Duration,
    },
    /// The server's answer breaks the protocol.
    #[error("the server's answer to {request:?} is malformed: {what}")]
    Malformed {
        /// The request.
        request: Request,
        /// What is wrong with the answer.
        what: &'static str,
    },
    /// The server has answered a request with an error.
    #[error("the server refuses {0:?}")]
    Refused(Request),
    /// The server or the disk cannot do what was requested.
    #[error("{0}")]
    Unsupported(String),
    /// The request is not valid for this disk or this queue. Nothing was sent.
    #[error("{0}")]
    Invalid(String),
    /// The ring has no room for the request's descriptors now. The slot stays claimed. A larger ring would have room,
    /// and so would indirect descriptors.
    #[error(
        "the ring has no room for another request; connect with a larger one, or with indirect descriptors"
    )]
    Full,
    /// A request was not completed in time. It is still in flight.
    #[error("no completion within {0:?}")]
    TimedOut(Duration),
    /// The disk has answered a request with an error.
    #[error("{operation} failed: {status}")]
    Failed {
        /// The operation and its range.
        operation: String,
        /// The disk's answer.
        status: crate::Status,
    },
    /// The ring contains what no correct device writes.
    #[error("the server has broken the ring of queue {queue}: {what}")]
    Corrupt {
        /// Number of the queue.
        queue: usize,
        /// What is wrong.
        what: String,
    },
    /// A block does not have the expected contents.
    #[error(transparent)]
    Wrong(#[from] crate::verify::Wrong),
    /// A vfio-user server has refused a command, or its answer breaks the protocol.
    #[error(transparent)]
    VfioUser(client::Error),
    /// An NVMe controller does not do what it must.
    #[error("the controller: {0}")]
    Controller(String),
    /// A system call has failed.
    #[error("{what}: {source}")]
    Io {
        /// What was attempted.
        what: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl Error {
    /// Returns a function that wraps an error of the kernel.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Io { what, source: errno.into() }
    }
}

impl From<client::Error> for Error {
    fn from(error: client::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected, UnexpectedEof};
        match &error {
            client::Error::Io(source)
                if matches!(source.kind(), BrokenPipe | ConnectionReset | NotConnected | UnexpectedEof) =>
            {
                Self::Gone
            }
            _ => Self::VfioUser(error),
        }
    }
}
