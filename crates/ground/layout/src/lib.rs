//! The formats of shared memory and of the protocols on sockets: structures, offsets and versions, and nothing else.
//!
//! Both sides of every boundary compile this crate. It allocates nothing, makes no system calls and contains no unsafe code.
//! Values that select a meaning are open newtypes: an unknown value is data that its reader refuses, never undefined behaviour.
//!
//! A format is written down in one of two ways, and both are asserted at compile time:
//!
//! - as a structure, with its size and the offset of each field (`layout!`);
//! - as words that are accessed one by one, each with a constant for its offset: in [`ring`], [`board`], [`sync`], [`verbs`],
//!   [`cache`], [`inflight`], [`nvme`] and [`nvme_state`]. They lie inside their area, are aligned and do not overlap, and words of
//!   different groups are in different cache lines (`words!`).
//!
//! `tests/claims.rs` checks that no structure and no offset is left out. Nothing checks that code accesses a word with the type
//! that its `words!` names, or that nobody but its writer writes it.
//!
//! All integers are little-endian; the crate does not compile for a big-endian machine.
#![no_std]

#[cfg(not(target_endian = "little"))]
compile_error!("the formats are little-endian and are read in place");

/// Asserts the layout of a structure at compile time: its size, and the offset of every field. None can be left out.
macro_rules! layout {
    ($type:ident, $size:literal { $($field:tt: $at:literal),* $(,)? }) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            $(assert!(core::mem::offset_of!($type, $field) == $at);)*
            let _ = |$type { $($field: _),* }: $type| ();
        };
    };
}

#[macro_use]
mod words;

pub mod board;
pub mod cache;
pub mod channel;
pub mod control;
pub mod dax;
pub mod farm;
pub mod inflight;
pub mod name;
pub mod nvme;
pub mod nvme_attach;
pub mod nvme_state;
pub mod relay;
pub mod ring;
pub mod segment;
pub mod sync;
pub mod verbs;
pub mod vfio_user;
pub mod vhost_user;
pub mod virtio;
pub mod virtio_blk;
pub mod virtio_scsi;
pub mod wire;

pub use name::Name;

/// Bytes in a cache line. Words that different parties often write are in different ones, where the format is ours and does not
/// say otherwise.
pub const CACHE_LINE: usize = 64;

/// The page of the smallest mapping, and the alignment of every channel block.
pub const PAGE: usize = 4096;

/// Member number of the host in every installation.
pub const HOST_MEMBER: u32 = 0;
