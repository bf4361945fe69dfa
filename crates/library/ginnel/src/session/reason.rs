//! Why there is no session with the daemon at the moment.

use crate::connection::protocol;
use crate::error::Error;
use ginnel_layout::wire::ErrorCode;
use rustix::io::Errno;
use std::path::Path;

/// The reason why there is no session at the moment.
#[derive(Clone, Debug)]
pub enum Reason {
    Lost(Errno),
    Refused(ErrorCode, String),
    Protocol(&'static str),
}

impl Reason {
    /// Returns whether the reason looks like a restart of the daemon.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Lost(errno) => {
                matches!(*errno, Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE | Errno::AGAIN)
            }
            Self::Refused(code, _) => *code == ErrorCode::UNAVAILABLE,
            Self::Protocol(_) => false,
        }
    }

    pub fn error(&self, path: &Path) -> Error {
        match self {
            Self::Lost(errno) => Error::NoDaemon { path: path.into(), source: (*errno).into() },
            Self::Refused(code, text) => Error::Refused { code: *code, text: text.clone() },
            Self::Protocol(what) => protocol(path, what),
        }
    }
}
