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

use crate::account::Tally;
use crate::books::{Books, Endpoint, InvalidRecord};
use crate::broker::{Broker, Effect, Who};
use crate::caller::Caller;
use crate::limits::MAX_HOLDS;
use crate::process::Process;
use crate::record::{Hex16, Record};
use crate::reply::Refusal;
use ginnel_config::Period;
use ginnel_layout::HOST_MEMBER;
use ginnel_layout::wire::{self, ErrorCode};
use std::time::Duration;
use tracing::{debug, info};

/// A hold of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The duration in milliseconds.
    pub millis: u32,
    /// The process that has adopted the endpoint with the hold's token. The hold does not keep the endpoint alive after that.
    pub adopter: Option<Process>,
}

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
            if Broker::token_matches(ours, token) && hold.adopter.is_none_or(|adopter| adopter == *process) {
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

impl Broker {
    /// Handles an owner's request for a hold, for more time, or for the end of a hold.
    pub(crate) fn hold(&mut self, caller: &Caller, body: &wire::Hold) -> Result<(), Refusal> {
        let (number, token) = (caller.endpoint, Hex16(body.token));
        let known = self.endpoint_of(caller)?.holds.get(&token).copied();
        if body.millis == 0 {
            // If there is no such hold, the request is a repetition or comes too late. The hold has ended, as the owner requested.
            if known.is_some() {
                self.end_hold(number, token)?;
            }
            return self.ok(caller);
        }
        if body.token == [0; 16] {
            let text = "the token of a hold is zeros: choose one that nobody can guess";
            return Err(Refusal::new(ErrorCode::INVALID, text));
        }
        let time = |millis: u64| Period(Duration::from_millis(millis));
        if u64::from(body.millis) > self.limits.max_hold {
            let text = format!(
                "endpoint {number} is to be held for {}, and {} is the limit: ask for less, or raise max_hold",
                time(body.millis.into()),
                time(self.limits.max_hold)
            );
            return Err(Refusal::new(ErrorCode::LIMIT, text));
        }
        match known {
            Some(Hold { adopter: Some(_), .. }) => {
                let text = "somebody has adopted the endpoint with this token: choose another";
                return Err(Refusal::new(ErrorCode::INVALID, text));
            }
            Some(_) => {}
            None => self.may_hold(caller)?,
        }
        if known.is_none_or(|known| known.millis != body.millis) {
            self.record(Record::Hold { endpoint: number, token, millis: body.millis })?;
        }
        debug!(endpoint = number, millis = body.millis, "endpoint is held");
        let Caller { endpoint, epoch, .. } = *caller;
        self.effect(Effect::TimeHold { endpoint, epoch, token, millis: body.millis });
        self.ok(caller)
    }

    /// Refuses a hold if the endpoint or its account has enough of them.
    fn may_hold(&self, caller: &Caller) -> Result<(), Refusal> {
        if self.endpoint_of(caller)?.holds.len() >= MAX_HOLDS {
            let text = format!(
                "endpoint {} has {MAX_HOLDS} holds, which is the limit: wait until some have ended",
                caller.endpoint
            );
            return Err(Refusal::new(ErrorCode::LIMIT, text));
        }
        let (account, limit) = (caller.account(), self.limits_of(caller.member).holds_per_member);
        if self.books.tally(account).holds >= limit {
            let text = format!(
                "{account} has {limit} holds, which is the limit: wait until some have ended, or raise holds_per_member"
            );
            return Err(Refusal::new(ErrorCode::LIMIT, text));
        }
        Ok(())
    }

    /// Refuses a process that wants to own an endpoint, if its user differs and may not use the segment. Inside a guest, the
    /// guest itself is responsible for its users.
    pub(crate) fn may_adopt(&self, endpoint: &Endpoint, who: &Who) -> Result<(), Refusal> {
        let segment = endpoint.segment;
        if who.member != HOST_MEMBER
            || endpoint.uid == who.uid
            || endpoint.owners.contains(&who.process)
            || self.may_attach(&segment, who.uid, &who.groups)
        {
            return Ok(());
        }
        let text = format!(
            "endpoint {} is of user {}, and user {} may not use segment {segment}: add the user to allow_users, or a group to \
             allow_groups, of [segment.{segment}]",
            endpoint.number, endpoint.uid, who.uid
        );
        Err(Refusal::new(ErrorCode::DENIED, text))
    }

    /// Makes a process that has shown the token of a hold an owner of the endpoint.
    pub(crate) fn adopted(&mut self, endpoint: u32, token: Hex16, process: Process) -> Result<(), Refusal> {
        let hold = self.books.endpoints.get(&endpoint).and_then(|endpoint| endpoint.holds.get(&token));
        if hold.is_none_or(|hold| hold.adopter.is_some()) {
            return Ok(()); // The process repeats its request.
        }
        info!(endpoint, pid = process.pid, "a process adopted the endpoint");
        self.record(Record::Adopted { endpoint, token, process })
    }

    /// Ends a hold whose time is over.
    pub fn hold_over(&mut self, endpoint: u32, epoch: u32, token: Hex16) {
        let there = self.books.endpoints.get(&endpoint).filter(|e| e.epoch == epoch);
        if there.is_some_and(|endpoint| endpoint.holds.contains_key(&token)) {
            // The hold is in the books, so they cannot refuse its end.
            let _ = self.end_hold(endpoint, token);
        }
    }

    fn end_hold(&mut self, endpoint: u32, token: Hex16) -> Result<(), Refusal> {
        self.effect(Effect::ForgetHold { endpoint, token });
        self.record(Record::HoldEnded { endpoint, token })?;
        debug!(endpoint, "a hold has ended");
        self.end_if_abandoned(endpoint);
        Ok(())
    }

    /// Starts the timers of all holds that an earlier daemon has left, with their full duration: without a daemon nobody could
    /// adopt.
    pub fn time_holds(&mut self) {
        let holds = self.books.endpoints.values().flat_map(|e| e.holds.iter().map(move |hold| (e, hold)));
        let effects = holds.map(|(e, (&token, hold))| Effect::TimeHold {
            endpoint: e.number,
            epoch: e.epoch,
            token,
            millis: hold.millis,
        });
        self.effects.extend(effects.collect::<Vec<_>>());
    }
}
