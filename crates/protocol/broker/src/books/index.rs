//! Indexes of the endpoints by other keys than their number. They follow from the endpoints in the books, and change
//! with them.

use super::endpoint::Endpoint;
use ginnel_layout::Name;
use std::collections::{BTreeMap, BTreeSet};

/// The endpoints by other keys.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Index {
    members: BTreeSet<(u32, u32)>,
    segments: BTreeSet<(Name, u32)>,
    /// The number of endpoints in a segment that use a vector of a member: segment, member, vector.
    vectors: BTreeMap<(Name, u32, u32), u32>,
}

impl Index {
    /// Makes the index of these endpoints.
    #[cfg(any(test, fuzzing))]
    pub fn of<'a>(endpoints: impl IntoIterator<Item = &'a Endpoint>) -> Self {
        let mut index = Self::default();
        endpoints.into_iter().for_each(|endpoint| index.insert(endpoint));
        index
    }

    pub(crate) fn insert(&mut self, endpoint: &Endpoint) {
        self.members.insert((endpoint.member, endpoint.number));
        self.segments.insert((endpoint.segment, endpoint.number));
        *self.vectors.entry((endpoint.segment, endpoint.member, endpoint.vector)).or_default() += 1;
    }

    pub(crate) fn remove(&mut self, endpoint: &Endpoint) {
        self.members.remove(&(endpoint.member, endpoint.number));
        self.segments.remove(&(endpoint.segment, endpoint.number));
        let vector = (endpoint.segment, endpoint.member, endpoint.vector);
        if let Some(users) = self.vectors.get_mut(&vector) {
            *users -= 1;
            if *users == 0 {
                self.vectors.remove(&vector);
            }
        }
    }

    /// Returns the endpoints of a member.
    pub fn of_member(&self, member: u32) -> impl Iterator<Item = u32> {
        self.members.range((member, 0)..=(member, u32::MAX)).map(|(_, endpoint)| *endpoint)
    }

    /// Returns the endpoints in a segment.
    pub fn of_segment(&self, segment: &Name) -> impl Iterator<Item = u32> {
        self.segments.range((*segment, 0)..=(*segment, u32::MAX)).map(|(_, endpoint)| *endpoint)
    }

    /// Returns how many endpoints of a member in a segment use a vector.
    pub fn users_of(&self, segment: &Name, member: u32, vector: u32) -> u32 {
        self.vectors.get(&(*segment, member, vector)).copied().unwrap_or(0)
    }
}
