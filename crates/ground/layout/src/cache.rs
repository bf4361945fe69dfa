//! A cache in a block of a segment: the layout of its items and of the index by which readers find them.
//!
//! One server writes the block. All others only read it. Since the server changes items while others read them, readers
//! validate everything that they read.
//!
//! ```text
//! offset   part
//! 0x0000   header    4 KiB
//! 0x1000   logs      128 B for each log segment, for the next server and for readers
//!          index     64 B for each bucket
//!          segments  the log segments, one after the other
//! ```
//!
//! ```text
//! header
//! 0x000  magic      u64  READY; written last
//! 0x008  segments   u64  how many log segments there are
//! 0x010  segment    u64  bytes of each
//! 0x018  buckets    u64  how many buckets the index has; a power of two
//! 0x020  key        u64 x 2  the key with which keys of items are hashed
//! 0x030  id         u64 x 2  unique to this cache; all its servers use the same
//! 0x040  clock      u64  milliseconds since the cache was made; stands still while no server lives
//! 0x048  boot time  u64  CLOCK_BOOTTIME of the server's machine when `clock` was set, in milliseconds
//! 0x050  flushed    u64  items whose version is not above this have ended
//! 0x058  versions   u64  an upper bound for the versions that the server has given out
//! 0x060  server     u64  how many servers there have been, including the current one
//! 0x068  limit      u64  how many log segments the server uses
//! 0x070  pressure   u64  1: the server is short of memory, so readers tell it which items they find; else 0
//! 0x078  flush at   u64  the second of the cache's clock at which the server must end all items; 0 = never
//! 0x3f8  contact    u64  bytes of the following text; 0 while it changes
//! 0x400             up to 1024 bytes of UTF-8: where the server can be reached, one address per line
//! ```
//!
//! ```text
//! log segment
//! 0x00  state     u64  State; written last
//! 0x08  used      u64  bytes, counted from the beginning, that contain items
//! 0x40  sequence  u64  a new number each time the segment is taken into use; the segments of a queue are in this order
//! ```
//!
//! A bucket has eight slots. A slot is empty (0) or refers to an item ([`Slot`]). Each item is in exactly one slot, in one of
//! the two buckets that its hash selects ([`buckets_of`]).
//!
//! ```text
//! item
//! 0x00  version  u64  unique among all versions of all items of the cache; 0 while the rest changes
//! 0x08  hash     u64  of the key
//! 0x10  expiry   u32  the second of the cache's clock at which the item ends; 0 = never
//! 0x14  flags    u32  the client's flags
//! 0x18  lengths  u64  bytes of the value (32 bits, low), of the key (16 bits), marks (8 bits), number of uses (8 bits, high)
//! 0x20  room     u32  bytes from the beginning of this item to the next one
//! 0x24  used     u32  the second of the cache's clock of the last use that the server knows of
//! 0x28  key, then value
//! ```
//!
//! A reader copies an item, and then checks whether the version, the slot and the log segment's sequence are still what they
//! were before. If they are, the copy is exactly what the server has written. The sequence is necessary because the item may
//! have moved away while the reader slept, other items may have been written to its place, and the item may have come back. A
//! reader must not trust any offset or length: the bytes of the copy may be of any origin.

use crate::{CACHE_LINE, PAGE};

/// Value of the word at [`MAGIC`] once the block can be used. Its last byte is the version of this format.
pub const READY: u64 = u64::from_le_bytes(*b"ginhold\x03");

/// Offset of [`READY`].
pub const MAGIC: usize = 0x000;
/// Offset of the number of log segments.
pub const SEGMENTS: usize = 0x008;
/// Offset of the number of bytes of each log segment.
pub const SEGMENT: usize = 0x010;
/// Offset of the number of buckets.
pub const BUCKETS: usize = 0x018;
/// Offset of the key with which keys of items are hashed.
pub const KEY: usize = 0x020;
/// Offset of the unique identifier of the cache.
pub const ID: usize = 0x030;
/// Offset of the cache's clock, in milliseconds.
pub const CLOCK: usize = 0x040;
/// Offset of CLOCK_BOOTTIME at the moment at which the clock was set, in milliseconds.
pub const BOOT_TIME: usize = 0x048;
/// Offset of the highest version that a flush has ended.
pub const FLUSHED: usize = 0x050;
/// Offset of an upper bound for the versions that the server has given out.
pub const VERSIONS: usize = 0x058;
/// Offset of the number of servers so far, including the current one.
pub const SERVER: usize = 0x060;
/// Offset of the number of log segments that the server uses.
pub const LIMIT: usize = 0x068;
/// Offset of the word with which a server that is short of memory asks readers to report the items that they find.
pub const PRESSURE: usize = 0x070;
/// Offset of the second at which the server must end all items.
pub const FLUSH_AT: usize = 0x078;
/// Offset of the length of the text at [`CONTACT`].
pub const CONTACT_LEN: usize = 0x3f8;
/// Offset of a text that says where the server can be reached. Each line is `channel SEGMENT`, `tcp ADDRESS:PORT` or `unix
/// PATH`.
pub const CONTACT: usize = 0x400;
/// Maximum length of the text at [`CONTACT`], in bytes.
pub const MOST_CONTACT: usize = 1024;

/// Offset of the first log segment's words.
pub const LOGS: usize = PAGE;
/// Bytes of the words of a log segment: one cache line that changes with each item, and one that readers look at.
pub const LOG: usize = 2 * CACHE_LINE;
/// Bytes of a bucket.
pub const BUCKET: usize = CACHE_LINE;
/// Number of slots of a bucket.
pub const SLOTS: usize = BUCKET / 8;

/// Minimum bytes of a log segment; a power of two.
pub const LEAST_SEGMENT: usize = 4 << 10;
/// Maximum bytes of a log segment; a power of two.
pub const MOST_SEGMENT: usize = 1 << 30;
/// Maximum number of log segments.
pub const MOST_SEGMENTS: usize = 1 << 20;
/// Maximum number of buckets.
pub const MOST_BUCKETS: usize = 1 << 30;

/// Maximum length of a key, in bytes.
pub const MOST_KEY: usize = 250;

/// Offsets in the words of a log segment.
pub mod log {
    /// Purpose of the segment ([`State`](super::State)).
    pub const STATE: usize = 0x00;
    /// Bytes that contain items.
    pub const USED: usize = 0x08;
    /// Position among the segments of its queue: a number that no other use of this segment has had.
    pub const SEQUENCE: usize = 0x40;
}

/// Offsets in an item.
pub mod item {
    /// Its version.
    pub const VERSION: usize = 0x00;
    /// Hash of the key.
    pub const HASH: usize = 0x08;
    /// When the item ends (32 bits, low), then the client's flags.
    pub const EXPIRY: usize = 0x10;
    /// Lengths of value and key, marks, and number of uses ([`Lengths`](super::Lengths)).
    pub const LENGTHS: usize = 0x18;
    /// Bytes from the beginning of the item to the next one (32 bits, low), then the time of its last use
    /// ([`Room`](super::Room)).
    pub const ROOM: usize = 0x20;
    /// The key, followed by the value.
    pub const BYTES: usize = 0x28;

    /// Returns the bytes that an item with a key and a value of these lengths occupies.
    pub const fn room(key: usize, value: usize) -> usize {
        (BYTES + key + value).next_multiple_of(8)
    }
}

words!(LOGS;
    server {
        MAGIC: u64, SEGMENTS: u64, SEGMENT: u64, BUCKETS: u64, KEY: [u64; 2], ID: [u64; 2], CLOCK: u64, BOOT_TIME: u64,
        FLUSHED: u64, VERSIONS: u64, SERVER: u64, LIMIT: u64, PRESSURE: u64, FLUSH_AT: u64, CONTACT_LEN: u64,
        CONTACT: [u8; MOST_CONTACT],
    }
);
words!(LOG;
    each_item { log::STATE: u64, log::USED: u64 }
    each_use { log::SEQUENCE: u64 }
);
words!(item::BYTES;
    server { item::VERSION: u64, item::HASH: u64, item::EXPIRY: u64, item::LENGTHS: u64, item::ROOM: u64 }
);

/// Purpose of a log segment. A server treats a segment with an unknown value as free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State(pub u64);

impl State {
    /// Unused. No slot refers to an item in it.
    pub const FREE: Self = Self(0);
    /// The segment contains new items.
    pub const SMALL: Self = Self(1);
    /// The segment contains items that were used again.
    pub const MAIN: Self = Self(2);
}

/// A slot of the index: 16 bits of the hash (high), then the item's offset in the block, in units of eight bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot(pub u64);

impl Slot {
    const OFFSET_BITS: u32 = 48;
    /// Refers to no item.
    pub const EMPTY: Self = Self(0);

    /// Returns the slot of an item at offset `at`, which is a multiple of eight.
    pub const fn new(hash: u64, at: usize) -> Self {
        Self((Self::tag(hash) << Self::OFFSET_BITS) | (at as u64 / 8))
    }

    const fn tag(hash: u64) -> u64 {
        // These bits differ from those that select the buckets.
        hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> Self::OFFSET_BITS
    }

    /// Returns whether the slot may refer to an item with this hash.
    pub const fn may_be(self, hash: u64) -> bool {
        self.0 != 0 && self.0 >> Self::OFFSET_BITS == Self::tag(hash)
    }

    /// Returns the item's offset in the block. Readers must check it: it may be out of range.
    pub const fn at(self) -> u64 {
        (self.0 & ((1 << Self::OFFSET_BITS) - 1)) * 8
    }
}

/// The bytes that an item occupies, and the time of its last use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room(pub u64);

impl Room {
    /// Returns the value for an item that occupies `bytes` bytes and was last used at the second `used`.
    pub const fn new(bytes: usize, used: u32) -> Self {
        Self(bytes as u64 & 0xffff_ffff | (used as u64) << 32)
    }

    /// Returns the bytes to the next item. It may be any number.
    pub const fn bytes(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    /// Returns the second of the last use that the server knows of.
    pub const fn used(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Marks of items, which are bits.
pub mod marks {
    /// The item has been used since it was stored.
    pub const FETCHED: u8 = 1;
    /// A client has declared the item out of date.
    pub const STALE: u8 = 2;
    /// A client has been told to store a newer item.
    pub const WON: u8 = 4;
    /// The client sent the key in base64.
    pub const BINARY_KEY: u8 = 8;
}

/// The lengths of an item's key and value, its marks, and how often it was used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths(pub u64);

impl Lengths {
    /// Returns the value for these lengths and this number of uses, without marks.
    pub const fn new(key: usize, value: usize, uses: u8) -> Self {
        Self(value as u64 & 0xffff_ffff | (key as u64 & 0xffff) << 32 | (uses as u64) << 56)
    }

    /// Returns the bytes of the key. It may be any number.
    pub const fn key(self) -> usize {
        (self.0 >> 32 & 0xffff) as usize
    }

    /// Returns the bytes of the value. It may be any number.
    pub const fn value(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    /// Returns the marks ([`marks`]).
    pub const fn marks(self) -> u8 {
        (self.0 >> 48) as u8
    }

    /// Returns the same value with `marks` instead of its marks.
    pub const fn with_marks(self, marks: u8) -> Self {
        Self(self.0 & !(0xff << 48) | (marks as u64) << 48)
    }

    /// Returns how often the item was used. The server stops counting after a few uses.
    pub const fn uses(self) -> u8 {
        (self.0 >> 56) as u8
    }

    /// Returns the same value with another number of uses.
    pub const fn with_uses(self, uses: u8) -> Self {
        Self(self.0 << 8 >> 8 | (uses as u64) << 56)
    }
}

/// Returns the two buckets of a hash in an index of `buckets` buckets (a power of two). They may be the same bucket.
pub const fn buckets_of(hash: u64, buckets: usize) -> [usize; 2] {
    [hash as usize & (buckets - 1), (hash >> 32) as usize & (buckets - 1)]
}

/// Numbers and sizes of the parts of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of log segments.
    pub segments: usize,
    /// Bytes of each log segment.
    pub segment: usize,
    /// Number of buckets of the index.
    pub buckets: usize,
}

impl Shape {
    /// Returns the parts with these numbers. `None` if a number is out of range or not a power of two where it must be, or if
    /// the parts need more than `len` bytes.
    pub const fn new(segments: u64, segment: u64, buckets: u64, len: usize) -> Option<Self> {
        let has_segments = segments >= 1 && segments <= MOST_SEGMENTS as u64;
        let has_bytes = segment >= LEAST_SEGMENT as u64 && segment <= MOST_SEGMENT as u64;
        let has_buckets = buckets >= 1 && buckets <= MOST_BUCKETS as u64;
        if !has_segments || !has_bytes || !has_buckets {
            return None;
        }
        if !segment.is_power_of_two() || !buckets.is_power_of_two() {
            return None;
        }
        let shape =
            Self { segments: segments as usize, segment: segment as usize, buckets: buckets as usize };
        if shape.len() <= len { Some(shape) } else { None }
    }

    /// Returns the offset of the words of a log segment.
    pub const fn log(&self, segment: usize) -> usize {
        LOGS + segment * LOG
    }

    /// Returns the offset of a bucket.
    pub const fn bucket(&self, bucket: usize) -> usize {
        (LOGS + self.segments * LOG).next_multiple_of(PAGE) + bucket * BUCKET
    }

    /// Returns the offset of a log segment.
    pub const fn segment(&self, segment: usize) -> usize {
        self.bucket(self.buckets).next_multiple_of(PAGE) + segment * self.segment
    }

    /// Returns the bytes of all parts together.
    pub const fn len(&self) -> usize {
        self.segment(self.segments)
    }

    /// Returns whether the parts have no bytes. (They always have.)
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the index and the end of the log segment in which an item at offset `at` would lie. `None` if no item can
    /// begin there.
    pub const fn place(&self, at: u64) -> Option<(usize, usize)> {
        let first = self.segment(0) as u64;
        if at < first || !at.is_multiple_of(8) {
            return None;
        }
        let index = (at - first) / self.segment as u64;
        if index >= self.segments as u64 {
            return None;
        }
        let end = self.segment(index as usize + 1);
        if end as u64 - at < item::BYTES as u64 { None } else { Some((index as usize, end)) }
    }
}

const _: () = {
    let Some(shape) = Shape::new(3, 4096, 2, 1 << 20) else { panic!() };
    assert!(shape.log(0) == 0x1000 && shape.bucket(0) == 0x2000 && shape.segment(0) == 0x3000);
    assert!(shape.len() == 0x6000 && Shape::new(3, 4096, 2, 0x5fff).is_none());
    assert!(Shape::new(0, 4096, 2, 1 << 20).is_none() && Shape::new(3, 4096, 3, 1 << 20).is_none());
    assert!(
        Shape::new(3, u64::MAX, 2, 1 << 20).is_none() && Shape::new(u64::MAX, 4096, 2, 1 << 20).is_none()
    );
    assert!(shape.place(0x2ff8).is_none() && shape.place(0x3004).is_none() && shape.place(0x6000).is_none());
    let Some((0, 0x4000)) = shape.place(0x3000) else { panic!() };
    let Some((2, 0x6000)) = shape.place(0x5fd8) else { panic!() };
    assert!(shape.place(0x5fe0).is_none() && shape.place(!7).is_none());
    let slot = Slot::new(0x1234_5678_9abc_def0, 0x5fd8);
    assert!(slot.at() == 0x5fd8 && slot.may_be(0x1234_5678_9abc_def0) && !Slot::EMPTY.may_be(0));
    let lengths = Lengths::new(250, u32::MAX as usize, 3);
    assert!(lengths.key() == 250 && lengths.value() == u32::MAX as usize && lengths.uses() == 3);
    assert!(lengths.with_uses(0).uses() == 0 && lengths.with_uses(0).key() == 250);
    let marked = lengths.with_marks(9);
    assert!(marked.marks() == 9 && marked.with_marks(0).0 == lengths.0 && lengths.marks() == 0);
    assert!(Room::new(1 << 30, 7).bytes() == 1 << 30 && Room::new(1 << 30, 7).used() == 7);
    assert!(CONTACT + MOST_CONTACT <= LOGS);
    assert!(item::room(1, 0) == 48 && item::room(0, 8) == 48);
};
