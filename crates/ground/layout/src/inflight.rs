//! In-flight regions: the records of a vhost-user device from which its next process can continue (vhost-user specification,
//! "Inflight I/O tracking").
//!
//! A region consists of one part for each queue, padded to a multiple of 64 bytes. The specification does not say how the
//! parts follow one another; the padding is the same as in other implementations.
//!
//! ```text
//! split                                        packed
//! 0   u64 features (0)                         0   u64 features (0)
//! 8   u16 version (0 = not in use yet)         8   u16 version
//! 10  u16 desc_num                             10  u16 desc_num
//! 12  u16 last_batch_head                      12  u16 free_head
//! 14  u16 used_idx                             14  u16 old_free_head
//! 16  {u8 inflight, u8[5], u16 next,           16  u16 used_idx, u16 old_used_idx,
//!      u64 counter}[desc_num]                      u8 used_wrap_counter, u8 old_used_wrap_counter, u8[7]
//!                                              32  {u8 inflight, u8, u16 next, u16 last, u16 num, u64 counter,
//!                                                   u16 id, u16 flags, u32 len, u64 addr}[desc_num]
//! ```

/// Version of a region that is in use.
pub const VERSION: u16 = 1;
/// Alignment of the parts of a region.
pub const ALIGN: usize = 64;

/// Offset of the features.
pub const FEATURES: usize = 0;
/// Offset of the version.
pub const VERSION_AT: usize = 8;
/// Offset of the number of entries.
pub const DESC_NUM: usize = 10;

/// Offset of the flag that says that an entry is in flight, in entries of both kinds. It is a u8 with padding behind it.
pub const ENTRY_INFLIGHT: usize = 0;
/// Offset of the counter from which the order of requests is restored, in entries of both kinds.
pub const ENTRY_COUNTER: usize = 8;

/// Offsets in the part of a split queue.
pub mod split {
    /// Offset of the head of the last batch's list.
    pub const LAST_BATCH_HEAD: usize = 12;
    /// Offset of the used index.
    pub const USED_IDX: usize = 14;
    /// Bytes in front of the entries.
    pub const HEADER: usize = 16;
    /// Bytes of an entry.
    pub const ENTRY: usize = 16;
    /// Offset of the link to the next entry of the batch.
    pub const ENTRY_NEXT: usize = 6;

    /// Returns the bytes of the part of a queue of this size.
    pub const fn len(size: u16) -> usize {
        (HEADER + ENTRY * size as usize).next_multiple_of(super::ALIGN)
    }
}

/// Offsets in the part of a packed queue.
pub mod packed {
    /// Offset of the head of the free list.
    pub const FREE_HEAD: usize = 12;
    /// Offset of the committed head of the free list.
    pub const OLD_FREE_HEAD: usize = 14;
    /// Offset of the 64-bit word with `used_idx` (bits 0-15), `old_used_idx` (16-31), `used_wrap_counter` (32-39) and
    /// `old_used_wrap_counter` (40-47).
    pub const USED: usize = 16;
    /// Bytes in front of the entries.
    pub const HEADER: usize = 32;
    /// Bytes of an entry.
    pub const ENTRY: usize = 32;
    /// Offset of the link to the next entry, free or of the same chain.
    pub const ENTRY_NEXT: usize = 2;
    /// Offset of the link to the last entry of the chain.
    pub const ENTRY_LAST: usize = 4;
    /// Offset of the number of entries of the chain.
    pub const ENTRY_NUM: usize = 6;
    /// Offset of the 64-bit word with `id` (bits 0-15), `flags` (16-31) and `len` (32-63).
    pub const ENTRY_WORD: usize = 16;
    /// Offset of the address.
    pub const ENTRY_ADDRESS: usize = 24;

    /// Returns the bytes of the part of a queue of this size.
    pub const fn len(size: u16) -> usize {
        (HEADER + ENTRY * size as usize).next_multiple_of(super::ALIGN)
    }
}

// The words are the device's alone. It writes the flag of an entry together with a byte of the padding.
words!(split::HEADER;
    device { FEATURES: u64, VERSION_AT: u16, DESC_NUM: u16, split::LAST_BATCH_HEAD: u16, split::USED_IDX: u16 }
);
words!(split::ENTRY; device { ENTRY_INFLIGHT: u16, split::ENTRY_NEXT: u16, ENTRY_COUNTER: u64 });
words!(packed::HEADER;
    device {
        FEATURES: u64, VERSION_AT: u16, DESC_NUM: u16, packed::FREE_HEAD: u16, packed::OLD_FREE_HEAD: u16,
        packed::USED: u64,
    }
);
words!(packed::ENTRY;
    device {
        ENTRY_INFLIGHT: u16, packed::ENTRY_NEXT: u16, packed::ENTRY_LAST: u16, packed::ENTRY_NUM: u16,
        ENTRY_COUNTER: u64, packed::ENTRY_WORD: u64, packed::ENTRY_ADDRESS: u64,
    }
);
const _: () = {
    assert!(
        split::len(1) == 64 && split::len(128) == 2112 && packed::len(1) == 64 && packed::len(256) == 8256
    );
};
