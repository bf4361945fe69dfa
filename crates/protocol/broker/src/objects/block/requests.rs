//! The requests about blocks: to make, open, name, grant, resize and free them.

use super::handles::{BlockGrant, BlockHandle, Grants, Handles};
use super::record::{Block, Change};
use crate::books::Endpoint;
use crate::broker::Broker;
use crate::caller::Caller;
use crate::effects::{ClientId, World};
use crate::objects::memory_object::MemoryObject;
use crate::objects::quota::no_room;
use crate::reply::{Refusal, body, broken, checked};
use crate::service::{Request, Service};
use crate::text::Text;
use ginnel_layout::Name;
use ginnel_layout::wire::{self, ErrorCode, Kind, Rights};
use tracing::debug;
use zerocopy::IntoBytes;

impl Service for Change {
    const REQUESTS: &[Request] = &[
        Request::write(Kind::BLOCK_CREATE, |broker, world, caller, bytes| {
            broker.block_create(world, caller, &body(bytes)?)
        }),
        Request::gift(Kind::BLOCK_OPEN, |broker, world, caller, bytes| {
            broker.block_open(world, caller, &body(bytes)?)
        }),
        Request::gift(Kind::BLOCK_RESIZE, |broker, _, caller, bytes| {
            broker.block_resize(caller, &body(bytes)?)
        }),
        Request::gift(Kind::BLOCK_LINK, |broker, _, caller, bytes| broker.block_link(caller, &body(bytes)?)),
        Request::new(Kind::BLOCK_UNLINK, |broker, _, caller, bytes| {
            broker.block_unlink(caller, &body(bytes)?)
        }),
        Request::new(Kind::BLOCK_CLOSE, |broker, _, caller, bytes| broker.block_close(caller, &body(bytes)?)),
        Request::gift(Kind::BLOCK_GRANT, |broker, _, caller, bytes| {
            broker.block_grant(caller, &body(bytes)?)
        }),
        Request::new(Kind::BLOCK_ACK, |broker, _, caller, bytes| broker.block_ack(caller, &body(bytes)?)),
    ];

    fn greet(broker: &mut Broker, endpoint: u32, _: ClientId) {
        broker.revocations.tell_again(endpoint);
    }
}

impl Broker {
    pub(crate) fn block_create(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        body: &wire::BlockCreate,
    ) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let segment = caller.segment;
        let name = if body.name.is_none() { Name::NONE } else { checked(&body.name, "block")? };
        if let Some(&handle) = endpoint.handles.get(&body.nonce) {
            return self.send_block(caller, handle);
        }
        if !body.rights.may_write() || !body.rights.is_known() || !body.others.is_known() {
            let text = "the maker of a block opens it for writing; others may have rights from 0 to 3";
            return Err(Refusal::new(ErrorCode::INVALID, text));
        }
        if world.is_broken(&segment) {
            return Err(broken(&segment));
        }
        self.name_is_free(&segment, name)?;
        let books = self.segment_of(caller)?;
        let page = u64::from(books.page);
        let align = if body.align == 0 { page } else { body.align.max(page) };
        let span = body.size.checked_next_multiple_of(page).filter(|&span| span > 0);
        let (Some(span), true) = (span, align.is_power_of_two()) else {
            let text = format!(
                "a block of {} bytes aligned to {}: a block has at least 1, and alignments are powers of two",
                body.size, body.align
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
            rights: body.rights.0,
            left: None,
            nonce: body.nonce,
        };
        let mut handles = Handles::default();
        handles.insert(handle);
        self.record(Change::Made(Box::new(Block {
            number: block,
            segment: Text(segment),
            name: Text(name),
            owner: number,
            owner_epoch: caller.epoch,
            member: caller.member,
            uid: caller.uid,
            offset,
            size: body.size,
            span,
            persistent: body.flags & wire::BlockCreate::PERSISTENT != 0,
            made: world.now(),
            others: body.others.0,
            grants: Grants::default(),
            handles,
        })))?;
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

    pub(crate) fn block_open(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        body: &wire::BlockOpen,
    ) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let (segment, name) = (caller.segment, checked(&body.name, "block")?);
        if let Some(&handle) = endpoint.handles.get(&body.nonce) {
            return self.send_block(caller, handle);
        }
        if body.rights == Rights::NONE || !body.rights.is_known() {
            return Err(Refusal::new(ErrorCode::INVALID, "a block is opened with rights from 1 to 3"));
        }
        if world.is_broken(&segment) {
            return Err(broken(&segment));
        }
        let block = self.block_named(&segment, name)?;
        let may = self.books.rights(block, endpoint);
        if body.rights > may {
            let text = format!(
                "endpoint {number} may open block {name} of {segment} with {} rights, not {}: its owner can grant them",
                may.name(),
                body.rights.name()
            );
            return Err(Refusal::new(ErrorCode::DENIED, text));
        }
        if body.rights.may_write() {
            self.may_write(caller)?;
            if let Some(other) = block.handles.in_the_way_of_writing(body.rights == Rights::WRITE_EXCLUSIVE) {
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
            rights: body.rights.0,
            left: None,
            nonce: body.nonce,
        };
        let block = block.number;
        self.record(Change::Opened { block, handle })?;
        debug!(block, endpoint = number, %segment, %name, rights = body.rights.name(), "block opened");
        self.send_block(caller, handle.number)
    }

    fn block_named(&self, segment: &Name, name: Name) -> Result<&Block, Refusal> {
        let block = self.books.block_names.get(&(*segment, name)).and_then(|n| self.books.blocks.get(n));
        block.ok_or_else(|| {
            Refusal::new(ErrorCode::NOT_FOUND, format!("there is no block {name} in segment {segment}"))
        })
    }

    /// Returns a block if the endpoint owns it or has the owner's rights.
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
                "block {} {} belongs to endpoint {} ({}): only that endpoint can do this",
                block.number, block.name.0, owner.number, owner.name
            ),
            None => format!(
                "block {} {} belongs to user {} of member {}: only programs of that user can do this",
                block.number, block.name.0, block.uid, block.member
            ),
        };
        Err(Refusal::new(ErrorCode::DENIED, text))
    }

    /// Returns the block of an endpoint's handle, and the handle.
    pub(crate) fn held(&self, endpoint: u32, handle: u64) -> Result<(&Block, BlockHandle), Refusal> {
        let block = self.books.handles.get(&handle).and_then(|block| self.books.blocks.get(block));
        let held = block.and_then(|b| Some((b, *b.handles.get(handle).filter(|h| h.endpoint == endpoint)?)));
        held.ok_or_else(|| {
            let text = format!("endpoint {endpoint} has no handle {handle} of a block (any more)");
            Refusal::new(ErrorCode::CLOSED, text)
        })
    }

    pub(crate) fn block_link(&mut self, caller: &Caller, body: &wire::BlockLink) -> Result<(), Refusal> {
        let endpoint = self.endpoint_of(caller)?;
        let name = checked(&body.name, "block")?;
        let block = self.own_block(endpoint, self.books.blocks.get(&body.block))?;
        // A repetition of the same request is not a second one.
        if block.name.0 != name {
            if !block.name.0.is_none() {
                let text =
                    format!("block {} has the name {} already: unlink it first", block.number, block.name.0);
                return Err(Refusal::new(ErrorCode::INVALID, text));
            }
            // A name ends with the owner, or with an unlink of a persistent one. Without an owner nobody would end this name.
            if !block.persistent && self.books.owner_of(block).is_none() {
                let text =
                    format!("the owner of block {} has ended: copy it into one of your own", block.number);
                return Err(Refusal::new(ErrorCode::INVALID, text));
            }
            self.name_is_free(&block.segment.0, name)?;
            self.record(Change::Linked { block: body.block, name: Text(name) })?;
        }
        self.ok(caller)
    }

    pub(crate) fn block_unlink(&mut self, caller: &Caller, body: &wire::ByName) -> Result<(), Refusal> {
        let endpoint = self.endpoint_of(caller)?;
        let block = self.block_named(&endpoint.segment, checked(&body.name, "block")?)?;
        let block = self.own_block(endpoint, Some(block))?.number;
        self.record(Change::Unlinked { block })?;
        self.ok(caller)
    }

    pub(crate) fn block_close(&mut self, caller: &Caller, body: &wire::BlockRights) -> Result<(), Refusal> {
        let number = caller.endpoint;
        self.held(number, body.handle)?;
        self.record(Change::Closed { handle: body.handle })?;
        self.revocations.settle(number, body.handle);
        self.ok(caller)
    }

    pub(crate) fn block_resize(&mut self, caller: &Caller, body: &wire::BlockResize) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let (block, _) = self.held(number, body.handle)?;
        self.own_block(endpoint, Some(block))?;
        let segment = self.segment_of(caller)?;
        let span = body.size.checked_next_multiple_of(segment.page.into()).filter(|&span| span > 0);
        let Some(span) = span else {
            let text = format!("a block cannot have {} bytes", body.size);
            return Err(Refusal::new(ErrorCode::INVALID, text));
        };
        if span < block.span && block.handles.len() > 1 {
            let text = format!(
                "block {} {} is open {} times, and programs that have it mapped would keep what is cut off: shorten it when \
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
        self.record(Change::Resized { block, size: body.size, span })?;
        self.send_block(caller, body.handle)
    }

    pub(crate) fn block_grant(&mut self, caller: &Caller, body: &wire::BlockGrant) -> Result<(), Refusal> {
        let endpoint = self.endpoint_of(caller)?;
        let block = self.own_block(endpoint, self.books.blocks.get(&body.block))?;
        if !body.rights.is_known() {
            return Err(Refusal::new(ErrorCode::INVALID, "rights are from 0 to 3"));
        }
        if !self.segment_of(caller)?.members.contains(&body.member) {
            let text = format!("segment {} has no member {}", endpoint.segment, body.member);
            return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
        }
        let mut grant = BlockGrant { member: body.member, endpoint: 0, epoch: 0, rights: body.rights.0 };
        if body.endpoint != 0 {
            let whom = self.books.endpoints.get(&body.endpoint).filter(|e| !e.is_ending);
            let Some(whom) = whom.filter(|e| e.member == body.member && e.segment == endpoint.segment) else {
                let text = format!(
                    "member {} has no endpoint {} in segment {}",
                    body.member, body.endpoint, endpoint.segment
                );
                return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
            };
            (grant.endpoint, grant.epoch) = (whom.number, whom.epoch);
        }
        let limit = self.limits_of(block.member).grants_per_block;
        let is_new = block.grants.get(grant.member, grant.endpoint).is_none();
        if is_new && block.grants.len() >= limit as usize {
            let text = format!(
                "block {} {} has {} grants, and its limit is {limit}: grant to a whole member instead of its endpoints, or \
                 raise grants_per_block",
                block.number,
                block.name.0,
                block.grants.len()
            );
            return Err(Refusal::new(ErrorCode::QUOTA, text));
        }
        let block = block.number;
        let revoked = self.books.revoked_by(block, &grant);
        self.record(Change::Granted { block, grant })?;
        let done = self.ok(caller);
        revoked.into_iter().for_each(|(endpoint, handle)| self.revocations.add(endpoint, handle));
        done
    }

    pub(crate) fn block_ack(&mut self, caller: &Caller, body: &wire::BlockRights) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let (_, held) = self.held(number, body.handle)?;
        // The rights may have been reduced further since. Then this acknowledges the earlier revocation, and another
        // acknowledgement will follow.
        if held.left.is_some_and(|left| body.rights.0 <= left) {
            self.record(Change::Acked { handle: body.handle })?;
            self.revocations.settle(number, body.handle);
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
