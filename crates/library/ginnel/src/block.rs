//! Blocks: named memory in a segment, comparable to POSIX shared memory, with access rights.

use crate::endpoint::{Endpoint, Tries, parse_name};
use crate::error::Error;
use crate::fork::Opener;
use crate::inner::{Inner, PATIENCE};
use crate::open_blocks::Held;
use ginnel_layout::wire::{self, ErrorCode, Kind, Rights};
use ginnel_layout::{Name, PAGE};
use ginnel_shmem::{Mapping, SharedMemory, SharedSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, RwLockReadGuard};
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

/// Options for creating a block.
#[derive(Clone, Copy, Debug)]
pub struct BlockOptions {
    /// Alignment in bytes, a power of two: the block's offset in the segment is a multiple of it and of the segment's
    /// page size. 0 means the page size. With 2 MiB the block can be mapped with huge pages if the segment's file has
    /// them.
    pub align: usize,
    /// Nobody else can open the block for writing while the creator has it open.
    pub exclusive: bool,
    /// The rights of members and endpoints that have no grant of their own. Default: [`Rights::READ_WRITE`].
    pub others: Rights,
    /// The name outlives this endpoint, until it is unlinked or the host reboots.
    pub persistent: bool,
    /// Fill the block with zeros before it gets its name. If false, its contents are unspecified (whatever the memory
    /// held before), and creating the block takes the same time for every size. Default: true.
    pub zero: bool,
}

impl Default for BlockOptions {
    fn default() -> Self {
        Self { align: 0, exclusive: false, others: Rights::READ_WRITE, persistent: false, zero: true }
    }
}

/// An open block. It is mapped at the first access, with exactly the rights that it was opened with, and unmapped and
/// closed when it is dropped. It may be used from several threads at once.
///
/// Other endpoints may change the bytes at any time, so there are no Rust references to them. Copy with [`Block::read`]
/// and [`Block::write`], or use [`Block::slice`] or its raw pointer and order the accesses with a lock of the segment.
pub struct Block {
    endpoint: Arc<Inner>,
    held: Arc<Held>,
    number: u64,
    opener: Arc<Opener>,
    closed: bool,
}

impl Endpoint {
    /// Creates a block of `size` bytes in the segment and opens it for reading and writing. A block with an empty
    /// `name` (`""`) cannot be opened by others until [`Block::link`] names it.
    ///
    /// Blocks for the daemon, for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::ReadOnly`] if this member may only read the segment, [`Error::Name`] for an invalid name,
    /// [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers. [`Error::Refused`] with [`ErrorCode::IN_USE`]
    /// if the name is in use, [`ErrorCode::NO_MEMORY`] if the segment has no free run of that length,
    /// [`ErrorCode::QUOTA`] if the endpoint or its member has reached its limit.
    pub fn create_block(&self, name: &str, size: usize, options: &BlockOptions) -> Result<Block, Error> {
        let inner = self.inner();
        inner.may_write()?;
        let name = if name.is_empty() { Name::NONE } else { parse_name(name)? };
        let zero = options.zero;
        let body = wire::BlockCreate {
            // The block gets its name only when it is zero, so that nobody opens it before.
            name: if zero { Name::NONE } else { name },
            size: size as u64,
            align: options.align as u64,
            rights: if options.exclusive { Rights::WRITE_EXCLUSIVE } else { Rights::READ_WRITE },
            others: options.others,
            flags: if options.persistent { wire::BlockCreate::PERSISTENT } else { 0 },
            nonce: inner.next_nonce(),
            ..wire::BlockCreate::new_zeroed()
        };
        let block = Block::open(inner, Kind::BLOCK_CREATE, body.as_bytes())?;
        if zero {
            let mapping = block.mapping()?;
            mapping.zero(0, mapping.len());
            if !name.is_none() {
                block.link_as(name)?;
            }
        }
        Ok(block)
    }

    /// Opens the block `name` with the given rights. Blocks for the daemon, for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with [`ErrorCode::NOT_FOUND`] if there is no such block, [`ErrorCode::DENIED`] if its owner
    /// does not grant these rights, [`ErrorCode::BUSY`] if it is open elsewhere in a way that excludes them.
    /// [`Error::Name`] for an invalid name, [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn open_block(&self, name: &str, rights: Rights) -> Result<Block, Error> {
        self.open_block_within(name, rights, Duration::ZERO)
    }

    /// Opens a block like [`Endpoint::open_block`], but retries for up to `patience` while the block does not exist or
    /// is busy. The retries ask the daemon at intervals of up to 200 ms, and each answer is waited for as
    /// [`Endpoint::connect_with`] does.
    ///
    /// # Errors
    ///
    /// Those of [`Endpoint::open_block`], of the last attempt.
    pub fn open_block_within(&self, name: &str, rights: Rights, patience: Duration) -> Result<Block, Error> {
        let inner = self.inner();
        let body =
            wire::BlockOpen { name: parse_name(name)?, rights, reserved: 0, nonce: inner.next_nonce() };
        let mut tries = Tries::new(patience);
        loop {
            match Block::open_by(inner, Kind::BLOCK_OPEN, body.as_bytes(), tries.answer_by) {
                Err(error)
                    if matches!(error.code(), Some(ErrorCode::NOT_FOUND | ErrorCode::BUSY))
                        && tries.pause() => {}
                other => return other,
            }
        }
    }

    /// Opens a block like [`Endpoint::open_block`], but waits for at most `answer` for the daemon. If the daemon opens
    /// the block after that, it is closed again.
    ///
    /// # Errors
    ///
    /// Those of [`Endpoint::open_block`].
    pub fn open_block_soon(&self, name: &str, rights: Rights, answer: Duration) -> Result<Block, Error> {
        let inner = self.inner();
        let body =
            wire::BlockOpen { name: parse_name(name)?, rights, reserved: 0, nonce: inner.next_nonce() };
        Block::open_by(inner, Kind::BLOCK_OPEN, body.as_bytes(), Instant::now() + answer)
    }

    /// Removes the name of a block. Its memory stays allocated as long as an endpoint has the block open. The owner may
    /// do this; after the owner has ended, so may programs of the same member and user. Blocks for the daemon, for at
    /// most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with [`ErrorCode::NOT_FOUND`] or [`ErrorCode::DENIED`], [`Error::Name`] for an invalid name,
    /// [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn unlink_block(&self, name: &str) -> Result<(), Error> {
        self.inner().order(Kind::BLOCK_UNLINK, wire::ByName { name: parse_name(name)? }.as_bytes())
    }

    /// Handles pending messages from the daemon, such as the revocation of rights to blocks. Every call that asks the
    /// daemon does this too, and so do the calls of a [`Block`], at most every 10 ms. Never waits for the daemon.
    pub fn process_events(&self) {
        self.inner().look_for_events();
    }
}

impl Block {
    fn open(endpoint: &Arc<Inner>, kind: Kind, body: &[u8]) -> Result<Self, Error> {
        Self::open_by(endpoint, kind, body, Instant::now() + PATIENCE)
    }

    fn open_by(endpoint: &Arc<Inner>, kind: Kind, body: &[u8], by: Instant) -> Result<Self, Error> {
        let packet = endpoint.request_by(kind, body, by)?;
        let (block, _) = packet.into_body::<wire::Block>(Kind::BLOCK, &endpoint.path)?;
        let held = hold(endpoint, &block);
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

    /// Returns the block's number, which is never reused in this installation.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the length in bytes, as requested when the block was created or last resized through this handle.
    pub fn len(&self) -> usize {
        self.held.size
    }

    /// Returns false: a block has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.held.size == 0
    }

    /// Returns the rights that this handle has at present; its owner may have revoked some of them.
    pub fn rights(&self) -> Rights {
        self.endpoint.glance();
        *self.held.rights()
    }

    /// Copies `into.len()` bytes from offset `at` of the block. Does not block.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBlock`] if the range is not inside the block, [`Error::Denied`] if this handle has lost its
    /// rights, [`Error::Broken`] if the segment's memory is gone.
    pub fn read(&self, at: usize, into: &mut [u8]) -> Result<(), Error> {
        self.inside(at, into.len())?;
        let (mapping, _rights) = self.with(Rights::READ)?;
        mapping.read(at, into);
        self.whole(mapping)
    }

    /// Copies `from` to offset `at` of the block. Does not block.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBlock`] if the range is not inside the block, [`Error::Denied`] without the right to write,
    /// [`Error::Broken`] if the segment's memory is gone.
    pub fn write(&self, at: usize, from: &[u8]) -> Result<(), Error> {
        self.inside(at, from.len())?;
        let (mapping, _rights) = self.with(Rights::READ_WRITE)?;
        mapping.write(at, from);
        self.whole(mapping)
    }

    /// Returns all bytes of the block, for access in place.
    ///
    /// A store through the slice without the right to write is a bug of the caller and panics. A store through
    /// [`SharedSlice::as_ptr`], or after the right was revoked, raises SIGSEGV unless [`Block::guard_writes`] was
    /// called.
    ///
    /// # Errors
    ///
    /// [`Error::Denied`] if this handle has lost its rights, [`Error::System`] if the block cannot be mapped.
    pub fn slice(&self) -> Result<SharedSlice<'_, Mapping>, Error> {
        let (mapping, _rights) = self.with(Rights::READ)?;
        Ok(SharedSlice::new(mapping, 0, self.held.size))
    }

    /// Returns the mapping of the block, for callers that access it in their own way and check their rights themselves.
    /// The mapping may outlive the block; once no endpoint has the block open, its memory can be given to
    /// another endpoint.
    ///
    /// # Errors
    ///
    /// As for [`Block::slice`].
    pub fn memory(&self) -> Result<Mapping, Error> {
        let (mapping, _rights) = self.with(Rights::READ)?;
        Ok(mapping.clone())
    }

    /// Returns the file that contains the block, and the block's byte offset in it, for callers that map its pages
    /// again at addresses of their choice.
    pub fn file(&self) -> (BorrowedFd<'_>, u64) {
        (self.endpoint.file.as_fd(), self.held.file_at)
    }

    /// Protects this process from stores without the right to write. From now on such a store goes to a private copy of
    /// the page and never to the block. The next call fails with [`Error::Denied`], and after that the block shows its
    /// real contents again.
    ///
    /// # Errors
    ///
    /// [`Error::Denied`] if this handle has lost its rights, [`Error::System`] if a system call fails.
    pub fn guard_writes(&self) -> Result<(), Error> {
        let unit = self.endpoint.page().max(PAGE);
        self.mapping()?.guard_stores(unit).map_err(Error::io("guarding a block"))
    }

    /// Gives a name to a block that has none. Blocks for the daemon, for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with [`ErrorCode::IN_USE`] if another block has the name, [`Error::Name`] for an invalid
    /// name, [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn link(&self, name: &str) -> Result<(), Error> {
        self.link_as(parse_name(name)?)
    }

    fn link_as(&self, name: Name) -> Result<(), Error> {
        self.endpoint.order(Kind::BLOCK_LINK, wire::BlockLink { block: self.number, name }.as_bytes())
    }

    /// Sets the rights of a member, or of one of its endpoints, to this block. `endpoint` 0 means all endpoints of the
    /// member. Only the owner may call this. Blocks for the daemon, for at most 10 seconds.
    ///
    /// Open handles lose the rights that are no longer granted. An exclusive opener gets its exclusive access only
    /// after every holder of such a handle has acknowledged the loss.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with [`ErrorCode::QUOTA`] if the block has as many grants as `grants_per_block` of ginneld(8)
    /// allows, or with [`ErrorCode::DENIED`] if this endpoint is not the owner; [`Error::TimedOut`] or
    /// [`Error::NoDaemon`] if no daemon answers.
    pub fn grant(&self, member: u32, endpoint: u32, rights: Rights) -> Result<(), Error> {
        let body = wire::BlockGrant { block: self.number, member, endpoint, rights, reserved: 0 };
        self.endpoint.order(Kind::BLOCK_GRANT, body.as_bytes())
    }

    /// Revokes all rights of a member or an endpoint: [`Block::grant`] with [`Rights::NONE`].
    ///
    /// # Errors
    ///
    /// As for [`Block::grant`].
    pub fn revoke(&self, member: u32, endpoint: u32) -> Result<(), Error> {
        self.grant(member, endpoint, Rights::NONE)
    }

    /// Changes the length of the block in place, to `size` bytes. The contents of new bytes are unspecified. Only the
    /// owner may call this. Other endpoints see the new length when they open the block again. Blocks for the daemon,
    /// for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with [`ErrorCode::NO_MEMORY`] if the memory behind the block is in use, or with
    /// [`ErrorCode::BUSY`] if the block shrinks while others have it open and would keep access to the part that is cut
    /// off; [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn resize(&mut self, size: usize) -> Result<(), Error> {
        let body = wire::BlockResize { handle: self.held.handle, size: size as u64 };
        let endpoint = &self.endpoint;
        let packet = endpoint.request(Kind::BLOCK_RESIZE, body.as_bytes())?;
        let (block, _) = packet.into_body::<wire::Block>(Kind::BLOCK, &endpoint.path)?;
        self.held = hold(endpoint, &block)?;
        Ok(())
    }

    /// Closes the block and reports the daemon's answer. Dropping a block closes it without a report. Blocks for the
    /// daemon, for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the daemon refuses, [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn close(mut self) -> Result<(), Error> {
        self.closed = true;
        self.endpoint.with_endpoint_state(|state| state.blocks.forget(self.held.handle));
        self.endpoint.order(Kind::BLOCK_CLOSE, closing(self.held.handle).as_bytes())
    }

    /// Checks that this handle has the needed rights. They are not revoked while the returned guard is held.
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

    /// Checks, after a copy, that the memory was there all the time and, as far as the daemon has said, still belongs
    /// to the segment.
    fn whole(&self, mapping: &Mapping) -> Result<(), Error> {
        match mapping.is_broken() || self.endpoint.memory.is_broken() {
            true => Err(Error::Broken),
            false => Ok(()),
        }
    }

    fn mapping(&self) -> Result<&Mapping, Error> {
        self.held.map(&self.endpoint.file)
    }
}

/// Checks the daemon's answer about a block, and remembers the block.
fn hold(endpoint: &Inner, block: &wire::Block) -> Result<Arc<Held>, Error> {
    let bad = || endpoint.protocol("a block outside its segment");
    let (size, span) = (usize::try_from(block.size), usize::try_from(block.span));
    let (Ok(size), Ok(span)) = (size, span) else { return Err(bad()) };
    let inside = block.offset.is_multiple_of(PAGE as u64) && span.is_multiple_of(PAGE) && size <= span;
    if !inside || endpoint.part(block.offset, span).is_none() {
        return Err(bad());
    }
    let file_at = endpoint.file_offset(block.offset);
    Ok(endpoint.with_endpoint_state(|state| state.blocks.hold(block, size, span, file_at)))
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
