//! Doorbells that the daemon passes on: where a VM's program cannot ring a peer by itself, it rings the host's daemon
//! vector, which does not say who is meant.

use super::broker::{Broker, Effect};
use super::record::{Record, Side};
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
    fn insert(&mut self, reason: Reason, bell: (u32, u32)) {
        if self.reasons.insert(reason, bell).is_none() {
            *self.bells.entry(bell).or_default() += 1;
        }
    }

    fn remove(&mut self, reason: Reason) {
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
    /// Makes the index of what the books say.
    pub(super) fn index_relayed(&mut self) {
        for channel in self.books.relayed.iter().copied().collect::<Vec<_>>() {
            self.relay_channel(channel);
        }
        let users = self.books.syncs.values().flat_map(|s| s.users.iter().map(|user| (s.number, user.slot)));
        for (object, slot) in users.collect::<Vec<_>>() {
            self.relay_user(object, slot);
        }
    }

    /// What a record that is about to be applied ends.
    pub(super) fn unrelay(&mut self, record: &Record) {
        match *record {
            Record::Closed { channel, initiator } => {
                self.relayed_bells.remove(Reason::Channel(channel, initiator));
            }
            Record::SyncClosed { object, slot, .. } => {
                self.relayed_bells.remove(Reason::Sync(object, slot));
            }
            Record::Dead { endpoint } => {
                let Some(dead) = self.books.endpoints.get(&endpoint) else { return };
                for &(object, slot) in &dead.syncs {
                    self.relayed_bells.remove(Reason::Sync(object, slot));
                }
                for &number in &dead.channels {
                    for initiator in [true, false] {
                        let channel = self.books.channels.get(&number);
                        if channel.is_some_and(|c| c.side(initiator).endpoint == endpoint) {
                            self.relayed_bells.remove(Reason::Channel(number, initiator));
                        }
                    }
                }
            }
            _ => {}
        }
    }

    /// What a record that was applied brings.
    pub(super) fn relay(&mut self, record: &Record) {
        match record {
            Record::Channel(channel) if channel.relayed => self.relay_channel(channel.number),
            Record::SyncOpened { object, user } => self.relay_user(*object, user.slot),
            _ => {}
        }
    }

    fn relay_channel(&mut self, number: u64) {
        let Some(channel) = self.books.channels.get(&number) else { return };
        for (initiator, side) in [(true, channel.initiator), (false, channel.acceptor)] {
            let Side { endpoint, epoch, closed: false, .. } = side else { continue };
            if let Some(endpoint) = self.books.endpoints.get(&endpoint).filter(|e| e.epoch == epoch) {
                let bell = (endpoint.member, endpoint.vector);
                self.relayed_bells.insert(Reason::Channel(number, initiator), bell);
            }
        }
    }

    /// Whether the newcomer and each of the others can ring one another. An object has few users.
    fn relay_user(&mut self, object: u64, slot: u32) {
        let Some(users) = self.books.syncs.get(&object).map(|object| object.users.clone()) else { return };
        let bell = |slot: u32| self.books.sync_bell(object, slot);
        let Some(own) = bell(slot) else { return };
        let mut unknown = Vec::new();
        for other in users.iter().map(|user| user.slot).filter(|other| *other != slot) {
            let Some(bell) = bell(other) else { continue };
            if !self.knows(own.0, bell.0, bell.1) {
                unknown.push((other, bell));
            }
            if !self.knows(bell.0, own.0, own.1) {
                unknown.push((slot, own));
            }
        }
        for (slot, bell) in unknown {
            self.relayed_bells.insert(Reason::Sync(object, slot), bell);
        }
    }

    /// The host's daemon vector was rung: who rings by way of the daemon has meant somebody of these.
    pub fn relay_rings(&mut self) {
        for (member, vector) in self.relayed_bells.bells().collect::<Vec<_>>() {
            self.effect(Effect::Ring { member, vector });
        }
    }
}
