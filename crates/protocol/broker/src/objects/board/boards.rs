//! The readiness boards of all endpoints, as the books have them.

use super::record::Board;
use crate::process::Process;
use std::collections::BTreeMap;

/// The boards of all endpoints.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Boards {
    /// The boards by endpoint and epoch, then by the nonce of the request.
    pub(super) all: BTreeMap<(u32, u32), BTreeMap<u64, Board>>,
    /// The endpoints that have ended, and the number of existing sides of channels that belonged to each.
    pub(super) ended: BTreeMap<(u32, u32), u32>,
}

impl Boards {
    /// Returns the offsets of the boards of an endpoint.
    pub fn of(&self, endpoint: u32, epoch: u32) -> Vec<u64> {
        self.all.get(&(endpoint, epoch)).into_iter().flatten().map(|(_, board)| board.offset).collect()
    }

    /// Marks the boards that a process has asked for as left by it.
    pub fn leave(&mut self, endpoint: u32, epoch: u32, process: Process) {
        let boards = self.all.get_mut(&(endpoint, epoch)).into_iter().flat_map(BTreeMap::values_mut);
        boards.filter(|board| board.process == Some(process)).for_each(|board| board.is_left = true);
    }

    /// Returns all boards.
    #[cfg(any(test, fuzzing))]
    pub fn all(&self) -> impl Iterator<Item = &Board> {
        self.all.values().flat_map(BTreeMap::values)
    }
}
