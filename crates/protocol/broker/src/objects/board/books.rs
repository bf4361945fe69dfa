//! Readiness boards in the books.

use super::record::Board;
use crate::account::Tally;
use crate::books::{Books, Endpoint, InvalidRecord};
use crate::objects::channel::record::Side;
use crate::process::Process;
use ginnel_layout::board;

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

    /// Gives a board that was left to another process of the endpoint.
    pub(super) fn board_taken(
        &mut self,
        key: (u32, u32),
        old: u64,
        nonce: u64,
        process: Process,
    ) -> Result<(), InvalidRecord> {
        let boards = self.boards.all.get_mut(&key).ok_or(InvalidRecord("an unknown board was taken over"))?;
        if boards.contains_key(&nonce) {
            return Err(InvalidRecord("two boards of one request"));
        }
        let board = boards.get(&old).filter(|board| board.is_left);
        let board = *board.ok_or(InvalidRecord("a board was taken over that is in use"))?;
        boards.remove(&old);
        boards.insert(nonce, Board { nonce, process: Some(process), is_left: false, ..board });
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
