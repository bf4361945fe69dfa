//! Readiness boards: pages on which endpoints learn which of their rings have something.
//!
//! A peer that has something for an endpoint writes to the endpoint's board, at any time until it has closed its channel with the
//! endpoint. So a board outlives its endpoint until the last channel is gone that ever belonged to the endpoint. After that
//! nobody can still write to it, and its page may be used for something else.

pub(crate) mod boards;
mod books;
mod record;
mod requests;

use super::class::Class;
use crate::books::{Books, Endpoint, InvalidRecord};
pub use boards::Boards;
pub use record::{Board, Change};
use std::collections::BTreeMap;

impl Class for Change {
    const RECORDS: &[&str] = &["board", "board_taken"];

    fn apply(&self, books: &mut Books) -> Result<(), InvalidRecord> {
        match self {
            Self::Board(board) => books.board(board),
            &Self::BoardTaken { endpoint, epoch, old, nonce, process } => {
                books.board_taken((endpoint, epoch), old, nonce, process)
            }
        }
    }

    fn gives(&self) -> bool {
        true
    }

    fn dump(books: &Books) -> impl Iterator<Item = Self> {
        books.boards.all.values().flat_map(BTreeMap::values).copied().map(Self::Board)
    }

    fn forget(books: &mut Books, endpoint: &Endpoint) {
        books.boards_of_dead(endpoint);
    }
}
