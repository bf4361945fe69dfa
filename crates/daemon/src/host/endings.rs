//! The end of an endpoint that has much: it is worked through in parts, so that nobody waits for it.
//!
//! What ends within a turn is one record. An endpoint with more than that is recorded as ending: nobody can be it any more,
//! or connect to it. Then its channels, locks, handles and names are given back one by one, each with its own record, so
//! the journal says at each moment what the books say. A daemon that is killed meanwhile leaves the rest to the next one.

use super::account::Tally;
use super::books::{Books, InvalidRecord};
use super::broker::Broker;
use super::objects::Change;
use super::record::Record;
use std::collections::VecDeque;

/// Channels, locks, handles and names that are given back before others have their turn.
pub const TURN: usize = 512;
/// How many of these may be of one endpoint, if others end as well.
const SHARE: usize = 64;

/// The endpoints that are ending.
#[derive(Debug)]
pub struct Endings {
    queue: VecDeque<u32>,
    /// What a turn can give back.
    turn: usize,
    /// What is left of this turn.
    rest: usize,
}

impl Default for Endings {
    fn default() -> Self {
        Self { queue: VecDeque::new(), turn: TURN, rest: TURN }
    }
}

impl Endings {
    /// What an earlier daemon has left.
    pub fn of(books: &Books) -> Self {
        let queue = books.endpoints.values().filter(|e| e.is_ending).map(|e| e.number).collect();
        Self { queue, ..Self::default() }
    }

    /// With turns of another length.
    #[cfg(test)]
    pub fn set_turn(&mut self, turn: usize) {
        (self.turn, self.rest) = (turn, turn);
    }
}

impl Books {
    /// Nobody can be this endpoint any more, or connect to it.
    pub(super) fn ending(&mut self, number: u32) -> Result<(), InvalidRecord> {
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
    /// Ends an endpoint at once if this turn has room for all that it gives back; tells everybody whom that concerns, but does
    /// not change the books. Else false.
    pub(super) fn ends_at_once(&mut self, endpoint: u32) -> bool {
        let most = self.endings.rest;
        let ends = self.ends(endpoint, most.saturating_add(1));
        if ends.len() > most {
            return false;
        }
        self.endings.rest -= ends.len();
        ends.into_iter().for_each(|change| change.mark_end(self));
        true
    }

    /// At most so many of the changes that give back what an endpoint has.
    fn ends(&self, endpoint: u32, most: usize) -> Vec<Change> {
        let endpoint = self.books.endpoints.get(&endpoint);
        endpoint.map(|e| Change::ends(&self.books, e).take(most).collect()).unwrap_or_default()
    }

    /// From now on an endpoint ends, turn by turn.
    pub(super) fn begin_ending(&mut self, endpoint: u32) {
        if self.record(Record::Ending { endpoint }).is_ok() {
            self.endings.queue.push_back(endpoint);
        }
    }

    /// A turn: gives back a part of what endpoints had that are ending. True if there is more.
    pub(super) fn end_some(&mut self) -> bool {
        let mut rest = self.endings.turn;
        while rest > 0
            && let Some(endpoint) = self.endings.queue.pop_front()
        {
            let share = SHARE.min(rest);
            // The books log what they refuse.
            let given =
                self.ends(endpoint, share).into_iter().take_while(|change| self.give_back(change)).count();
            // One more than it gives back, so that endpoints that have nothing left end the turn, too.
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

    /// Ends all that are ending.
    pub(super) fn end_all(&mut self) {
        while self.end_some() {}
    }

    fn give_back(&mut self, change: &Change) -> bool {
        change.mark_end(self);
        self.record(Record::Object(change.clone())).is_ok()
    }
}
