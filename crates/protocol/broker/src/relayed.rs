//! Doorbells that the daemon relays. A VM's program that cannot ring a peer directly rings the host's daemon vector, which does
//! not say which peer is meant.

mod rings;

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
