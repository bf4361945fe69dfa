//! Counts the connections of each user, and decides which connection to close when there are too many. The rule is the same on
//! the host and in a guest, so that no user keeps others out by opening connections.

use std::collections::{BTreeMap, BTreeSet};

/// The limits on connections at a time.
#[derive(Clone, Copy, Debug)]
pub struct Most {
    /// The most connections of all users together.
    pub all: usize,
    /// The most connections of one user other than root.
    pub per_user: usize,
}

/// The limit that a new connection has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The limit for all users together, [`Most::all`].
    All,
    /// The limit for one user, [`Most::per_user`].
    PerUser,
}

/// There is no room for one more connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full<Id> {
    /// The limit that was reached.
    pub limit: Limit,
    /// The user whose connection is closed to make room.
    pub user: u32,
    /// The connection to close to make room. `None`: the new connection is refused.
    pub given_up: Option<Id>,
}

/// The connections by user. A later connection has a greater number.
#[derive(Debug)]
pub struct UserConnections<Id> {
    of_user: BTreeMap<u32, BTreeSet<Id>>,
    len: usize,
}

impl<Id> Default for UserConnections<Id> {
    fn default() -> Self {
        Self { of_user: BTreeMap::new(), len: 0 }
    }
}

impl<Id: Copy + Ord> UserConnections<Id> {
    /// Adds a connection of a user.
    pub fn add(&mut self, uid: u32, id: Id) {
        self.len += usize::from(self.of_user.entry(uid).or_default().insert(id));
    }

    /// Removes a connection that has ended.
    pub fn remove(&mut self, uid: u32, id: Id) {
        let Some(of_user) = self.of_user.get_mut(&uid) else { return };
        self.len -= usize::from(of_user.remove(&id));
        if of_user.is_empty() {
            self.of_user.remove(&uid);
        }
    }

    /// Returns the number of connections of a user.
    pub fn count(&self, uid: u32) -> usize {
        self.of_user.get(&uid).map_or(0, BTreeSet::len)
    }

    /// Returns `Ok` if there is room for one more connection of `newcomer`. Otherwise the error says which user must give up a
    /// connection: one that has reached its own limit, or the one that has most connections.
    pub fn room(&self, newcomer: u32, most: Most, is_attached: impl Fn(Id) -> bool) -> Result<(), Full<Id>> {
        let (limit, user) = if self.len >= most.all {
            (Limit::All, self.user_with_most().unwrap_or(newcomer))
        } else if newcomer != 0 && self.count(newcomer) >= most.per_user {
            (Limit::PerUser, newcomer)
        } else {
            return Ok(());
        };
        Err(Full { limit, user, given_up: self.given_up(user, newcomer, is_attached) })
    }

    /// Returns the user that has most connections.
    fn user_with_most(&self) -> Option<u32> {
        self.of_user.iter().max_by_key(|(_, ids)| ids.len()).map(|(uid, _)| *uid)
    }

    /// Returns which connection of `user` to close in favour of one of `newcomer`: the oldest that is not attached as an
    /// endpoint. If all are attached, it is the oldest of all, provided that `newcomer` has fewer connections. Endpoints do not
    /// end with their connections, so this is harmless, and no user is kept out by users that have more than their share.
    fn given_up(&self, user: u32, newcomer: u32, is_attached: impl Fn(Id) -> bool) -> Option<Id> {
        let of_user = self.of_user.get(&user)?;
        let idle = of_user.iter().find(|id| !is_attached(**id));
        let has_fewer = self.count(newcomer) + 1 < of_user.len();
        idle.or_else(|| of_user.first().filter(|_| has_fewer)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_with_most_connections_makes_room() {
        let mut connections = UserConnections::default();
        for (id, uid) in (0..).zip([7, 1, 1, 1, 2, 2, 2, 2]) {
            connections.add(uid, id);
        }
        assert_eq!(connections.user_with_most(), Some(2));
        // Unattached connections are closed first, and never those of a user who has fewer.
        let attached = |id| id != 6 && id != 0;
        assert_eq!(connections.given_up(2, 7, attached), Some(6));
        assert_eq!(connections.given_up(2, 2, attached), Some(6));
        let all = |_| true;
        assert_eq!(connections.given_up(2, 7, all), Some(4));
        assert_eq!(connections.given_up(2, 99, all), Some(4), "a new user gets a connection");
        assert_eq!(connections.given_up(2, 2, all), None, "not for the user with most connections");
        assert_eq!(connections.given_up(2, 1, all), None, "nor for a user that would have as many");
        connections.remove(2, 4);
        connections.remove(2, 4);
        assert_eq!((connections.count(2), connections.count(99), connections.len), (3, 0, 7));
    }

    #[test]
    fn users_meet_their_own_limit_first_and_root_none() {
        let mut connections = UserConnections::default();
        for id in 0..4 {
            connections.add(5, id);
        }
        let most = Most { all: 6, per_user: 4 };
        let none = |_| false;
        assert_eq!(connections.room(6, most, none), Ok(()));
        let full = Full { limit: Limit::PerUser, user: 5, given_up: Some(0) };
        assert_eq!(connections.room(5, most, none), Err(full));
        assert_eq!(connections.room(5, most, |_| true), Err(Full { given_up: None, ..full }));
        connections.add(0, 4);
        connections.add(0, 5);
        assert_eq!(connections.room(0, most, none), Err(Full { limit: Limit::All, ..full }));
        connections.remove(5, 0);
        (6..9).for_each(|id| connections.add(0, id));
        let most = Most { all: 60, per_user: 4 };
        assert_eq!(connections.room(0, most, none), Ok(()));
    }
}
