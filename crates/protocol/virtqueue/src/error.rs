//! Errors: the operation is not possible now, is never possible with these parameters, or the other side is broken.

use thiserror::Error;

/// The other side has broken a rule of the ring, and the queue must not be used any more. The device tells the driver through
/// the error eventfd, and the driver resets the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Corrupt {
    /// The available index is further ahead than the room in the queue allows (2.7.13.3).
    #[error(
        "the available index is {index}: {ahead} entries ahead, with {outstanding} of {size} outstanding"
    )]
    AvailableIndex {
        /// The index that was found.
        index: u16,
        /// Number of entries between the last one taken and the index.
        ahead: u16,
        /// Number of chains that the device has.
        outstanding: u16,
        /// Size of the queue.
        size: u16,
    },
    /// A descriptor number outside of its table: a head, or a link of a chain.
    #[error("descriptor {index} of a table of {size}")]
    Descriptor {
        /// The number that was found.
        index: u32,
        /// Number of descriptors in the table.
        size: u32,
    },
    /// A chain that is longer than its table and therefore a loop (2.7.5.2), or a chain over more descriptors than the driver
    /// owns.
    #[error("a chain of more than {limit} descriptors")]
    ChainLength {
        /// Maximum length of the chain.
        limit: u32,
    },
    /// A request with more pieces of memory than this device accepts.
    #[error("a request of more than {limit} segments")]
    Segments {
        /// Maximum number of segments.
        limit: u16,
    },
    /// All buffers together are 4 GiB or more (2.7.5.2).
    #[error("a request of 4 GiB or more")]
    TooLong,
    /// A buffer for reading after a buffer for writing (2.7.4.2).
    #[error("a buffer to read from follows one to write to")]
    Order,
    /// A buffer, or an indirect table, outside of the guest's memory.
    #[error("{len} bytes at {address:#x} are outside of the guest's memory")]
    Outside {
        /// Guest physical address.
        address: u64,
        /// Length in bytes.
        len: u32,
    },
    /// An indirect table whose length is not a positive multiple of 16 (2.7.5.3).
    #[error("an indirect table of {0} bytes")]
    IndirectLength(u32),
    /// An indirect descriptor whose chain continues, or that is itself in an indirect table (2.7.5.3.1), or that is one of
    /// several of a packed chain (2.8.8).
    #[error("an indirect descriptor where none is allowed")]
    IndirectPlace,
    /// The used index is further ahead than there are outstanding chains (found by a driver).
    #[error("the used index is {index}: {ahead} entries ahead, with {outstanding} outstanding")]
    UsedIndex {
        /// The index that was found.
        index: u16,
        /// Number of entries between the last one taken and the index.
        ahead: u16,
        /// Number of chains that the device has.
        outstanding: u16,
    },
    /// A used element for a chain that the device does not have (found by a driver).
    #[error("a used element with id {0}, which is not outstanding")]
    UsedId(u32),
    /// A used element with more bytes than the chain had room for (found by a driver).
    #[error("the device claims to have written {written} bytes to a chain with room for {room}")]
    UsedLength {
        /// Bytes in the used element.
        written: u32,
        /// Bytes of the chain's writable buffers.
        room: u32,
    },
}

/// The parameters of a queue are invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SetupError {
    /// An impossible size. Valid sizes are 1 to 32768, and powers of two for a split queue.
    #[error("a queue of {0} entries: allowed are 1 to 32768, powers of two if split")]
    Size(u16),
    /// An area that is misaligned, or shorter than the queue's size needs.
    #[error(
        "the {area} area at {address:#x}, {len} bytes: it must be aligned to {align} and have {needed} bytes"
    )]
    Area {
        /// Name of the area.
        area: &'static str,
        /// Guest physical address.
        address: u64,
        /// Length in bytes.
        len: usize,
        /// Required alignment.
        align: usize,
        /// Required bytes.
        needed: usize,
    },
    /// A base that is impossible in a queue of this size.
    #[error("a queue of {size} entries cannot begin at {base:#x}")]
    Base {
        /// The given base.
        base: u32,
        /// Size of the queue.
        size: u16,
    },
    /// The in-flight region does not belong to this queue, or contains impossible values.
    #[error("the in-flight region: {0}")]
    Inflight(&'static str),
}

/// A driver cannot make these buffers available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AddError {
    /// Not now: too few descriptors are free.
    #[error("the queue is full")]
    Full,
    /// Never: there are no buffers, or more than the queue or an indirect table holds.
    #[error("a chain of {count} buffers: allowed are 1 to {limit}")]
    Count {
        /// Number of buffers.
        count: usize,
        /// Maximum number of buffers.
        limit: usize,
    },
}
