//! RDMA verbs in a segment: the structures through which endpoints use each other's queue pairs and memory regions.
//!
//! Each endpoint that uses a segment as an RDMA device has one block with its *tables*. The block is named `verbs.E`, where E
//! is the endpoint's number. Further blocks `verbs.E.0`, `verbs.E.1` and so on are its *arenas*. The arenas hold the
//! endpoint's rings, and the pages of the program that are registered for remote access. A queue pair number contains the
//! number of the endpoint that owns the queue pair, and the index of the queue pair in that endpoint's tables ([`QpNumber`]).
//!
//! ```text
//! tables   0x00000  header       4 KiB    written by the owner, except the count of offers
//!          0x01000  queue pairs  QPS x 256 B
//!          0x41000  regions      REGIONS x 64 B, written by the owner
//!          0x81000  chunks       CHUNKS x 4 B, written by the owner
//!          0xa1000  copies       QPS x 64 B, written by the peers of queue pairs
//!          0xb1000  counters     QPS x 64 B, written by the owner, read by monitoring tools
//! ```
//!
//! The CPU that posts a work request also executes it: it looks up the peer's region or receive entry, copies directly into
//! the peer's pages, and writes the peer's completion. So each cache line of a connected queue pair has one writing endpoint
//! while the queue pair is connected, which the tables below name, except the line of a shared copy, whose claims both write.
//! Lines with several writing endpoints are the count of offers, and, for datagrams and shared receive queues, the line of
//! `head` and `senders` and the completion entries.
//!
//! ```text
//! queue pair
//! offset   writer   word
//! 0x00     owner    state       u64  incarnation (32 bits, high), then QpState
//! 0x08     owner    peer        u32  number of the queue pair that it is connected to
//! 0x0c     owner    domain      u32  protection domain
//! 0x10     owner    ring        u64  position of its receive ring (Place)
//! 0x18     owner    completions u64  position of its completion ring (Place)
//! 0x20     owner    entries     u32  of both rings; a power of two
//! 0x24     owner    stride      u32  bytes of an entry of the receive ring
//! 0x28     owner    access      u32  what the peer may do (Access)
//! 0x2c     owner    executor    u32  who executes the requests that are posted to it (Executor)
//! 0x30     owner    kind        u32  type of the queue pair (Kind)
//! 0x34     owner    queue       u32  index of the table entry whose receives it uses: its own, or a shared receive queue's
//! 0x38     owner    qkey        u32  the Q_Key that a datagram for it must carry
//! 0x3c     owner    armed       u32  whether a completion must wake the owner (Armed)
//! 0x40     owner    tail        u64  receive entries ever posted
//! 0x48     owner    shortest    u32  a lower bound for the bytes of each posted, unused receive entry
//! 0x50     owner    answer      u64  result of an errand: its number (32 bits, high), then WcStatus
//! 0x58     owner    bounce      u64  position of the bounce area, through which the bytes of errands go (Place)
//! 0x60     owner    room        u32  maximum bytes of an errand; 0 if the owner does no errands
//! 0x80     peer     head        u64  receive entries ever used
//! 0x88     peer     executing   u64  what the peer is about to access (Executing), 0 = nothing
//! 0x90     peer     error       u64  error that the peer has found: incarnation (32 bits, high), then WcStatus; 0 = none
//! 0x98     peers    senders     u64  how many endpoints are about to send a datagram to it
//! 0xa0     both     turn        u64  reserved: who executes this direction
//! 0xc0     peer     asked       u64  an errand for the owner: incarnation (32 bits, high), then its number; written last
//! 0xc8     peer     address     u64  the errand's address in the owner's memory
//! 0xd0     peer     key         u32  key of the region
//! 0xd4     peer     kind        u32  the operation (Errand)
//! 0xd8     peer     length      u32  bytes that are in the bounce area, or that the owner puts there
//! 0xdc     peer     rest        u32  bytes that the request still has from this address on, including those of this errand
//! 0xe0     peer     first       u64  atomic operations: the value to compare with, or to add
//! 0xe8     peer     second      u64  atomic operations: the value to swap in
//! ```
//!
//! ```text
//! receive entry                                   completion entry
//! 0x00  length  u32  bytes of all elements        0x00  header   u64  stamp (32 bits, high), kind, flags, inline length
//! 0x04  count   u32  of elements                  0x08  length   u32  bytes received
//! 0x10  elements, 16 bytes each:                  0x0c  immediate u32 as it was posted
//!       address u64, length u32, key u32          0x10  source   u32  number of the sender's queue pair
//!                                                 0x14  target   u32  number of the receiver's queue pair
//!                                                 0x18  lid      u16  of the sender's port
//!                                                 0x20  payload  32 B a short message that was sent inline
//! ```
//!
//! Several senders may use the receives of a datagram queue pair, and those of a shared receive queue. A shared receive queue
//! has an entry in the table of queue pairs for its words. A sender claims a receive with a compare-exchange of the
//! completion's header, from the header's value of the previous lap to a claim that contains the sender's identity
//! ([`Completion::claim`]). With several senders, `head` is only a hint where to begin the search, and the words `source`,
//! `target` and `lid` of the completion are valid. The owner takes a claim back if the sender has died.
//!
//! Entry *i* of the completion ring is the completion of entry *i* of the receive ring. Its header is written last. The stamp
//! is the low half of *i* + 1, so the owner does not mistake an entry of an earlier lap for the completion of entry *i*.
//!
//! ```text
//! region
//! 0x00  word     u64  generation (32 bits, high), then Access, with Access::VALID; written last
//! 0x08  address  u64  first address of the region, in the owner's address space
//! 0x10  length   u64  bytes
//! 0x18  domain   u32  protection domain
//! 0x1c  chunk    u32  index of its first chunk
//! ```
//!
//! ```text
//! counters of a queue pair
//! 0x00  executed  u64  requests executed since the queue pair was made
//! 0x08  bytes     u64  bytes that these requests have sent, written or read
//! 0x10  waits     u64  why requests wait (Waits; 32 bits, high), then how many wait; 0 = none
//! 0x18  since     u64  when the first of them began to wait for this reason
//! 0x20  tried     u64  when it was tried last
//! 0x28  waited    u64  nanoseconds that requests have waited, without the current wait of `waits`
//! 0x30  helped    u64  bytes that the owner has copied for requests of its peer
//! ```
//!
//! ```text
//! copy that the peer of a queue pair shares with the owner of the queue pair
//! offset   writer   word
//! 0x00     peer     offer       u64  incarnation (32 bits, high), then its number; written last
//! 0x08     peer     address     u64  first address, in the owner's address space
//! 0x10     peer     key         u32  key of the owner's region
//! 0x14     peer     length      u32  bytes
//! 0x18     peer     local       u64  first address, in the peer's address space
//! 0x20     peer     local key   u32  key of the peer's region
//! 0x24     peer     kind        u32  whether the owner's bytes are written or read (Errand)
//! 0x30     both     claims      u64  which pieces have been claimed (Claims)
//! ```
//!
//! The times `since` and `tried` are nanoseconds of the owner's CLOCK_MONOTONIC. Peers do not use the counters: they are for
//! the administrator of the machine.
//!
//! Pages are registered in units of 2 MiB of the owner's address space, called *chunks*. Each chunk corresponds to 2 MiB of
//! an arena, in which each page lies at the same offset as in the chunk. A region names consecutive chunks, beginning with
//! the one that contains its first byte.
//!
//! Pages that cannot lie in an arena form a *shadow* region. Its key says so ([`Key::is_shadow`]), and the tables contain
//! nothing about it. A peer does not access a shadow region itself: it asks the owner's process to do so, with an *errand* in
//! the words of the queue pair, one errand at a time. The bytes go through the queue pair's bounce area, which lies in an
//! arena of the owner. A receive into a shadow region has one element, whose key is [`Key::PLACE`] and whose address is a
//! place in the owner's arenas. The owner copies from there when it takes the completion.
//!
//! A peer that executes a long RDMA READ or WRITE offers to *share the copy*. It divides the bytes into pieces
//! ([`copy::piece`]) and claims one piece after the other from the front. If the owner polls meanwhile, it claims pieces from
//! the back and copies them. `claims` begins anew with each offer. The word in the header that counts all offers tells a
//! polling owner when to look at the queue pairs.

use crate::{CACHE_LINE, PAGE};

/// Value of the word at [`MAGIC`] once the tables can be used. Its last byte is the version of the format.
pub const READY: u64 = u64::from_le_bytes(*b"ginverb\x02");

/// Offset of [`READY`].
pub const MAGIC: usize = 0x00;
/// Offset of the owner's endpoint number.
pub const ENDPOINT: usize = 0x08;
/// Offset of the owner's epoch.
pub const EPOCH: usize = 0x0c;
/// Offset of the owner's member number.
pub const MEMBER: usize = 0x10;
/// Offset of the number of the owner's arenas.
pub const ARENAS: usize = 0x14;
/// Offset of the number of the owner's shadow regions, for monitoring tools.
pub const SHADOWS: usize = 0x18;
/// Offset of the total number of bytes in the owner's shadow regions, for monitoring tools.
pub const SHADOW_BYTES: usize = 0x20;
/// Offset of the number of copies that peers have offered to share. Peers write it, so it has a cache line of its own.
pub const OFFERS: usize = 0x40;

/// Maximum number of queue pairs of an endpoint, shared receive queues included.
pub const QPS: usize = 1024;
/// Maximum number of regions of an endpoint.
pub const REGIONS: usize = 4096;
/// Maximum number of chunks that all regions of an endpoint name together.
pub const CHUNKS: usize = 32_768;

/// Offset of the first queue pair.
pub const QP_TABLE: usize = PAGE;
/// Bytes of a queue pair.
pub const QP: usize = 256;
/// Offset of the first region.
pub const REGION_TABLE: usize = QP_TABLE + QPS * QP;
/// Bytes of a region.
pub const REGION: usize = CACHE_LINE;
/// Offset of the first chunk.
pub const CHUNK_TABLE: usize = REGION_TABLE + REGIONS * REGION;
/// Offset of the shared copy of the first queue pair.
pub const COPY_TABLE: usize = CHUNK_TABLE + CHUNKS * 4;
/// Bytes of a shared copy.
pub const COPY: usize = CACHE_LINE;
/// Offset of the counters of the first queue pair. Peers use nothing from here on.
pub const COUNTER_TABLE: usize = COPY_TABLE + QPS * COPY;
/// Bytes of a queue pair's counters: one cache line, which only the owner writes.
pub const COUNTERS: usize = CACHE_LINE;
/// Bytes of the tables.
pub const TABLES: usize = COUNTER_TABLE + QPS * COUNTERS;

const _: () = {
    assert!(REGION_TABLE == 0x41000 && CHUNK_TABLE == 0x81000);
    assert!(COPY_TABLE == 0xa1000 && COUNTER_TABLE == 0xb1000);
    assert!(TABLES.is_multiple_of(PAGE));
};

/// Bytes of a chunk.
pub const CHUNK: usize = 2 << 20;

/// Only endpoints with numbers below this can have queue pairs.
pub const ENDPOINTS: u32 = 1 << 12;

/// Offsets in a queue pair.
pub mod qp {
    /// State ([`QpState`](super::QpState)) and incarnation.
    pub const STATE: usize = 0x00;
    /// Number of the queue pair that it is connected to.
    pub const PEER: usize = 0x08;
    /// Protection domain.
    pub const DOMAIN: usize = 0x0c;
    /// Position of the receive ring ([`Place`](super::Place)).
    pub const RING: usize = 0x10;
    /// Position of the completion ring ([`Place`](super::Place)).
    pub const COMPLETIONS: usize = 0x18;
    /// Number of entries of both rings, a power of two.
    pub const ENTRIES: usize = 0x20;
    /// Bytes of an entry of the receive ring.
    pub const STRIDE: usize = 0x24;
    /// What the peer may do ([`Access`](super::Access)).
    pub const ACCESS: usize = 0x28;
    /// Who executes the requests that are posted to it ([`Executor`](super::Executor)).
    pub const EXECUTOR: usize = 0x2c;
    /// Type of the queue pair ([`Kind`](super::Kind)).
    pub const KIND: usize = 0x30;
    /// Index of the table entry whose receives it uses.
    pub const QUEUE: usize = 0x34;
    /// The Q_Key that a datagram for it must carry.
    pub const QKEY: usize = 0x38;
    /// Whether a completion must wake the owner ([`Armed`](super::Armed)).
    pub const ARMED: usize = 0x3c;
    /// Number of receive entries ever posted.
    pub const TAIL: usize = 0x40;
    /// A lower bound for the bytes of each posted, unused receive entry.
    pub const SHORTEST: usize = 0x48;
    /// Result of the last errand.
    pub const ANSWER: usize = 0x50;
    /// Position of the bounce area, through which the bytes of errands go ([`Place`](super::Place)).
    pub const BOUNCE: usize = 0x58;
    /// Maximum bytes of an errand.
    pub const ROOM: usize = 0x60;
    /// Number of receive entries ever used.
    pub const HEAD: usize = 0x80;
    /// What the peer is about to access ([`Executing`](super::Executing)).
    pub const EXECUTING: usize = 0x88;
    /// Error that the peer has found.
    pub const ERROR: usize = 0x90;
    /// How many endpoints are about to send a datagram to it.
    pub const SENDERS: usize = 0x98;
    /// Incarnation and number of an errand for the owner; written last.
    pub const ASKED: usize = 0xc0;
    /// The errand's address in the owner's memory.
    pub const ASKED_ADDRESS: usize = 0xc8;
    /// Key of the errand's region, then the operation ([`Errand`](super::Errand)).
    pub const ASKED_KEY: usize = 0xd0;
    /// Bytes of the errand, then the bytes that the whole request still has from its address on.
    pub const ASKED_LENGTH: usize = 0xd8;
    /// Atomic operations: the value to compare with, or to add.
    pub const ASKED_FIRST: usize = 0xe0;
    /// Atomic operations: the value to swap in.
    pub const ASKED_SECOND: usize = 0xe8;
}

/// Offsets in a queue pair's counters.
pub mod counters {
    /// Number of requests executed.
    pub const EXECUTED: usize = 0x00;
    /// Bytes that these requests have sent, written or read.
    pub const BYTES: usize = 0x08;
    /// Why requests wait ([`Waits`](super::Waits)), and how many wait.
    pub const WAITS: usize = 0x10;
    /// When the first of them began to wait for this reason.
    pub const SINCE: usize = 0x18;
    /// When the first of them was tried last.
    pub const TRIED: usize = 0x20;
    /// Nanoseconds that requests have waited, without the current wait of [`WAITS`].
    pub const WAITED: usize = 0x28;
    /// Bytes that the owner has copied for requests of its peer.
    pub const HELPED: usize = 0x30;
}

/// Offsets in a shared copy, and its pieces.
pub mod copy {
    /// Incarnation, and number of the offer; written last.
    pub const OFFER: usize = 0x00;
    /// First address in the owner's address space.
    pub const ADDRESS: usize = 0x08;
    /// The key of the owner's region, then the number of bytes.
    pub const KEY: usize = 0x10;
    /// First address in the peer's address space.
    pub const LOCAL: usize = 0x18;
    /// The key of the peer's region, then the operation ([`Errand`](super::Errand)).
    pub const LOCAL_KEY: usize = 0x20;
    /// Which pieces have been claimed ([`Claims`](super::Claims)).
    pub const CLAIMS: usize = 0x30;

    /// Returns the bytes of each piece, except the last, of a copy of `length` bytes: an eighth of it or 32 KiB, whichever is
    /// less. The pieces are larger if the copy would otherwise have more than [`MOST`] pieces.
    pub const fn piece(length: usize) -> usize {
        let least = length.div_ceil(MOST).next_multiple_of(UNIT);
        let eighth = length.div_ceil(8).next_multiple_of(UNIT);
        let usual = if eighth < USUAL { eighth } else { USUAL };
        if least > usual { least } else { usual }
    }

    /// Maximum number of pieces of a copy.
    pub const MOST: usize = 4096;
    const USUAL: usize = if cfg!(loom) { 16 } else { 32 << 10 };
    const UNIT: usize = if cfg!(loom) { 16 } else { 4 << 10 };
}

/// Offsets in a region.
pub mod region {
    /// Generation and access ([`Access`](super::Access)).
    pub const WORD: usize = 0x00;
    /// First address, in the owner's address space.
    pub const ADDRESS: usize = 0x08;
    /// Bytes of the region.
    pub const LENGTH: usize = 0x10;
    /// Protection domain.
    pub const DOMAIN: usize = 0x18;
    /// Index of the first chunk.
    pub const CHUNK: usize = 0x1c;
}

/// Offsets in a receive entry.
pub mod receive {
    /// Bytes of all elements together.
    pub const LENGTH: usize = 0x00;
    /// Number of elements.
    pub const COUNT: usize = 0x04;
    /// The first element.
    pub const ELEMENTS: usize = 0x10;
    /// Bytes of an element.
    pub const ELEMENT: usize = 0x10;
    /// Maximum number of elements of an entry.
    pub const MOST: usize = 15;

    /// Returns the bytes of an entry with room for `elements` elements.
    pub const fn stride(elements: usize) -> usize {
        (ELEMENTS + elements * ELEMENT).next_multiple_of(crate::CACHE_LINE)
    }
}

/// Offsets in a completion entry.
pub mod completion {
    /// What has happened ([`Completion`](super::Completion)); written last.
    pub const HEADER: usize = 0x00;
    /// Bytes received.
    pub const LENGTH: usize = 0x08;
    /// The immediate data.
    pub const IMMEDIATE: usize = 0x0c;
    /// Number of the sender's queue pair.
    pub const SOURCE: usize = 0x10;
    /// Number of the receiver's queue pair.
    pub const TARGET: usize = 0x14;
    /// The local identifier (LID) of the sender's port.
    pub const LID: usize = 0x18;
    /// Payload of a short message that was sent inline.
    pub const PAYLOAD: usize = 0x20;
    /// Maximum bytes of an inline payload.
    pub const INLINE: usize = 32;
    /// Bytes of an entry.
    pub const ENTRY: usize = crate::CACHE_LINE;
}

words!(TABLES;
    queue_pairs { QP_TABLE: [u8; QPS * QP] }
    regions { REGION_TABLE: [u8; REGIONS * REGION] }
    chunks { CHUNK_TABLE: [u8; CHUNKS * 4] }
    copies { COPY_TABLE: [u8; QPS * COPY] }
    counters { COUNTER_TABLE: [u8; QPS * COUNTERS] }
);
words!(PAGE;
    owner { MAGIC: u64, ENDPOINT: u32, EPOCH: u32, MEMBER: u32, ARENAS: u32, SHADOWS: u64, SHADOW_BYTES: u64 }
    peers { OFFERS: u64 }
);
words!(QP;
    owner {
        qp::STATE: u64, qp::PEER: u32, qp::DOMAIN: u32, qp::RING: u64, qp::COMPLETIONS: u64, qp::ENTRIES: u32,
        qp::STRIDE: u32, qp::ACCESS: u32, qp::EXECUTOR: u32, qp::KIND: u32, qp::QUEUE: u32, qp::QKEY: u32,
        qp::ARMED: u32, qp::TAIL: u64, qp::SHORTEST: u32, qp::ANSWER: u64, qp::BOUNCE: u64, qp::ROOM: u32,
    }
    peer { qp::HEAD: u64, qp::EXECUTING: u64, qp::ERROR: u64, qp::SENDERS: u64 }
    errand {
        qp::ASKED: u64, qp::ASKED_ADDRESS: u64, qp::ASKED_KEY: u64, qp::ASKED_LENGTH: u64, qp::ASKED_FIRST: u64,
        qp::ASKED_SECOND: u64,
    }
);
words!(COUNTERS;
    owner {
        counters::EXECUTED: u64, counters::BYTES: u64, counters::WAITS: u64, counters::SINCE: u64,
        counters::TRIED: u64, counters::WAITED: u64, counters::HELPED: u64,
    }
);
words!(COPY;
    both {
        copy::OFFER: u64, copy::ADDRESS: u64, copy::KEY: u64, copy::LOCAL: u64, copy::LOCAL_KEY: u64,
        copy::CLAIMS: u64,
    }
);
words!(REGION;
    owner {
        region::WORD: u64, region::ADDRESS: u64, region::LENGTH: u64, region::DOMAIN: u32, region::CHUNK: u32,
    }
);
words!(receive::stride(receive::MOST);
    owner {
        receive::LENGTH: u32, receive::COUNT: u32, receive::ELEMENTS: [u8; receive::MOST * receive::ELEMENT],
    }
);
words!(completion::ENTRY;
    sender {
        completion::HEADER: u64, completion::LENGTH: u32, completion::IMMEDIATE: u32, completion::SOURCE: u32,
        completion::TARGET: u32, completion::LID: u16, completion::PAYLOAD: [u8; completion::INLINE],
    }
);

/// The number of a queue pair, which has 24 bits: the endpoint's number (12 bits, high), then the index in its tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QpNumber(pub u32);

impl QpNumber {
    const INDEX_BITS: u32 = 12;
    /// Mask of the bits of a queue pair number.
    pub const MASK: u32 = 0xff_ffff;

    /// Returns the number of the queue pair at `index` in the tables of `endpoint`. `None` if the endpoint or the index is
    /// out of range.
    pub const fn new(endpoint: u32, index: usize) -> Option<Self> {
        if endpoint == 0 || endpoint >= ENDPOINTS || index >= QPS {
            return None;
        }
        Some(Self(endpoint << Self::INDEX_BITS | index as u32))
    }

    /// Returns the number of the owner's endpoint.
    pub const fn endpoint(self) -> u32 {
        self.0 >> Self::INDEX_BITS & (ENDPOINTS - 1)
    }

    /// Returns the index in the owner's tables. It may be out of range.
    pub const fn index(self) -> usize {
        (self.0 & ((1 << Self::INDEX_BITS) - 1)) as usize
    }

    /// Returns the queue pair's offset in its owner's tables. `None` if the index is out of range.
    pub const fn at(self) -> Option<usize> {
        if self.index() < QPS { Some(QP_TABLE + self.index() * QP) } else { None }
    }

    /// Returns the offset of the queue pair's shared copy in its owner's tables. `None` if the index is out of range.
    pub const fn copy_at(self) -> Option<usize> {
        if self.index() < QPS { Some(COPY_TABLE + self.index() * COPY) } else { None }
    }

    /// Returns the offset of the queue pair's counters in its owner's tables. `None` if the index is out of range.
    pub const fn counters_at(self) -> Option<usize> {
        if self.index() < QPS { Some(COUNTER_TABLE + self.index() * COUNTERS) } else { None }
    }
}

/// A position in an endpoint's arenas: the arena's number (16 bits, high), then the offset in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place(pub u64);

impl Place {
    const OFFSET_BITS: u32 = 48;

    /// Returns the position at `offset` in arena `arena`.
    pub const fn new(arena: u16, offset: u64) -> Self {
        Self((arena as u64) << Self::OFFSET_BITS | offset & ((1 << Self::OFFSET_BITS) - 1))
    }

    /// Returns the number of the arena.
    pub const fn arena(self) -> u16 {
        (self.0 >> Self::OFFSET_BITS) as u16
    }

    /// Returns the offset in the arena.
    pub const fn offset(self) -> u64 {
        self.0 & ((1 << Self::OFFSET_BITS) - 1)
    }
}

/// A chunk of an arena: the arena's number (12 bits, high), then the index of the chunk in it. The value 0 is a chunk as
/// well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunk(pub u32);

impl Chunk {
    const INDEX_BITS: u32 = 20;

    /// Returns chunk `index` of arena `arena`.
    pub const fn new(arena: u16, index: u32) -> Self {
        Self((arena as u32) << Self::INDEX_BITS | index & ((1 << Self::INDEX_BITS) - 1))
    }

    /// Returns the position of the chunk's first byte.
    pub const fn place(self) -> Place {
        let index = self.0 & ((1 << Self::INDEX_BITS) - 1);
        Place::new((self.0 >> Self::INDEX_BITS) as u16, index as u64 * CHUNK as u64)
    }
}

/// The key of a region, as programs exchange it: whether it is a shadow region (1 bit, high), the region's index (23 bits),
/// then the low bits of its generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u32);

impl Key {
    const SHADOW: u32 = 1 << 31;

    /// The key of no region. In a receive entry, it says that the address is a [`Place`] in the owner's arenas.
    pub const PLACE: Self = Self(u32::MAX);

    /// Returns the key of a region in this generation.
    pub const fn new(index: usize, generation: u32) -> Self {
        Self((index as u32) << 8 & !Self::SHADOW | generation & 0xff)
    }

    /// Returns the key of a shadow region in this generation.
    pub const fn shadow(index: usize, generation: u32) -> Self {
        Self(Self::new(index, generation).0 | Self::SHADOW)
    }

    /// Whether the region is a shadow region.
    pub const fn is_shadow(self) -> bool {
        self.0 & Self::SHADOW != 0
    }

    /// Returns the region's index. It may be out of range.
    pub const fn index(self) -> usize {
        ((self.0 & !Self::SHADOW) >> 8) as usize
    }

    /// Returns the region's offset in its owner's tables. `None` for a shadow region, or if the index is out of range.
    pub const fn at(self) -> Option<usize> {
        if self.0 >> 8 < REGIONS as u32 { Some(REGION_TABLE + self.index() * REGION) } else { None }
    }
}

/// An operation that a peer asks the owner of a shadow region to do. Readers refuse unknown values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errand(pub u32);

impl Errand {
    /// Copies from the bounce area to the region.
    pub const WRITE: Self = Self(1);
    /// Copies from the region to the bounce area.
    pub const READ: Self = Self(2);
    /// Compares and swaps. The old value goes into the bounce area.
    pub const COMPARE_AND_SWAP: Self = Self(3);
    /// Adds. The old value goes into the bounce area.
    pub const FETCH_AND_ADD: Self = Self(4);
}

/// Rights of a region, or of the peer of a queue pair. The bits are those of `ibv_access_flags`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access(pub u32);

impl Access {
    /// Received data may be written to the region.
    pub const LOCAL_WRITE: u32 = 1;
    /// RDMA WRITE is allowed.
    pub const REMOTE_WRITE: u32 = 2;
    /// RDMA READ is allowed.
    pub const REMOTE_READ: u32 = 4;
    /// Atomic operations are allowed.
    pub const REMOTE_ATOMIC: u32 = 8;
    /// The region exists. This bit is not one of `ibv_access_flags`.
    pub const VALID: u32 = 1 << 31;

    /// Returns whether all rights in `wanted` are granted.
    pub const fn allows(self, wanted: u32) -> bool {
        self.0 & wanted == wanted
    }
}

/// State of a queue pair, with the numbers of `ibv_qp_state`. Readers refuse unknown values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpState(pub u32);

impl QpState {
    /// Newly made or reset.
    pub const RESET: Self = Self(0);
    /// Receives can be posted.
    pub const INIT: Self = Self(1);
    /// Ready to receive.
    pub const RTR: Self = Self(2);
    /// Ready to send.
    pub const RTS: Self = Self(3);
    /// Sends are suspended; messages are still received.
    pub const SQD: Self = Self(4);
    /// A send request has failed.
    pub const SQE: Self = Self(5);
    /// All posted requests are flushed.
    pub const ERR: Self = Self(6);

    /// Returns whether the peer may send to a queue pair in this state.
    pub const fn receives(self) -> bool {
        matches!(self, Self::RTR | Self::RTS | Self::SQD)
    }
}

/// A mark of what a peer is about to access through a queue pair: a region, by its key, and perhaps the queue pair's rings.
/// The owner ignores marks of another incarnation of the queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Executing(pub u64);

impl Executing {
    /// No access.
    pub const NONE: Self = Self(0);
    const REGION: u64 = 1 << 32;
    const RINGS: u64 = 1 << 33;
    const INCARNATION_SHIFT: u32 = 34;

    const fn of(incarnation: u32, what: u64) -> Self {
        Self((incarnation as u64) << Self::INCARNATION_SHIFT | what)
    }

    /// The peer accesses the rings alone.
    pub const fn rings(incarnation: u32) -> Self {
        Self::of(incarnation, Self::RINGS)
    }

    /// The peer accesses the region of `key`.
    pub const fn region(incarnation: u32, key: Key) -> Self {
        Self::of(incarnation, Self::REGION | key.0 as u64)
    }

    /// The peer accesses the region of `key`, and the rings.
    pub const fn region_and_rings(incarnation: u32, key: Key) -> Self {
        Self::of(incarnation, Self::RINGS | Self::REGION | key.0 as u64)
    }

    /// Returns whether this is a mark of this incarnation of the queue pair.
    pub const fn is_of(self, incarnation: u32) -> bool {
        self.0 != 0
            && self.0 >> Self::INCARNATION_SHIFT == Self::of(incarnation, 0).0 >> Self::INCARNATION_SHIFT
    }

    /// Returns whether the peer may access the region of `key`.
    pub const fn is_region(self, key: Key) -> bool {
        self.0 & Self::REGION != 0 && self.0 as u32 == key.0
    }
}

/// Why the requests of a queue pair wait. Readers show unknown values as unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waits(pub u32);

impl Waits {
    /// No request waits.
    pub const NOTHING: Self = Self(0);
    /// The peer's queue pair is not ready to receive.
    pub const PEER: Self = Self(1);
    /// The peer has posted no receive.
    pub const RECEIVE: Self = Self(2);
    /// The peer's process has been asked for an errand, and has not answered.
    pub const ERRAND: Self = Self(3);
    /// The queue pair's own completion queue has no room.
    pub const COMPLETIONS: Self = Self(4);
    /// The queue pair's own program has stopped it ([`QpState::SQD`]).
    pub const STOPPED: Self = Self(5);
    /// The peer or its queue pair has ended, and this queue pair is about to fail.
    pub const ENDED: Self = Self(6);
    /// The peer has claimed a piece of a shared copy, and has not copied it yet.
    pub const COPY: Self = Self(7);
}

/// The claimed pieces of a shared copy: the number of the offer (25 bits, high), how many pieces are claimed from the front,
/// how many from the back, and how many of those from the back have been copied (13 bits each).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claims(pub u64);

impl Claims {
    const BITS: u32 = 13;
    const MASK: u64 = (1 << Self::BITS) - 1;
    const FRONT: u64 = 1 << (2 * Self::BITS);
    const BACK: u64 = 1 << Self::BITS;
    const DONE: u64 = 1;
    const NUMBER: u32 = 3 * Self::BITS;

    /// Returns the claims of a new offer with this number: none.
    pub const fn new(number: u32) -> Self {
        Self((number as u64) << Self::NUMBER)
    }

    /// Returns whether these claims belong to the offer with this number.
    pub const fn is_of(self, number: u32) -> bool {
        self.0 >> Self::NUMBER == Self::new(number).0 >> Self::NUMBER
    }

    /// Returns how many pieces the peer has claimed from the front.
    pub const fn front(self) -> usize {
        (self.0 >> (2 * Self::BITS) & Self::MASK) as usize
    }

    /// Returns how many pieces the owner has claimed from the back.
    pub const fn back(self) -> usize {
        (self.0 >> Self::BITS & Self::MASK) as usize
    }

    /// Returns how many of the owner's pieces have been copied.
    pub const fn done(self) -> usize {
        (self.0 & Self::MASK) as usize
    }

    /// Returns the claims with one more piece from the front. `None` if all `pieces` are claimed.
    pub const fn claim_front(self, pieces: usize) -> Option<Self> {
        if self.front() + self.back() < pieces { Some(Self(self.0 + Self::FRONT)) } else { None }
    }

    /// Returns the claims with one more piece from the back. `None` if all `pieces` are claimed.
    pub const fn claim_back(self, pieces: usize) -> Option<Self> {
        if self.front() + self.back() < pieces { Some(Self(self.0 + Self::BACK)) } else { None }
    }

    /// Returns whether the owner may have changed `before` into these claims, by claiming further ones of the `pieces` or by
    /// copying some.
    pub const fn follow(self, before: Self, pieces: usize) -> bool {
        self.0 >> (2 * Self::BITS) == before.0 >> (2 * Self::BITS)
            && self.back() >= before.back()
            && self.done() >= before.done()
            && self.done() <= self.back()
            && self.front() + self.back() <= pieces
    }

    /// The number to add when a piece from the back has been copied.
    pub const COPIED: u64 = Self::DONE;
}

/// Who executes the requests that are posted to a queue pair. Readers refuse unknown values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executor(pub u32);

impl Executor {
    /// The thread that posts a request executes it.
    pub const POSTER: Self = Self(0);
}

/// Type of an entry in the table of queue pairs: a number of `ibv_qp_type`, or [`Kind::SHARED`]. Readers refuse unknown
/// values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(pub u32);

impl Kind {
    /// The entry is free.
    pub const NONE: Self = Self(0);
    /// Reliable connection.
    pub const RC: Self = Self(2);
    /// Unreliable connection.
    pub const UC: Self = Self(3);
    /// Unreliable datagrams.
    pub const UD: Self = Self(4);
    /// A shared receive queue.
    pub const SHARED: Self = Self(0x100);

    /// Returns the bytes in front of a received message. For a datagram these have room for a global route header.
    pub const fn prefix(self) -> usize {
        if self.0 == Self::UD.0 { GRH } else { 0 }
    }
}

/// Bytes of a global route header (InfiniBand Architecture Specification 1.2.1, 8.3).
pub const GRH: usize = 40;

/// Maximum bytes of a datagram.
pub const MTU: usize = 4096;

/// Whether the completion of a receive must wake the owner of the queue pair. Two bits select the completions, a third says
/// whether the owner ever wants to be woken, and a count above them changes each time that the owner arms, so that a sender
/// wakes it once per arming.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Armed(pub u32);

impl Armed {
    const ANY: u32 = 1;
    const SOLICITED: u32 = 2;
    const EVER: u32 = 4;

    /// The owner never wants to be woken.
    pub const NEVER: Self = Self(0);

    /// The owner does not want to be woken now.
    pub const IDLE: Self = Self(Self::EVER);

    /// The owner wants to be woken for the next completion; if `solicited_only`, for the next one that is solicited or an
    /// error.
    pub const fn new(count: u32, solicited_only: bool) -> Self {
        Self(count << 3 | Self::EVER | if solicited_only { Self::SOLICITED } else { Self::ANY })
    }

    /// Returns whether senders must look at this word at all.
    pub const fn is_ever(self) -> bool {
        self.0 & Self::EVER != 0
    }

    /// Returns whether a completion must wake the owner.
    pub const fn wants(self, is_solicited: bool) -> bool {
        self.0 & Self::ANY != 0 || self.0 & Self::SOLICITED != 0 && is_solicited
    }
}

/// The sender that has claimed a receive: its endpoint number (12 bits), and the low bits of its epoch (12 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimer(u32);

impl Claimer {
    /// Returns the claimer for an endpoint with this number and epoch.
    pub const fn new(endpoint: u32, epoch: u32) -> Self {
        Self((endpoint & 0xfff) << 12 | epoch & 0xfff)
    }

    /// Returns the endpoint's number.
    pub const fn endpoint(self) -> u32 {
        self.0 >> 12
    }

    /// Returns whether the endpoint with this number may be the claimer if it has this epoch.
    pub const fn is_of(self, epoch: u32) -> bool {
        epoch & 0xfff == self.0 & 0xfff
    }
}

/// Header of a completion entry, in 64 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion(pub u64);

impl Completion {
    /// A message was received.
    pub const RECEIVE: u8 = 1;
    /// An RDMA WRITE with immediate data has used the entry.
    pub const WRITE_WITH_IMMEDIATE: u8 = 2;
    /// The message was longer than the entry's buffers.
    pub const TOO_LONG: u8 = 3;
    /// A buffer of the entry does not lie in a region.
    pub const PROTECTION: u8 = 4;
    /// No completion yet: a sender has claimed the entry.
    pub const CLAIMED: u8 = 5;
    /// The entry was given back to the owner without a message, and none will follow.
    pub const VOID: u8 = 6;

    /// The message has immediate data.
    pub const HAS_IMMEDIATE: u8 = 1;
    /// An owner that sleeps for solicited events must be woken.
    pub const SOLICITED: u8 = 2;
    /// The payload is in the completion entry, and not yet in the buffers of the receive entry.
    pub const IN_ENTRY: u8 = 4;

    /// Returns the header of the completion of entry `index`.
    pub const fn new(index: u64, kind: u8, flags: u8) -> Self {
        Self((Self::stamp(index) as u64) << 32 | (flags as u64) << 8 | kind as u64)
    }

    /// Returns the header that claims entry `index`.
    pub const fn claim(index: u64, claimer: Claimer) -> Self {
        Self((Self::stamp(index) as u64) << 32 | (claimer.0 as u64) << 8 | Self::CLAIMED as u64)
    }

    /// Returns the sender that has claimed the entry, if any.
    pub const fn claimer(self) -> Option<Claimer> {
        if self.kind() == Self::CLAIMED { Some(Claimer((self.0 as u32) >> 8)) } else { None }
    }

    /// Returns whether entry `index` of a ring with `entries` entries can be claimed: this header is of the previous lap, or
    /// zero in the first.
    pub const fn is_free(self, index: u64, entries: u64) -> bool {
        if index < entries { self.0 == 0 } else { self.is_of(index - entries) && self.claimer().is_none() }
    }

    const fn stamp(index: u64) -> u32 {
        index.wrapping_add(1) as u32
    }

    /// Returns whether this is the header of entry `index`.
    pub const fn is_of(self, index: u64) -> bool {
        (self.0 >> 32) as u32 == Self::stamp(index)
    }

    /// Returns the kind of the completion. It may be an unknown value.
    pub const fn kind(self) -> u8 {
        self.0 as u8
    }

    /// Returns the flags.
    pub const fn flags(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Returns whether the completion wakes an owner that sleeps for solicited events. Errors count as solicited.
    pub const fn is_solicited(self) -> bool {
        match self.kind() {
            Self::RECEIVE | Self::WRITE_WITH_IMMEDIATE => self.flags() & Self::SOLICITED != 0,
            _ => true,
        }
    }
}

const _: () = {
    let Some(number) = QpNumber::new(4095, 1023) else { panic!() };
    assert!(number.0 < 1 << 24 && number.endpoint() == 4095 && number.index() == 1023);
    assert!(QpNumber::new(0, 0).is_none() && QpNumber::new(4096, 0).is_none());
    assert!(Key::new(4095, 0x1ff).index() == 4095 && Key::new(4095, 0x1ff).0 & 0xff == 0xff);
    assert!(Key::shadow(4095, 0x1ff).index() == 4095 && Key::shadow(4095, 1).is_shadow());
    assert!(Key::shadow(4095, 1).at().is_none() && Key::new(4095, 1).at().is_some());
    assert!(Key::PLACE.is_shadow() && Key::PLACE.index() >= REGIONS && Key::PLACE.at().is_none());
    assert!(Chunk::new(3, 7).place().arena() == 3 && Chunk::new(3, 7).place().offset() == 14 << 20);
    assert!(receive::stride(3) == 64 && receive::stride(receive::MOST) == 256);
    assert!(completion::PAYLOAD + completion::INLINE == completion::ENTRY);
    // In a ring of one entry, the stamp differs from the zeros of fresh memory.
    assert!(Completion::new(0, Completion::RECEIVE, 0).is_of(0) && !Completion(0).is_of(0));
    assert!(Completion(0).is_free(0, 1) && !Completion(0).is_free(1, 1));
    let claim = Completion::claim(5, Claimer::new(4095, 0x7fff));
    assert!(claim.is_of(5) && !claim.is_free(9, 4) && Completion::new(5, Completion::VOID, 0).is_free(9, 4));
    let Some(claimer) = claim.claimer() else { panic!() };
    assert!(claimer.endpoint() == 4095 && claimer.is_of(0xfff) && !claimer.is_of(1));
    let claims = Claims::new(u32::MAX);
    assert!(claims.is_of(u32::MAX) && !claims.is_of(0) && claims.claim_front(0).is_none());
    let (Some(front), Some(back)) = (claims.claim_front(1), claims.claim_back(1)) else { panic!() };
    assert!(front.front() == 1 && front.back() == 0 && front.claim_back(1).is_none());
    assert!(back.back() == 1 && back.front() == 0 && back.is_of(u32::MAX) && back.done() == 0);
    assert!(back.follow(claims, 1) && !back.follow(claims, 0) && !claims.follow(back, 1));
    let copied = Claims(back.0 + Claims::COPIED);
    assert!(copied.done() == 1 && copied.follow(back, 1) && !copied.follow(front, 2));
    assert!(copy::MOST < 1 << 13 && u32::MAX as usize / copy::piece(u32::MAX as usize) < copy::MOST);
};
