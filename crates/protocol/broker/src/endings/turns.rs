//! The turns in which the broker gives back what ending endpoints had.

use crate::broker::Broker;
use crate::objects::Change;
use crate::record::Record;

/// The number of these that one endpoint gets at a time if others are ending as well.
const SHARE: usize = 64;

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
