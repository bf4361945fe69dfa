//! The end of an endpoint that owns many things is worked through in parts, so that no client has to wait for it.
//!
//! If everything that the endpoint has can be given back within one turn, its end is one record. Otherwise the endpoint is first
//! recorded as ending: nobody can attach as it any more, or connect to it. Then its channels, locks, handles and names are given
//! back one by one, each with a record of its own, so that the journal and the books agree at every moment. If the daemon is
//! killed meanwhile, its successor does the rest.

use crate::account::Tally;
use crate::books::{Books, InvalidRecord};
use crate::broker::Broker;
use crate::objects::Change;
use crate::record::Record;
use std::collections::VecDeque;

/// The number of channels, locks, handles and names that one turn gives back.
pub const TURN: usize = 512;
/// The number of these that one endpoint gets at a time if others are ending as well.
const SHARE: usize = 64;

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

impl Broker {
    /// Returns true if this turn has room for everything that an endpoint gives back. Then tells all who are affected, but does
    /// not change the books. Otherwise returns false.
    pub(crate) fn ends_at_once(&mut self, endpoint: u32) -> bool {
        let most = self.endings.rest;
        let ends = self.ends(endpoint, most.saturating_add(1));
        if ends.len() > most {
            return false;
        }
        self.endings.rest -= ends.len();
        ends.into_iter().for_each(|change| change.mark_end(self));
        true
    }

    /// Returns at most `most` of the changes that give back what an endpoint has.
    fn ends(&self, endpoint: u32, most: usize) -> Vec<Change> {
        let endpoint = self.books.endpoints.get(&endpoint);
        endpoint.map(|e| Change::ends(&self.books, e).take(most).collect()).unwrap_or_default()
    }

    /// Starts to end an endpoint, turn by turn.
    pub(crate) fn begin_ending(&mut self, endpoint: u32) {
        if self.record(Record::Ending { endpoint }).is_ok() {
            self.endings.queue.push_back(endpoint);
        }
    }

    /// Runs one turn: gives back a part of what the ending endpoints had. Returns true if there is more.
    pub fn end_some(&mut self) -> bool {
        let mut rest = self.endings.turn;
        while rest > 0
            && let Some(endpoint) = self.endings.queue.pop_front()
        {
            let share = SHARE.min(rest);
            // The books log the changes that they refuse.
            let given =
                self.ends(endpoint, share).into_iter().take_while(|change| self.give_back(change)).count();
            // Each endpoint counts as one more than it gives back, so that endpoints that have nothing left use up the turn, too.
            rest = rest.saturating_sub(given + 1);
            if given == share {
                self.endings.queue.push_back(endpoint);
            } else {
                self.remove_endpoint(endpoint);
            }
        }
        self.endings.rest = self.endings.turn;
        !self.endings.queue.is_empty()
    }

    /// Completes all endings.
    pub(crate) fn end_all(&mut self) {
        while self.end_some() {}
    }

    fn give_back(&mut self, change: &Change) -> bool {
        change.mark_end(self);
        self.record(Record::Object(change.clone())).is_ok()
    }
}
