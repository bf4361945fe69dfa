//! What an endpoint keeps of its open blocks, because the daemon may revoke rights to them at any time.

use crate::error::Error;
use ginnel_layout::wire::{self, Rights};
use ginnel_shmem::{Mapping, Protection};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};

/// The part of an open block that the endpoint needs when the daemon revokes rights.
pub(crate) struct Held {
    pub handle: u64,
    pub file_at: u64,
    pub size: usize,
    pub span: usize,
    rights: RwLock<Rights>,
    mapping: OnceLock<Mapping>,
}

/// The blocks that an endpoint has open, by handle.
#[derive(Clone, Default)]
pub(crate) struct OpenBlocks {
    held: HashMap<u64, Weak<Held>>,
    /// The remaining rights of handles whose opening answer has not been processed yet.
    left: HashMap<u64, Rights>,
    acknowledge: Vec<wire::BlockRights>,
}

impl Held {
    pub fn rights(&self) -> RwLockReadGuard<'_, Rights> {
        self.rights.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn map(&self, file: impl AsFd) -> Result<&Mapping, Error> {
        if let Some(mapping) = self.mapping.get() {
            return Ok(mapping);
        }
        // The guard keeps the rights from changing meanwhile.
        let rights = self.rights();
        if *rights == Rights::NONE {
            return Err(Error::Denied { rights: *rights });
        }
        let protection = if rights.may_write() { Protection::ReadWrite } else { Protection::Read };
        let mapping = Mapping::of_file(file, self.file_at, self.span, protection)
            .map_err(Error::io("mapping a block"))?;
        Ok(self.mapping.get_or_init(|| mapping))
    }

    /// Reduces the rights of this handle to `left`.
    fn leave(&self, left: Rights) {
        let mut rights = self.rights.write().unwrap_or_else(PoisonError::into_inner);
        if left >= *rights {
            return;
        }
        *rights = left;
        let Some(mapping) = self.mapping.get() else { return };
        let done = match left {
            Rights::NONE => mapping.detach(),
            _ if !left.may_write() => mapping.forbid_stores(),
            _ => Ok(()),
        };
        if done.is_err() {
            // The kernel has no memory for its own structures. The calls of the block refuse access all the same.
            mapping.mark_broken();
        }
    }
}

impl OpenBlocks {
    /// Remembers a block that the daemon has opened, which has been found to lie inside of the segment. `size` and `span` are its
    /// lengths, and `file_at` is its offset in the segment's file.
    pub fn hold(&mut self, block: &wire::Block, size: usize, span: usize, file_at: u64) -> Arc<Held> {
        let (handle, rights) = (block.handle, RwLock::new(block.rights));
        let held = Arc::new(Held { handle, file_at, size, span, rights, mapping: OnceLock::new() });
        self.held.insert(block.handle, Arc::downgrade(&held));
        if let Some(left) = self.left.remove(&block.handle) {
            self.leave(left, &held);
        }
        held
    }

    /// Handles the daemon's message that a handle keeps only some of its rights.
    pub fn revoked(&mut self, event: &wire::BlockRights) {
        match self.held.get(&event.handle).and_then(Weak::upgrade) {
            Some(held) => self.leave(event.rights, &held),
            None => drop(self.left.insert(event.handle, event.rights)),
        }
    }

    fn leave(&mut self, left: Rights, held: &Held) {
        held.leave(left);
        self.acknowledge.push(wire::BlockRights { handle: held.handle, rights: left, reserved: 0 });
    }

    pub fn forget(&mut self, handle: u64) {
        self.held.remove(&handle);
        self.left.remove(&handle);
    }

    /// Takes the acknowledgements of revocations that the daemon must get.
    pub fn take_acknowledgements(&mut self) -> Vec<wire::BlockRights> {
        std::mem::take(&mut self.acknowledge)
    }
}
