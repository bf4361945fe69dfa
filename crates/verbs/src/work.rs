//! Work requests, and what comes of them.

use ginnel_layout::verbs::{Key, QpNumber};

/// A run of the program's bytes, within one of its regions: `ibv_sge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Element {
    /// Where it begins.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Key of its region.
    pub key: u32,
}

/// Bytes of all elements. `None` if they are more than a message may have.
#[inline]
pub fn total(elements: &[Element]) -> Option<u32> {
    let bytes = match elements {
        [one] => u64::from(one.length),
        _ => elements.iter().map(|element| u64::from(element.length)).sum(),
    };
    u32::try_from(bytes).ok().filter(|bytes| *bytes <= MAX_MESSAGE)
}

/// The most bytes of a message.
pub const MAX_MESSAGE: u32 = 1 << 31;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A message for the peer's next receive entry.
    Send {
        /// A value that goes along.
        immediate: Option<u32>,
        /// Whether a peer that waits for solicited events is woken.
        solicited: bool,
    },
    /// RDMA WRITE to the peer's memory.
    Write {
        /// Where to.
        address: u64,
        /// Key of the peer's region.
        key: Key,
        /// A value that uses up one of the peer's receive entries.
        immediate: Option<u32>,
        /// As with [`Operation::Send`], if there is such a value.
        solicited: bool,
    },
    /// RDMA READ from the peer's memory.
    Read {
        /// Where from.
        address: u64,
        /// Key of the peer's region.
        key: Key,
    },
    /// Puts `swap` in the place of the peer's word if that is `compare`. The word that was there is returned.
    CompareAndSwap {
        /// The word.
        address: u64,
        /// Key of the peer's region.
        key: Key,
        /// What must be there.
        compare: u64,
        /// What is put there.
        swap: u64,
    },
    /// Adds to the peer's word, and returns what was there.
    FetchAndAdd {
        /// The word.
        address: u64,
        /// Key of the peer's region.
        key: Key,
        /// What is added.
        add: u64,
    },
}

impl Operation {
    /// What a completion says that has been done.
    pub fn done(&self) -> Opcode {
        match self {
            Self::Send { .. } => Opcode::SEND,
            Self::Write { .. } => Opcode::RDMA_WRITE,
            Self::Read { .. } => Opcode::RDMA_READ,
            Self::CompareAndSwap { .. } => Opcode::COMP_SWAP,
            Self::FetchAndAdd { .. } => Opcode::FETCH_ADD,
        }
    }

    /// Whether the program's bytes are written, and not read.
    pub fn fills_elements(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::CompareAndSwap { .. } | Self::FetchAndAdd { .. })
    }
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The queue pair.
    pub number: QpNumber,
    /// The local identifier of its port.
    pub lid: u16,
    /// What it must have been given, too.
    pub qkey: u32,
}

/// A request to send.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// The program's own number for it.
    pub id: u64,
    /// What is to be done.
    pub operation: Operation,
    /// Where to, if it is a datagram.
    pub datagram: Option<Datagram>,
    /// With which bytes of the program.
    pub elements: &'a [Element],
    /// Their keys do not count, and the program may change the bytes as soon as they are posted.
    pub is_inline: bool,
    /// There is a completion also if all is well.
    pub is_signaled: bool,
}

/// How a request has ended: `ibv_wc_status`, with its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

impl Status {
    /// All is well.
    pub const SUCCESS: Self = Self(0);
    /// A message is longer than its buffers.
    pub const LOC_LEN_ERR: Self = Self(1);
    /// A buffer lies in no region of its key, or the region does not allow this.
    pub const LOC_PROT_ERR: Self = Self(4);
    /// The queue pair is in the error state.
    pub const WR_FLUSH_ERR: Self = Self(5);
    /// The peer has answered what it must not.
    pub const BAD_RESP_ERR: Self = Self(7);
    /// The peer cannot do that: its buffer is too short, for example.
    pub const REM_INV_REQ_ERR: Self = Self(9);
    /// The peer's region does not allow it.
    pub const REM_ACCESS_ERR: Self = Self(10);
    /// The peer could not do it, for a fault of its own.
    pub const REM_OP_ERR: Self = Self(11);
    /// The peer does not answer.
    pub const RETRY_EXC_ERR: Self = Self(12);
    /// The peer has posted no receive in time.
    pub const RNR_RETRY_EXC_ERR: Self = Self(13);
}

/// What a completion is of: `ibv_wc_opcode`, with its numbers.
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
    /// The program's own number for the request.
    pub id: u64,
    /// How it has ended.
    pub status: Status,
    /// What it was. Means nothing if it has failed.
    pub opcode: Opcode,
    /// Bytes received.
    pub length: u32,
    /// A value that came along.
    pub immediate: Option<u32>,
    /// The queue pair that it was posted to.
    pub queue_pair: QpNumber,
    /// The sender's queue pair, of a datagram that was received.
    pub source: QpNumber,
    /// The local identifier of the sender's port, likewise.
    pub lid: u16,
}
