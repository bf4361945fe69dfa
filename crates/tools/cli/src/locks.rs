//! `ginnel locks`.

use crate::inspect::{Inspect, Lock, User};
use crate::list::{self, Listed, or_dash};
use anyhow::Result;

/// Shows the locks of segments: owner, readers, and who waits since when.
///
/// Locks are mutexes, read-write locks, condition variables, semaphores, barriers and onces. On the host, this shows
/// all locks. In a VM, it shows those of the segments in which the VM has a share.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    which: list::Which,
}

pub fn run(args: Args) -> Result<()> {
    list::run::<Lock>(&args.which)
}

impl Listed for Lock {
    const NAME: &'static str = "locks";
    const TITLES: &'static [&'static str] = &["SEGMENT", "LOCK", "KIND", "STATE", "USERS", "WAITING"];

    fn of(inspect: &Inspect) -> (&[Self], usize) {
        (&inspect.locks, inspect.locks_total)
    }

    fn segment(&self) -> &str {
        &self.segment
    }

    fn row(&self) -> Vec<String> {
        vec![
            self.segment.clone(),
            or_dash(&*self.name),
            self.kind.clone(),
            state(self),
            self.users.to_string(),
            or_dash(users(&self.waiters)),
        ]
    }
}

fn users(users: &[User]) -> String {
    let one = |user: &User| match user.since_s {
        Some(seconds) => format!("{user} ({seconds:.1} s)"),
        None => user.to_string(),
    };
    users.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn state(lock: &Lock) -> String {
    let mut parts = Vec::new();
    if let Some(owner) = &lock.owner {
        parts.push(format!("held by {owner}"));
    }
    if !lock.readers.is_empty() {
        parts.push(format!("read by {}", users(&lock.readers)));
    }
    if let Some(permits) = lock.permits {
        parts.push(format!("{permits} of {} permits", lock.limit));
    }
    if lock.kind == "barrier" {
        parts.push(format!("{} parties", lock.limit));
    }
    for (flag, text) in [
        (lock.owner_died, if lock.kind == "barrier" { "broken" } else { "OWNER DIED" }),
        (lock.not_recoverable, "NOT RECOVERABLE"),
        (lock.done, "done"),
    ] {
        if flag {
            parts.push(text.into());
        }
    }
    if parts.is_empty() { "free".into() } else { parts.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_shown_with_owner_and_waiters() {
        let answer = r#"{"locks_total": 4, "locks": [
            {"segment": "web", "name": "m", "kind": "mutex", "users": 3, "owner": {"endpoint": 1, "name": "a", "member": "host"},
             "owner_died": true, "waiters": [{"endpoint": 2, "name": "b", "member": "vm-a", "since_s": 1.25},
             {"endpoint": 3, "name": "c", "member": "vm-a", "since_s": null}]},
            {"segment": "web", "name": "s", "kind": "semaphore", "limit": 5, "permits": 2, "users": 1},
            {"segment": "web", "name": "", "kind": "barrier", "limit": 4, "owner_died": true, "users": 1},
            {"segment": "db", "name": "r", "kind": "rwlock", "users": 1}]}"#;
        let all = list::table::<Lock>(&crate::inspect::parse(answer).unwrap(), None).to_string();
        for line in [
            "web      m     mutex      held by 1 a@host, OWNER DIED  3      2 b@vm-a (1.2 s), 3 c@vm-a",
            "web      s     semaphore  2 of 5 permits                1      -",
            "web      -     barrier    4 parties, broken             1      -",
            "db       r     rwlock     free                          1      -",
        ] {
            assert!(all.lines().any(|l| l == line), "{line:?} is missing in\n{all}");
        }
    }
}
