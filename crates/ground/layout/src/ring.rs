//! A ring: a buffer with one producer, one consumer, and a power of two of data bytes.
//!
//! ```text
//! offset   writer     word
//! 0x000    producer   tail        u64  bytes ever published (byte-stream rings only)
//! 0x040    producer   space_armed u32  wake token of a producer that sleeps for space, 0 = awake
//! 0x048    producer   space_notify u64 where the producer sleeps (board::Place), 0 = at its doorbell
//! 0x080    consumer   head        u64  bytes ever released
//! 0x0c0    consumer   data_armed  u32  wake token of a consumer that sleeps for data, 0 = awake
//! 0x0c8    consumer   data_notify u64  where the consumer sleeps (board::Place), 0 = at its doorbell
//! 0x100    producer*  producer_state u32 (SideState)
//! 0x140    consumer*  consumer_state u32 (SideState)
//! 0x180    producer   base     u64  sockets only: bytes carried by the previous carrier, + 1; 0 = not known yet
//! 0x188    producer   wanted   u32  sockets only: 1 = the producer wants a larger ring; 0 = it does not
//! 0x190    producer   end      u64  sockets only: bytes of this ring before the kernel carries again, + 1; 0 = it does not
//! 0x198    producer   resume   u64  sockets only: bytes that the kernel has carried until then, wake bytes included
//! 0x1a0    producer   repeated u64  sockets only: how many of the ring's last bytes the kernel then carries once more
//! 0x1c0    consumer   ready    u32  sockets only: the consumer counts the bytes of the previous carrier, and looks at base:
//!                                   1 = that carrier is the kernel, 2 = it is a ring; 0 = the consumer does not do so yet
//! 0x1c8    consumer   recall   u32  sockets only: 1 = asks the producer to go back to the kernel; 0 = does not
//! 0x1d0    consumer   taken    u64  sockets only: bytes of this ring that the program has received; head may lag behind
//! 0x200               data[capacity]
//! ```
//!
//! In a ring of a socket, the notify word 0 means that the side is woken by a byte on the kernel's connection, and
//! [`crate::board::Place::DOORBELL`] that it is woken by its doorbell. A side that sleeps at its doorbell also watches the
//! connection, so a byte wakes it as well.
//!
//! `*` The daemon writes [`SideState::DEAD`] there when it knows that the side has died, or [`SideState::LOST`] when the
//! memory was lost. Apart from this, each word has one writer, and words of the producer and of the consumer never share a
//! cache line.
//!
//! # Message rings
//!
//! The data part contains records, each aligned to a cache line: a 64-bit [`RecordHeader`], then the payload. There is no
//! shared tail: the consumer polls the header of the next record, so a message of up to 56 bytes costs one cache line. A
//! header is zero until its record is published. Before the producer publishes a record, it zeroes the header behind it, so
//! that the consumer never mistakes an old payload for a header. A record is contiguous; a [`RecordKind::PAD`] record covers
//! the bytes that are left at the end of the ring.

/// Offset of the number of bytes that the producer has published (byte-stream rings).
pub const TAIL: usize = 0x000;
/// Offset of the producer's wake token; 0 while it is awake.
pub const SPACE_ARMED: usize = 0x040;
/// Offset of the slot of a readiness board ([`crate::board::Place`]) on which the producer sleeps.
pub const SPACE_NOTIFY: usize = 0x048;
/// Offset of the number of bytes that the consumer has released.
pub const HEAD: usize = 0x080;
/// Offset of the consumer's wake token; 0 while it is awake.
pub const DATA_ARMED: usize = 0x0c0;
/// Offset of the slot of a readiness board ([`crate::board::Place`]) on which the consumer sleeps.
pub const DATA_NOTIFY: usize = 0x0c8;
/// Offset of the producer's [`SideState`].
pub const PRODUCER_STATE: usize = 0x100;
/// Offset of the consumer's [`SideState`].
pub const CONSUMER_STATE: usize = 0x140;
/// Offset, in a ring of a socket, of the producer's word that says at which byte of the connection the ring begins.
pub const BASE: usize = 0x180;
/// Offset, in a ring of a socket, of the producer's word that says that it wants a larger ring.
pub const WANTED: usize = 0x188;
/// Offset, in a ring of a socket, of the producer's word that says at which byte of the ring the kernel carries again.
pub const END: usize = 0x190;
/// Offset, in a ring of a socket, of the producer's word that says where wake bytes end in the kernel's stream.
pub const RESUME: usize = 0x198;
/// Offset, in a ring of a socket, of the producer's word that says how much of the ring the kernel carries once more.
pub const REPEATED: usize = 0x1a0;
/// Offset, in a ring of a socket, of the consumer's word that says that it looks at [`BASE`].
pub const READY: usize = 0x1c0;
/// Offset, in a ring of a socket, of the consumer's word that asks the producer to go back to the kernel.
pub const RECALL: usize = 0x1c8;
/// Offset, in a ring of a socket, of the consumer's word that says how many bytes its program has received.
pub const TAKEN: usize = 0x1d0;
/// Bytes of the header, which lies in front of the data.
pub const HEADER: usize = 0x200;

words!(HEADER;
    producer {
        TAIL: u64, SPACE_ARMED: u32, SPACE_NOTIFY: u64, PRODUCER_STATE: u32,
        BASE: u64, WANTED: u32, END: u64, RESUME: u64, REPEATED: u64,
    }
    consumer { HEAD: u64, DATA_ARMED: u32, DATA_NOTIFY: u64, CONSUMER_STATE: u32, READY: u32, RECALL: u32, TAKEN: u64 }
);
// What is written often is in different lines even if its writer is the same.
words!(HEADER;
    tail { TAIL: u64 }
    space { SPACE_ARMED: u32, SPACE_NOTIFY: u64 }
    head { HEAD: u64 }
    data { DATA_ARMED: u32, DATA_NOTIFY: u64 }
    producer_state { PRODUCER_STATE: u32 }
    consumer_state { CONSUMER_STATE: u32 }
);

/// The smallest ring, in data bytes.
pub const MIN_CAPACITY: usize = 4096;
/// The largest ring, in data bytes. The limit keeps every record length within [`RecordHeader::LEN_BITS`].
pub const MAX_CAPACITY: usize = 1 << 28;

/// Bytes of a record's header.
pub const RECORD_HEADER: usize = 8;
/// Alignment of records.
pub const RECORD_ALIGN: usize = crate::CACHE_LINE;

/// Returns whether `capacity` may be the number of data bytes of a ring.
pub const fn valid_capacity(capacity: u64) -> bool {
    capacity.is_power_of_two() && capacity >= MIN_CAPACITY as u64 && capacity <= MAX_CAPACITY as u64
}

/// Returns the bytes that a ring occupies, header and data. `capacity` must be valid.
pub const fn footprint(capacity: usize) -> usize {
    HEADER + capacity
}

/// Returns the maximum length of a message in a ring of `capacity` data bytes. It is about a quarter of the ring, so that a
/// message always fits into an empty ring, whatever padding the end of the ring needs, and although the consumer returns
/// space in eighths.
pub const fn max_message(capacity: usize) -> usize {
    capacity / 4 - RECORD_HEADER
}

/// Returns the bytes that a record with `len` bytes of payload occupies.
pub const fn record_span(len: usize) -> usize {
    (RECORD_HEADER + len).next_multiple_of(RECORD_ALIGN)
}

/// State of one side of a ring, as the side itself or the daemon has written it. An unknown value is an error for the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideState(pub u32);

impl SideState {
    /// The owner has not set up this side yet (the state of fresh memory). The other side may already work.
    pub const NEW: Self = Self(0);
    /// In use.
    pub const OPEN: Self = Self(1);
    /// Producer: it will publish nothing more. Consumer: it will take nothing more.
    pub const FINISHED: Self = Self(2);
    /// The process that had this side has died. Written by the daemon.
    pub const DEAD: Self = Self(3);
    /// The content of the ring is lost, because the segment's file was truncated and has its size again. Written by the
    /// daemon.
    pub const LOST: Self = Self(4);
    /// Producer: it will publish nothing more, and the consumer must not receive what it has not received yet. Consumer: it
    /// will take nothing more, and drops what was published and not taken.
    pub const ABORTED: Self = Self(5);
}

/// Kind of a record, in four bits. An unknown value is corruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordKind(pub u8);

impl RecordKind {
    /// A message.
    pub const DATA: Self = Self(1);
    /// No message; fills the ring up to its end.
    pub const PAD: Self = Self(2);
}

/// The 64-bit word in front of each record: stamp (32 bits, high), kind (4 bits), payload length (28 bits).
///
/// The stamp is derived from the record's position, with its top bit set. Therefore a header is never zero, and a reader that
/// has lost its place notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader(pub u64);

impl RecordHeader {
    /// Bits of the payload length.
    pub const LEN_BITS: u32 = 28;

    /// Returns the header of a record at `position` (in bytes since the ring began) with `len` bytes of payload.
    pub const fn new(kind: RecordKind, position: u64, len: usize) -> Self {
        Self(
            (Self::stamp(position) as u64) << 32
                | ((kind.0 & 0xf) as u64) << Self::LEN_BITS
                | len as u64 & 0xfff_ffff,
        )
    }

    const fn stamp(position: u64) -> u32 {
        (position / RECORD_ALIGN as u64) as u32 | 1 << 31
    }

    /// Returns whether this header was written for `position`.
    pub const fn is_for(self, position: u64) -> bool {
        (self.0 >> 32) as u32 == Self::stamp(position)
    }

    /// Returns the kind of the record.
    pub const fn kind(self) -> RecordKind {
        RecordKind((self.0 >> Self::LEN_BITS) as u8 & 0xf)
    }

    /// Returns the bytes of payload.
    pub const fn len(self) -> usize {
        (self.0 & ((1 << Self::LEN_BITS) - 1)) as usize
    }

    /// Returns whether the payload is empty.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }
}

const _: () = {
    let h = RecordHeader::new(RecordKind::PAD, 0x1_2345_6780, 77);
    assert!(h.is_for(0x1_2345_6780) && !h.is_for(0x1_2345_67c0) && h.len() == 77 && h.kind().0 == 2);
    assert!(MAX_CAPACITY <= 1 << RecordHeader::LEN_BITS);
    // A padding record and the longest message, each with a zeroed header behind it, fit even if the consumer holds back the
    // eighth that it has not returned yet, and padding that it returns together with the record behind it.
    let c = MIN_CAPACITY;
    assert!(3 * record_span(max_message(c)) + RECORD_ALIGN <= c - c / 8);
};
