//! What can go wrong: not now, never with this set-up, or the other side is broken.

use thiserror::Error;

/// The other side has broken a rule of the ring. The queue is not to be used any more: the device tells the driver by its
/// error eventfd, the driver resets the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Corrupt {
    /// The available index is further ahead than the queue has room (2.7.13.3).
    #[error(
        "the available index is {index}: {ahead} entries ahead, with {outstanding} of {size} outstanding"
    )]
    AvailableIndex {
        /// The index found.
        index: u16,
        /// Entries between what was taken last and the index.
        ahead: u16,
        /// Chains that the device has.
        outstanding: u16,
        /// Size of the queue.
        size: u16,
    },
    /// A descriptor number outside of its table: a head, or a link of a chain.
    #[error("descriptor {index} of a table of {size}")]
    Descriptor {
        /// The number found.
        index: u32,
        /// Descriptors in the table.
        size: u32,
    },
    /// A chain longer than its table, so a loop (2.7.5.2), or a chain over more descriptors than the driver owns.
    #[error("a chain of more than {limit} descriptors")]
    ChainLength {
        /// Most that there can be.
        limit: u32,
    },
    /// More pieces of memory than this device takes in a request.
    #[error("a request of more than {limit} segments")]
    Segments {
        /// Most that it takes.
        limit: u16,
    },
    /// All buffers together are 4 GiB or more (2.7.5.2).
    #[error("a request of 4 GiB or more")]
    TooLong,
    /// A buffer for reading behind one for writing (2.7.4.2).
    #[error("a buffer to read from follows one to write to")]
    Order,
    /// A buffer, or an indirect table, outside of the guest's memory.
    #[error("{len} bytes at {address:#x} are outside of the guest's memory")]
    Outside {
        /// Guest physical address.
        address: u64,
        /// Bytes.
        len: u32,
    },
    /// An indirect table whose length is no positive multiple of 16 (2.7.5.3).
    #[error("an indirect table of {0} bytes")]
    IndirectLength(u32),
    /// An indirect descriptor that says that its chain goes on, or one within an indirect table (2.7.5.3.1), or one of
    /// several of a packed chain (2.8.8).
    #[error("an indirect descriptor where none may be")]
    IndirectPlace,
    /// The used index is further ahead than chains are outstanding (seen by a driver).
    #[error("the used index is {index}: {ahead} entries ahead, with {outstanding} outstanding")]
    UsedIndex {
        /// The index found.
        index: u16,
        /// Entries between what was taken last and the index.
        ahead: u16,
        /// Chains that the device has.
        outstanding: u16,
    },
    /// A used element for a chain that the device does not have (seen by a driver).
    #[error("a used element with id {0}, which is not outstanding")]
    UsedId(u32),
    /// A used element that claims more bytes than the chain had room for (seen by a driver).
    #[error("{written} bytes were written, it is said, to a chain with room for {room}")]
    UsedLength {
        /// Bytes claimed.
        written: u32,
        /// Bytes of its writable buffers.
        room: u32,
    },
}

/// A queue cannot be set up so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SetupError {
    /// Not a possible size: 1 to 32768, and a power of two if split.
    #[error("a queue of {0} entries: it is 1 to 32768, a power of two if split")]
    Size(u16),
    /// An area that is misaligned, or shorter than the queue's size asks.
    #[error(
        "the {area} area at {address:#x}, {len} bytes: it must be aligned to {align} and have {needed} bytes"
    )]
    Area {
        /// Which.
        area: &'static str,
        /// Guest physical address.
        address: u64,
        /// Bytes.
        len: usize,
        /// Needed alignment.
        align: usize,
        /// Needed bytes.
        needed: usize,
    },
    /// Indices to begin with that do not exist in a queue of this size.
    #[error("a queue of {size} entries cannot begin at {base:#x}")]
    Base {
        /// As given.
        base: u32,
        /// Size of the queue.
        size: u16,
    },
    /// The in-flight region is not one for this queue, or says what cannot be.
    #[error("the in-flight region: {0}")]
    Inflight(&'static str),
}

/// The guest's memory cannot be so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Two regions overlap, in the guest's or in the front end's addresses.
    #[error("memory regions overlap at {0:#x}")]
    Overlap(u64),
    /// A region that passes the end of the address space.
    #[error("the memory region at {0:#x} passes the end of the address space")]
    TooLong(u64),
    /// More regions than can be numbered.
    #[error("{0} memory regions: at most 65535 are possible")]
    TooMany(usize),
}

/// A driver cannot make these buffers available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AddError {
    /// Not now: as many descriptors are not free.
    #[error("the queue is full")]
    Full,
    /// Never: no buffers, or more than the queue or an indirect table holds.
    #[error("a chain of {count} buffers: it is 1 to {limit}")]
    Count {
        /// Buffers.
        count: usize,
        /// Most that are possible.
        limit: usize,
    },
}
