//! Blocks: memory of a segment by name, and who may do what with it.
//!
//! As with POSIX shared memory, a block lives as long as it has a name or somebody has it open. Its owner is the endpoint
//! that has made it; when that ends, the name goes too, unless the block is persistent. Then whoever is of the same member
//! and user has the owner's rights.
//!
//! Rights that are taken back are gone from the books at once, but the holder's mapping is as it was until its library
//! has heard of it ([`BlockHandle::left`]); so long the handle counts as what it was, and nobody is told that he is alone.

use super::books::{Books, Endpoint, Misfit};
use super::broker::{Broker, ClientId, World};
use super::estate::{Estate, Shelf};
use super::record::{Block, BlockGrant, BlockHandle, Record, Text};
use super::reply::{self, Refusal};
use super::requests::{broken, checked};
use super::sync::no_room;
use ginnel_layout::Name;
use ginnel_layout::wire::{self, ErrorCode, Kind, Rights};
use std::collections::BTreeMap;
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

    fn handle_mut(&mut self, handle: u64) -> Option<&mut BlockHandle> {
        self.handles.iter_mut().find(|h| h.number == handle)
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

    fn member(&self) -> u32 {
        self.member
    }

    fn place(&self) -> (u64, u64) {
        (self.offset, self.span)
    }

    fn is_possible(&self) -> bool {
        !self.is_over() && self.size <= self.span
    }

    fn users(&self) -> &[BlockHandle] {
        &self.handles
    }

    fn add(&mut self, handle: BlockHandle) {
        self.handles.push(handle);
    }

    fn collide(one: &BlockHandle, other: &BlockHandle) -> bool {
        one.number == other.number || (one.endpoint, one.nonce) == (other.endpoint, other.nonce)
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
        let granted = |epoch| block.grants.iter().find(|g| g.member == endpoint.member && g.epoch == epoch);
        let granted = granted(endpoint.epoch).or_else(|| granted(0));
        Rights(granted.map_or(block.others, |grant| grant.rights))
    }

    pub(super) fn block(&mut self, block: &Block) -> Result<(), Misfit> {
        self.enter(block)?;
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
        let at = there.handles.iter().position(|h| h.number == handle);
        let closed = at.map(|at| there.handles.remove(at));
        let over = there.is_over();
        if let Some(closed) = closed
            && let Some(endpoint) = self.endpoints.get_mut(&closed.endpoint)
        {
            endpoint.handles.remove(&closed.nonce);
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
        if let Some(member) = self.members.get_mut(&there.member) {
            member.tally.block_bytes = member.tally.block_bytes - old + span;
        }
        if let Some(owner) = self.endpoints.get_mut(&there.owner).filter(|e| e.epoch == there.owner_epoch) {
            owner.block_bytes = owner.block_bytes - old + span;
        }
        Ok(())
    }

    pub(super) fn block_granted(&mut self, block: u64, grant: BlockGrant) -> Result<(), Misfit> {
        let there = self.blocks.get_mut(&block).ok_or(Misfit("an unknown block granted"))?;
        // What was granted to endpoints that have ended is of no more use.
        let lives = |epoch| epoch == 0 || self.endpoints.values().any(|e| e.epoch == epoch);
        there.grants.retain(|g| lives(g.epoch) && (g.member, g.epoch) != (grant.member, grant.epoch));
        there.grants.push(grant);
        let Some(there) = self.blocks.get(&block) else { return Ok(()) };
        let lost: Vec<(u64, u32)> = there
            .handles
            .iter()
            .filter_map(|handle| {
                let rights = self.rights(there, self.endpoints.get(&handle.endpoint)?).0;
                (rights < handle.left.unwrap_or(handle.rights)).then_some((handle.number, rights))
            })
            .collect();
        for (handle, rights) in lost {
            if let Some(handle) = self.blocks.get_mut(&block).and_then(|b| b.handle_mut(handle)) {
                handle.left = Some(rights);
            }
        }
        Ok(())
    }

    pub(super) fn block_acked(&mut self, handle: u64) -> Result<(), Misfit> {
        let block = self.handles.get(&handle).and_then(|block| self.blocks.get_mut(block));
        let there = block.and_then(|block| block.handle_mut(handle));
        let there = there.ok_or(Misfit("an unknown handle acknowledged"))?;
        there.rights = there.left.take().unwrap_or(there.rights);
        match Rights(there.rights) {
            Rights::NONE => self.block_closed(handle),
            _ => Ok(()),
        }
    }

    /// What an endpoint leaves when it ends: handles, and names that do not outlive it.
    pub(super) fn blocks_of_dead(&mut self, endpoint: u32) -> Result<(), Misfit> {
        let Some(dead) = self.endpoints.get(&endpoint) else { return Ok(()) };
        let (handles, blocks) = (dead.handles.clone(), dead.blocks.clone());
        for handle in handles.into_values() {
            self.block_closed(handle)?;
        }
        for block in blocks {
            if self.blocks.get(&block).is_some_and(|b| !b.persistent && !b.name.0.is_none()) {
                self.block_unlinked(block)?;
            }
        }
        Ok(())
    }

    pub(super) fn block_removed(&mut self, block: u64) {
        let Some(block) = self.remove::<Block>(block) else { return };
        if let Some(owner) = self.endpoints.get_mut(&block.owner).filter(|e| e.epoch == block.owner_epoch) {
            owner.blocks.remove(&block.number);
            owner.block_bytes -= block.span;
        }
    }
}

impl Broker {
    pub(super) fn block_create(
        &mut self,
        world: &mut impl World,
        id: ClientId,
        request: u32,
        wish: &wire::BlockCreate,
    ) -> Result<(), Refusal> {
        let number = self.endpoint_of(id)?;
        let Some(endpoint) = self.books.endpoints.get(&number) else { return Ok(()) };
        let (segment, member) = (endpoint.segment, endpoint.member);
        let name = if wish.name.is_none() { Name::NONE } else { checked(&wish.name, "block")? };
        self.may_write(&segment, member)?;
        if let Some(&handle) = endpoint.handles.get(&wish.nonce) {
            return self.send_block(id, request, handle);
        }
        if !wish.rights.may_write() || !wish.rights.is_known() || !wish.others.is_known() {
            let text = "whoever makes a block opens it for writing; others may have rights from 0 to 3";
            return Err(Refusal::new(ErrorCode::INVALID, text));
        }
        if world.is_broken(&segment) {
            return Err(broken(&segment));
        }
        self.name_is_free(&segment, name)?;
        let Some(books) = self.books.segments.get(&segment) else { return Ok(()) };
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
        self.block_quota(member, 1, span)?;
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
        self.record(Record::Block(Block {
            number: block,
            segment: Text(segment),
            name: Text(name),
            owner: number,
            owner_epoch: endpoint.epoch,
            member,
            uid: endpoint.uid,
            offset,
            size: wish.size,
            span,
            persistent: wish.flags & wire::BlockCreate::PERSISTENT != 0,
            made: world.now(),
            others: wish.others.0,
            grants: Vec::new(),
            handles: vec![handle],
        }))?;
        debug!(block, endpoint = number, %segment, %name, span, "block");
        self.send_block(id, request, handle.number)
    }

    fn name_is_free(&self, segment: &Name, name: Name) -> Result<(), Refusal> {
        if name.is_none() || !self.books.block_names.contains_key(&(*segment, name)) {
            return Ok(());
        }
        let text = format!("{segment} has a block {name} already: choose another name, or open that one");
        Err(Refusal::new(ErrorCode::IN_USE, text))
    }

    fn send_block(&mut self, id: ClientId, request: u32, handle: u64) -> Result<(), Refusal> {
        let block = self.books.handles.get(&handle).and_then(|block| self.books.blocks.get(block));
        let Some(block) = block else { return Ok(()) };
        let Some(held) = block.handles.iter().find(|h| h.number == handle) else { return Ok(()) };
        let answer = wire::Block {
            block: block.number,
            handle,
            offset: block.offset,
            size: block.size,
            span: block.span,
            rights: Rights(held.left.unwrap_or(held.rights)),
            owner: self.books.owner_of(block).map_or(0, |owner| owner.number),
            owner_member: block.member,
            reserved: 0,
        };
        self.send(id, reply::packet(Kind::BLOCK, request, answer.as_bytes()), vec![]);
        Ok(())
    }

    pub(super) fn block_open(
        &mut self,
        world: &mut impl World,
        id: ClientId,
        request: u32,
        wish: &wire::BlockOpen,
    ) -> Result<(), Refusal> {
        let number = self.endpoint_of(id)?;
        let Some(endpoint) = self.books.endpoints.get(&number) else { return Ok(()) };
        let (segment, name) = (endpoint.segment, checked(&wish.name, "block")?);
        if let Some(&handle) = endpoint.handles.get(&wish.nonce) {
            return self.send_block(id, request, handle);
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
            self.may_write(&segment, endpoint.member)?;
            let exclusive = wish.rights == Rights::WRITE_EXCLUSIVE;
            let hinders = |held: Rights| held == Rights::WRITE_EXCLUSIVE || exclusive && held.may_write();
            if let Some(other) = block.handles.iter().find(|handle| hinders(Rights(handle.rights))) {
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
        self.send_block(id, request, handle.number)
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
    fn held(&self, endpoint: u32, handle: u64) -> Result<(&Block, BlockHandle), Refusal> {
        let block = self.books.handles.get(&handle).and_then(|block| self.books.blocks.get(block));
        let held = block.and_then(|b| {
            b.handles.iter().find(|h| h.number == handle && h.endpoint == endpoint).map(|h| (b, *h))
        });
        held.ok_or_else(|| {
            let text = format!("endpoint {endpoint} has no handle {handle} of a block (any more)");
            Refusal::new(ErrorCode::CLOSED, text)
        })
    }

    pub(super) fn block_link(
        &mut self,
        id: ClientId,
        request: u32,
        wish: &wire::BlockLink,
    ) -> Result<(), Refusal> {
        let number = self.endpoint_of(id)?;
        let Some(endpoint) = self.books.endpoints.get(&number) else { return Ok(()) };
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
        self.ok(id, request);
        Ok(())
    }

    pub(super) fn block_unlink(
        &mut self,
        id: ClientId,
        request: u32,
        wish: &wire::ByName,
    ) -> Result<(), Refusal> {
        let number = self.endpoint_of(id)?;
        let Some(endpoint) = self.books.endpoints.get(&number) else { return Ok(()) };
        let block = self.block_named(&endpoint.segment, checked(&wish.name, "block")?)?;
        let block = self.own_block(endpoint, Some(block))?.number;
        self.record(Record::BlockUnlinked { block })?;
        self.ok(id, request);
        Ok(())
    }

    pub(super) fn block_close(
        &mut self,
        id: ClientId,
        request: u32,
        wish: &wire::BlockRights,
    ) -> Result<(), Refusal> {
        let number = self.endpoint_of(id)?;
        self.held(number, wish.handle)?;
        self.record(Record::BlockClosed { handle: wish.handle })?;
        self.ok(id, request);
        Ok(())
    }

    pub(super) fn block_resize(
        &mut self,
        id: ClientId,
        request: u32,
        wish: &wire::BlockResize,
    ) -> Result<(), Refusal> {
        let number = self.endpoint_of(id)?;
        let Some(endpoint) = self.books.endpoints.get(&number) else { return Ok(()) };
        let (block, _) = self.held(number, wish.handle)?;
        self.own_block(endpoint, Some(block))?;
        let Some(segment) = self.books.segments.get(&block.segment.0) else { return Ok(()) };
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
            self.block_quota(block.member, 0, span - block.span)?;
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
        self.send_block(id, request, wish.handle)
    }

    pub(super) fn block_grant(
        &mut self,
        id: ClientId,
        request: u32,
        wish: &wire::BlockGrant,
    ) -> Result<(), Refusal> {
        let number = self.endpoint_of(id)?;
        let Some(endpoint) = self.books.endpoints.get(&number) else { return Ok(()) };
        let block = self.own_block(endpoint, self.books.blocks.get(&wish.block))?;
        if !wish.rights.is_known() {
            return Err(Refusal::new(ErrorCode::INVALID, "rights are from 0 to 3"));
        }
        let segment = self.books.segments.get(&endpoint.segment);
        if segment.is_none_or(|s| !s.members.contains(&wish.member)) {
            let text = format!("segment {} has no member {}", endpoint.segment, wish.member);
            return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
        }
        let mut grant = BlockGrant { member: wish.member, epoch: 0, rights: wish.rights.0 };
        if wish.endpoint != 0 {
            let whom = self.books.endpoints.get(&wish.endpoint);
            let Some(whom) = whom.filter(|e| e.member == wish.member && e.segment == endpoint.segment) else {
                let text = format!(
                    "member {} has no endpoint {} in segment {}",
                    wish.member, wish.endpoint, endpoint.segment
                );
                return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
            };
            grant.epoch = whom.epoch;
        }
        let block = block.number;
        self.record(Record::BlockGranted { block, grant })?;
        self.ok(id, request);
        let handles = self.books.blocks.get(&block).map(|b| b.handles.clone()).unwrap_or_default();
        for handle in handles {
            self.send_revoked(handle);
        }
        Ok(())
    }

    /// Tells whoever has a handle what is left of it, if that is less than it had.
    fn send_revoked(&mut self, handle: BlockHandle) {
        let (Some(left), Some(&client)) = (handle.left, self.attached.get(&handle.endpoint)) else { return };
        let event = wire::BlockRights { handle: handle.number, rights: Rights(left), reserved: 0 };
        self.send(client, reply::packet(Kind::BLOCK_REVOKED, 0, event.as_bytes()), vec![]);
    }

    /// Tells an endpoint that has come back again what it has not acknowledged.
    pub(super) fn send_all_revoked(&mut self, endpoint: u32) {
        let Some(endpoint) = self.books.endpoints.get(&endpoint) else { return };
        let held = endpoint.handles.values().filter_map(|handle| self.held(endpoint.number, *handle).ok());
        let left: Vec<BlockHandle> = held.map(|(_, handle)| handle).filter(|h| h.left.is_some()).collect();
        left.into_iter().for_each(|handle| self.send_revoked(handle));
    }

    pub(super) fn block_ack(
        &mut self,
        id: ClientId,
        request: u32,
        wish: &wire::BlockRights,
    ) -> Result<(), Refusal> {
        let number = self.endpoint_of(id)?;
        let (_, held) = self.held(number, wish.handle)?;
        // It may have been left even less since; then this is the answer to the earlier word, and another follows.
        if held.left.is_some_and(|left| wish.rights.0 <= left) {
            self.record(Record::BlockAcked { handle: wish.handle })?;
        }
        self.ok(id, request);
        Ok(())
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
