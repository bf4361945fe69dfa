//! Records of readiness boards.

use crate::account::Account;
use crate::process::Process;
use crate::text::Text;
use serde::{Deserialize, Serialize};

/// One change, as [`crate::record::Record`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// An endpoint has a readiness board.
    Board(Board),
    /// Another process of the endpoint has taken over a board that the previous one has left.
    BoardTaken {
        /// The number of the endpoint.
        endpoint: u32,
        /// The epoch of the endpoint.
        epoch: u32,
        /// The nonce of the first request for the board.
        old: u64,
        /// The nonce of this request.
        nonce: u64,
        /// The process that took the board over.
        process: Process,
    },
}

/// A readiness board: a page of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Board {
    /// The number of the endpoint that has, or had, the board.
    pub endpoint: u32,
    /// The epoch of that endpoint.
    pub epoch: u32,
    /// The segment's name.
    pub segment: Text,
    /// The number of the endpoint's member, for the account.
    pub member: u32,
    /// The number of the endpoint's user, for the account.
    pub uid: u32,
    /// The offset of the page in the segment.
    pub offset: u64,
    /// The nonce that the endpoint has chosen for its request.
    pub nonce: u64,
    /// The process that waits at the board. Older journals do not have this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
    /// Whether `process` no longer waits at the board, because it does not own the endpoint any more or has executed another
    /// program.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_left: bool,
}

impl Board {
    /// Returns the account that is charged for the board.
    pub fn account(&self) -> Account {
        Account::new(self.member, self.segment.0, self.uid)
    }
}
