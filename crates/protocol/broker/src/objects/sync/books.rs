//! Synchronisation objects in the books.

use super::record::{SyncObject, SyncUser, kind_of};
use crate::account::Account;
use crate::books::{Books, InvalidRecord};
use crate::objects::memory_object::{MemoryObject, Tables};
use ginnel_layout::{Name, PAGE, sync};
use ginnel_sync::authority::Left;
use std::collections::{BTreeMap, BTreeSet};

impl SyncObject {
    pub(super) fn user(&self, slot: u32) -> Option<&SyncUser> {
        self.users.iter().find(|user| user.slot == slot)
    }

    pub(super) fn free_slot(&self) -> Option<u32> {
        (0..sync::SLOTS as u32).find(|&slot| self.user(slot).is_none())
    }

    /// Returns whether the object must be removed.
    fn is_over(&self) -> bool {
        self.users.is_empty() && (self.name.0.is_none() || !(self.persistent || self.bereaved))
    }
}

impl MemoryObject for SyncObject {
    type User = SyncUser;

    fn number(&self) -> u64 {
        self.number
    }

    fn key(&self) -> (Name, Name) {
        (self.segment.0, self.name.0)
    }

    fn account(&self) -> Account {
        Account::new(self.member, self.segment.0, self.uid)
    }

    fn place(&self) -> (u64, u64) {
        (self.offset, PAGE as u64)
    }

    fn is_possible(&self) -> bool {
        let kind = kind_of(self);
        let slots: BTreeSet<u32> = self.users().map(|user| user.slot).collect();
        let requests: BTreeSet<(u32, u64)> = self.users().map(|user| (user.endpoint, user.nonce)).collect();
        let apart = slots.len() == self.users.len() && requests.len() == self.users.len();
        kind.is_known() && kind.allows(self.limit) && !self.is_over() && apart
    }

    fn users(&self) -> impl Iterator<Item = SyncUser> {
        self.users.iter().copied()
    }

    fn add(&mut self, user: SyncUser) {
        self.next_epoch = following(user.epoch);
        self.bereaved = false;
        self.users.push(user);
        self.users.sort_unstable_by_key(|user| user.slot);
    }

    fn is_taken(&self, user: &SyncUser) -> bool {
        self.user(user.slot).is_some()
    }

    fn has_user(books: &Books, segment: &Name, user: &SyncUser) -> bool {
        let endpoint = books.endpoints.get(&user.endpoint).filter(|e| e.segment == *segment);
        endpoint.is_some_and(|e| !e.slots.contains_key(&user.nonce)) && (user.slot as usize) < sync::SLOTS
    }

    fn used(books: &mut Books, number: u64, user: &SyncUser) {
        if let Some(endpoint) = books.endpoints.get_mut(&user.endpoint) {
            endpoint.syncs.insert((number, user.slot));
            endpoint.slots.insert(user.nonce, (number, user.slot));
        }
        books.one_more_handle(user.endpoint);
    }

    fn all(books: &Books) -> &BTreeMap<u64, Self> {
        &books.syncs
    }

    fn tables(books: &mut Books) -> Tables<'_, Self> {
        (&mut books.syncs, &mut books.sync_names)
    }
}

impl Books {
    /// Removes a user. If it has died and was the last one, the object stays for the next user.
    pub(crate) fn sync_left(&mut self, object: u64, slot: u32, left: Left) -> Result<(), InvalidRecord> {
        let there =
            self.syncs.get_mut(&object).ok_or(InvalidRecord("an unknown synchronisation object closed"))?;
        let at = there.users.iter().position(|user| user.slot == slot);
        let user = there.users.remove(at.ok_or(InvalidRecord("a synchronisation object closed twice"))?);
        there.bereaved = left == Left::Died && there.users.is_empty();
        let over = there.is_over();
        if let Some(endpoint) = self.endpoints.get_mut(&user.endpoint) {
            endpoint.syncs.remove(&(object, slot));
            endpoint.slots.remove(&user.nonce);
        }
        self.one_less_handle(user.endpoint);
        if over {
            self.remove::<SyncObject>(object);
        }
        Ok(())
    }

    pub(crate) fn sync_unlinked(&mut self, object: u64) -> Result<(), InvalidRecord> {
        let there =
            self.syncs.get_mut(&object).ok_or(InvalidRecord("an unknown synchronisation object unlinked"))?;
        let name = std::mem::replace(&mut there.name.0, Name::NONE);
        let (key, over) = ((there.segment.0, name), there.is_over());
        self.sync_names.remove(&key);
        if over {
            self.remove::<SyncObject>(object);
        }
        Ok(())
    }

    /// Returns the doorbell of a user: member and vector.
    pub fn sync_bell(&self, object: u64, slot: u32) -> Option<(u32, u32)> {
        let user = self.syncs.get(&object)?.user(slot)?;
        self.endpoints.get(&user.endpoint).map(|endpoint| (endpoint.member, endpoint.vector))
    }
}

/// Returns the epoch after this one. Epochs wrap around; 0 is for slots that are free.
fn following(epoch: u16) -> u16 {
    epoch.checked_add(1).filter(|&next| next != u16::MAX).unwrap_or(1)
}
