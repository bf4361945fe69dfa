//! Tells holders of blocks that rights were revoked.
//!
//! One grant may revoke rights of any number of handles, whose endpoints may not read or not answer. So a
//! revocation is not sent when it happens: it is remembered, once for each handle, and sent when the holder can receive it.
//! At most [`WINDOW`] revocations of an endpoint are sent and not acknowledged.

mod telling;

use crate::books::Books;
use std::collections::{BTreeMap, BTreeSet};

/// The most revocations that an endpoint may have been sent and not acknowledged.
const WINDOW: usize = 64;

/// The revocations that have not been acknowledged.
#[derive(Debug, Default, PartialEq)]
pub struct Revocations {
    endpoints: BTreeMap<u32, Telling>,
    /// The endpoints to which something can be sent.
    open: BTreeSet<u32>,
}

#[derive(Debug, Default, PartialEq)]
struct Telling {
    untold: BTreeSet<u64>,
    told: BTreeSet<u64>,
}

impl Revocations {
    /// Takes the revocations from the books of an earlier daemon. It is not known which have been sent.
    pub fn of(books: &Books) -> Self {
        let mut all = Self::default();
        let left = books.blocks.values().flat_map(|block| block.handles.iter()).filter(|h| h.left.is_some());
        let is_ending = |number| books.endpoints.get(&number).is_some_and(|endpoint| endpoint.is_ending);
        for handle in left.filter(|handle| !is_ending(handle.endpoint)) {
            all.add(handle.endpoint, handle.number);
        }
        all
    }

    /// Adds a handle whose rights were reduced.
    pub fn add(&mut self, endpoint: u32, handle: u64) {
        let telling = self.endpoints.entry(endpoint).or_default();
        telling.told.remove(&handle);
        telling.untold.insert(handle);
        self.look_at(endpoint);
    }

    /// Removes a handle that is closed, or whose holder has acknowledged the rights that are left.
    pub fn settle(&mut self, endpoint: u32, handle: u64) {
        let Some(telling) = self.endpoints.get_mut(&endpoint) else { return };
        telling.told.remove(&handle);
        telling.untold.remove(&handle);
        self.look_at(endpoint);
    }

    /// Marks all revocations of an endpoint as not sent, because it has a new connection and may not have read the old one.
    pub fn tell_again(&mut self, endpoint: u32) {
        let Some(telling) = self.endpoints.get_mut(&endpoint) else { return };
        let told = std::mem::take(&mut telling.told);
        telling.untold.extend(told);
        self.look_at(endpoint);
    }

    /// Returns all of them: endpoint and handle.
    #[cfg(any(test, fuzzing))]
    pub fn all(&self) -> BTreeSet<(u32, u64)> {
        let all = self.endpoints.iter().flat_map(|(endpoint, telling)| {
            telling.untold.union(&telling.told).map(move |handle| (*endpoint, *handle))
        });
        all.collect()
    }

    /// Forgets an endpoint that has ended.
    pub fn forget(&mut self, endpoint: u32) {
        self.endpoints.remove(&endpoint);
        self.open.remove(&endpoint);
    }

    fn look_at(&mut self, endpoint: u32) {
        let Some(telling) = self.endpoints.get(&endpoint) else { return };
        if !telling.untold.is_empty() && telling.told.len() < WINDOW {
            self.open.insert(endpoint);
        } else {
            self.open.remove(&endpoint);
        }
        if telling.untold.is_empty() && telling.told.is_empty() {
            self.endpoints.remove(&endpoint);
        }
    }

    /// Returns the next handle that an endpoint must be told of; it counts as told from now on.
    fn next(&mut self, endpoint: u32) -> Option<u64> {
        let telling = self.endpoints.get_mut(&endpoint).filter(|telling| telling.told.len() < WINDOW)?;
        let handle = telling.untold.pop_first()?;
        telling.told.insert(handle);
        self.look_at(endpoint);
        Some(handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unacknowledged_revocations_are_bounded_and_sent_once() {
        let mut revocations = Revocations::default();
        (0..1000).for_each(|handle| revocations.add(1, handle));
        let first: Vec<u64> = std::iter::from_fn(|| revocations.next(1)).collect();
        assert_eq!(first, (0..WINDOW as u64).collect::<Vec<_>>());
        assert!(revocations.open.is_empty(), "nothing more before an answer");
        revocations.settle(1, 0);
        assert_eq!((revocations.next(1), revocations.next(1)), (Some(WINDOW as u64), None));
        // The rights were reduced further on a handle whose holder was told already.
        revocations.add(1, 5);
        assert_eq!((revocations.next(1), revocations.next(1)), (Some(5), None));
        revocations.tell_again(1);
        assert_eq!(revocations.next(1), Some(1), "again, over a new connection");
        revocations.forget(1);
        assert_eq!(revocations, Revocations::default());
    }

    #[test]
    fn settled_revocations_leave_nothing_behind() {
        let mut revocations = Revocations::default();
        (0..10).for_each(|handle| revocations.add(1, handle));
        revocations.next(1);
        (0..10).for_each(|handle| revocations.settle(1, handle));
        assert_eq!(revocations, Revocations::default());
    }
}
