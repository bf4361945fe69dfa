//! What the books charge the accounts for.

use super::{Account, Tally};
use crate::books::{Books, Endpoint};
use ginnel_layout::Name;

impl Endpoint {
    /// Returns the account that is charged for the endpoint and for everything that it makes.
    pub fn account(&self) -> Account {
        Account::new(self.member, self.segment, self.uid)
    }
}

impl Books {
    pub(crate) fn charge(&mut self, account: Account, more: Tally) {
        let tally = self.tallies.entry(account).or_default();
        *tally = tally.plus(more);
    }

    pub(crate) fn discharge(&mut self, account: Account, less: Tally) {
        let Some(tally) = self.tallies.get_mut(&account) else { return };
        *tally = tally.minus(less);
        if *tally == Tally::default() {
            self.tallies.remove(&account);
        }
    }

    /// Returns what an account is charged for.
    pub fn tally(&self, account: Account) -> Tally {
        self.tallies.get(&account).copied().unwrap_or_default()
    }

    /// Returns the accounts of a member.
    pub fn accounts_of(&self, member: u32) -> impl Iterator<Item = (&Account, &Tally)> {
        let first = Account { member, segment: Name::NONE, uid: 0 };
        self.tallies.range(first..).take_while(move |(account, _)| account.member == member)
    }

    /// Returns whether a member is charged for anything.
    pub fn has_accounts(&self, member: u32) -> bool {
        self.accounts_of(member).next().is_some()
    }

    /// Returns the sum over all accounts of a member.
    pub fn tally_of(&self, member: u32) -> Tally {
        self.accounts_of(member).fold(Tally::default(), |sum, (_, tally)| sum.plus(*tally))
    }
}
