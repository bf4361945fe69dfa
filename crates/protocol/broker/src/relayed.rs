//! Doorbells that the daemon relays. A VM's program that cannot ring a peer directly rings the host's daemon vector, which does
//! not say which peer is meant.

use crate::broker::{Broker, Effect};
use crate::objects::Change;
use crate::record::Record;
use std::collections::BTreeMap;

/// The reason why a doorbell is relayed: a side of a channel, or a user of a synchronisation object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The number of the channel, and whether its initiator is to be rung.
    Channel(u64, bool),
    /// The number of the object, and the user's slot.
    Sync(u64, u32),
}

/// The doorbells (member and vector) that a program may mean when it rings the daemon's vector.
///
/// A reason lasts as long as the channel's side or the object's user: a program that was told to ring through the daemon
/// continues to do so.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Relayed {
    reasons: BTreeMap<Reason, (u32, u32)>,
    /// The number of reasons for each doorbell.
    bells: BTreeMap<(u32, u32), u32>,
}

impl Relayed {
    pub(crate) fn insert(&mut self, reason: Reason, bell: (u32, u32)) {
        if self.reasons.insert(reason, bell).is_none() {
            *self.bells.entry(bell).or_default() += 1;
        }
    }

    pub(crate) fn remove(&mut self, reason: Reason) {
        let Some(bell) = self.reasons.remove(&reason) else { return };
        if let Some(count) = self.bells.get_mut(&bell) {
            *count -= 1;
            if *count == 0 {
                self.bells.remove(&bell);
            }
        }
    }

    /// Returns the reasons.
    #[cfg(any(test, fuzzing))]
    pub fn reasons(&self) -> &BTreeMap<Reason, (u32, u32)> {
        &self.reasons
    }

    /// Returns the doorbells, each once.
    pub fn bells(&self) -> impl Iterator<Item = (u32, u32)> {
        self.bells.keys().copied()
    }
}

impl Broker {
    /// Makes the index from the books of an earlier daemon.
    pub(crate) fn index_relayed(&mut self) {
        Change::relay_all(&self.books, &mut self.relayed_bells);
    }

    /// Removes the reasons that a record ends. Must be called before the record is applied.
    pub(crate) fn unrelay(&mut self, record: &Record) {
        match record {
            Record::Object(change) => change.unrelay(&mut self.relayed_bells),
            Record::Dead { endpoint } => {
                let Some(dead) = self.books.endpoints.get(endpoint) else { return };
                Change::ends(&self.books, dead).for_each(|change| change.unrelay(&mut self.relayed_bells));
            }
            _ => {}
        }
    }

    /// Adds the reasons that a record creates. Must be called after the record was applied.
    pub(crate) fn relay(&mut self, record: &Record) {
        if let Record::Object(change) = record {
            change.relay(&self.books, &mut self.relayed_bells);
        }
    }

    /// Rings all relayed doorbells, because the host's daemon vector was rung and any of them may be meant.
    pub fn relay_rings(&mut self) {
        for (member, vector) in self.relayed_bells.bells().collect::<Vec<_>>() {
            self.effect(Effect::Ring { member, vector });
        }
    }
}
