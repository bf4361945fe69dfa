//! Which changes begin and end the relaying of doorbells, and the rings.

use crate::broker::Broker;
use crate::effects::Effect;
use crate::objects::Change;
use crate::record::Record;

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
