//! The parameters of a queue pair, its events, and the errors of its calls.

use crate::completion_queue::CompletionQueue;
use crate::receive::{NotPosted, Shape};
use crate::shared_receive_queue::SharedReceiveQueue;
use ginnel_layout::verbs::{Access, Kind, Place, QpNumber};
use ginnel_shmem::SharedMemory;
use std::sync::Arc;
use std::time::Duration;

/// An asynchronous event of a queue pair, of a shared receive queue or of the device, with the numbers of `ibv_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u32);

impl Event {
    /// The queue pair has failed.
    pub const QP_FATAL: Self = Self(1);
    /// The peer has sent an invalid request.
    pub const QP_REQ_ERR: Self = Self(2);
    /// The peer has requested an access that it has no right to.
    pub const QP_ACCESS_ERR: Self = Self(3);
    /// The device is lost for good.
    pub const DEVICE_FATAL: Self = Self(8);
    /// A shared receive queue has fewer receives than its limit.
    pub const SRQ_LIMIT_REACHED: Self = Self(15);
    /// A queue pair takes no more receives from its shared receive queue.
    pub const QP_LAST_WQE_REACHED: Self = Self(16);
}

/// The callback that notifies the program of events.
pub type EventCallback = Box<dyn Fn(Event) + Send + Sync>;

/// Returns the local identifier (LID) of a member's port.
pub fn lid(member: u32) -> u16 {
    u16::try_from(member.saturating_add(1)).unwrap_or(u16::MAX)
}

/// The size of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Maximum number of send requests that wait to be executed.
    pub sends: usize,
    /// Maximum number of elements of a send request.
    pub elements: usize,
    /// Maximum length of an inline request, in bytes.
    pub inline: usize,
    /// Size of the receive queue.
    pub receives: Shape,
}

/// What `modify` can change besides the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The queue pair to connect to. Required for the change to RTR of a connected queue pair, and forbidden otherwise.
    pub peer: Option<QpNumber>,
    /// The remote operations that the peer may execute.
    pub access: Option<Access>,
    /// How long to wait until the peer is ready to receive; `Some(None)` means without limit.
    pub timeout: Option<Option<Duration>>,
    /// How long to wait until the peer has posted a receive; `Some(None)` means without limit.
    pub patience: Option<Option<Duration>>,
    /// The Q_Key that a datagram for this queue pair must have.
    pub qkey: Option<u32>,
}

/// Why a call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The state of the queue pair does not allow the call, or the arguments are invalid.
    Invalid,
    /// The queue has no room for another request.
    Full,
}

impl From<NotPosted> for Refused {
    fn from(error: NotPosted) -> Self {
        match error {
            NotPosted::Full => Self::Full,
            NotPosted::Invalid => Self::Invalid,
        }
    }
}

/// The location of the two rings of a receive queue.
#[derive(Clone)]
pub struct Rings<M> {
    /// The receive ring.
    pub receives: (Place, (M, usize)),
    /// The completion ring.
    pub completions: (Place, (M, usize)),
}

/// The location of a new queue pair.
pub struct Location<M> {
    /// Number of the queue pair.
    pub number: QpNumber,
    /// Its rings; `None` if it uses a shared receive queue.
    pub rings: Option<Rings<M>>,
}

/// The properties of a new queue pair.
pub struct QueuePairOptions<M: SharedMemory> {
    /// RC, UC or UD.
    pub kind: Kind,
    /// The protection domain.
    pub domain: u32,
    /// The size.
    pub capacity: Capacity,
    /// The shared receive queue; `None` if the queue pair has its own receive queue.
    pub shared: Option<Arc<SharedReceiveQueue<M>>>,
    /// The completion queues for sends and for receives.
    pub completes: (Arc<CompletionQueue<M>>, Arc<CompletionQueue<M>>),
    /// The callback that notifies the program of events.
    pub tell: EventCallback,
}
