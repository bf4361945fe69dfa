//! Whose turn it is. Each user's clients get a share of the daemon's time, however many they are and whatever they ask for. A single
//! call can take much longer than a turn, such as a send to a client with very many waiters at its socket; then its user has no turn
//! until others have had several times as much.

use crate::poller::Ready;
use ginnel_broker::broker::ClientId;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::time::{Duration, Instant};

/// The time of a user's turn. A turn goes on until the request is answered during which this time is over.
const SHARE: Duration = Duration::from_millis(1);
/// How many times the time by which a turn was too long its user has no other turn. Root pays nothing.
const PRICE: u32 = 4;

/// The clients that have something to read, have room to write, or have ended, by user.
#[derive(Debug, Default)]
pub struct Turns {
    of_user: BTreeMap<u32, VecDeque<ClientId>>,
    ready: BTreeMap<ClientId, Ready>,
    /// The users whose turns were too long, and until when they have no other.
    paying: BTreeMap<u32, Instant>,
    /// The user who had the last turn.
    last: u32,
}

impl Turns {
    /// Lets a client wait for its turn.
    pub fn add(&mut self, uid: u32, client: ClientId, ready: Ready) {
        self.ready
            .entry(client)
            .and_modify(|known| {
                known.readable |= ready.readable;
                known.writable |= ready.writable;
                known.hung_up |= ready.hung_up;
            })
            .or_insert_with(|| {
                self.of_user.entry(uid).or_default().push_back(client);
                ready
            });
    }

    /// Returns the time until somebody who waits has a turn; `None` if nobody waits.
    pub fn until_next(&self) -> Option<Duration> {
        let now = Instant::now();
        let until =
            |uid| self.paying.get(uid).map_or(Duration::ZERO, |end| end.saturating_duration_since(now));
        self.of_user.keys().map(until).min()
    }

    /// Returns the number of users with clients that wait.
    pub fn users(&self) -> usize {
        self.of_user.len()
    }

    /// Returns the user whose turn it is, and the end of the turn.
    pub fn begin(&mut self) -> Option<(u32, Instant)> {
        let now = Instant::now();
        self.paying.retain(|_, end| *end > now);
        let paying = &self.paying;
        let may = |uid: &&u32| !paying.contains_key(*uid);
        let mut later = self.of_user.range((Excluded(self.last), Unbounded)).map(|(uid, _)| uid).filter(may);
        let uid = *later.next().or_else(|| self.of_user.keys().find(may))?;
        self.last = uid;
        Some((uid, now + SHARE))
    }

    /// Notes that the turn of a user was to end at this time, and is over now.
    pub fn end(&mut self, uid: u32, end: Instant) {
        let now = Instant::now();
        let excess = now.saturating_duration_since(end);
        if uid != 0 && excess > SHARE {
            self.paying.insert(uid, now + PRICE * excess);
        }
    }

    /// Returns the client of this user that has waited longest.
    pub fn next_of(&mut self, uid: u32) -> Option<(ClientId, Ready)> {
        let clients = self.of_user.get_mut(&uid)?;
        let client = clients.pop_front();
        if clients.is_empty() {
            self.of_user.remove(&uid);
        }
        client.and_then(|client| Some((client, self.ready.remove(&client)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(readable: bool, writable: bool) -> Ready {
        Ready { token: 0, readable, writable, hung_up: false }
    }

    #[test]
    fn each_user_has_a_turn_before_any_has_two() {
        let mut turns = Turns::default();
        for client in 1..=100 {
            turns.add(7, ClientId(client), ready(true, false));
        }
        turns.add(0, ClientId(200), ready(true, false));
        turns.add(9, ClientId(201), ready(true, false));
        let mut order = Vec::new();
        while let Some((uid, _)) = turns.begin() {
            order.push((uid, turns.next_of(uid).unwrap().0.0));
        }
        assert_eq!(order[..4], [(7, 1), (9, 201), (0, 200), (7, 2)]);
        assert_eq!(order.len(), 102);
        assert!(turns.ready.is_empty() && turns.of_user.is_empty());
    }

    #[test]
    fn a_client_waits_once_for_all_that_has_happened() {
        let mut turns = Turns::default();
        turns.add(7, ClientId(1), ready(true, false));
        turns.add(7, ClientId(1), ready(false, true));
        assert_eq!(turns.next_of(7), Some((ClientId(1), ready(true, true))));
        assert_eq!((turns.next_of(7), turns.until_next()), (None, None));
    }

    #[test]
    fn who_takes_too_long_pays_with_time() {
        let mut turns = Turns::default();
        for client in 1..=3 {
            turns.add(7, ClientId(client), ready(true, false));
            turns.add(0, ClientId(10 + client), ready(true, false));
        }
        let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        for _ in 0..3 {
            let (uid, _) = turns.begin().unwrap();
            turns.next_of(uid);
            turns.end(uid, long_ago);
        }
        // User 7 had the first turn only, and root all others.
        assert_eq!(turns.of_user.get(&0).map(VecDeque::len), Some(1));
        assert_eq!(turns.until_next(), Some(Duration::ZERO));
        turns.next_of(0);
        assert_eq!(turns.begin(), None);
        assert!(turns.until_next().unwrap() > Duration::from_secs(200));
    }
}
