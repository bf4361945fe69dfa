//! The open handles of a block, and its grants, in the orders in which requests look for them. In the journal both are
//! lists.

use ginnel_layout::wire::Rights;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// An open handle of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockHandle {
    /// The handle's number.
    pub number: u64,
    /// The number of the endpoint that has it.
    pub endpoint: u32,
    /// The rights with which the library has mapped the block.
    pub rights: u32,
    /// The rights that a revocation has left, until the library acknowledges it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<u32>,
    /// The nonce that the endpoint has chosen for its request.
    pub nonce: u64,
}

impl BlockHandle {
    /// Returns the rights that the holder still has. After a revocation they are less than its mapping allows, until it has
    /// acknowledged the revocation.
    pub fn remaining(&self) -> u32 {
        self.left.unwrap_or(self.rights)
    }
}

/// The open handles of a block. Each operation costs at most the logarithm of their number for each handle that it changes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<BlockHandle>", into = "Vec<BlockHandle>")]
pub struct Handles {
    by_number: BTreeMap<u64, BlockHandle>,
    /// The handles by the rights of the holder's mapping, and number.
    by_rights: BTreeSet<(u32, u64)>,
    /// The handles by endpoint, the rights that it still has through the handle, and number.
    by_holder: BTreeSet<(u32, u32, u64)>,
}

impl Handles {
    /// Returns the number of handles.
    pub fn len(&self) -> usize {
        self.by_number.len()
    }

    /// Returns whether there are no handles.
    pub fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }

    /// Returns all handles, by number.
    pub fn iter(&self) -> impl Iterator<Item = &BlockHandle> {
        self.by_number.values()
    }

    /// Returns the handle with that number.
    pub fn get(&self, number: u64) -> Option<&BlockHandle> {
        self.by_number.get(&number)
    }

    /// Adds a handle. Returns false if its number is taken.
    pub fn insert(&mut self, handle: BlockHandle) -> bool {
        if self.by_number.contains_key(&handle.number) {
            return false;
        }
        self.by_number.insert(handle.number, handle);
        self.by_rights.insert((handle.rights, handle.number));
        self.by_holder.insert((handle.endpoint, handle.remaining(), handle.number));
        true
    }

    /// Removes a handle.
    pub fn remove(&mut self, number: u64) -> Option<BlockHandle> {
        let handle = self.by_number.remove(&number)?;
        self.by_rights.remove(&(handle.rights, number));
        self.by_holder.remove(&(handle.endpoint, handle.remaining(), number));
        Some(handle)
    }

    /// Returns a handle that prevents others from opening the block for writing now; if `exclusive`, one that prevents exclusive
    /// access.
    pub fn in_the_way_of_writing(&self, exclusive: bool) -> Option<&BlockHandle> {
        let least = if exclusive { Rights::READ_WRITE } else { Rights::WRITE_EXCLUSIVE };
        let (_, number) = self.by_rights.range((least.0, 0)..).next()?;
        self.get(*number)
    }

    /// Returns the endpoints that have one or more handles, each once.
    pub fn holders(&self) -> impl Iterator<Item = u32> {
        let first_from = |endpoint| self.by_holder.range((endpoint, 0, 0)..).next().map(|entry| entry.0);
        std::iter::successors(first_from(0), move |last| first_from(last.checked_add(1)?))
    }

    /// Returns the handles through which an endpoint has more than `rights`.
    pub fn above(&self, endpoint: u32, rights: u32) -> impl Iterator<Item = u64> {
        let least = rights.saturating_add(1);
        self.by_holder.range((endpoint, least, 0)..=(endpoint, u32::MAX, u64::MAX)).map(|entry| entry.2)
    }

    /// Reduces all handles of an endpoint to at most `rights`.
    pub fn revoke(&mut self, endpoint: u32, rights: u32) {
        for number in self.above(endpoint, rights).collect::<Vec<_>>() {
            let Some(mut handle) = self.remove(number) else { continue };
            handle.left = Some(rights);
            self.insert(handle);
        }
    }

    /// Handles a holder's acknowledgement of a revocation. Returns the rights that it has from now on.
    pub fn acknowledge(&mut self, number: u64) -> Option<u32> {
        let mut handle = self.remove(number)?;
        handle.rights = handle.remaining();
        handle.left = None;
        self.insert(handle);
        Some(handle.rights)
    }
}

impl From<Handles> for Vec<BlockHandle> {
    fn from(handles: Handles) -> Self {
        handles.by_number.into_values().collect()
    }
}

impl TryFrom<Vec<BlockHandle>> for Handles {
    type Error = &'static str;

    fn try_from(list: Vec<BlockHandle>) -> Result<Self, Self::Error> {
        let mut handles = Self::default();
        match list.into_iter().all(|handle| handles.insert(handle)) {
            true => Ok(handles),
            false => Err("two handles of one number"),
        }
    }
}

/// The rights of a member or an endpoint to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockGrant {
    /// The member number.
    pub member: u32,
    /// The number of one of the member's endpoints. Older journals do not have it; there, the epoch identifies the endpoint.
    #[serde(default)]
    pub endpoint: u32,
    /// The epoch of that endpoint; 0 if the grant is for all other endpoints of the member.
    pub epoch: u32,
    /// The rights.
    pub rights: u32,
}

/// The rights that are granted to members and endpoints, by member and endpoint (0 for all endpoints of the member).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<BlockGrant>", into = "Vec<BlockGrant>")]
pub struct Grants(BTreeMap<(u32, u32, u32), BlockGrant>);

impl Grants {
    /// Returns whether there are no grants.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of grants.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns all grants.
    pub fn iter(&self) -> impl Iterator<Item = BlockGrant> {
        self.0.values().copied()
    }

    /// Returns the rights that were granted to an endpoint, or to its member (0).
    pub fn get(&self, member: u32, endpoint: u32) -> Option<u32> {
        let (first, last) = ((member, endpoint, 0), (member, endpoint, u32::MAX));
        self.0.range(first..=last).next_back().map(|(_, grant)| grant.rights)
    }

    /// Adds a grant, in place of an earlier one for the same member and endpoint.
    pub fn set(&mut self, grant: BlockGrant) {
        self.0.insert((grant.member, grant.endpoint, grant.epoch), grant);
    }

    /// Removes the grant to an endpoint that has ended.
    pub fn remove(&mut self, member: u32, endpoint: u32) {
        let (first, last) = ((member, endpoint, 0), (member, endpoint, u32::MAX));
        while let Some(key) = self.0.range(first..=last).next().map(|(key, _)| *key) {
            self.0.remove(&key);
        }
    }
}

impl From<Grants> for Vec<BlockGrant> {
    fn from(grants: Grants) -> Self {
        grants.0.into_values().collect()
    }
}

impl From<Vec<BlockGrant>> for Grants {
    fn from(list: Vec<BlockGrant>) -> Self {
        let mut grants = Self::default();
        list.into_iter().for_each(|grant| grants.set(grant));
        grants
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn handle(number: u64, endpoint: u32, rights: u32) -> BlockHandle {
        BlockHandle { number, endpoint, rights, left: None, nonce: number }
    }

    proptest! {
        #[test]
        fn handles_are_found_as_in_a_list(
            steps in prop::collection::vec((0..6u8, 0..12u64, 1..4u32, 0..4u32), 1..80),
        ) {
            let (mut handles, mut list) = (Handles::default(), Vec::<BlockHandle>::new());
            for (step, number, endpoint, rights) in steps {
                let at = list.iter().position(|h| h.number == number);
                match step {
                    0..=2 => {
                        let new = handle(number, endpoint, rights);
                        prop_assert_eq!(handles.insert(new), at.is_none());
                        if at.is_none() {
                            list.push(new);
                        }
                    }
                    3 => prop_assert_eq!(handles.remove(number), at.map(|at| list.remove(at))),
                    4 => {
                        handles.revoke(endpoint, rights);
                        let held = list.iter_mut().filter(|h| h.endpoint == endpoint && h.remaining() > rights);
                        held.for_each(|h| h.left = Some(rights));
                    }
                    _ => {
                        let acknowledged = at.map(|at| &mut list[at]).map(|h| {
                            (h.rights, h.left) = (h.remaining(), None);
                            h.rights
                        });
                        prop_assert_eq!(handles.acknowledge(number), acknowledged);
                    }
                }
                list.sort_unstable_by_key(|h| h.number);
                prop_assert_eq!(&Vec::from(handles.clone()), &list);
                prop_assert_eq!(&Handles::try_from(list.clone()).unwrap(), &handles);
                let above: BTreeSet<u64> = handles.above(endpoint, rights).collect();
                let held = list.iter().filter(|h| h.endpoint == endpoint && h.remaining() > rights);
                prop_assert_eq!(above, held.map(|h| h.number).collect::<BTreeSet<_>>());
                let holders: BTreeSet<u32> = list.iter().map(|h| h.endpoint).collect();
                prop_assert_eq!(handles.holders().collect::<Vec<_>>(), Vec::from_iter(holders));
                for (exclusive, least) in [(true, 2), (false, 3)] {
                    let found = handles.in_the_way_of_writing(exclusive);
                    prop_assert_eq!(found.is_some(), list.iter().any(|h| h.rights >= least));
                    prop_assert!(found.is_none_or(|h| h.rights >= least));
                }
            }
        }
    }

    #[test]
    fn a_list_with_a_number_twice_is_refused() {
        let twice = serde_json::to_string(&[handle(1, 1, 1), handle(1, 2, 1)]).unwrap();
        assert!(serde_json::from_str::<Handles>(&twice).is_err());
    }
}
