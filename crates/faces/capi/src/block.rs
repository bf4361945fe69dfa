//! Blocks.

use crate::boundary::{
    Growing, Outcome, borrow, borrow_mut, bytes, checked, close, fill, invalid, output, output_handle,
    read_options, return_handle, room, share, status, text,
};
use crate::endpoint::Endpoint;
use crate::handle_table::handle;
use ginnel::BlockOptions as Options;
use libc::c_int;
use std::ffi::{c_char, c_void};
use std::time::Duration;

/// An open block of a segment: named memory with access rights. Any number of threads may use it at once, except for
/// ginnel_block_resize(). Created by ginnel_block_create() or ginnel_block_open(), freed by ginnel_block_close().
pub struct Block(ginnel::Block);
handle!(Block, "block");

/// Rights to a block. Each right includes those above it.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum Rights {
    /// No access.
    GINNEL_RIGHTS_NONE = 0,
    /// Read access.
    GINNEL_RIGHTS_READ = 1,
    /// Read and write access.
    GINNEL_RIGHTS_READ_WRITE = 2,
    /// Read and write access, while nobody else has the block open for writing.
    GINNEL_RIGHTS_WRITE_EXCLUSIVE = 3,
}

fn rights(rights: c_int) -> Outcome<ginnel::Rights> {
    let known = u32::try_from(rights).map(ginnel::Rights).ok().filter(|rights| rights.is_known());
    known.ok_or_else(|| invalid(format!("{rights} is not a right; use one of GINNEL_RIGHTS_*")))
}

/// Options for creating a block. Fill the structure with zeros, set `size`, then the members that should differ from
/// the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BlockOptions {
    /// sizeof(ginnel_block_options).
    pub size: usize,
    /// Alignment of the block in the segment, in bytes, a power of two. 0: the segment's page size.
    pub align: usize,
    /// 1: nobody else can open the block for writing while the creator has it open.
    pub exclusive: u32,
    /// 1: the name outlives the endpoint, until it is unlinked or the host reboots.
    pub persistent: u32,
    /// 1: the contents are unspecified, and creating the block takes the same time for every size. 0: the bytes are
    /// zero.
    pub no_zero: u32,
    /// 1: `others` counts. 0: the rights of others are GINNEL_RIGHTS_READ_WRITE.
    pub set_others: u32,
    /// Rights of members and endpoints that have no grant of their own: one of GINNEL_RIGHTS_*.
    pub others: c_int,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for BlockOptions {}

/// Properties of an open block.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BlockInfo {
    /// sizeof(ginnel_block_info).
    pub size: usize,
    /// Number of the block, which is never reused in this installation.
    pub number: u64,
    /// Length of the block in bytes.
    pub length: usize,
    /// Rights that this handle has at present: one of GINNEL_RIGHTS_*.
    pub rights: c_int,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for BlockInfo {}

/// Creates a block of `size` bytes in the segment of `endpoint` and opens it for reading and writing. `name` may be
/// NULL: then other programs cannot open the block until ginnel_block_link() names it. `options` may be NULL. On
/// success the caller must free `*block` with ginnel_block_close(); on failure it is NULL.
///
/// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
/// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_create(
    endpoint: *const Endpoint,
    name: *const c_char,
    size: usize,
    options: *const BlockOptions,
    block: *mut *mut Block,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(block));
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let name = if name.is_null() { "" } else { checked!(text(name)) };
        let asked = checked!(read_options(options));
        let options = Options {
            align: asked.align,
            exclusive: asked.exclusive != 0,
            others: if asked.set_others != 0 { rights(asked.others)? } else { ginnel::Rights::READ_WRITE },
            persistent: asked.persistent != 0,
            zero: asked.no_zero == 0,
        };
        return_handle(place, Block(endpoint.create_block(name, size, &options)?));
        Ok(())
    })
}

/// Opens a block of the segment of `endpoint` by name, with the given rights (one of GINNEL_RIGHTS_*, not NONE). If the
/// block does not exist or is busy, waits for up to `patience_ns` nanoseconds; 0 means not at all. On success the
/// caller must free `*block` with ginnel_block_close(); on failure it is NULL.
///
/// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED,
/// GINNEL_ERR_BUSY, GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_open(
    endpoint: *const Endpoint,
    name: *const c_char,
    wanted: c_int,
    patience_ns: u64,
    block: *mut *mut Block,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(block));
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let (name, patience) = (checked!(text(name)), Duration::from_nanos(patience_ns));
        return_handle(place, Block(endpoint.open_block_within(name, rights(wanted)?, patience)?));
        Ok(())
    })
}

/// Removes the name of a block. Its memory stays allocated as long as a program has the block open. Only the owner may
/// call it. Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED,
/// GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_unlink(endpoint: *const Endpoint, name: *const c_char) -> c_int {
    status(|| {
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        Ok(endpoint.unlink_block(checked!(text(name)))?)
    })
}

/// Gives a name to a block that has none. Only the owner may call it. Blocks until the daemon answers. Any thread may
/// call it. Errors: GINNEL_ERR_IN_USE, GINNEL_ERR_DENIED, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_link(block: *const Block, name: *const c_char) -> c_int {
    status(|| {
        let Block(block) = checked!(borrow(block));
        Ok(block.link(checked!(text(name)))?)
    })
}

/// Stores the address of the block's bytes and, unless `length` is NULL, their number. They are mapped with the rights
/// of this handle, until ginnel_block_close() or ginnel_block_resize(). Other programs write to the same bytes, so use
/// a lock to order the accesses. A store without the right to write raises SIGSEGV, unless ginnel_block_guard() was
/// called. Any thread may call it. Errors: GINNEL_ERR_DENIED, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_map(
    block: *const Block,
    address: *mut *mut c_void,
    length: *mut usize,
) -> c_int {
    status(|| {
        let to = checked!(output(address));
        let Block(block) = checked!(borrow(block));
        let slice = block.slice()?;
        to.write(slice.as_ptr().cast());
        if !length.is_null() {
            checked!(output(length)).write(slice.len());
        }
        Ok(())
    })
}

/// Protects this process from stores without the right to write. From now on such a store goes to a private copy of the
/// page and never to the block. The next function of this block returns GINNEL_ERR_DENIED, and after that the block
/// shows its real contents again. Installs a handler for SIGSEGV, which passes on faults outside of such blocks. Any
/// thread may call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_guard(block: *const Block) -> c_int {
    status(|| {
        let Block(block) = checked!(borrow(block));
        Ok(block.guard_writes()?)
    })
}

/// Copies `len` bytes from offset `at` of the block to `buffer`. Does not block. Any thread may call it. Errors:
/// GINNEL_ERR_RANGE, GINNEL_ERR_DENIED, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_read(
    block: *const Block,
    at: usize,
    buffer: *mut c_void,
    len: usize,
) -> c_int {
    status(|| {
        let Block(block) = checked!(borrow(block));
        Ok(block.read(at, checked!(room(buffer, len)))?)
    })
}

/// Copies `len` bytes from `data` to offset `at` of the block. Does not block. Any thread may call it. Errors:
/// GINNEL_ERR_RANGE, GINNEL_ERR_DENIED, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_write(
    block: *const Block,
    at: usize,
    data: *const c_void,
    len: usize,
) -> c_int {
    status(|| {
        let Block(block) = checked!(borrow(block));
        Ok(block.write(at, checked!(bytes(data, len)))?)
    })
}

/// Changes the length of the block to `size` bytes without moving it in the segment; afterwards it may be mapped at
/// another address of this process. Only the owner may call it, and only while no other thread uses the handle. Blocks
/// until the daemon answers. Errors: GINNEL_ERR_NO_MEMORY if the memory behind the block is in use, GINNEL_ERR_BUSY if
/// others have the block open and would keep access to the part that is cut off, GINNEL_ERR_QUOTA, GINNEL_ERR_DENIED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_resize(block: *mut Block, size: usize) -> c_int {
    status(|| {
        let Block(block) = checked!(borrow_mut(block));
        Ok(block.resize(size)?)
    })
}

/// Sets the rights of a member, or of one of its endpoints, to the block. `endpoint` 0 means all endpoints of the
/// member. Open handles lose the rights that are no longer granted. Only the owner may call it. Blocks until the daemon
/// answers. Any thread may call it. Errors: GINNEL_ERR_DENIED, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_QUOTA if the block has
/// as many grants as the daemon allows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_grant(
    block: *const Block,
    member: u32,
    endpoint: u32,
    granted: c_int,
) -> c_int {
    status(|| {
        let Block(block) = checked!(borrow(block));
        Ok(block.grant(member, endpoint, rights(granted)?)?)
    })
}

/// Fills in `*info`, whose `size` the caller has set. Any thread may call it; it does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_get_info(block: *const Block, info: *mut BlockInfo) -> c_int {
    status(|| {
        let Block(block) = checked!(borrow(block));
        let rights = c_int::try_from(block.rights().0).unwrap_or(0);
        let facts = BlockInfo { size: 0, number: block.number(), length: block.len(), rights };
        checked!(fill(info, facts));
        Ok(())
    })
}

/// Unmaps and frees a block handle. NULL is allowed. No other thread may be using the handle. May inform the daemon,
/// which takes at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_close(block: *mut Block) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(block) }
}

/// Handles pending messages from the daemon, such as the revocation of rights to blocks. Functions that ask the daemon
/// do this too, and functions of a block do so at most every 10 ms. Any thread may call it; it does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_process_events(endpoint: *const Endpoint) -> c_int {
    status(|| {
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        endpoint.process_events();
        Ok(())
    })
}
