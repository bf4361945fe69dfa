//! The limits on handles and blocks, and what a client is told at a limit or in a full segment.

use crate::account::Account;
use crate::books::Endpoint;
use crate::broker::Broker;
use crate::reply::Refusal;
use ginnel_layout::Name;
use ginnel_layout::wire::ErrorCode;

impl Broker {
    /// Refuses one more handle if the endpoint or its account has as many as allowed.
    pub(crate) fn handle_quota(&self, endpoint: &Endpoint) -> Result<(), Refusal> {
        let limits = self.limits_of(endpoint.member);
        let own = endpoint.syncs.len() + endpoint.handles.len();
        let account = endpoint.account();
        let all = self.books.tally(account).handles as usize;
        for (key, open, limit) in [
            ("handles_per_endpoint", own, limits.handles_per_endpoint),
            ("handles_per_member", all, limits.handles_per_member),
        ] {
            if open >= limit as usize {
                let number = endpoint.number;
                let text = format!(
                    "endpoint {number}, or {account}, has {open} handles of blocks and synchronisation objects, which is its limit: \
                     close some, or raise {key}"
                );
                return Err(Refusal::new(ErrorCode::QUOTA, text));
            }
        }
        Ok(())
    }

    /// Refuses this many more blocks and bytes of blocks if the account would exceed its limits.
    pub(crate) fn block_quota(&self, account: Account, blocks: u64, bytes: u64) -> Result<(), Refusal> {
        let limits = self.limits_of(account.member);
        let tally = self.books.tally(account);
        for (key, used, more, limit) in [
            ("blocks_per_member", tally.blocks.into(), blocks, limits.blocks_per_member.into()),
            ("block_bytes_per_member", tally.block_bytes, bytes, limits.block_bytes_per_member),
        ] {
            if used.saturating_add(more) > limit {
                let text = format!(
                    "{account} has {used} of {limit}, and this takes {more} more: free some, or raise {key}"
                );
                return Err(Refusal::new(ErrorCode::QUOTA, text));
            }
        }
        Ok(())
    }
}

/// Makes the refusal for a full segment.
pub(crate) fn no_room(segment: &Name, len: u64, longest: u64) -> Refusal {
    let text = format!(
        "segment {segment} has no room for {len} bytes (its longest free run has {longest}): free blocks, close \
         channels, or make the segment larger"
    );
    Refusal::new(ErrorCode::NO_MEMORY, text)
}
