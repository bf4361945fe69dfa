//! Blocks: memory of a segment by name, and who may do what with it.
//!
//! As with POSIX shared memory, a block lives as long as it has a name or somebody has it open. Its owner is the endpoint
//! that has made it; when that ends, the name goes too, unless the block is persistent. Then whoever is of the same member
//! and user has the owner's rights.
//!
//! Rights that are taken back are gone from the books at once, but the holder's mapping is as it was until its library
//! has heard of it ([`BlockHandle::left`]); so long the handle counts as what it was, and nobody is told that he is alone.

use super::account::{Account, Tally};
use super::books::{Books, Endpoint, Misfit};
use super::broker::{Broker, Caller, World};
use super::estate::{Estate, Shelf};
use super::handles::{Grants, Handles};
use super::record::{Block, BlockGrant, BlockHandle, Record, Text};
use super::reply::Refusal;
use super::requests::{broken, checked};
use super::sync::no_room;
use ginnel_layout::Name;
use ginnel_layout::wire::{self, ErrorCode, Kind, Rights};
use std::collections::{BTreeMap, BTreeSet};
use tracing::debug;
use zerocopy::IntoBytes;

impl Block {
    /// Whether nothing holds it any more.
    fn is_over(&self) -> bool {
        self.handles.is_empty() && self.name.0.is_none()
    }

    /// Whether an endpoint has made it, or stands in for who has.
    fn is_of(&self, endpoint: &Endpoint, owner_lives: bool) -> bool {
        match owner_lives {
            true => (endpoint.number, endpoint.epoch) == (self.owner, self.owner_epoch),
            false => (endpoint.member, endpoint.uid) == (self.member, self.uid),
        }
    }
}

impl Estate for Block {
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

    fn shelf(books: &mut Books) -> Shelf<'_, Self> {
        (&mut books.blocks, &mut books.block_names)
    }
}

impl Books {
    pub(super) fn blocks_of(&self, segment: &Name) -> Vec<u64> {
        self.blocks.values().filter(|b| b.segment.0 == *segment).map(|b| b.number).collect()
    }

    /// The endpoint that owns a block, if it lives.
    pub fn owner_of(&self, block: &Block) -> Option<&Endpoint> {
        self.endpoints.get(&block.owner).filter(|e| e.epoch == block.owner_epoch)
    }

    /// The most that an endpoint may do with a block.
    fn rights(&self, block: &Block, endpoint: &Endpoint) -> Rights {
        if block.is_of(endpoint, self.owner_of(block).is_some()) {
            return Rights::WRITE_EXCLUSIVE;
        }
        let granted = |number| block.grants.get(endpoint.member, number);
        Rights(granted(endpoint.number).or_else(|| granted(0)).unwrap_or(block.others))
    }

    /// The endpoints that a grant is about, and what each of them may do with the block once it is granted.
    fn rights_after(&self, block: &Block, grant: &BlockGrant) -> Vec<(u32, Rights)> {
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
            0 => self.index.of_member(grant.member).collect(),
            endpoint => vec![endpoint],
        };
        let endpoints = whom.iter().filter_map(|number| self.endpoints.get(number));
        endpoints.filter(|e| e.member == grant.member).map(|e| (e.number, after(e))).collect()
    }

    /// The handles that a grant leaves less than they have: endpoint and number.
    pub(super) fn revoked_by(&self, block: u64, grant: &BlockGrant) -> Vec<(u32, u64)> {
        let Some(block) = self.blocks.get(&block) else { return Vec::new() };
        let after = self.rights_after(block, grant).into_iter();
        after
            .flat_map(|(endpoint, rights)| {
                block.handles.above(endpoint, rights.0).map(move |h| (endpoint, h))
            })
            .collect()
    }

    /// A grant with the number of its endpoint, which older journals leave out; `None` if that endpoint has ended.
    fn whole(&self, grant: BlockGrant) -> Option<BlockGrant> {
        if grant.epoch == 0 {
            return Some(grant);
        }
        if grant.endpoint != 0 {
            let whom = self.endpoints.get(&grant.endpoint);
            return whom.filter(|e| (e.member, e.epoch) == (grant.member, grant.epoch)).map(|_| grant);
        }
        // There, no two endpoints had the same epoch.
        let whom = self.endpoints.values().find(|e| (e.member, e.epoch) == (grant.member, grant.epoch))?;
        Some(BlockGrant { endpoint: whom.number, ..grant })
    }

    pub(super) fn block(&mut self, block: &Block) -> Result<(), Misfit> {
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
        }
        Ok(())
    }

    pub(super) fn block_linked(&mut self, block: u64, name: Name) -> Result<(), Misfit> {
        let there = self.blocks.get_mut(&block).filter(|b| b.name.0.is_none() && !name.is_none());
        let there = there.ok_or(Misfit("a name for no block"))?;
        let key = (there.segment.0, name);
        if self.block_names.contains_key(&key) {
            return Err(Misfit("two blocks of one name"));
        }
        there.name = Text(name);
        self.block_names.insert(key, block);
        Ok(())
    }

    pub(super) fn block_unlinked(&mut self, block: u64) -> Result<(), Misfit> {
        let there = self.blocks.get_mut(&block).ok_or(Misfit("an unknown block unlinked"))?;
        let name = std::mem::replace(&mut there.name.0, Name::NONE);
        let (key, over) = ((there.segment.0, name), there.is_over());
        self.block_names.remove(&key);
        if over {
            self.block_removed(block);
        }
        Ok(())
    }

    pub(super) fn block_closed(&mut self, handle: u64) -> Result<(), Misfit> {
        let block = self.handles.remove(&handle).ok_or(Misfit("an unknown handle closed"))?;
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

    pub(super) fn block_resized(&mut self, block: u64, size: u64, span: u64) -> Result<(), Misfit> {
        let there = self.blocks.get_mut(&block).ok_or(Misfit("an unknown block resized"))?;
        let segment = self.segments.get_mut(&there.segment.0).ok_or(Misfit("a block in no segment"))?;
        if size > span || !segment.arena.resize(there.offset, there.span, span) {
            return Err(Misfit("a block resized without room"));
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

    pub(super) fn block_granted(&mut self, block: u64, grant: BlockGrant) -> Result<(), Misfit> {
        let there = self.blocks.get(&block).ok_or(Misfit("an unknown block granted"))?;
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

    pub(super) fn block_acked(&mut self, handle: u64) -> Result<(), Misfit> {
        let block = self.handles.get(&handle).and_then(|block| self.blocks.get_mut(block));
        let rights = block.and_then(|block| block.handles.acknowledge(handle));
        match Rights(rights.ok_or(Misfit("an unknown handle acknowledged"))?) {
            Rights::NONE => self.block_closed(handle),
            _ => Ok(()),
        }
    }

    /// Whether a block has a name that ends with its owner.
    pub(super) fn is_name_ending(&self, block: u64) -> bool {
        self.blocks.get(&block).is_some_and(|b| !b.persistent && !b.name.0.is_none())
    }

    /// What an endpoint leaves when it ends: handles, and names that do not outlive it.
    pub(super) fn blocks_of_dead(&mut self, endpoint: u32) -> Result<(), Misfit> {
        let Some(dead) = self.endpoints.get_mut(&endpoint) else { return Ok(()) };
        let member = dead.member;
        let (handles, blocks) = (dead.handles.clone(), dead.blocks.clone());
        for block in std::mem::take(&mut dead.granted) {
            if let Some(block) = self.blocks.get_mut(&block) {
                block.grants.remove(member, endpoint);
            }
        }
        for handle in handles.into_values() {
            self.block_closed(handle)?;
        }
        for block in blocks {
            if self.is_name_ending(block) {
                self.block_unlinked(block)?;
            }
        }
        Ok(())
    }

    pub(super) fn block_removed(&mut self, block: u64) {
        let Some(block) = self.remove::<Block>(block) else { return };
        for grant in block.grants.iter() {
            if let Some(endpoint) = self.endpoints.get_mut(&grant.endpoint) {
                endpoint.granted.remove(&block.number);
            }
        }
        if let Some(owner) = self.endpoints.get_mut(&block.owner).filter(|e| e.epoch == block.owner_epoch) {
            owner.blocks.remove(&block.number);
            owner.block_bytes -= block.span;
        }
    }
}

impl Broker {
    pub(super) fn block_create(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        wish: &wire::BlockCreate,
    ) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let segment = caller.segment;
        let name = if wish.name.is_none() { Name::NONE } else { checked(&wish.name, "block")? };
        if let Some(&handle) = endpoint.handles.get(&wish.nonce) {
            return self.send_block(caller, handle);
        }
        if !wish.rights.may_write() || !wish.rights.is_known() || !wish.others.is_known() {
            let text = "whoever makes a block opens it for writing; others may have rights from 0 to 3";
            return Err(Refusal::new(ErrorCode::INVALID, text));
        }
        if world.is_broken(&segment) {
            return Err(broken(&segment));
        }
        self.name_is_free(&segment, name)?;
        let books = self.segment_of(caller)?;
        let page = u64::from(books.page);
        let align = if wish.align == 0 { page } else { wish.align.max(page) };
        let span = wish.size.checked_next_multiple_of(page).filter(|&span| span > 0);
        let (Some(span), true) = (span, align.is_power_of_two()) else {
            let text = format!(
                "a block of {} bytes aligned to {}: it has at least 1, and alignments are powers of two",
                wish.size, wish.align
            );
            return Err(Refusal::new(ErrorCode::INVALID, text));
        };
        self.handle_quota(endpoint)?;
        self.block_quota(caller.account(), 1, span)?;
        self.own_quota(endpoint, 1, span)?;
        let offset =
            books.arena.find(span, align).ok_or_else(|| no_room(&segment, span, books.arena.longest()))?;
        let block = self.books.next_object.max(1);
        let handle = BlockHandle {
            number: block + 1,
            endpoint: number,
            rights: wish.rights.0,
            left: None,
            nonce: wish.nonce,
        };
        let mut handles = Handles::default();
        handles.insert(handle);
        self.record(Record::Block(Block {
            number: block,
            segment: Text(segment),
            name: Text(name),
            owner: number,
            owner_epoch: caller.epoch,
            member: caller.member,
            uid: caller.uid,
            offset,
            size: wish.size,
            span,
            persistent: wish.flags & wire::BlockCreate::PERSISTENT != 0,
            made: world.now(),
            others: wish.others.0,
            grants: Grants::default(),
            handles,
        }))?;
        debug!(block, endpoint = number, %segment, %name, span, "block");
        self.send_block(caller, handle.number)
    }

    fn name_is_free(&self, segment: &Name, name: Name) -> Result<(), Refusal> {
        if name.is_none() || !self.books.block_names.contains_key(&(*segment, name)) {
            return Ok(());
        }
        let text = format!("{segment} has a block {name} already: choose another name, or open that one");
        Err(Refusal::new(ErrorCode::IN_USE, text))
    }

    fn send_block(&mut self, caller: &Caller, handle: u64) -> Result<(), Refusal> {
        let block = self.books.handles.get(&handle).and_then(|block| self.books.blocks.get(block));
        let Some(block) = block else { return Ok(()) };
        let Some(held) = block.handles.get(handle) else { return Ok(()) };
        let answer = wire::Block {
            block: block.number,
            handle,
            offset: block.offset,
            size: block.size,
            span: block.span,
            rights: Rights(held.remaining()),
            owner: self.books.owner_of(block).map_or(0, |owner| owner.number),
            owner_member: block.member,
            reserved: 0,
        };
        self.answer(caller, Kind::BLOCK, answer.as_bytes(), vec![])
    }

    pub(super) fn block_open(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        wish: &wire::BlockOpen,
    ) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let (segment, name) = (caller.segment, checked(&wish.name, "block")?);
        if let Some(&handle) = endpoint.handles.get(&wish.nonce) {
            return self.send_block(caller, handle);
        }
        if wish.rights == Rights::NONE || !wish.rights.is_known() {
            return Err(Refusal::new(ErrorCode::INVALID, "a block is opened with rights from 1 to 3"));
        }
        if world.is_broken(&segment) {
            return Err(broken(&segment));
        }
        let block = self.block_named(&segment, name)?;
        let may = self.books.rights(block, endpoint);
        if wish.rights > may {
            let text = format!(
                "endpoint {number} may open block {name} of {segment} with {} rights, not {}: its owner can grant them",
                may.name(),
                wish.rights.name()
            );
            return Err(Refusal::new(ErrorCode::DENIED, text));
        }
        if wish.rights.may_write() {
            self.may_write(caller)?;
            if let Some(other) = block.handles.in_the_way_of_writing(wish.rights == Rights::WRITE_EXCLUSIVE) {
                let text = format!(
                    "endpoint {} has block {name} of {segment} open for {} access: try again when it has closed it",
                    other.endpoint,
                    Rights(other.rights).name()
                );
                return Err(Refusal::new(ErrorCode::BUSY, text));
            }
        }
        self.handle_quota(endpoint)?;
        let handle = BlockHandle {
            number: self.books.next_object.max(1),
            endpoint: number,
            rights: wish.rights.0,
            left: None,
            nonce: wish.nonce,
        };
        let block = block.number;
        self.record(Record::BlockOpened { block, handle })?;
        debug!(block, endpoint = number, %segment, %name, rights = wish.rights.name(), "block opened");
        self.send_block(caller, handle.number)
    }

    fn block_named(&self, segment: &Name, name: Name) -> Result<&Block, Refusal> {
        let block = self.books.block_names.get(&(*segment, name)).and_then(|n| self.books.blocks.get(n));
        block.ok_or_else(|| {
            Refusal::new(ErrorCode::NOT_FOUND, format!("there is no block {name} in segment {segment}"))
        })
    }

    /// A block of an endpoint's own.
    fn own_block<'a>(&'a self, endpoint: &Endpoint, block: Option<&'a Block>) -> Result<&'a Block, Refusal> {
        let block = block.filter(|b| b.segment.0 == endpoint.segment).ok_or_else(|| {
            Refusal::new(
                ErrorCode::NOT_FOUND,
                format!("there is no such block in segment {}", endpoint.segment),
            )
        })?;
        let owner = self.books.owner_of(block);
        if block.is_of(endpoint, owner.is_some()) {
            return Ok(block);
        }
        let text = match owner {
            Some(owner) => format!(
                "block {} {} belongs to endpoint {} ({}): only that can do this",
                block.number, block.name.0, owner.number, owner.name
            ),
            None => format!(
                "block {} {} belongs to user {} of member {}: only programs of that user can do this",
                block.number, block.name.0, block.uid, block.member
            ),
        };
        Err(Refusal::new(ErrorCode::DENIED, text))
    }

    /// The block of an endpoint's handle, and the handle.
    pub(super) fn held(&self, endpoint: u32, handle: u64) -> Result<(&Block, BlockHandle), Refusal> {
        let block = self.books.handles.get(&handle).and_then(|block| self.books.blocks.get(block));
        let held = block.and_then(|b| Some((b, *b.handles.get(handle).filter(|h| h.endpoint == endpoint)?)));
        held.ok_or_else(|| {
            let text = format!("endpoint {endpoint} has no handle {handle} of a block (any more)");
            Refusal::new(ErrorCode::CLOSED, text)
        })
    }

    pub(super) fn block_link(&mut self, caller: &Caller, wish: &wire::BlockLink) -> Result<(), Refusal> {
        let endpoint = self.endpoint_of(caller)?;
        let name = checked(&wish.name, "block")?;
        let block = self.own_block(endpoint, self.books.blocks.get(&wish.block))?;
        // The same request again is no other.
        if block.name.0 != name {
            if !block.name.0.is_none() {
                let text =
                    format!("block {} has the name {} already: unlink it first", block.number, block.name.0);
                return Err(Refusal::new(ErrorCode::INVALID, text));
            }
            // A name ends with the owner, or with an unlink of a persistent one. Nobody would end this one.
            if !block.persistent && self.books.owner_of(block).is_none() {
                let text =
                    format!("the owner of block {} has ended: copy it into one of your own", block.number);
                return Err(Refusal::new(ErrorCode::INVALID, text));
            }
            self.name_is_free(&block.segment.0, name)?;
            self.record(Record::BlockLinked { block: wish.block, name: Text(name) })?;
        }
        self.ok(caller)
    }

    pub(super) fn block_unlink(&mut self, caller: &Caller, wish: &wire::ByName) -> Result<(), Refusal> {
        let endpoint = self.endpoint_of(caller)?;
        let block = self.block_named(&endpoint.segment, checked(&wish.name, "block")?)?;
        let block = self.own_block(endpoint, Some(block))?.number;
        self.record(Record::BlockUnlinked { block })?;
        self.ok(caller)
    }

    pub(super) fn block_close(&mut self, caller: &Caller, wish: &wire::BlockRights) -> Result<(), Refusal> {
        let number = caller.endpoint;
        self.held(number, wish.handle)?;
        self.record(Record::BlockClosed { handle: wish.handle })?;
        self.revocations.settle(number, wish.handle);
        self.ok(caller)
    }

    pub(super) fn block_resize(&mut self, caller: &Caller, wish: &wire::BlockResize) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let (block, _) = self.held(number, wish.handle)?;
        self.own_block(endpoint, Some(block))?;
        let segment = self.segment_of(caller)?;
        let span = wish.size.checked_next_multiple_of(segment.page.into()).filter(|&span| span > 0);
        let Some(span) = span else {
            let text = format!("a block cannot have {} bytes", wish.size);
            return Err(Refusal::new(ErrorCode::INVALID, text));
        };
        if span < block.span && block.handles.len() > 1 {
            let text = format!(
                "block {} {} is open {} times, and whoever has it mapped would keep what is cut off: shorten it when \
                 nobody else has it open",
                block.number,
                block.name.0,
                block.handles.len()
            );
            return Err(Refusal::new(ErrorCode::BUSY, text));
        }
        if span > block.span {
            self.block_quota(block.account(), 0, span - block.span)?;
            self.own_quota(endpoint, 0, span - block.span)?;
            let behind = block.offset + block.span;
            if !segment.arena.is_free_behind(behind, span - block.span) {
                let text = format!(
                    "there is no room for {span} bytes where block {} lies: make another and copy",
                    block.number
                );
                return Err(Refusal::new(ErrorCode::NO_MEMORY, text));
            }
        }
        let block = block.number;
        self.record(Record::BlockResized { block, size: wish.size, span })?;
        self.send_block(caller, wish.handle)
    }

    pub(super) fn block_grant(&mut self, caller: &Caller, wish: &wire::BlockGrant) -> Result<(), Refusal> {
        let endpoint = self.endpoint_of(caller)?;
        let block = self.own_block(endpoint, self.books.blocks.get(&wish.block))?;
        if !wish.rights.is_known() {
            return Err(Refusal::new(ErrorCode::INVALID, "rights are from 0 to 3"));
        }
        if !self.segment_of(caller)?.members.contains(&wish.member) {
            let text = format!("segment {} has no member {}", endpoint.segment, wish.member);
            return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
        }
        let mut grant = BlockGrant { member: wish.member, endpoint: 0, epoch: 0, rights: wish.rights.0 };
        if wish.endpoint != 0 {
            let whom = self.books.endpoints.get(&wish.endpoint);
            let Some(whom) = whom.filter(|e| e.member == wish.member && e.segment == endpoint.segment) else {
                let text = format!(
                    "member {} has no endpoint {} in segment {}",
                    wish.member, wish.endpoint, endpoint.segment
                );
                return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
            };
            (grant.endpoint, grant.epoch) = (whom.number, whom.epoch);
        }
        let block = block.number;
        let revoked = self.books.revoked_by(block, &grant);
        self.record(Record::BlockGranted { block, grant })?;
        let done = self.ok(caller);
        revoked.into_iter().for_each(|(endpoint, handle)| self.revocations.add(endpoint, handle));
        done
    }

    pub(super) fn block_ack(&mut self, caller: &Caller, wish: &wire::BlockRights) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let (_, held) = self.held(number, wish.handle)?;
        // It may have been left even less since; then this is the answer to the earlier word, and another follows.
        if held.left.is_some_and(|left| wish.rights.0 <= left) {
            self.record(Record::BlockAcked { handle: wish.handle })?;
            self.revocations.settle(number, wish.handle);
        }
        self.ok(caller)
    }

    fn own_quota(&self, endpoint: &Endpoint, blocks: u64, bytes: u64) -> Result<(), Refusal> {
        let limits = self.limits_of(endpoint.member);
        for (key, used, more, limit) in [
            ("blocks_per_endpoint", endpoint.blocks.len() as u64, blocks, limits.blocks_per_endpoint.into()),
            ("block_bytes_per_endpoint", endpoint.block_bytes, bytes, limits.block_bytes_per_endpoint),
        ] {
            if used.saturating_add(more) > limit {
                let text = format!(
                    "endpoint {} has {used} of {limit}, and this takes {more} more: free some, or raise {key}",
                    endpoint.number
                );
                return Err(Refusal::new(ErrorCode::QUOTA, text));
            }
        }
        Ok(())
    }
}
