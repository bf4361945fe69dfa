//! Blocks in the books.

use super::handles::{BlockGrant, BlockHandle};
use super::record::Block;
use crate::account::{Account, Tally};
use crate::books::{Books, Endpoint, InvalidRecord};
use crate::objects::memory_object::{MemoryObject, Tables};
use crate::text::Text;
use ginnel_layout::Name;
use ginnel_layout::wire::Rights;
use std::collections::{BTreeMap, BTreeSet};

impl Block {
    /// Returns whether the block must be removed: nobody has it open, and it has no name.
    fn is_over(&self) -> bool {
        self.handles.is_empty() && self.name.0.is_none()
    }

    /// Returns whether an endpoint owns the block, or has the owner's rights because the owner has ended.
    pub(super) fn is_of(&self, endpoint: &Endpoint, owner_lives: bool) -> bool {
        match owner_lives {
            true => (endpoint.number, endpoint.epoch) == (self.owner, self.owner_epoch),
            false => (endpoint.member, endpoint.uid) == (self.member, self.uid),
        }
    }
}

impl MemoryObject for Block {
    type User = BlockHandle;

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
        (self.offset, self.span)
    }

    fn is_possible(&self) -> bool {
        let requests: BTreeSet<(u32, u64)> = self.users().map(|h| (h.endpoint, h.nonce)).collect();
        !self.is_over() && self.size <= self.span && requests.len() == self.handles.len()
    }

    fn users(&self) -> impl Iterator<Item = BlockHandle> {
        self.handles.iter().copied()
    }

    fn add(&mut self, handle: BlockHandle) {
        self.handles.insert(handle);
    }

    fn is_taken(&self, handle: &BlockHandle) -> bool {
        self.handles.get(handle.number).is_some()
    }

    fn has_user(books: &Books, segment: &Name, handle: &BlockHandle) -> bool {
        let endpoint = books.endpoints.get(&handle.endpoint).filter(|e| e.segment == *segment);
        endpoint.is_some_and(|e| !e.handles.contains_key(&handle.nonce))
            && !books.handles.contains_key(&handle.number)
    }

    fn used(books: &mut Books, number: u64, handle: &BlockHandle) {
        books.handles.insert(handle.number, number);
        books.next_object = books.next_object.max(handle.number.saturating_add(1));
        if let Some(endpoint) = books.endpoints.get_mut(&handle.endpoint) {
            endpoint.handles.insert(handle.nonce, handle.number);
        }
        books.one_more_handle(handle.endpoint);
    }

    fn all(books: &Books) -> &BTreeMap<u64, Self> {
        &books.blocks
    }

    fn tables(books: &mut Books) -> Tables<'_, Self> {
        (&mut books.blocks, &mut books.block_names)
    }
}

impl Books {
    /// Returns the endpoint that owns a block, if it is alive.
    pub fn owner_of(&self, block: &Block) -> Option<&Endpoint> {
        self.endpoints.get(&block.owner).filter(|e| e.epoch == block.owner_epoch)
    }

    /// Returns the most rights that an endpoint may have.
    pub(super) fn rights(&self, block: &Block, endpoint: &Endpoint) -> Rights {
        if block.is_of(endpoint, self.owner_of(block).is_some()) {
            return Rights::WRITE_EXCLUSIVE;
        }
        let granted = |number| block.grants.get(endpoint.member, number);
        Rights(granted(endpoint.number).or_else(|| granted(0)).unwrap_or(block.others))
    }

    /// Returns the holders that a grant concerns, and the rights that each of them has once the grant is made.
    pub(crate) fn rights_after(&self, block: &Block, grant: &BlockGrant) -> Vec<(u32, Rights)> {
        let owner_lives = self.owner_of(block).is_some();
        let after = |endpoint: &Endpoint| {
            let special = || block.grants.get(endpoint.member, endpoint.number);
            match grant.endpoint {
                _ if block.is_of(endpoint, owner_lives) => Rights::WRITE_EXCLUSIVE,
                0 => Rights(special().unwrap_or(grant.rights)),
                _ => Rights(grant.rights),
            }
        };
        let whom: Vec<u32> = match grant.endpoint {
            0 => block.handles.holders().collect(),
            endpoint => vec![endpoint],
        };
        // An endpoint that is ending gives its handles back itself.
        let endpoints = whom.iter().filter_map(|number| self.endpoints.get(number)).filter(|e| !e.is_ending);
        endpoints.filter(|e| e.member == grant.member).map(|e| (e.number, after(e))).collect()
    }

    /// Returns the handles whose rights a grant reduces: endpoint and number.
    pub(crate) fn revoked_by(&self, block: u64, grant: &BlockGrant) -> Vec<(u32, u64)> {
        let Some(block) = self.blocks.get(&block) else { return Vec::new() };
        let after = self.rights_after(block, grant).into_iter();
        after
            .flat_map(|(endpoint, rights)| {
                block.handles.above(endpoint, rights.0).map(move |h| (endpoint, h))
            })
            .collect()
    }

    /// Returns a grant with the number of its endpoint, which older journals leave out; `None` if that endpoint has ended.
    fn whole(&self, grant: BlockGrant) -> Option<BlockGrant> {
        if grant.epoch == 0 {
            return Some(grant);
        }
        if grant.endpoint != 0 {
            let whom = self.endpoints.get(&grant.endpoint);
            return whom.filter(|e| (e.member, e.epoch) == (grant.member, grant.epoch)).map(|_| grant);
        }
        // In those journals, no two endpoints have the same epoch.
        let whom = self.endpoints.values().find(|e| (e.member, e.epoch) == (grant.member, grant.epoch))?;
        Some(BlockGrant { endpoint: whom.number, ..grant })
    }

    pub(crate) fn block(&mut self, block: &Block) -> Result<(), InvalidRecord> {
        let grants: Vec<BlockGrant> = block.grants.iter().filter_map(|grant| self.whole(grant)).collect();
        self.enter(&Block { grants: grants.clone().into(), ..block.clone() })?;
        self.numbers.refer(block.owner, block.owner_epoch);
        for grant in grants.iter().filter(|grant| grant.endpoint != 0) {
            if let Some(endpoint) = self.endpoints.get_mut(&grant.endpoint) {
                endpoint.granted.insert(block.number);
            }
        }
        if let Some(owner) = self.endpoints.get_mut(&block.owner).filter(|e| e.epoch == block.owner_epoch) {
            owner.blocks.insert(block.number);
            owner.block_bytes += block.span;
            if !block.persistent && !block.name.0.is_none() {
                owner.ending_names.insert(block.number);
            }
        }
        Ok(())
    }

    pub(crate) fn block_linked(&mut self, block: u64, name: Name) -> Result<(), InvalidRecord> {
        let there = self.blocks.get_mut(&block).filter(|b| b.name.0.is_none() && !name.is_none());
        let there = there.ok_or(InvalidRecord("a name for no block"))?;
        let key = (there.segment.0, name);
        if self.block_names.contains_key(&key) {
            return Err(InvalidRecord("two blocks of one name"));
        }
        there.name = Text(name);
        if let Some(owner) = self.endpoints.get_mut(&there.owner)
            && owner.epoch == there.owner_epoch
            && !there.persistent
        {
            owner.ending_names.insert(block);
        }
        self.block_names.insert(key, block);
        Ok(())
    }

    pub(crate) fn block_unlinked(&mut self, block: u64) -> Result<(), InvalidRecord> {
        let there = self.blocks.get_mut(&block).ok_or(InvalidRecord("an unknown block unlinked"))?;
        let name = std::mem::replace(&mut there.name.0, Name::NONE);
        let (key, over) = ((there.segment.0, name), there.is_over());
        if let Some(owner) = self.endpoints.get_mut(&there.owner).filter(|e| e.epoch == there.owner_epoch) {
            owner.ending_names.remove(&block);
        }
        self.block_names.remove(&key);
        if over {
            self.block_removed(block);
        }
        Ok(())
    }

    pub(crate) fn block_closed(&mut self, handle: u64) -> Result<(), InvalidRecord> {
        let block = self.handles.remove(&handle).ok_or(InvalidRecord("an unknown handle closed"))?;
        let Some(there) = self.blocks.get_mut(&block) else { return Ok(()) };
        let closed = there.handles.remove(handle);
        let over = there.is_over();
        if let Some(closed) = closed {
            if let Some(endpoint) = self.endpoints.get_mut(&closed.endpoint) {
                endpoint.handles.remove(&closed.nonce);
            }
            self.one_less_handle(closed.endpoint);
        }
        if over {
            self.block_removed(block);
        }
        Ok(())
    }

    pub(crate) fn block_resized(&mut self, block: u64, size: u64, span: u64) -> Result<(), InvalidRecord> {
        let there = self.blocks.get_mut(&block).ok_or(InvalidRecord("an unknown block resized"))?;
        let segment =
            self.segments.get_mut(&there.segment.0).ok_or(InvalidRecord("a block in no segment"))?;
        if size > span || !segment.arena.resize(there.offset, there.span, span) {
            return Err(InvalidRecord("a block resized without room"));
        }
        let old = std::mem::replace(&mut there.span, span);
        there.size = size;
        let account = there.account();
        if let Some(owner) = self.endpoints.get_mut(&there.owner).filter(|e| e.epoch == there.owner_epoch) {
            owner.block_bytes = owner.block_bytes - old + span;
        }
        self.charge(account, Tally { block_bytes: span, ..Tally::default() });
        self.discharge(account, Tally { block_bytes: old, ..Tally::default() });
        Ok(())
    }

    pub(crate) fn block_granted(&mut self, block: u64, grant: BlockGrant) -> Result<(), InvalidRecord> {
        let there = self.blocks.get(&block).ok_or(InvalidRecord("an unknown block granted"))?;
        // A grant ends with the endpoint that it is for.
        let Some(grant) = self.whole(grant) else { return Ok(()) };
        let after = self.rights_after(there, &grant);
        if let Some(endpoint) = self.endpoints.get_mut(&grant.endpoint).filter(|_| grant.endpoint != 0) {
            endpoint.granted.insert(block);
        }
        if let Some(there) = self.blocks.get_mut(&block) {
            there.grants.set(grant);
            after.into_iter().for_each(|(endpoint, rights)| there.handles.revoke(endpoint, rights.0));
        }
        Ok(())
    }

    pub(crate) fn block_grant_ended(&mut self, block: u64, endpoint: u32) -> Result<(), InvalidRecord> {
        let there = self.blocks.get_mut(&block).ok_or(InvalidRecord("a grant of an unknown block ended"))?;
        let whom =
            self.endpoints.get_mut(&endpoint).ok_or(InvalidRecord("a grant to an unknown endpoint ended"))?;
        there.grants.remove(whom.member, endpoint);
        whom.granted.remove(&block);
        Ok(())
    }

    pub(crate) fn block_acked(&mut self, handle: u64) -> Result<(), InvalidRecord> {
        let block = self.handles.get(&handle).and_then(|block| self.blocks.get_mut(block));
        let rights = block.and_then(|block| block.handles.acknowledge(handle));
        match Rights(rights.ok_or(InvalidRecord("an unknown handle acknowledged"))?) {
            Rights::NONE => self.block_closed(handle),
            _ => Ok(()),
        }
    }

    pub(crate) fn block_removed(&mut self, block: u64) {
        let Some(block) = self.remove::<Block>(block) else { return };
        for grant in block.grants.iter() {
            if let Some(endpoint) = self.endpoints.get_mut(&grant.endpoint) {
                endpoint.granted.remove(&block.number);
            }
        }
        if let Some(owner) = self.endpoints.get_mut(&block.owner).filter(|e| e.epoch == block.owner_epoch) {
            owner.blocks.remove(&block.number);
            owner.ending_names.remove(&block.number);
            owner.block_bytes -= block.span;
        }
    }
}
