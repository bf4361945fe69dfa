//! Why a job ends without its result.

use crate::Piece;
use std::io;
use std::time::Duration;
use thiserror::Error;

/// Why the caller's consolidation takes no result.
#[derive(Debug)]
pub enum Refusal {
    /// It is nonsense, for this reason: its worker is dismissed, and another gets the piece.
    Nonsense(String),
    /// The job cannot go on. Any error becomes this with `?`.
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
    /// There was no worker for as long as the manager waits for one.
    #[error(
        "no worker for {waited:?}, and {left} left to do{last}; start some, such as `ginnel farm work {address}`, or wait longer"
    )]
    NoWorker {
        /// How long.
        waited: Duration,
        /// Where they would be expected.
        address: String,
        /// What remains, in words.
        left: String,
        /// How the last worker went, in words; empty if there was none.
        last: String,
    },
    /// The input could not be read.
    #[error("the input cannot be read at {} ({} bytes): {source}", piece.offset, piece.len)]
    Source {
        /// Which part.
        piece: Piece,
        /// Why.
        source: io::Error,
    },
    /// A piece failed, or took its worker along, as often as the manager tries.
    #[error("the piece at {} ({} bytes) was tried {} times; the last worker {why}", piece.offset, piece.len, piece.tries)]
    Piece {
        /// Which one.
        piece: Piece,
        /// What its last worker said, or how it went.
        why: String,
    },
    /// A piece is longer than a worker's ring takes.
    #[error("the piece at {} has {} bytes, and {worker} takes {max}; cut smaller pieces, or set Options::piece", piece.offset, piece.len)]
    TooLong {
        /// Which one.
        piece: Piece,
        /// Whose channel.
        worker: String,
        /// The longest that fits.
        max: usize,
    },
    /// The caller's consolidation failed.
    #[error("the result of the piece at {} ({} bytes) from {worker}: {why}", piece.offset, piece.len)]
    Result {
        /// Of which piece.
        piece: Piece,
        /// Whose.
        worker: String,
        /// Why.
        why: Box<dyn std::error::Error + Send + Sync>,
    },
}
