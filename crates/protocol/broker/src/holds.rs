//! Holds: an endpoint lives for a bounded time without owners, so that another process can adopt it.
//!
//! A process that is about to execute another program, or to hand its connections to another process, asks for a hold with a
//! token of its own choice, and passes the token on. A process that attaches with the token becomes an owner. A token is valid
//! for one process and for the duration of its hold. The token of the endpoint itself never leaves the processes that own it.
//!
//! | which process ends, and when | consequence |
//! |---|---|
//! | the holder, before another process has the token | the hold ends after its time, and the endpoint with it, unless others own it |
//! | the holder, later | none; this is the purpose of a hold |
//! | the adopter, before it attaches | the same as without an adopter: until the time is over, another process can adopt |
//! | the adopter, later | it is an owner like others; if it is the last one, the endpoint ends |
//! | the daemon | the hold is in the journal, and its time begins anew with the next daemon, because nobody could adopt without a daemon |
//! | the VM, or its kernel | the endpoint ends, held or not |
//!
//! If the daemon ends before it has answered an adopter, the adopter asks again with the same token. So the daemon remembers a
//! used hold for this one process until its time is over.

mod requests;

use crate::account::Tally;
use crate::books::{Books, Endpoint, InvalidRecord};
pub use crate::hold::Hold;
use crate::process::Process;
use crate::record::Record;
use crate::text::Hex16;

impl Endpoint {
    /// Returns whether a hold keeps the endpoint alive without owners.
    pub fn is_held(&self) -> bool {
        self.holds.values().any(|hold| hold.adopter.is_none())
    }

    /// Returns the hold that matches a token and that this process may use. Compares all tokens, in a time that does not depend
    /// on their contents.
    pub(crate) fn hold_for(&self, token: &[u8; 16], process: &Process) -> Option<Hex16> {
        let mut found = None;
        for (ours, hold) in &self.holds {
            if token_matches(ours, token) && hold.adopter.is_none_or(|adopter| adopter == *process) {
                found = Some(*ours);
            }
        }
        found
    }

    pub(crate) fn dump_holds(&self) -> impl Iterator<Item = Record> {
        let endpoint = self.number;
        self.holds.iter().flat_map(move |(&token, hold)| {
            let adopted = hold.adopter.map(|process| Record::Adopted { endpoint, token, process });
            std::iter::once(Record::Hold { endpoint, token, millis: hold.millis }).chain(adopted)
        })
    }
}

impl Books {
    /// Begins a hold, or changes its duration.
    pub(crate) fn hold(&mut self, endpoint: u32, token: Hex16, millis: u32) -> Result<(), InvalidRecord> {
        let endpoint = self.endpoints.get_mut(&endpoint).filter(|endpoint| !endpoint.is_ending);
        let endpoint = endpoint.ok_or(InvalidRecord("an unknown endpoint was held"))?;
        let old = endpoint.holds.insert(token, Hold { millis, adopter: None });
        let account = endpoint.account();
        if old.is_none() {
            self.charge(account, Tally::holds(1));
        }
        Ok(())
    }

    pub(crate) fn adopted(
        &mut self,
        endpoint: u32,
        token: &Hex16,
        process: Process,
    ) -> Result<(), InvalidRecord> {
        let endpoint =
            self.endpoints.get_mut(&endpoint).ok_or(InvalidRecord("an unknown endpoint was adopted"))?;
        let hold = endpoint.holds.get_mut(token).filter(|hold| hold.adopter.is_none());
        hold.ok_or(InvalidRecord("an endpoint adopted that was not held"))?.adopter = Some(process);
        // The adopter may be the process that had the endpoint before, and now runs another program.
        self.boards.leave(endpoint.number, endpoint.epoch, process);
        Ok(())
    }

    pub(crate) fn hold_ended(&mut self, endpoint: u32, token: &Hex16) -> Result<(), InvalidRecord> {
        let endpoint =
            self.endpoints.get_mut(&endpoint).ok_or(InvalidRecord("an unknown endpoint was held"))?;
        endpoint.holds.remove(token).ok_or(InvalidRecord("an unknown hold ended"))?;
        let account = endpoint.account();
        self.discharge(account, Tally::holds(1));
        Ok(())
    }
}

/// Compares tokens of an endpoint, in a time that does not depend on their contents.
pub(crate) fn token_matches(ours: &Hex16, theirs: &[u8; 16]) -> bool {
    ours.0.iter().zip(theirs).fold(0, |different, (a, b)| different | (a ^ b)) == 0
}
