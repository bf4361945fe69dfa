//! Work requests and work completions.

use ginnel_layout::verbs::{Key, QpNumber};

/// A range of the program's memory within one of its regions: `ibv_sge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Element {
    /// Virtual address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Key (`lkey`) of the region that contains the range.
    pub key: u32,
}

/// Returns the total length of the elements in bytes, or `None` if it exceeds the length of a message.
#[inline]
pub fn total(elements: &[Element]) -> Option<u32> {
    let bytes = match elements {
        [one] => u64::from(one.length),
        _ => elements.iter().map(|element| u64::from(element.length)).sum(),
    };
    u32::try_from(bytes).ok().filter(|bytes| *bytes <= MAX_MESSAGE)
}

/// The maximum length of a message, in bytes.
pub const MAX_MESSAGE: u32 = 1 << 31;

/// The operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Sends a message into the peer's next receive.
    Send {
        /// Immediate data for the receiver's completion.
        immediate: Option<u32>,
        /// Whether to wake a peer that waits for solicited events.
        solicited: bool,
    },
    /// RDMA WRITE: writes to the peer's memory.
    Write {
        /// Virtual address in the peer's memory.
        address: u64,
        /// Key (`rkey`) of the peer's region.
        key: Key,
        /// Immediate data, which consumes one of the peer's receives.
        immediate: Option<u32>,
        /// As with [`Operation::Send`]. Ignored without immediate data.
        solicited: bool,
    },
    /// RDMA READ: reads from the peer's memory.
    Read {
        /// Virtual address in the peer's memory.
        address: u64,
        /// Key (`rkey`) of the peer's region.
        key: Key,
    },
    /// Replaces the peer's word by `swap` if it equals `compare`, and returns the earlier value.
    CompareAndSwap {
        /// Virtual address of the word; a multiple of eight.
        address: u64,
        /// Key (`rkey`) of the peer's region.
        key: Key,
        /// The value that the word is compared with.
        compare: u64,
        /// The new value.
        swap: u64,
    },
    /// Adds to the peer's word, and returns the earlier value.
    FetchAndAdd {
        /// Virtual address of the word; a multiple of eight.
        address: u64,
        /// Key (`rkey`) of the peer's region.
        key: Key,
        /// The value to add.
        add: u64,
    },
}

impl Operation {
    /// Returns the opcode of the completion of this operation.
    pub fn done(&self) -> Opcode {
        match self {
            Self::Send { .. } => Opcode::SEND,
            Self::Write { .. } => Opcode::RDMA_WRITE,
            Self::Read { .. } => Opcode::RDMA_READ,
            Self::CompareAndSwap { .. } => Opcode::COMP_SWAP,
            Self::FetchAndAdd { .. } => Opcode::FETCH_ADD,
        }
    }

    /// Returns whether the operation writes to the program's memory instead of reading from it.
    pub fn fills_elements(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::CompareAndSwap { .. } | Self::FetchAndAdd { .. })
    }
}

/// The destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Number of the destination queue pair.
    pub number: QpNumber,
    /// The local identifier (LID) of its port.
    pub lid: u16,
    /// The Q_Key, which must match that of the destination queue pair.
    pub qkey: u32,
}

/// A send request: `ibv_send_wr`.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// The work request identifier (`wr_id`), which the program chooses.
    pub id: u64,
    /// The operation to execute.
    pub operation: Operation,
    /// The destination, if the request is a datagram.
    pub datagram: Option<Datagram>,
    /// The program's buffers.
    pub elements: &'a [Element],
    /// The data is copied when the request is posted, so the keys are ignored and the program may change the buffers at once.
    pub is_inline: bool,
    /// Whether the request generates a completion when it succeeds.
    pub is_signaled: bool,
}

/// The result of a request: `ibv_wc_status`, with the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

impl Status {
    /// The request succeeded.
    pub const SUCCESS: Self = Self(0);
    /// A received message is longer than the posted buffers.
    pub const LOC_LEN_ERR: Self = Self(1);
    /// A buffer is not in the region of its key, or the region does not allow the access.
    pub const LOC_PROT_ERR: Self = Self(4);
    /// The queue pair is in the error state, so the request was flushed.
    pub const WR_FLUSH_ERR: Self = Self(5);
    /// The peer sent an invalid response.
    pub const BAD_RESP_ERR: Self = Self(7);
    /// The peer cannot execute the request, for example because its buffer is too short.
    pub const REM_INV_REQ_ERR: Self = Self(9);
    /// The peer's region does not allow the access.
    pub const REM_ACCESS_ERR: Self = Self(10);
    /// The peer could not execute the request because of an error on its own side.
    pub const REM_OP_ERR: Self = Self(11);
    /// The peer does not answer.
    pub const RETRY_EXC_ERR: Self = Self(12);
    /// The peer did not post a receive in time.
    pub const RNR_RETRY_EXC_ERR: Self = Self(13);
}

/// The operation that a completion belongs to: `ibv_wc_opcode`, with the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opcode(pub u32);

impl Opcode {
    /// SEND.
    pub const SEND: Self = Self(0);
    /// RDMA WRITE.
    pub const RDMA_WRITE: Self = Self(1);
    /// RDMA READ.
    pub const RDMA_READ: Self = Self(2);
    /// Compare-and-swap.
    pub const COMP_SWAP: Self = Self(3);
    /// Fetch-and-add.
    pub const FETCH_ADD: Self = Self(4);
    /// A message was received.
    pub const RECV: Self = Self(128);
    /// RDMA WRITE with an immediate value was received.
    pub const RECV_RDMA_WITH_IMM: Self = Self(129);
}

/// A work completion: `ibv_wc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The work request identifier (`wr_id`), which the program chose.
    pub id: u64,
    /// The result.
    pub status: Status,
    /// The operation. Undefined if the request has failed.
    pub opcode: Opcode,
    /// Number of bytes received.
    pub length: u32,
    /// Immediate data that came with the message.
    pub immediate: Option<u32>,
    /// The queue pair to which the request was posted.
    pub queue_pair: QpNumber,
    /// The queue pair that sent a received datagram.
    pub source: QpNumber,
    /// The local identifier (LID) of the port that sent a received datagram.
    pub lid: u16,
}
