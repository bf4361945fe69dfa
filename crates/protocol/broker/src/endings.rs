//! The end of an endpoint that owns many things is worked through in parts, so that no client has to wait for it.
//!
//! If everything that the endpoint has can be given back within one turn, its end is one record. Otherwise the endpoint is first
//! recorded as ending: nobody can attach as it any more, or connect to it. Then its channels, locks, handles and names are given
//! back one by one, each with a record of its own, so that the journal and the books agree at every moment. If the daemon is
//! killed meanwhile, its successor does the rest.

mod turns;

use crate::account::Tally;
use crate::books::{Books, InvalidRecord};
use std::collections::VecDeque;

/// The number of channels, locks, handles and names that one turn gives back.
pub const TURN: usize = 512;

/// The endpoints that are ending.
#[derive(Debug)]
pub struct Endings {
    queue: VecDeque<u32>,
    /// The number of things that a turn can give back.
    turn: usize,
    /// The part of the present turn that is left.
    rest: usize,
}

impl Default for Endings {
    fn default() -> Self {
        Self { queue: VecDeque::new(), turn: TURN, rest: TURN }
    }
}

impl Endings {
    /// Starts with the endpoints whose ending an earlier daemon has not completed.
    pub fn of(books: &Books) -> Self {
        let queue = books.endpoints.values().filter(|e| e.is_ending).map(|e| e.number).collect();
        Self { queue, ..Self::default() }
    }

    /// Sets the length of a turn.
    #[cfg(any(test, fuzzing))]
    pub fn set_turn(&mut self, turn: usize) {
        (self.turn, self.rest) = (turn, turn);
    }
}

impl Books {
    /// Marks an endpoint as ending, so that nobody can attach as it any more, or connect to it.
    pub(crate) fn ending(&mut self, number: u32) -> Result<(), InvalidRecord> {
        let endpoint = self.endpoints.get_mut(&number).ok_or(InvalidRecord("an unknown endpoint ends"))?;
        endpoint.is_ending = true;
        endpoint.owners.clear();
        let (account, holds) = (endpoint.account(), std::mem::take(&mut endpoint.holds).len());
        for listener in endpoint.listeners.clone() {
            self.unlisten(listener)?;
        }
        self.discharge(account, Tally::holds(holds));
        Ok(())
    }
}
