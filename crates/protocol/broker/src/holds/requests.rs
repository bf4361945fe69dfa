//! The requests for holds and by token, and the ends of holds.

use crate::books::Endpoint;
use crate::broker::Broker;
use crate::caller::Caller;
use crate::effects::{Effect, Who};
use crate::hold::Hold;
use crate::limits::MAX_HOLDS;
use crate::process::Process;
use crate::record::Record;
use crate::reply::Refusal;
use crate::text::Hex16;
use ginnel_config::Period;
use ginnel_layout::HOST_MEMBER;
use ginnel_layout::wire::{self, ErrorCode};
use std::time::Duration;
use tracing::{debug, info};

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
