//! A cache in a block of a segment: where its items lie, and how readers find them.
//!
//! One server writes the block. Everybody else only reads it, and validates what they read: the server changes items while others read them.
//!
//! ```text
//! offset   part
//! 0x0000   header    4 KiB
//! 0x1000   logs      128 B for each log segment: for the server's successor, and for readers
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
//! 0x020  key        u64 x 2  what keys of items are hashed with
//! 0x030  id         u64 x 2  no other cache has this one; all servers of this cache have it
//! 0x040  clock      u64  milliseconds since the cache was made, while a server lived
//! 0x048  boot time  u64  CLOCK_BOOTTIME of the server's machine at that moment, in milliseconds
//! 0x050  flushed    u64  items whose version is not above this have ended
//! 0x058  versions   u64  the server has given out no version above this
//! 0x060  server     u64  how many servers there have been, this one included
//! 0x068  limit      u64  how many log segments the server uses
//! 0x070  pressure   u64  1: the server is short of memory, so readers tell it which items they find; else 0
//! 0x078  flush at   u64  the second of the cache's clock at which the server is to end all items; 0 = never
//! 0x3f8  contact    u64  bytes of the text that follows; 0 while it changes
//! 0x400             up to 1024 bytes of UTF-8: where the server can be reached, a line each
//! ```
//!
//! ```text
//! log segment
//! 0x00  state     u64  State; written last
//! 0x08  used      u64  bytes from the beginning that have items
//! 0x40  sequence  u64  another one each time that the segment is taken into use; segments of a queue are in this order
//! ```
//!
//! A bucket has eight slots, each of which is empty (0) or names an item ([`Slot`]). An item is named by one slot of one of the two
//! buckets that its hash chooses ([`buckets_of`]).
//!
//! ```text
//! item
//! 0x00  version  u64  no other version of any item has had this number; 0 while the rest changes
//! 0x08  hash     u64  of its key
//! 0x10  expiry   u32  the second of the cache's clock at which it ends; 0 = never
//! 0x14  flags    u32  the client's
//! 0x18  lengths  u64  bytes of the value (32 bits, low), of the key (16 bits), marks (8 bits), how often it was used (8 bits, high)
//! 0x20  room     u32  bytes from here to the next item
//! 0x24  used     u32  the second of the cache's clock at which the server saw a use last
//! 0x28  key, then value
//! ```
//!
//! A reader copies an item, and then looks whether the version, the slot and the log segment's sequence are what they were before. If they are,
//! the copy is what the server has put there. (The sequence: while the reader slept, the item may have moved away, others may have lain
//! here, and the item may have come back.) A reader takes no offset or length for granted: the copy may be made of anything.

use crate::{CACHE_LINE, PAGE};

/// What stands at [`MAGIC`] once the block can be used. Its last byte is the version of this format.
pub const READY: u64 = u64::from_le_bytes(*b"ginhold\x03");

/// Offset of [`READY`].
pub const MAGIC: usize = 0x000;
/// Offset of the number of log segments.
pub const SEGMENTS: usize = 0x008;
/// Offset of the bytes of a log segment.
pub const SEGMENT: usize = 0x010;
/// Offset of the number of buckets.
pub const BUCKETS: usize = 0x018;
/// Offset of the key of the hash.
pub const KEY: usize = 0x020;
/// Offset of what tells this cache from all others.
pub const ID: usize = 0x030;
/// Offset of the clock.
pub const CLOCK: usize = 0x040;
/// Offset of the machine's time at which the clock was set.
pub const BOOT_TIME: usize = 0x048;
/// Offset of the last version that a flush has ended.
pub const FLUSHED: usize = 0x050;
/// Offset of the highest version that may have been given out.
pub const VERSIONS: usize = 0x058;
/// Offset of the number of servers.
pub const SERVER: usize = 0x060;
/// Offset of the number of log segments in use.
pub const LIMIT: usize = 0x068;
/// Offset of the word that asks readers to say what they find.
pub const PRESSURE: usize = 0x070;
/// Offset of the second at which the server ends all items.
pub const FLUSH_AT: usize = 0x078;
/// Offset of the length of the text at [`CONTACT`].
pub const CONTACT_LEN: usize = 0x3f8;
/// Offset of a text that says where the server can be reached. A line is `channel SEGMENT`, `tcp ADDRESS:PORT` or `unix PATH`.
pub const CONTACT: usize = 0x400;
/// The longest such text, in bytes.
pub const MOST_CONTACT: usize = 1024;

/// Offset of the first log segment's words.
pub const LOGS: usize = PAGE;
/// Bytes of the words of a log segment: a line that changes with each item, and one that readers look at.
pub const LOG: usize = 2 * CACHE_LINE;
/// Bytes of a bucket.
pub const BUCKET: usize = CACHE_LINE;
/// Slots of a bucket.
pub const SLOTS: usize = BUCKET / 8;

/// The fewest bytes of a log segment, and the most. Each is a power of two.
pub const LEAST_SEGMENT: usize = 4 << 10;
/// See above.
pub const MOST_SEGMENT: usize = 1 << 30;
/// The most log segments, and the most buckets.
pub const MOST_SEGMENTS: usize = 1 << 20;
/// See above.
pub const MOST_BUCKETS: usize = 1 << 30;

/// The longest key, in bytes.
pub const MOST_KEY: usize = 250;

/// Offsets in the words of a log segment.
pub mod log {
    /// What it is for ([`State`](super::State)).
    pub const STATE: usize = 0x00;
    /// Bytes that have items.
    pub const USED: usize = 0x08;
    /// Its place among the segments of its queue. No other use of the segment has had this number.
    pub const SEQUENCE: usize = 0x40;
}

/// Offsets in an item.
pub mod item {
    /// Its version.
    pub const VERSION: usize = 0x00;
    /// The hash of its key.
    pub const HASH: usize = 0x08;
    /// When it ends (32 bits, low), then the client's flags.
    pub const EXPIRY: usize = 0x10;
    /// Bytes of value and key, and how often it was used ([`Lengths`](super::Lengths)).
    pub const LENGTHS: usize = 0x18;
    /// Bytes from its beginning to the next item (32 bits, low), then when it was used last ([`Room`](super::Room)).
    pub const ROOM: usize = 0x20;
    /// Its key.
    pub const BYTES: usize = 0x28;

    /// Bytes of an item with a key and a value of these lengths.
    pub const fn room(key: usize, value: usize) -> usize {
        (BYTES + key + value).next_multiple_of(8)
    }
}

/// What a log segment is for. Open: a server that finds another one takes the segment for a free one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State(pub u64);

impl State {
    /// Nothing. No slot names an item in it.
    pub const FREE: Self = Self(0);
    /// Items that are new.
    pub const SMALL: Self = Self(1);
    /// Items that were used again.
    pub const MAIN: Self = Self(2);
}

/// A slot of the index: 16 bits of the hash (high), then the item's offset in the block, in units of eight bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot(pub u64);

impl Slot {
    const OFFSET_BITS: u32 = 48;
    /// Names nothing.
    pub const EMPTY: Self = Self(0);

    /// The slot of an item at a multiple of eight.
    pub const fn new(hash: u64, at: usize) -> Self {
        Self((Self::tag(hash) << Self::OFFSET_BITS) | (at as u64 / 8))
    }

    const fn tag(hash: u64) -> u64 {
        // The buckets are chosen by other bits.
        hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> Self::OFFSET_BITS
    }

    /// Whether it may name an item of this hash.
    pub const fn may_be(self, hash: u64) -> bool {
        self.0 != 0 && self.0 >> Self::OFFSET_BITS == Self::tag(hash)
    }

    /// Where the item lies. May be anywhere.
    pub const fn at(self) -> u64 {
        (self.0 & ((1 << Self::OFFSET_BITS) - 1)) * 8
    }
}

/// How much room an item has, and when it was used last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room(pub u64);

impl Room {
    /// So many bytes, of an item that was used at this second.
    pub const fn new(bytes: usize, used: u32) -> Self {
        Self(bytes as u64 & 0xffff_ffff | (used as u64) << 32)
    }

    /// Bytes to the next item. May be anything.
    pub const fn bytes(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    /// The second of the last use that the server knows of.
    pub const fn used(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// What is marked on items.
pub mod marks {
    /// It has been used since it was stored.
    pub const FETCHED: u8 = 1;
    /// A client has said that it is out of date.
    pub const STALE: u8 = 2;
    /// Some client has been told that it is to store a newer one.
    pub const WON: u8 = 4;
    /// Its key came in base64.
    pub const BINARY_KEY: u8 = 8;
}

/// The lengths of an item, its marks, and how often it was used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths(pub u64);

impl Lengths {
    /// These lengths, of an item that was used so often.
    pub const fn new(key: usize, value: usize, uses: u8) -> Self {
        Self(value as u64 & 0xffff_ffff | (key as u64 & 0xffff) << 32 | (uses as u64) << 56)
    }

    /// Bytes of the key. May be anything.
    pub const fn key(self) -> usize {
        (self.0 >> 32 & 0xffff) as usize
    }

    /// Bytes of the value. May be anything.
    pub const fn value(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    /// What is marked on it ([`marks`]).
    pub const fn marks(self) -> u8 {
        (self.0 >> 48) as u8
    }

    /// The same, with these marks in place of others.
    pub const fn with_marks(self, marks: u8) -> Self {
        Self(self.0 & !(0xff << 48) | (marks as u64) << 48)
    }

    /// How often it was used, up to a few times.
    pub const fn uses(self) -> u8 {
        (self.0 >> 56) as u8
    }

    /// The same lengths, and another number of uses.
    pub const fn with_uses(self, uses: u8) -> Self {
        Self(self.0 << 8 >> 8 | (uses as u64) << 56)
    }
}

/// The two buckets of a hash, of so many (a power of two). They may be the same.
pub const fn buckets_of(hash: u64, buckets: usize) -> [usize; 2] {
    [hash as usize & (buckets - 1), (hash >> 32) as usize & (buckets - 1)]
}

/// The parts of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Log segments.
    pub segments: usize,
    /// Bytes of each.
    pub segment: usize,
    /// Buckets of the index.
    pub buckets: usize,
}

impl Shape {
    /// The parts, if a block of `len` bytes can have them.
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

    /// Where the words of a log segment lie.
    pub const fn log(&self, segment: usize) -> usize {
        LOGS + segment * LOG
    }

    /// Where a bucket lies.
    pub const fn bucket(&self, bucket: usize) -> usize {
        (LOGS + self.segments * LOG).next_multiple_of(PAGE) + bucket * BUCKET
    }

    /// Where a log segment lies.
    pub const fn segment(&self, segment: usize) -> usize {
        self.bucket(self.buckets).next_multiple_of(PAGE) + segment * self.segment
    }

    /// Bytes of all.
    pub const fn len(&self) -> usize {
        self.segment(self.segments)
    }

    /// Whether that is none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The log segment in which an item of at least a key at this offset would lie, and where the segment ends.
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
