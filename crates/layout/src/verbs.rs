//! RDMA verbs in a segment: what the endpoints of a segment know of each other's queue pairs and memory regions.
//!
//! Each endpoint that uses a segment as an RDMA device has one block with its *tables*, named `verbs.E` after its number, and
//! further blocks, `verbs.E.0`, `verbs.E.1` and so on, its *arenas*. In the arenas lie its rings and the pages of the program that
//! are registered for remote access. A queue pair number says whose queue pair it is: the endpoint's number, then
//! the queue pair's index in that endpoint's tables ([`QpNumber`]).
//!
//! ```text
//! tables   0x00000  header       4 KiB    written by the owner, but for the count of offers
//!          0x01000  queue pairs  QPS x 256 B
//!          0x41000  regions      REGIONS x 64 B, written by the owner
//!          0x81000  chunks       CHUNKS x 4 B, written by the owner
//!          0xa1000  copies       QPS x 64 B, written by the peers of queue pairs
//!          0xb1000  counters     QPS x 64 B, written by the owner, for people
//! ```
//!
//! The CPU that posts a work request also executes it: it looks up the peer's region or receive entry, copies straight into the
//! peer's pages, and writes the peer's completion. So each cache line has one writing endpoint, but for the claims of
//! shared copies; which one, the tables say.
//!
//! ```text
//! queue pair
//! offset   writer   word
//! 0x00     owner    state       u64  incarnation (32 bits, high), then QpState
//! 0x08     owner    peer        u32  number of the queue pair that it is connected to
//! 0x0c     owner    domain      u32  protection domain
//! 0x10     owner    ring        u64  where its receive ring lies (Place)
//! 0x18     owner    completions u64  where its completion ring lies (Place)
//! 0x20     owner    entries     u32  of both rings; a power of two
//! 0x24     owner    stride      u32  bytes of an entry of the receive ring
//! 0x28     owner    access      u32  what the peer may do (Access)
//! 0x2c     owner    executor    u32  who executes what is posted to it (Executor)
//! 0x30     owner    kind        u32  what it is (Kind)
//! 0x34     owner    queue       u32  index of the entry whose receives serve it: its own, or a shared receive queue's
//! 0x38     owner    qkey        u32  what a datagram for it must name
//! 0x3c     owner    armed       u32  whether the owner is to be woken for a completion (Armed)
//! 0x40     owner    tail        u64  receive entries ever posted
//! 0x48     owner    shortest    u32  no entry that waits has fewer bytes
//! 0x50     owner    answer      u64  what has come of an errand: its number (32 bits, high), then WcStatus
//! 0x58     owner    bounce      u64  where the bytes of errands lie (Place)
//! 0x60     owner    room        u32  how many there may be; 0 if no errands are done
//! 0x80     peer     head        u64  receive entries ever used
//! 0x88     peer     executing   u64  what the peer is about to access (Executing), 0 = nothing
//! 0x90     peer     error       u64  what the peer has found wrong: incarnation (32 bits, high), then WcStatus; 0 = nothing
//! 0x98     peers    senders     u64  how many endpoints are about to send a datagram to it
//! 0xa0     both     turn        u64  reserved: who executes this direction
//! 0xc0     peer     asked       u64  an errand for the owner: incarnation (32 bits, high), then its number; written last
//! 0xc8     peer     address     u64  the errand's address in the owner's memory
//! 0xd0     peer     key         u32  the region's key
//! 0xd4     peer     kind        u32  what is to be done (Errand)
//! 0xd8     peer     length      u32  bytes that are in the bounce area, or are to be put there
//! 0xdc     peer     rest        u32  bytes from the address on that the request is about, these included
//! 0xe0     peer     first       u64  what is to be compared with, or added
//! 0xe8     peer     second      u64  what is to be put there
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
//!                                                 0x20  payload  32 B if it is short and was sent so
//! ```
//!
//! Several senders may use the receives of a datagram queue pair, and those of a shared receive queue, which has an entry in the table of
//! queue pairs for its words. A sender claims a receive by a compare-exchange of the completion's header, from what it was a lap ago to a
//! claim with the sender's name ([`Completion::claim`]). Here, `head` is only a hint where to begin to look, and the last three words
//! of the completion mean something. The owner takes a claim back if the sender has died.
//!
//! Entry *i* of the completion ring is the completion of entry *i* of the receive ring, and its header is written last. A stamp
//! is the low half of *i* + 1, so what stands there from an earlier lap is not taken for it.
//!
//! ```text
//! region
//! 0x00  word     u64  generation (32 bits, high), then Access, with Access::VALID; written last
//! 0x08  address  u64  where it begins, in the owner's addresses
//! 0x10  length   u64  bytes
//! 0x18  domain   u32  protection domain
//! 0x1c  chunk    u32  index of its first chunk
//! ```
//!
//! ```text
//! counters of a queue pair
//! 0x00  executed  u64  requests executed since it was made
//! 0x08  bytes     u64  that these have sent, written or read
//! 0x10  waits     u64  what requests wait for (Waits; 32 bits, high), then how many wait; 0 = none
//! 0x18  since     u64  when the first of them began to wait for it
//! 0x20  tried     u64  when it was tried last
//! 0x28  waited    u64  nanoseconds that requests have waited, without the wait that `waits` is about
//! 0x30  helped    u64  bytes that the owner has copied for requests of its peer
//! ```
//!
//! ```text
//! copy that the peer of a queue pair shares with its owner
//! offset   writer   word
//! 0x00     peer     offer       u64  incarnation (32 bits, high), then its number; written last
//! 0x08     peer     address     u64  where the bytes begin, in the owner's addresses
//! 0x10     peer     key         u32  of the owner's region
//! 0x14     peer     length      u32  bytes
//! 0x18     peer     local       u64  where the bytes begin, in the peer's addresses
//! 0x20     peer     local key   u32  of the peer's region
//! 0x24     peer     kind        u32  whether the owner's bytes are written or read (Errand)
//! 0x30     both     claims      u64  which pieces have been claimed (Claims)
//! ```
//!
//! Both times are nanoseconds of the owner's CLOCK_MONOTONIC. Peers have nothing to do with the counters: whoever looks after the machine
//! reads them.
//!
//! Pages are registered in units of 2 MiB of the owner's addresses, the *chunks*: each corresponds to 2 MiB of an arena, in which
//! a page lies where it lies in the chunk. A region names one chunk after the other, from the one that has its first byte.
//!
//! Pages that cannot lie in an arena form a *shadow* region. Its key says so ([`Key::is_shadow`]), and nothing of it is in the tables. What a
//! peer would do to it, the peer asks the owner's process for, by way of the queue pair: an *errand*, one at a time. The bytes go
//! through the queue pair's bounce area, which is in an arena of the owner. A receive into a shadow region has one element, whose key is
//! [`Key::PLACE`] and whose address is a place in the owner's arenas; the owner copies from there when it takes the completion.
//!
//! A peer that executes a long RDMA READ or WRITE offers to *share the copy*: it divides the bytes into pieces ([`copy::piece`]) and claims
//! one after the other from the front, and an owner that polls meanwhile claims pieces from the back and copies these. `claims` begins anew
//! with each offer. The word in the header that counts all offers tells a poller when to look at the queue pairs.

use crate::{CACHE_LINE, PAGE};

/// What stands at [`MAGIC`] once the tables can be used. Its last byte is the version.
pub const READY: u64 = u64::from_le_bytes(*b"ginverb\x02");

/// Offset of [`READY`].
pub const MAGIC: usize = 0x00;
/// Offset of the owner's endpoint number.
pub const ENDPOINT: usize = 0x08;
/// Offset of the owner's epoch.
pub const EPOCH: usize = 0x0c;
/// Offset of the owner's member number.
pub const MEMBER: usize = 0x10;
/// Offset of the number of its arenas.
pub const ARENAS: usize = 0x14;
/// Offset of the number of its shadow regions, and of their bytes: for people.
pub const SHADOWS: usize = 0x18;
/// See above.
pub const SHADOW_BYTES: usize = 0x20;
/// Offset of the number of copies that peers have offered to share. Peers write it, so it has a line of its own.
pub const OFFERS: usize = 0x40;

/// Queue pairs of an endpoint.
pub const QPS: usize = 1024;
/// Regions of an endpoint.
pub const REGIONS: usize = 4096;
/// Chunks that the regions of an endpoint name, together.
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
/// Offset of the counters of the first queue pair, and the end of what peers use.
pub const COUNTER_TABLE: usize = COPY_TABLE + QPS * COPY;
/// Bytes of a queue pair's counters: a line that only its owner writes.
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

/// Endpoints whose numbers are not below this have no queue pairs.
pub const ENDPOINTS: u32 = 1 << 12;

/// Offsets in a queue pair.
pub mod qp {
    /// Its state and incarnation.
    pub const STATE: usize = 0x00;
    /// The queue pair that it is connected to.
    pub const PEER: usize = 0x08;
    /// Its protection domain.
    pub const DOMAIN: usize = 0x0c;
    /// Where its receive ring lies.
    pub const RING: usize = 0x10;
    /// Where its completion ring lies.
    pub const COMPLETIONS: usize = 0x18;
    /// Entries of both rings.
    pub const ENTRIES: usize = 0x20;
    /// Bytes of an entry of the receive ring.
    pub const STRIDE: usize = 0x24;
    /// What the peer may do.
    pub const ACCESS: usize = 0x28;
    /// Who executes what is posted to it.
    pub const EXECUTOR: usize = 0x2c;
    /// What it is.
    pub const KIND: usize = 0x30;
    /// Index of the entry whose receives serve it.
    pub const QUEUE: usize = 0x34;
    /// What a datagram for it must name.
    pub const QKEY: usize = 0x38;
    /// Whether the owner is to be woken.
    pub const ARMED: usize = 0x3c;
    /// Receive entries ever posted.
    pub const TAIL: usize = 0x40;
    /// No entry that waits has fewer bytes.
    pub const SHORTEST: usize = 0x48;
    /// What has come of an errand.
    pub const ANSWER: usize = 0x50;
    /// Where the bytes of errands lie.
    pub const BOUNCE: usize = 0x58;
    /// How many bytes an errand may have.
    pub const ROOM: usize = 0x60;
    /// Receive entries ever used.
    pub const HEAD: usize = 0x80;
    /// What the peer is about to access ([`Executing`](super::Executing)).
    pub const EXECUTING: usize = 0x88;
    /// What the peer has found wrong.
    pub const ERROR: usize = 0x90;
    /// How many endpoints are about to send a datagram to it.
    pub const SENDERS: usize = 0x98;
    /// An errand for the owner.
    pub const ASKED: usize = 0xc0;
    /// Its address.
    pub const ASKED_ADDRESS: usize = 0xc8;
    /// Its key, and what is to be done ([`Errand`](super::Errand)).
    pub const ASKED_KEY: usize = 0xd0;
    /// How many bytes it has, and how many the whole request has from there on.
    pub const ASKED_LENGTH: usize = 0xd8;
    /// What is to be compared with, or added.
    pub const ASKED_FIRST: usize = 0xe0;
    /// What is to be put there.
    pub const ASKED_SECOND: usize = 0xe8;
}

/// Offsets in a queue pair's counters.
pub mod counters {
    /// Requests executed.
    pub const EXECUTED: usize = 0x00;
    /// Their bytes.
    pub const BYTES: usize = 0x08;
    /// What requests wait for ([`Waits`](super::Waits)), and how many.
    pub const WAITS: usize = 0x10;
    /// When the first of them began to wait for it.
    pub const SINCE: usize = 0x18;
    /// When it was tried last.
    pub const TRIED: usize = 0x20;
    /// Nanoseconds that requests have waited, without the wait that WAITS is about.
    pub const WAITED: usize = 0x28;
    /// Bytes that the owner has copied for requests of its peer.
    pub const HELPED: usize = 0x30;
}

/// Offsets in a shared copy, and its pieces.
pub mod copy {
    /// Incarnation and number.
    pub const OFFER: usize = 0x00;
    /// Where the owner's bytes begin.
    pub const ADDRESS: usize = 0x08;
    /// The key of the owner's region, then the number of bytes.
    pub const KEY: usize = 0x10;
    /// Where the peer's bytes begin.
    pub const LOCAL: usize = 0x18;
    /// The key of the peer's region, then what is done ([`Errand`](super::Errand)).
    pub const LOCAL_KEY: usize = 0x20;
    /// Which pieces have been claimed ([`Claims`](super::Claims)).
    pub const CLAIMS: usize = 0x30;

    /// Bytes of all pieces but the last, for a copy of `length` bytes: an eighth of it or 32 KiB, whichever is less, unless it would have more
    /// than [`MOST`] pieces then.
    pub const fn piece(length: usize) -> usize {
        let least = length.div_ceil(MOST).next_multiple_of(UNIT);
        let eighth = length.div_ceil(8).next_multiple_of(UNIT);
        let usual = if eighth < USUAL { eighth } else { USUAL };
        if least > usual { least } else { usual }
    }

    /// The most pieces of a copy.
    pub const MOST: usize = 4096;
    const USUAL: usize = if cfg!(loom) { 16 } else { 32 << 10 };
    const UNIT: usize = if cfg!(loom) { 16 } else { 4 << 10 };
}

/// Offsets in a region.
pub mod region {
    /// Generation and access.
    pub const WORD: usize = 0x00;
    /// Where it begins.
    pub const ADDRESS: usize = 0x08;
    /// Its bytes.
    pub const LENGTH: usize = 0x10;
    /// Its protection domain.
    pub const DOMAIN: usize = 0x18;
    /// Its first chunk.
    pub const CHUNK: usize = 0x1c;
}

/// Offsets in a receive entry.
pub mod receive {
    /// Bytes of all elements.
    pub const LENGTH: usize = 0x00;
    /// How many elements there are.
    pub const COUNT: usize = 0x04;
    /// The first element.
    pub const ELEMENTS: usize = 0x10;
    /// Bytes of an element.
    pub const ELEMENT: usize = 0x10;
    /// The most elements of an entry.
    pub const MOST: usize = 15;

    /// Bytes of an entry with room for so many elements.
    pub const fn stride(elements: usize) -> usize {
        (ELEMENTS + elements * ELEMENT).next_multiple_of(crate::CACHE_LINE)
    }
}

/// Offsets in a completion entry.
pub mod completion {
    /// What has happened; written last.
    pub const HEADER: usize = 0x00;
    /// Bytes received.
    pub const LENGTH: usize = 0x08;
    /// The immediate value.
    pub const IMMEDIATE: usize = 0x0c;
    /// Number of the sender's queue pair.
    pub const SOURCE: usize = 0x10;
    /// Number of the receiver's queue pair.
    pub const TARGET: usize = 0x14;
    /// The local identifier of the sender's port.
    pub const LID: usize = 0x18;
    /// A short payload.
    pub const PAYLOAD: usize = 0x20;
    /// Its bytes.
    pub const INLINE: usize = 32;
    /// Bytes of an entry.
    pub const ENTRY: usize = crate::CACHE_LINE;
}

/// The number of a queue pair, which has 24 bits: endpoint (12 bits, high), then index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QpNumber(pub u32);

impl QpNumber {
    const INDEX_BITS: u32 = 12;
    /// The bits that a number may have.
    pub const MASK: u32 = 0xff_ffff;

    /// The queue pair of this index of an endpoint's. `None` if there are no such numbers.
    pub const fn new(endpoint: u32, index: usize) -> Option<Self> {
        if endpoint == 0 || endpoint >= ENDPOINTS || index >= QPS {
            return None;
        }
        Some(Self(endpoint << Self::INDEX_BITS | index as u32))
    }

    /// Whose it is.
    pub const fn endpoint(self) -> u32 {
        self.0 >> Self::INDEX_BITS & (ENDPOINTS - 1)
    }

    /// Its index. May be no index of the tables.
    pub const fn index(self) -> usize {
        (self.0 & ((1 << Self::INDEX_BITS) - 1)) as usize
    }

    /// Where it lies in its owner's tables, if it is there.
    pub const fn at(self) -> Option<usize> {
        if self.index() < QPS { Some(QP_TABLE + self.index() * QP) } else { None }
    }

    /// Where its shared copy lies in its owner's tables, likewise.
    pub const fn copy_at(self) -> Option<usize> {
        if self.index() < QPS { Some(COPY_TABLE + self.index() * COPY) } else { None }
    }

    /// Where its counters lie in its owner's tables, likewise.
    pub const fn counters_at(self) -> Option<usize> {
        if self.index() < QPS { Some(COUNTER_TABLE + self.index() * COUNTERS) } else { None }
    }
}

/// A place in an endpoint's arenas: number of the arena (16 bits, high), then the offset in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place(pub u64);

impl Place {
    const OFFSET_BITS: u32 = 48;

    /// An offset of an arena.
    pub const fn new(arena: u16, offset: u64) -> Self {
        Self((arena as u64) << Self::OFFSET_BITS | offset & ((1 << Self::OFFSET_BITS) - 1))
    }

    /// The arena.
    pub const fn arena(self) -> u16 {
        (self.0 >> Self::OFFSET_BITS) as u16
    }

    /// The offset.
    pub const fn offset(self) -> u64 {
        self.0 & ((1 << Self::OFFSET_BITS) - 1)
    }
}

/// A chunk of an arena: number of the arena (12 bits, high), then which of its chunks. 0 is a chunk as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunk(pub u32);

impl Chunk {
    const INDEX_BITS: u32 = 20;

    /// A chunk of an arena.
    pub const fn new(arena: u16, index: u32) -> Self {
        Self((arena as u32) << Self::INDEX_BITS | index & ((1 << Self::INDEX_BITS) - 1))
    }

    /// Where it lies.
    pub const fn place(self) -> Place {
        let index = self.0 & ((1 << Self::INDEX_BITS) - 1);
        Place::new((self.0 >> Self::INDEX_BITS) as u16, index as u64 * CHUNK as u64)
    }
}

/// A key of a region, as programs pass it around: whether it is a shadow region (1 bit, high), index (23 bits), then the low bits of its
/// generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u32);

impl Key {
    const SHADOW: u32 = 1 << 31;

    /// No region's: in a receive entry, it says that the address is a [`Place`] in the owner's arenas.
    pub const PLACE: Self = Self(u32::MAX);

    /// The key of a region's generation.
    pub const fn new(index: usize, generation: u32) -> Self {
        Self((index as u32) << 8 & !Self::SHADOW | generation & 0xff)
    }

    /// The same for a shadow region.
    pub const fn shadow(index: usize, generation: u32) -> Self {
        Self(Self::new(index, generation).0 | Self::SHADOW)
    }

    /// Whether the region is a shadow region.
    pub const fn is_shadow(self) -> bool {
        self.0 & Self::SHADOW != 0
    }

    /// The region's index. May be no index of the tables.
    pub const fn index(self) -> usize {
        ((self.0 & !Self::SHADOW) >> 8) as usize
    }

    /// Where the region lies in its owner's tables, if it is there.
    pub const fn at(self) -> Option<usize> {
        if self.0 >> 8 < REGIONS as u32 { Some(REGION_TABLE + self.index() * REGION) } else { None }
    }
}

/// What the owner of a shadow region is asked to do. Open: the reader refuses others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errand(pub u32);

impl Errand {
    /// Copies from the bounce area to the region.
    pub const WRITE: Self = Self(1);
    /// Copies from the region to the bounce area.
    pub const READ: Self = Self(2);
    /// Compares and swaps; what was there is put into the bounce area.
    pub const COMPARE_AND_SWAP: Self = Self(3);
    /// Adds; what was there is put into the bounce area.
    pub const FETCH_AND_ADD: Self = Self(4);
}

/// What may be done with a region, or by the peer of a queue pair: bits as those of `ibv_access_flags`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access(pub u32);

impl Access {
    /// Received data may be written there.
    pub const LOCAL_WRITE: u32 = 1;
    /// RDMA WRITE.
    pub const REMOTE_WRITE: u32 = 2;
    /// RDMA READ.
    pub const REMOTE_READ: u32 = 4;
    /// Atomic operations.
    pub const REMOTE_ATOMIC: u32 = 8;
    /// The region exists. (No flag of verbs.)
    pub const VALID: u32 = 1 << 31;

    /// Whether all of `wanted` is allowed.
    pub const fn allows(self, wanted: u32) -> bool {
        self.0 & wanted == wanted
    }
}

/// State of a queue pair, with the numbers of `ibv_qp_state`. Open: the reader refuses others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpState(pub u32);

impl QpState {
    /// Made, and nothing else.
    pub const RESET: Self = Self(0);
    /// Takes receives.
    pub const INIT: Self = Self(1);
    /// Ready to receive.
    pub const RTR: Self = Self(2);
    /// Ready to send.
    pub const RTS: Self = Self(3);
    /// Nothing is sent; what is received is.
    pub const SQD: Self = Self(4);
    /// What was posted to send has failed.
    pub const SQE: Self = Self(5);
    /// All that was posted is flushed.
    pub const ERR: Self = Self(6);

    /// Whether the peer may send to it.
    pub const fn receives(self) -> bool {
        matches!(self, Self::RTR | Self::RTS | Self::SQD)
    }
}

/// What a peer is about to access by way of a queue pair: a region, by its key, and perhaps the queue pair's rings. Marks of another
/// incarnation of the queue pair mean nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Executing(pub u64);

impl Executing {
    /// Nothing.
    pub const NONE: Self = Self(0);
    const REGION: u64 = 1 << 32;
    const RINGS: u64 = 1 << 33;
    const INCARNATION_SHIFT: u32 = 34;

    const fn of(incarnation: u32, what: u64) -> Self {
        Self((incarnation as u64) << Self::INCARNATION_SHIFT | what)
    }

    /// The rings alone.
    pub const fn rings(incarnation: u32) -> Self {
        Self::of(incarnation, Self::RINGS)
    }

    /// The region of a key.
    pub const fn region(incarnation: u32, key: Key) -> Self {
        Self::of(incarnation, Self::REGION | key.0 as u64)
    }

    /// The region of a key, and the rings.
    pub const fn region_and_rings(incarnation: u32, key: Key) -> Self {
        Self::of(incarnation, Self::RINGS | Self::REGION | key.0 as u64)
    }

    /// Whether it says something of this incarnation of the queue pair.
    pub const fn is_of(self, incarnation: u32) -> bool {
        self.0 != 0
            && self.0 >> Self::INCARNATION_SHIFT == Self::of(incarnation, 0).0 >> Self::INCARNATION_SHIFT
    }

    /// Whether it may access the region of this key.
    pub const fn is_region(self, key: Key) -> bool {
        self.0 & Self::REGION != 0 && self.0 as u32 == key.0
    }
}

/// What the requests of a queue pair wait for. Open: the reader shows others as unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waits(pub u32);

impl Waits {
    /// Nothing.
    pub const NOTHING: Self = Self(0);
    /// The peer's queue pair is not ready to receive.
    pub const PEER: Self = Self(1);
    /// The peer has posted no receive.
    pub const RECEIVE: Self = Self(2);
    /// The peer's process has been asked for something, and has not answered.
    pub const ERRAND: Self = Self(3);
    /// There is no room in its own completion queue.
    pub const COMPLETIONS: Self = Self(4);
    /// Its own program has stopped it ([`QpState::SQD`]).
    pub const STOPPED: Self = Self(5);
    /// The peer has ended, or its queue pair has. It is about to fail.
    pub const ENDED: Self = Self(6);
    /// The peer has claimed a piece of a shared copy, and has not copied it yet.
    pub const COPY: Self = Self(7);
}

/// Which pieces of a shared copy have been claimed: the number of the offer (25 bits, high), how many from the front, how many from
/// the back, and how many of the latter have been copied (13 bits each).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claims(pub u64);

impl Claims {
    const BITS: u32 = 13;
    const MASK: u64 = (1 << Self::BITS) - 1;
    const FRONT: u64 = 1 << (2 * Self::BITS);
    const BACK: u64 = 1 << Self::BITS;
    const DONE: u64 = 1;
    const NUMBER: u32 = 3 * Self::BITS;

    /// None yet, of the offer of this number.
    pub const fn new(number: u32) -> Self {
        Self((number as u64) << Self::NUMBER)
    }

    /// Whether they are of the offer of this number.
    pub const fn is_of(self, number: u32) -> bool {
        self.0 >> Self::NUMBER == Self::new(number).0 >> Self::NUMBER
    }

    /// Pieces that the peer has claimed, from the front.
    pub const fn front(self) -> usize {
        (self.0 >> (2 * Self::BITS) & Self::MASK) as usize
    }

    /// Pieces that the owner has claimed, from the back.
    pub const fn back(self) -> usize {
        (self.0 >> Self::BITS & Self::MASK) as usize
    }

    /// How many of the owner's it has copied.
    pub const fn done(self) -> usize {
        (self.0 & Self::MASK) as usize
    }

    /// With one more piece from the front, if there is one left of so many.
    pub const fn claim_front(self, pieces: usize) -> Option<Self> {
        if self.front() + self.back() < pieces { Some(Self(self.0 + Self::FRONT)) } else { None }
    }

    /// With one more piece from the back, likewise.
    pub const fn claim_back(self, pieces: usize) -> Option<Self> {
        if self.front() + self.back() < pieces { Some(Self(self.0 + Self::BACK)) } else { None }
    }

    /// Whether the owner may have changed `before` into these: it has claimed further pieces of so many, or copied some.
    pub const fn follow(self, before: Self, pieces: usize) -> bool {
        self.0 >> (2 * Self::BITS) == before.0 >> (2 * Self::BITS)
            && self.back() >= before.back()
            && self.done() >= before.done()
            && self.done() <= self.back()
            && self.front() + self.back() <= pieces
    }

    /// What is added once a piece from the back has been copied.
    pub const COPIED: u64 = Self::DONE;
}

/// Who executes what is posted to a queue pair. Open: the reader refuses others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executor(pub u32);

impl Executor {
    /// Whoever posts it.
    pub const POSTER: Self = Self(0);
}

/// What an entry in the table of queue pairs is: numbers of `ibv_qp_type`, and one for shared receive queues. Open: the reader refuses
/// others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(pub u32);

impl Kind {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Reliable connection.
    pub const RC: Self = Self(2);
    /// Unreliable connection.
    pub const UC: Self = Self(3);
    /// Unreliable datagrams.
    pub const UD: Self = Self(4);
    /// A shared receive queue.
    pub const SHARED: Self = Self(0x100);

    /// Bytes in front of a received message: a datagram may have a global route header there.
    pub const fn prefix(self) -> usize {
        if self.0 == Self::UD.0 { GRH } else { 0 }
    }
}

/// Bytes of a global route header (InfiniBand Architecture Specification 1.2.1, 8.3).
pub const GRH: usize = 40;

/// The most bytes of a datagram.
pub const MTU: usize = 4096;

/// Whether the owner of a queue pair is to be woken when one of its receives completes: two bits, then one that says whether it ever is,
/// then a count, so that a sender wakes it once for each time that it was armed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Armed(pub u32);

impl Armed {
    const ANY: u32 = 1;
    const SOLICITED: u32 = 2;
    const EVER: u32 = 4;

    /// Never.
    pub const NEVER: Self = Self(0);

    /// Not now.
    pub const IDLE: Self = Self(Self::EVER);

    /// For the next completion, or for the next one that is solicited or an error.
    pub const fn new(count: u32, solicited_only: bool) -> Self {
        Self(count << 3 | Self::EVER | if solicited_only { Self::SOLICITED } else { Self::ANY })
    }

    /// Whether a sender must look at all.
    pub const fn is_ever(self) -> bool {
        self.0 & Self::EVER != 0
    }

    /// Whether a completion wakes the owner.
    pub const fn wants(self, is_solicited: bool) -> bool {
        self.0 & Self::ANY != 0 || self.0 & Self::SOLICITED != 0 && is_solicited
    }
}

/// Who claims a receive: the number of an endpoint (12 bits), and of its epoch the low bits (12 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimer(u32);

impl Claimer {
    /// An endpoint.
    pub const fn new(endpoint: u32, epoch: u32) -> Self {
        Self((endpoint & 0xfff) << 12 | epoch & 0xfff)
    }

    /// The endpoint's number.
    pub const fn endpoint(self) -> u32 {
        self.0 >> 12
    }

    /// Whether an endpoint of that number and this epoch may be the one.
    pub const fn is_of(self, epoch: u32) -> bool {
        epoch & 0xfff == self.0 & 0xfff
    }
}

/// What a completion in a ring says, in 64 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion(pub u64);

impl Completion {
    /// A message was received.
    pub const RECEIVE: u8 = 1;
    /// RDMA WRITE with an immediate value has used the entry.
    pub const WRITE_WITH_IMMEDIATE: u8 = 2;
    /// The message was longer than the entry's buffers.
    pub const TOO_LONG: u8 = 3;
    /// A buffer of the entry is no memory of a region.
    pub const PROTECTION: u8 = 4;
    /// No completion yet: a sender has claimed the entry.
    pub const CLAIMED: u8 = 5;
    /// Nothing has come, and nothing will: the entry is its owner's again.
    pub const VOID: u8 = 6;

    /// The message has an immediate value.
    pub const HAS_IMMEDIATE: u8 = 1;
    /// Whoever sleeps for solicited events is to be woken.
    pub const SOLICITED: u8 = 2;
    /// The payload is in the completion, and not in the entry's buffers yet.
    pub const IN_ENTRY: u8 = 4;

    /// The completion of entry `index`.
    pub const fn new(index: u64, kind: u8, flags: u8) -> Self {
        Self((Self::stamp(index) as u64) << 32 | (flags as u64) << 8 | kind as u64)
    }

    /// The claim of entry `index`.
    pub const fn claim(index: u64, claimer: Claimer) -> Self {
        Self((Self::stamp(index) as u64) << 32 | (claimer.0 as u64) << 8 | Self::CLAIMED as u64)
    }

    /// Who has claimed the entry, if somebody has.
    pub const fn claimer(self) -> Option<Claimer> {
        if self.kind() == Self::CLAIMED { Some(Claimer((self.0 as u32) >> 8)) } else { None }
    }

    /// Whether entry `index` can be claimed, in a ring of so many entries: what stands there is of the lap before, or of none.
    pub const fn is_free(self, index: u64, entries: u64) -> bool {
        if index < entries { self.0 == 0 } else { self.is_of(index - entries) && self.claimer().is_none() }
    }

    const fn stamp(index: u64) -> u32 {
        index.wrapping_add(1) as u32
    }

    /// Whether it is the completion of entry `index`.
    pub const fn is_of(self, index: u64) -> bool {
        (self.0 >> 32) as u32 == Self::stamp(index)
    }

    /// What has happened. May be anything.
    pub const fn kind(self) -> u8 {
        self.0 as u8
    }

    /// The flags.
    pub const fn flags(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Whether whoever sleeps for solicited completions is to be woken for it. Errors count as such.
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
    // A ring of one entry has a stamp other than that of fresh memory.
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
