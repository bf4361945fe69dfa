//! The users of the host whose programs were given the memory of a segment.
//!
//! Nobody can take it away from them again, and a program may have given up its endpoint and kept the memory. So this is all that is known
//! about who may have it, and it stays true as long as the segment has the same file.

use crate::declared::Access;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// How many are told apart. After that, all who may attach by the same right count as one.
const MOST: usize = 64;
/// How many groups of one are told apart. One with more groups is only known by those whose members may attach.
const GROUPS: usize = 32;

/// One who was given the memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Recipient {
    /// The user. `None` stands for everybody who may attach by one of the groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
    /// The groups of his program.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub groups: BTreeSet<u32>,
}

impl fmt::Display for Recipient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.user, self.groups.first()) {
            (Some(user), _) => write!(f, "user {user}"),
            (None, Some(group)) => write!(f, "group {group}"),
            (None, None) => f.write_str("nobody"),
        }
    }
}

/// All who were given the memory, except root.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Recipients(BTreeSet<Recipient>);

impl Recipients {
    /// Returns all who may attach. They count as recipients if it is not known who was given the memory.
    pub fn all(access: &Access) -> Self {
        let user = |user: &u32| Recipient { user: Some(*user), groups: BTreeSet::new() };
        let group = |group: &u32| Recipient { user: None, groups: [*group].into() };
        Self(access.users.iter().map(user).chain(access.groups.iter().map(group)).collect())
    }

    /// Returns them together with a user, to whom a program of these groups belongs and who may attach. `None` if that is known already.
    pub fn with(&self, user: u32, groups: &[u32], access: &Access) -> Option<Self> {
        let named = || groups.iter().copied().filter(|group| access.groups.contains(group));
        let groups = if groups.len() > GROUPS { named().collect() } else { groups.iter().copied().collect() };
        let mut one = Recipient { user: Some(user), groups };
        if !self.0.contains(&one) && self.0.len() >= MOST {
            one = match named().min().filter(|_| !access.users.contains(&user)) {
                Some(group) => Recipient { user: None, groups: [group].into() },
                None => Recipient { user: Some(user), groups: BTreeSet::new() },
            };
        }
        (!self.0.contains(&one)).then(|| Self(self.0.iter().cloned().chain([one]).collect()))
    }

    /// Returns these and those.
    pub fn and(&self, others: &Self) -> Self {
        Self(self.0.union(&others.0).cloned().collect())
    }

    /// Returns each of them.
    pub fn iter(&self) -> impl Iterator<Item = &Recipient> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(users: &[u32], groups: &[u32]) -> Access {
        Access {
            users: users.iter().copied().collect(),
            groups: groups.iter().copied().collect(),
            ..Access::default()
        }
    }

    fn excluded(all: &Recipients, access: &Access) -> Vec<String> {
        all.iter().filter(|one| !access.admits(one.user, &one.groups)).map(ToString::to_string).collect()
    }

    #[test]
    fn who_may_attach_by_another_right_is_not_excluded() {
        let first = access(&[1000], &[77]);
        let all = Recipients::default().with(1000, &[100, 1000], &first).unwrap();
        assert_eq!(all.with(1000, &[1000, 100], &first), None, "it is known");
        let all = all.with(1001, &[77, 78], &first).unwrap();
        assert!(excluded(&all, &first).is_empty());
        assert!(excluded(&all, &access(&[1001], &[100])).is_empty());
        assert!(excluded(&all, &access(&[], &[78, 1000])).is_empty());
        assert_eq!(excluded(&all, &access(&[1001], &[101])), ["user 1000"]);
        assert_eq!(excluded(&all, &access(&[], &[])), ["user 1000", "user 1001"]);
    }

    #[test]
    fn a_user_who_drops_a_group_counts_once_more() {
        let first = access(&[], &[77, 78]);
        let all = Recipients::default().with(1000, &[77], &first).unwrap().with(1000, &[78], &first).unwrap();
        assert_eq!(excluded(&all, &access(&[], &[77])), ["user 1000"]);
    }

    #[test]
    fn their_number_does_not_grow_beyond_what_is_declared() {
        let first = access(&[1, 2], &[77, 78]);
        let mut all = Recipients::default();
        for user in 1000..2000 {
            all = all.with(user, &[user, 77], &first).unwrap_or(all);
        }
        for groups in [vec![78], vec![79, 78, 77]] {
            all = all.with(2000, &groups, &first).unwrap_or(all);
        }
        for user in [1, 2, 1, 2] {
            all = all.with(user, &[user], &first).unwrap_or(all);
        }
        assert_eq!(all.iter().count(), MOST + 4);
        assert!(excluded(&all, &first).is_empty());
        let without = excluded(&all, &access(&[1], &[78]));
        assert!(without.contains(&"user 2".into()) && without.contains(&"group 77".into()));
        assert_eq!(without.len(), MOST + 2);
    }

    #[test]
    fn of_very_many_groups_those_count_that_are_declared() {
        let (first, many) = (access(&[], &[77]), (70..70 + GROUPS as u32 + 1).collect::<Vec<_>>());
        let all = Recipients::default().with(1000, &many, &first).unwrap();
        assert_eq!(all.iter().next().unwrap().groups, [77].into());
    }

    #[test]
    fn if_nobody_was_noted_everybody_counts() {
        let first = access(&[1000], &[77]);
        let all = Recipients::all(&first);
        assert!(excluded(&all, &first).is_empty());
        assert_eq!(excluded(&all, &access(&[1000], &[])), ["group 77"]);
        assert_eq!(excluded(&all, &access(&[], &[77])), ["user 1000"]);
    }
}
