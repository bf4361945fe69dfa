//! Blocks.

use crate::boundary::{
    Growing, Outcome, borrow, borrow_mut, bytes, checked, close, fill, invalid, output, output_handle,
    read_options, return_handle, room, status, text,
};
use crate::endpoint::Endpoint;
use crate::handle_table::handle;
use ginnel::BlockOptions as Options;
use libc::c_int;
use std::ffi::{c_char, c_void};
use std::time::Duration;

/// An open block of a segment: memory by name, with rights. Any number of threads may use it at once, ginnel_block_resize()
/// excepted. Made by ginnel_block_create() or ginnel_block_open(), freed by ginnel_block_close().
pub struct Block(ginnel::Block);
handle!(Block, "block");

/// What may be done with a block. Each right includes those above it.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum Rights {
    /// Nothing.
    GINNEL_RIGHTS_NONE = 0,
    /// Loads.
    GINNEL_RIGHTS_READ = 1,
    /// Loads and stores.
    GINNEL_RIGHTS_READ_WRITE = 2,
    /// The same, and nobody else has it open for stores meanwhile.
    GINNEL_RIGHTS_WRITE_EXCLUSIVE = 3,
}

fn rights(rights: c_int) -> Outcome<ginnel::Rights> {
    let known = u32::try_from(rights).map(ginnel::Rights).ok().filter(|rights| rights.is_known());
    known.ok_or_else(|| invalid(format!("{rights} is no right; use one of GINNEL_RIGHTS_*")))
}

/// How to make a block. Fill it with zeros, set `size`, then what you want otherwise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BlockOptions {
    /// sizeof(ginnel_block_options).
    pub size: usize,
    /// Its offset in the segment is a multiple of this power of two, in bytes. 0: of the segment's page.
    pub align: usize,
    /// 1: nobody else can have it open for writing while the creator has.
    pub exclusive: u32,
    /// 1: its name outlives the endpoint, until it is unlinked.
    pub persistent: u32,
    /// 1: its bytes are whatever was there before, and it costs the same however large it is. 0: they are zero.
    pub no_zero: u32,
    /// 1: others may do what `others` says; 0: GINNEL_RIGHTS_READ_WRITE.
    pub set_others: u32,
    /// What those may who have not been granted anything else: one of GINNEL_RIGHTS_*.
    pub others: c_int,
}
// SAFETY: as the trait asks.
unsafe impl Growing for BlockOptions {}

/// Facts about an open block.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BlockInfo {
    /// sizeof(ginnel_block_info).
    pub size: usize,
    /// Number of the block; never used again.
    pub number: u64,
    /// Its bytes.
    pub length: usize,
    /// What this handle may do just now: one of GINNEL_RIGHTS_*.
    pub rights: c_int,
}
// SAFETY: as the trait asks.
unsafe impl Growing for BlockInfo {}

/// Makes a block of `size` bytes in the segment of `endpoint` and opens it for reading and writing. `name` may be NULL: then
/// nobody finds it until ginnel_block_link(). `options` may be NULL. On success `*block` is the caller's, to be freed with
/// ginnel_block_close(); on failure it is NULL.
///
/// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY, GINNEL_ERR_QUOTA,
/// GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
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
        let Endpoint(endpoint) = checked!(borrow(endpoint));
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

/// Opens a block of the segment of `endpoint` by name, with these rights (one of GINNEL_RIGHTS_*, not NONE). Waits up to
/// `patience_ns` nanoseconds for one that is not there or busy; 0: not at all. On success `*block` is the caller's, to be
/// freed with ginnel_block_close(); on failure it is NULL.
///
/// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED, GINNEL_ERR_BUSY,
/// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
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
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        let (name, patience) = (checked!(text(name)), Duration::from_nanos(patience_ns));
        return_handle(place, Block(endpoint.open_block_within(name, rights(wanted)?, patience)?));
        Ok(())
    })
}

/// Removes the name of a block. Its memory stays as long as somebody has it open. For its owner. Blocks for the daemon's answer.
/// Any thread. Errors: GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_unlink(endpoint: *const Endpoint, name: *const c_char) -> c_int {
    status(|| {
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        Ok(endpoint.unlink_block(checked!(text(name)))?)
    })
}

/// Gives a name to a block that has none. For its owner. Blocks for the daemon's answer. Any thread. Errors:
/// GINNEL_ERR_IN_USE, GINNEL_ERR_DENIED, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_link(block: *const Block, name: *const c_char) -> c_int {
    status(|| {
        let Block(block) = checked!(borrow(block));
        Ok(block.link(checked!(text(name)))?)
    })
}

/// Where the block's bytes lie, and how many there are: mapped with the rights of this handle, until ginnel_block_close() or
/// ginnel_block_resize(). Others write there too: order your accesses by a lock. A store without the right is SIGSEGV,
/// unless ginnel_block_guard(). `length` may be NULL. Any thread. Errors: GINNEL_ERR_DENIED, GINNEL_ERR_BROKEN.
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

/// Survives stores without the right from now on: they go into a private copy of the page, never into the block, and the
/// next function of this block returns GINNEL_ERR_DENIED, after which the block shows what it has. Installs a handler for
/// SIGSEGV, which passes on what does not lie in such a block. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_guard(block: *const Block) -> c_int {
    status(|| {
        let Block(block) = checked!(borrow(block));
        Ok(block.guard_writes()?)
    })
}

/// Copies `len` bytes at `at` of the block to `buffer`. Any thread. Errors: GINNEL_ERR_RANGE, GINNEL_ERR_DENIED,
/// GINNEL_ERR_BROKEN.
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

/// Copies `len` bytes from `data` into the block at `at`. Any thread. Errors: GINNEL_ERR_RANGE, GINNEL_ERR_DENIED,
/// GINNEL_ERR_BROKEN.
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

/// Makes the block longer or shorter where it is; it may be mapped elsewhere in the process afterwards. For its owner, and
/// while no other thread uses the handle. Blocks for the daemon's answer. Errors: GINNEL_ERR_NO_MEMORY if there is no room
/// behind it, GINNEL_ERR_BUSY if others have it open and would keep what is cut off, GINNEL_ERR_QUOTA, GINNEL_ERR_DENIED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_resize(block: *mut Block, size: usize) -> c_int {
    status(|| {
        let Block(block) = checked!(borrow_mut(block));
        Ok(block.resize(size)?)
    })
}

/// Says what a member may do with the block: number of the member, and of one of its endpoints, or 0 for all of them. Rights
/// that handles have and that are not granted any more are taken away. For its owner. Blocks for the daemon's answer. Any
/// thread. Errors: GINNEL_ERR_DENIED, GINNEL_ERR_NOT_FOUND.
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

/// Fills in `*info`, whose `size` the caller has set. Any thread; does not block.
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

/// Unmaps and frees a block handle. NULL is allowed. No other thread may be using the handle. May tell the daemon, for at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_block_close(block: *mut Block) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(block) }
}

/// Handles what the daemon has said unasked, for example that rights were taken away. Functions that ask the daemon do so
/// too, and those of a block every 10 ms. Any thread; does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_process_events(endpoint: *const Endpoint) -> c_int {
    status(|| {
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        endpoint.process_events();
        Ok(())
    })
}
