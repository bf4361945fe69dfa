//! Doorbells that the daemon passes on: where a VM's program cannot ring a peer by itself, it rings the host's daemon
//! vector, which does not say who is meant.

use super::broker::{Broker, Effect};
use super::objects::Change;
use super::record::Record;
use std::collections::BTreeMap;

/// Why a doorbell may be meant: a side of a channel, or a user of a synchronisation object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Number of the channel, and whether its initiator is meant.
    Channel(u64, bool),
    /// Number of the object, and the user's slot.
    Sync(u64, u32),
}

/// The doorbells (member and vector) that somebody may mean who rings the daemon's vector.
///
/// A reason lasts as long as the channel's side or the object's user: a program that was told to ring by way of the daemon goes
/// on with that.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Relayed {
    reasons: BTreeMap<Reason, (u32, u32)>,
    /// How many reasons there are for each.
    bells: BTreeMap<(u32, u32), u32>,
}

impl Relayed {
    pub(super) fn insert(&mut self, reason: Reason, bell: (u32, u32)) {
        if self.reasons.insert(reason, bell).is_none() {
            *self.bells.entry(bell).or_default() += 1;
        }
    }

    pub(super) fn remove(&mut self, reason: Reason) {
        let Some(bell) = self.reasons.remove(&reason) else { return };
        if let Some(count) = self.bells.get_mut(&bell) {
            *count -= 1;
            if *count == 0 {
                self.bells.remove(&bell);
            }
        }
    }

    /// The reasons.
    #[cfg(test)]
    pub fn reasons(&self) -> &BTreeMap<Reason, (u32, u32)> {
        &self.reasons
    }

    /// The doorbells, each once.
    pub fn bells(&self) -> impl Iterator<Item = (u32, u32)> {
        self.bells.keys().copied()
    }
}

impl Broker {
    /// Makes the index of what the books of an earlier daemon say.
    pub(super) fn index_relayed(&mut self) {
        Change::relay_all(&self.books, &mut self.relayed_bells);
    }

    /// What a record that is about to be applied ends.
    pub(super) fn unrelay(&mut self, record: &Record) {
        match record {
            Record::Object(change) => change.unrelay(&mut self.relayed_bells),
            Record::Dead { endpoint } => {
                let Some(dead) = self.books.endpoints.get(endpoint) else { return };
                Change::ends(&self.books, dead).for_each(|change| change.unrelay(&mut self.relayed_bells));
            }
            _ => {}
        }
    }

    /// What a record that was applied brings.
    pub(super) fn relay(&mut self, record: &Record) {
        if let Record::Object(change) = record {
            change.relay(&self.books, &mut self.relayed_bells);
        }
    }

    /// The host's daemon vector was rung: who rings by way of the daemon has meant somebody of these.
    pub fn relay_rings(&mut self) {
        for (member, vector) in self.relayed_bells.bells().collect::<Vec<_>>() {
            self.effect(Effect::Ring { member, vector });
        }
    }
}
