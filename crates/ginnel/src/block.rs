//! Blocks: memory of a segment by name, as POSIX shared memory is, with rights.

use crate::Endpoint;
use crate::endpoint::{Inner, Tries, parse_name};
use crate::error::Error;
use crate::fork::Opener;
use crate::inner::PATIENCE;
use ginnel_layout::wire::{self, ErrorCode, Kind, Rights};
use ginnel_layout::{Name, PAGE};
use ginnel_shmem::{Mapping, Protection, SharedMemory, SharedSlice};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

/// How to make a block.
#[derive(Clone, Copy, Debug)]
pub struct BlockOptions {
    /// In bytes, a power of two: the block's offset in the segment is a multiple of it, and of the segment's page. 0: that
    /// page. 2 MiB lets it be mapped with huge pages where the segment's file has them.
    pub align: usize,
    /// Nobody else can have it open for writing while the creator has.
    pub exclusive: bool,
    /// What those may who have not been granted anything else. Default: [`Rights::READ_WRITE`].
    pub others: Rights,
    /// Its name outlives this endpoint, until it is unlinked or the host reboots.
    pub persistent: bool,
    /// Its bytes are zero, and it gets its name when they are. Else they are whatever was there before, and the block costs
    /// the same however large it is. Default: true.
    pub zero: bool,
}

impl Default for BlockOptions {
    fn default() -> Self {
        Self { align: 0, exclusive: false, others: Rights::READ_WRITE, persistent: false, zero: true }
    }
}

/// An open block. Mapped by itself at the first touch, with just the rights that it was opened with; unmapped and closed when
/// dropped. May be used from several threads.
///
/// The bytes are shared with whoever else has the block open, so there is no reference to them: copy with [`Block::read`] and
/// [`Block::write`], or take the [`Block::slice`] or its raw pointer and order the accesses with a lock of the segment.
pub struct Block {
    endpoint: Arc<Inner>,
    held: Arc<Held>,
    number: u64,
    opener: Arc<Opener>,
    closed: bool,
}

/// What the endpoint must reach when rights are taken away.
pub(crate) struct Held {
    handle: u64,
    file_at: u64,
    size: usize,
    span: usize,
    rights: RwLock<Rights>,
    mapping: OnceLock<Mapping>,
}

/// The blocks that an endpoint has open.
#[derive(Clone, Default)]
pub(crate) struct OpenBlocks {
    held: HashMap<u64, Weak<Held>>,
    /// What is left of handles whose answer has not been looked at yet.
    left: HashMap<u64, Rights>,
    acknowledge: Vec<wire::BlockRights>,
}

impl Endpoint {
    /// Makes a block of `size` bytes in the segment and opens it for reading and writing. Without a name (`""`) it is found
    /// by nobody, until [`Block::link`].
    ///
    /// Errors: [`ErrorCode::IN_USE`] if there is a block of that name, [`ErrorCode::NO_MEMORY`] if the segment has no run of
    /// that length, [`ErrorCode::QUOTA`] if the endpoint or its member has as much as it may, [`Error::ReadOnly`] if this
    /// member may only read the segment, [`Error::Name`].
    pub fn create_block(&self, name: &str, size: usize, options: &BlockOptions) -> Result<Block, Error> {
        let inner = self.inner();
        inner.may_write()?;
        let name = if name.is_empty() { Name::NONE } else { parse_name(name)? };
        let zero = options.zero;
        let wish = wire::BlockCreate {
            // Nobody finds it before it is zero.
            name: if zero { Name::NONE } else { name },
            size: size as u64,
            align: options.align as u64,
            rights: if options.exclusive { Rights::WRITE_EXCLUSIVE } else { Rights::READ_WRITE },
            others: options.others,
            flags: if options.persistent { wire::BlockCreate::PERSISTENT } else { 0 },
            nonce: inner.next_nonce(),
            ..wire::BlockCreate::new_zeroed()
        };
        let block = Block::open(inner, Kind::BLOCK_CREATE, wish.as_bytes())?;
        if zero {
            let mapping = block.mapping()?;
            mapping.zero(0, mapping.len());
            if !name.is_none() {
                block.link_as(name)?;
            }
        }
        Ok(block)
    }

    /// Opens a block of the segment by name.
    ///
    /// Errors: [`ErrorCode::NOT_FOUND`], [`ErrorCode::DENIED`] if its owner does not grant these rights,
    /// [`ErrorCode::BUSY`] if somebody has it open in a way that excludes them.
    pub fn open_block(&self, name: &str, rights: Rights) -> Result<Block, Error> {
        self.open_block_within(name, rights, Duration::ZERO)
    }

    /// Opens a block, and waits up to `patience` as long as it is not there or busy. Asks the daemon again now and then, at
    /// most every 200 ms; waits for its answer as [`Endpoint::connect_with`] does.
    pub fn open_block_within(&self, name: &str, rights: Rights, patience: Duration) -> Result<Block, Error> {
        let inner = self.inner();
        let wish =
            wire::BlockOpen { name: parse_name(name)?, rights, reserved: 0, nonce: inner.next_nonce() };
        let mut tries = Tries::new(patience);
        loop {
            match Block::open_by(inner, Kind::BLOCK_OPEN, wish.as_bytes(), tries.answer_by) {
                Err(error)
                    if matches!(error.code(), Some(ErrorCode::NOT_FOUND | ErrorCode::BUSY))
                        && tries.pause() => {}
                other => return other,
            }
        }
    }

    /// Opens a block, and waits at most this long for the daemon's answer: then it fails, and if the daemon opens the block later, it is closed
    /// again. Errors: as [`Endpoint::open_block`].
    pub fn open_block_soon(&self, name: &str, rights: Rights, answer: Duration) -> Result<Block, Error> {
        let inner = self.inner();
        let wish =
            wire::BlockOpen { name: parse_name(name)?, rights, reserved: 0, nonce: inner.next_nonce() };
        Block::open_by(inner, Kind::BLOCK_OPEN, wish.as_bytes(), Instant::now() + answer)
    }

    /// Removes the name of a block. Its memory stays as long as somebody has it open. Its owner may do this; if that has ended,
    /// programs of the same member and user.
    pub fn unlink_block(&self, name: &str) -> Result<(), Error> {
        self.inner().order(Kind::BLOCK_UNLINK, wire::ByName { name: parse_name(name)? }.as_bytes())
    }

    /// Handles what the daemon has said unasked: rights to blocks that were taken away, among others. Every call that asks the
    /// daemon does so too, and those of a [`Block`] every 10 ms. Never waits for the daemon.
    pub fn process_events(&self) {
        self.inner().look_for_events();
    }
}

impl Block {
    fn open(endpoint: &Arc<Inner>, kind: Kind, wish: &[u8]) -> Result<Self, Error> {
        Self::open_by(endpoint, kind, wish, Instant::now() + PATIENCE)
    }

    fn open_by(endpoint: &Arc<Inner>, kind: Kind, wish: &[u8], by: Instant) -> Result<Self, Error> {
        let packet = endpoint.request_by(kind, wish, by)?;
        let (block, _) = packet.into_body::<wire::Block>(Kind::BLOCK, &endpoint.path)?;
        let held = endpoint.with_endpoint_state(|state| state.blocks.hold(endpoint, &block));
        match held {
            Ok(held) => Ok(Self {
                endpoint: endpoint.clone(),
                held,
                number: block.block,
                opener: Opener::current(),
                closed: false,
            }),
            Err(error) => {
                endpoint.tell(Kind::BLOCK_CLOSE, closing(block.handle).as_bytes());
                Err(error)
            }
        }
    }

    /// Number of the block; never used again in this installation.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Bytes, as it was made or resized.
    pub fn len(&self) -> usize {
        self.held.size
    }

    /// Never: a block has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.held.size == 0
    }

    /// What may be done with it just now.
    pub fn rights(&self) -> Rights {
        self.endpoint.glance();
        *self.held.rights()
    }

    /// Copies out from `at`. [`Error::OutOfBlock`] if the block does not have these bytes.
    pub fn read(&self, at: usize, into: &mut [u8]) -> Result<(), Error> {
        self.inside(at, into.len())?;
        let (mapping, _rights) = self.with(Rights::READ)?;
        mapping.read(at, into);
        self.whole(mapping)
    }

    /// Copies in at `at`. [`Error::Denied`] without the right, [`Error::OutOfBlock`] if the block does not have these bytes.
    pub fn write(&self, at: usize, from: &[u8]) -> Result<(), Error> {
        self.inside(at, from.len())?;
        let (mapping, _rights) = self.with(Rights::READ_WRITE)?;
        mapping.write(at, from);
        self.whole(mapping)
    }

    /// All bytes, to work on in place. A store through it without the right to write is a bug of the caller and panics; one
    /// through [`SharedSlice::as_ptr`], or after the right was taken away, is SIGSEGV, unless [`Block::guard_writes`].
    pub fn slice(&self) -> Result<SharedSlice<'_, Mapping>, Error> {
        let (mapping, _rights) = self.with(Rights::READ)?;
        Ok(SharedSlice::new(mapping, 0, self.held.size))
    }

    /// The mapping of the block, for those who work on it in their own way and see to their rights themselves. It may outlive the block,
    /// whose memory is somebody else's once nobody has it open.
    pub fn memory(&self) -> Result<Mapping, Error> {
        let (mapping, _rights) = self.with(Rights::READ)?;
        Ok(mapping.clone())
    }

    /// The file in which the block lies, and where: for mapping its pages once more, at addresses of the caller's choice.
    pub fn file(&self) -> (BorrowedFd<'_>, u64) {
        (self.endpoint.file.as_fd(), self.held.file_at)
    }

    /// Survives stores without the right from now on: they go into a private copy of the page, never into the block, and the
    /// next call says [`Error::Denied`], after which the block shows what it has.
    pub fn guard_writes(&self) -> Result<(), Error> {
        let unit = self.endpoint.page().max(PAGE);
        self.mapping()?.guard_stores(unit).map_err(Error::io("guarding a block"))
    }

    /// Gives a name to a block that has none. [`ErrorCode::IN_USE`] if another has it.
    pub fn link(&self, name: &str) -> Result<(), Error> {
        self.link_as(parse_name(name)?)
    }

    fn link_as(&self, name: Name) -> Result<(), Error> {
        self.endpoint.order(Kind::BLOCK_LINK, wire::BlockLink { block: self.number, name }.as_bytes())
    }

    /// Says what a member may do with it: number of the member, and of one of its endpoints, or 0 for all of them. For the
    /// owner. Handles that are open lose what is not granted any more; others are told that they are alone only when who has
    /// such a handle has heard of it. [`ErrorCode::QUOTA`] if the block has as many grants as `grants_per_block` of ginneld(8)
    /// allows.
    pub fn grant(&self, member: u32, endpoint: u32, rights: Rights) -> Result<(), Error> {
        let wish = wire::BlockGrant { block: self.number, member, endpoint, rights, reserved: 0 };
        self.endpoint.order(Kind::BLOCK_GRANT, wish.as_bytes())
    }

    /// Takes all rights from a member or an endpoint: [`Block::grant`] with none.
    pub fn revoke(&self, member: u32, endpoint: u32) -> Result<(), Error> {
        self.grant(member, endpoint, Rights::NONE)
    }

    /// Makes the block longer or shorter where it is; new bytes are whatever was there before. For the owner.
    /// [`ErrorCode::NO_MEMORY`] if there is no room behind it, [`ErrorCode::BUSY`] if others have it open and would keep what
    /// is cut off. Others see a new length when they open it again.
    pub fn resize(&mut self, size: usize) -> Result<(), Error> {
        let wish = wire::BlockResize { handle: self.held.handle, size: size as u64 };
        let endpoint = &self.endpoint;
        let packet = endpoint.request(Kind::BLOCK_RESIZE, wish.as_bytes())?;
        let (block, _) = packet.into_body::<wire::Block>(Kind::BLOCK, &endpoint.path)?;
        self.held = endpoint.with_endpoint_state(|state| state.blocks.hold(endpoint, &block))?;
        Ok(())
    }

    /// Closes the block and says what the daemon says to it. Dropping it does the same and says nothing.
    pub fn close(mut self) -> Result<(), Error> {
        self.closed = true;
        self.endpoint.with_endpoint_state(|state| state.blocks.forget(self.held.handle));
        self.endpoint.order(Kind::BLOCK_CLOSE, closing(self.held.handle).as_bytes())
    }

    /// Looks whether the right is there. As long as what is returned is held, it is not taken away.
    fn with(&self, needed: Rights) -> Result<(&Mapping, RwLockReadGuard<'_, Rights>), Error> {
        self.endpoint.glance();
        let mapping = self.mapping()?;
        mapping.attend();
        let rights = self.held.rights();
        let denied = || Error::Denied { rights: *rights };
        if *rights < needed {
            return Err(denied());
        }
        if mapping
            .take_denied(&self.endpoint.file, self.held.file_at)
            .map_err(Error::io("mapping a block"))?
        {
            return Err(denied());
        }
        Ok((mapping, rights))
    }

    fn inside(&self, at: usize, len: usize) -> Result<(), Error> {
        match at.checked_add(len) {
            Some(end) if end <= self.held.size => Ok(()),
            _ => Err(Error::OutOfBlock { at, len, size: self.held.size }),
        }
    }

    /// After a copy: whether the memory was there all the time, and is the segment's as far as the daemon has said.
    fn whole(&self, mapping: &Mapping) -> Result<(), Error> {
        match mapping.is_broken() || self.endpoint.memory.is_broken() {
            true => Err(Error::Broken),
            false => Ok(()),
        }
    }

    fn mapping(&self) -> Result<&Mapping, Error> {
        self.held.map(&self.endpoint)
    }
}

fn closing(handle: u64) -> wire::BlockRights {
    wire::BlockRights { handle, rights: Rights::NONE, reserved: 0 }
}

impl Drop for Block {
    fn drop(&mut self) {
        if !self.closed && self.opener.is_succeeded() {
            self.endpoint.with_endpoint_state(|state| state.blocks.forget(self.held.handle));
            self.endpoint.tell(Kind::BLOCK_CLOSE, closing(self.held.handle).as_bytes());
        }
    }
}

impl Held {
    fn rights(&self) -> RwLockReadGuard<'_, Rights> {
        self.rights.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn map(&self, endpoint: &Inner) -> Result<&Mapping, Error> {
        if let Some(mapping) = self.mapping.get() {
            return Ok(mapping);
        }
        // Rights do not change meanwhile.
        let rights = self.rights();
        if *rights == Rights::NONE {
            return Err(Error::Denied { rights: *rights });
        }
        let protection = if rights.may_write() { Protection::ReadWrite } else { Protection::Read };
        let mapping = Mapping::of_file(&endpoint.file, self.file_at, self.span, protection)
            .map_err(Error::io("mapping a block"))?;
        Ok(self.mapping.get_or_init(|| mapping))
    }

    /// Rights are less from now on.
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
            // Out of memory for the kernel's own books. The calls of the block refuse all the same.
            mapping.mark_broken();
        }
    }
}

impl OpenBlocks {
    /// Checks what the daemon says of a block, and remembers it.
    pub fn hold(&mut self, endpoint: &Inner, block: &wire::Block) -> Result<Arc<Held>, Error> {
        let bad = || endpoint.protocol("a block outside its segment");
        let (size, span) = (usize::try_from(block.size), usize::try_from(block.span));
        let (Ok(size), Ok(span)) = (size, span) else { return Err(bad()) };
        let inside = block.offset.is_multiple_of(PAGE as u64) && span.is_multiple_of(PAGE) && size <= span;
        if !inside || endpoint.part(block.offset, span).is_none() {
            return Err(bad());
        }
        let held = Arc::new(Held {
            handle: block.handle,
            file_at: endpoint.file_offset(block.offset),
            size,
            span,
            rights: RwLock::new(block.rights),
            mapping: OnceLock::new(),
        });
        self.held.insert(block.handle, Arc::downgrade(&held));
        if let Some(left) = self.left.remove(&block.handle) {
            self.leave(left, &held);
        }
        Ok(held)
    }

    /// The daemon says what is left of a handle.
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

    /// What the daemon should hear: that we know what was taken away.
    pub fn take_acknowledgements(&mut self) -> Vec<wire::BlockRights> {
        std::mem::take(&mut self.acknowledge)
    }
}
