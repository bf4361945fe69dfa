//! TCP connections of programs: the daemon finds the two ends of a connection and tells them where to meet.
//!
//! A program sends its socket to its daemon, on the host or in a VM, which gets the facts about it from its kernel. The host's
//! daemon trusts a VM's for its own VM. [`ginnel_tcp::Rendezvous`] decides which two reports are
//! the ends of one connection. Both ends are told the name of a listener in a segment that both may use. Nobody else knows the
//! name, so a program that connects there is the other end, and from then on their channel is like any other.
//!
//! All of this is in private memory: after a restart of the daemon, programs report again.

mod requests;

use crate::allowance::{Allowance, REPORTS_OF_PROCESS, Rate};
use crate::effects::{ClientId, Who};
use crate::process::Process;
use ginnel_tcp::{Rendezvous, Socket};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// The rate at which all processes of a user of the host, or of a VM, may report.
const REPORTS_OF_ALL: Rate = Rate { burst: 8000, interval: Duration::from_micros(250) };
/// The time between two searches for allowances that need not be kept.
const TIDY: Duration = Duration::from_secs(1);

/// Reports of TCP connections, and what is known about the programs that made them.
#[derive(Debug)]
pub struct Sockets {
    rendezvous: Rendezvous<Waiting>,
    /// The sockets of each session that wait for their other end, by the keys that the program has chosen.
    sessions: BTreeMap<ClientId, Session>,
    allowances: Allowances,
    /// Whether any program may leave TCP.
    enabled: bool,
}

/// How often each reporter may still report.
#[derive(Debug, Default)]
struct Allowances {
    of: BTreeMap<Reporter, Allowance>,
    tidied: Duration,
}

/// A reporter for which an allowance is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reporter {
    /// A process of a member.
    Process(u32, Process),
    /// All processes of a member that report on one account ([`account`]).
    All(u32, u32),
}

/// Returns the user on whose account a program reports. The daemon does not trust a VM's daemon about users, so all programs of a
/// VM have one account.
fn account(who: &Who) -> u32 {
    if who.is_relayed() { 0 } else { who.uid }
}

impl Allowances {
    /// Returns whether a program may report once more, and counts that report.
    fn take(&mut self, who: &Who, now: Duration) -> bool {
        if now.saturating_sub(self.tidied) >= TIDY {
            self.tidied = now;
            self.of.retain(|_, allowance| !allowance.is_full(now));
        }
        let all = Reporter::All(who.member, account(who));
        let process = Reporter::Process(who.member, who.process);
        [(process, REPORTS_OF_PROCESS), (all, REPORTS_OF_ALL)].into_iter().all(|(reporter, rate)| {
            self.of.entry(reporter).or_insert_with(|| Allowance::new(now)).take(rate, now)
        })
    }
}

#[derive(Debug, Default)]
struct Session {
    waiting: HashMap<u64, Socket>,
}

/// A report that waits for its other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Waiting {
    client: ClientId,
    key: u64,
}

impl Default for Sockets {
    fn default() -> Self {
        Self {
            rendezvous: Rendezvous::default(),
            sessions: BTreeMap::new(),
            allowances: Allowances::default(),
            enabled: true,
        }
    }
}

#[cfg(test)]
impl Sockets {
    /// Returns whether no report is waiting.
    pub fn rendezvous_is_empty(&self) -> bool {
        self.rendezvous.is_empty()
    }

    /// Resets the allowances, as if nobody had reported.
    pub fn allow_more(&mut self) {
        self.allowances.of.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_layout::HOST_MEMBER;

    fn who(member: u32, pid: u32, uid: u32) -> Who {
        Who { member, process: Process { pid, started: 1 }, image: None, uid, groups: Vec::new() }
    }

    #[test]
    fn the_reports_of_a_process_and_of_an_account_are_limited() {
        let now = Duration::ZERO;
        let mut allowances = Allowances::default();
        let of_process = REPORTS_OF_PROCESS.burst as usize;
        let of_all = REPORTS_OF_ALL.burst as usize;
        let mut taken = |who: Who, at| (0..2 * of_process).filter(|_| allowances.take(&who, at)).count();
        let processes = (of_all / of_process) as u32;
        for pid in 1..=processes {
            assert_eq!(taken(who(HOST_MEMBER, pid, 1000), now), of_process);
        }
        assert_eq!(taken(who(HOST_MEMBER, processes + 1, 1000), now), 0, "its user has reported enough");
        assert_eq!(taken(who(HOST_MEMBER, processes + 2, 1001), now), of_process, "another has not");
        // A VM's daemon may claim that its programs belong to any users.
        let vm: usize = (1..=2 * processes).map(|n| taken(who(3, n, n), now)).sum();
        assert_eq!(vm, of_all);
        let later = now + Duration::from_secs(3600);
        assert_eq!(taken(who(HOST_MEMBER, 1, 1000), later), of_process);
        assert_eq!(allowances.of.len(), 2, "the others are full again");
    }
}
