//! The end of an endpoint that has much: it is worked through in parts, so that nobody waits for it.
//!
//! What ends within a turn is one record. An endpoint with more than that is recorded as ending: nobody can be it any more,
//! or connect to it. Then its channels, locks, handles and names are given back one by one, each with its own record, so
//! the journal says at each moment what the books say. A daemon that is killed meanwhile leaves the rest to the next one.

use super::books::{Books, Endpoint, Misfit};
use super::broker::Broker;
use super::record::Record;
use ginnel_layout::ring::SideState;
use ginnel_sync::authority::Left;
use std::collections::VecDeque;

/// Channels, locks, handles and names that are given back before others have their turn.
pub const TURN: usize = 512;
/// How many of these may be of one endpoint, if others end as well.
const SHARE: usize = 64;

/// The endpoints that are ending.
#[derive(Debug)]
pub struct Endings {
    queue: VecDeque<Ending>,
    /// What a turn can give back.
    turn: usize,
    /// What is left of this turn.
    rest: usize,
}

#[derive(Debug)]
struct Ending {
    endpoint: u32,
    /// Its blocks before this one are done.
    block: u64,
}

impl Default for Endings {
    fn default() -> Self {
        Self { queue: VecDeque::new(), turn: TURN, rest: TURN }
    }
}

impl Endings {
    /// What an earlier daemon has left.
    pub fn of(books: &Books) -> Self {
        let ending = books.endpoints.values().filter(|e| e.is_ending);
        let queue = ending.map(|e| Ending { endpoint: e.number, block: 0 }).collect();
        Self { queue, ..Self::default() }
    }

    /// With turns of another length.
    #[cfg(test)]
    pub fn set_turn(&mut self, turn: usize) {
        (self.turn, self.rest) = (turn, turn);
    }
}

impl Endpoint {
    fn holdings(&self) -> usize {
        self.channels.len() + self.syncs.len() + self.handles.len() + self.blocks.len()
    }
}

impl Books {
    /// Nobody can be this endpoint any more, or connect to it.
    pub(super) fn ending(&mut self, number: u32) -> Result<(), Misfit> {
        let endpoint = self.endpoints.get_mut(&number).ok_or(Misfit("an unknown endpoint ends"))?;
        endpoint.is_ending = true;
        endpoint.owners.clear();
        for listener in endpoint.listeners.clone() {
            self.unlisten(listener)?;
        }
        Ok(())
    }
}

impl Broker {
    /// Whether an endpoint has so little that it can end at once.
    pub(super) fn ends_at_once(&mut self, number: u32) -> bool {
        let holdings = self.books.endpoints.get(&number).map_or(0, Endpoint::holdings);
        let fits = holdings <= self.endings.rest;
        self.endings.rest -= if fits { holdings } else { 0 };
        fits
    }

    /// From now on an endpoint ends, turn by turn.
    pub(super) fn begin_ending(&mut self, endpoint: u32) {
        if self.record(Record::Ending { endpoint }).is_ok() {
            self.endings.queue.push_back(Ending { endpoint, block: 0 });
        }
    }

    /// A turn: gives back a part of what endpoints had that are ending. True if there is more.
    pub(super) fn end_some(&mut self) -> bool {
        let mut rest = self.endings.turn;
        while rest > 0
            && let Some(mut ending) = self.endings.queue.pop_front()
        {
            let share = SHARE.min(rest);
            let given = (0..share).take_while(|_| self.give_back_one(&mut ending)).count();
            // One more than it gives back, so that endpoints that have nothing left end the turn, too.
            rest = rest.saturating_sub(given + 1);
            if given == share {
                self.endings.queue.push_back(ending);
            } else {
                // Known to be there, so this cannot be refused.
                let _ = self.record(Record::Dead { endpoint: ending.endpoint });
            }
        }
        self.endings.rest = self.endings.turn;
        !self.endings.queue.is_empty()
    }

    /// Ends all that are ending.
    pub(super) fn end_all(&mut self) {
        while self.end_some() {}
    }

    /// Gives back one thing. False if there is none left, or if the books refuse it, which they log.
    fn give_back_one(&mut self, ending: &mut Ending) -> bool {
        let number = ending.endpoint;
        let Some(endpoint) = self.books.endpoints.get(&number) else { return false };
        if let Some(&channel) = endpoint.channels.first() {
            let sides = [true, false].into_iter().filter(|initiator| {
                let channel = self.books.channels.get(&channel);
                channel.is_some_and(|c| c.side(*initiator).endpoint == number && !c.side(*initiator).closed)
            });
            let sides: Vec<bool> = sides.collect();
            return !sides.is_empty()
                && sides.into_iter().all(|initiator| {
                    self.mark(channel, initiator, SideState::DEAD);
                    self.record(Record::Closed { channel, initiator }).is_ok()
                });
        }
        if let Some(&(object, slot)) = endpoint.syncs.first() {
            self.reclaim(object, slot, Left::Died);
            return self.record(Record::SyncClosed { object, slot, died: true }).is_ok();
        }
        if let Some((_, &handle)) = endpoint.handles.first_key_value() {
            return self.record(Record::BlockClosed { handle }).is_ok();
        }
        let Some(&block) = endpoint.blocks.range(ending.block..).next() else { return false };
        ending.block = block + 1;
        match self.books.is_name_ending(block) {
            true => self.record(Record::BlockUnlinked { block }).is_ok(),
            false => true,
        }
    }
}
