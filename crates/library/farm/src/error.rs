//! Why a job ends without its result.

use crate::Piece;
use std::io;
use std::time::Duration;
use thiserror::Error;

/// Why the caller's `fold` does not accept a result.
#[derive(Debug)]
pub enum Refusal {
    /// The result is invalid, for this reason. Its worker is dismissed, and another worker gets the piece.
    Nonsense(String),
    /// The job cannot go on. `?` converts any error to this.
    Fatal(Box<dyn std::error::Error + Send + Sync>),
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self::Fatal(error.into())
    }
}

/// Why a job ended without its result.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Listening, attaching or waiting failed.
    #[error(transparent)]
    Ginnel(#[from] ginnel::Error),
    /// No worker was connected for the whole time that the manager waits for one.
    #[error(
        "no worker for {waited:?}, and {left} left to do{last}; start some, such as `ginnel farm work {address}`, or wait longer"
    )]
    NoWorker {
        /// How long the manager has waited.
        waited: Duration,
        /// The address at which workers were expected.
        address: String,
        /// What remains to be done, in words.
        left: String,
        /// How the last worker departed, in words; empty if there was none.
        last: String,
    },
    /// The input could not be read.
    #[error("the input cannot be read at {} ({} bytes): {source}", piece.offset, piece.len)]
    Source {
        /// The range of the input.
        piece: Piece,
        /// The error of the input.
        source: io::Error,
    },
    /// Every attempt at a piece has failed: the worker reported a failure, died, left or was dismissed.
    #[error("the piece at {} ({} bytes) was tried {} times; the last worker {why}", piece.offset, piece.len, piece.tries)]
    Piece {
        /// The piece.
        piece: Piece,
        /// What its last worker reported, or how that worker departed.
        why: String,
    },
    /// A piece is longer than a worker's ring takes.
    #[error("the piece at {} has {} bytes, and {worker} takes {max}; cut smaller pieces, or set Options::piece", piece.offset, piece.len)]
    TooLong {
        /// The piece.
        piece: Piece,
        /// The worker whose channel is too small.
        worker: String,
        /// The longest piece that fits, in bytes.
        max: usize,
    },
    /// The caller's `fold` has failed.
    #[error("the result of the piece at {} ({} bytes) from {worker}: {why}", piece.offset, piece.len)]
    Result {
        /// The piece whose result was passed to it.
        piece: Piece,
        /// The worker that sent the result.
        worker: String,
        /// The error of `fold`.
        why: Box<dyn std::error::Error + Send + Sync>,
    },
}
