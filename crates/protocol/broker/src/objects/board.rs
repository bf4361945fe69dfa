//! Readiness boards: pages on which endpoints learn which of their rings have something.
//!
//! A peer that has something for an endpoint writes to the endpoint's board, at any time until it has closed its channel with the
//! endpoint. So a board outlives its endpoint until the last channel is gone that ever belonged to the endpoint. After that
//! nobody can still write to it, and its page may be used for something else.

mod requests;

use super::Class;
use crate::account::{Account, Tally};
use crate::books::{Books, Endpoint, InvalidRecord};
use crate::objects::channel::Side;
use crate::process::Process;
use crate::text::Text;
use ginnel_layout::board;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

impl Class for Change {
    const RECORDS: &[&str] = &["board", "board_taken"];

    fn apply(&self, books: &mut Books) -> Result<(), InvalidRecord> {
        match self {
            Self::Board(board) => books.board(board),
            &Self::BoardTaken { endpoint, epoch, old, nonce, process } => {
                books.boards.take_left((endpoint, epoch), old, nonce, process)
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

/// The boards of all endpoints.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Boards {
    /// The boards by endpoint and epoch, then by the nonce of the request.
    all: BTreeMap<(u32, u32), BTreeMap<u64, Board>>,
    /// The endpoints that have ended, and the number of existing sides of channels that belonged to each.
    ended: BTreeMap<(u32, u32), u32>,
}

impl Boards {
    /// Returns the offsets of the boards of an endpoint.
    pub fn of(&self, endpoint: u32, epoch: u32) -> Vec<u64> {
        self.all.get(&(endpoint, epoch)).into_iter().flatten().map(|(_, board)| board.offset).collect()
    }

    /// Marks the boards that a process has asked for as left by it.
    pub fn leave(&mut self, endpoint: u32, epoch: u32, process: Process) {
        let boards = self.all.get_mut(&(endpoint, epoch)).into_iter().flat_map(BTreeMap::values_mut);
        boards.filter(|board| board.process == Some(process)).for_each(|board| board.is_left = true);
    }

    fn take_left(
        &mut self,
        key: (u32, u32),
        old: u64,
        nonce: u64,
        process: Process,
    ) -> Result<(), InvalidRecord> {
        let boards = self.all.get_mut(&key).ok_or(InvalidRecord("an unknown board was taken over"))?;
        if boards.contains_key(&nonce) {
            return Err(InvalidRecord("two boards of one request"));
        }
        let board = boards.get(&old).filter(|board| board.is_left);
        let board = *board.ok_or(InvalidRecord("a board was taken over that is in use"))?;
        boards.remove(&old);
        boards.insert(nonce, Board { nonce, process: Some(process), is_left: false, ..board });
        Ok(())
    }

    /// Returns all boards.
    #[cfg(any(test, fuzzing))]
    pub fn all(&self) -> impl Iterator<Item = &Board> {
        self.all.values().flat_map(BTreeMap::values)
    }
}

impl Board {
    /// Returns the account that is charged for the board.
    pub fn account(&self) -> Account {
        Account::new(self.member, self.segment.0, self.uid)
    }
}

impl Books {
    pub(crate) fn board(&mut self, board: &Board) -> Result<(), InvalidRecord> {
        let key = (board.endpoint, board.epoch);
        let boards = self.boards.all.get(&key);
        if boards.is_some_and(|boards| boards.contains_key(&board.nonce)) {
            return Err(InvalidRecord("two boards of one request"));
        }
        let alive = self.endpoints.get(&board.endpoint).filter(|e| e.epoch == board.epoch);
        if alive.is_some_and(|e| e.segment != board.segment.0) {
            return Err(InvalidRecord("a board in another segment"));
        }
        let sides = match alive {
            Some(_) => 0,
            None => self.sides_of(key),
        };
        if alive.is_none() && sides == 0 {
            return Err(InvalidRecord("a board of an unknown endpoint"));
        }
        let segment =
            self.segments.get_mut(&board.segment.0).ok_or(InvalidRecord("a board in no segment"))?;
        if !segment.arena.take(board.offset, board::LEN as u64) {
            return Err(InvalidRecord("a board without memory"));
        }
        if sides > 0 {
            self.boards.ended.insert(key, sides);
        }
        self.charge(board.account(), Tally::bytes(board::LEN as u64));
        self.boards.all.entry(key).or_default().insert(board.nonce, *board);
        Ok(())
    }

    /// Returns the number of sides of channels that are or were of this endpoint. Looks at all channels, for the books of an
    /// earlier daemon.
    fn sides_of(&self, key: (u32, u32)) -> u32 {
        let sides = self.channels.values().flat_map(|c| [c.initiator, c.acceptor]);
        sides.filter(|side| (side.endpoint, side.epoch) == key).count() as u32
    }

    pub(crate) fn one_more_side(&mut self, side: &Side) {
        if let Some(endpoint) = self.endpoints.get_mut(&side.endpoint).filter(|e| e.epoch == side.epoch) {
            endpoint.sides += 1;
        }
    }

    pub(crate) fn one_less_side(&mut self, side: &Side) {
        let key = (side.endpoint, side.epoch);
        if let Some(endpoint) = self.endpoints.get_mut(&side.endpoint).filter(|e| e.epoch == side.epoch) {
            endpoint.sides -= 1;
        } else if let Some(sides) = self.boards.ended.get_mut(&key) {
            *sides -= 1;
            if *sides == 0 {
                self.boards.ended.remove(&key);
                self.give_boards(key);
            }
        }
    }

    /// Handles the end of an endpoint, which has been taken out of the books.
    pub(crate) fn boards_of_dead(&mut self, endpoint: &Endpoint) {
        let key = (endpoint.number, endpoint.epoch);
        if endpoint.sides == 0 {
            self.give_boards(key);
        } else if self.boards.all.contains_key(&key) {
            self.boards.ended.insert(key, endpoint.sides);
        }
    }

    fn give_boards(&mut self, key: (u32, u32)) {
        for board in self.boards.all.remove(&key).unwrap_or_default().into_values() {
            self.discharge(board.account(), Tally::bytes(board::LEN as u64));
            if let Some(segment) = self.segments.get_mut(&board.segment.0) {
                let given = segment.arena.give(board.offset, board::LEN as u64);
                debug_assert!(given, "the page of a board was taken");
            }
        }
    }
}
