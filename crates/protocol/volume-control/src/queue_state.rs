//! The state of queues, for debugging a guest that is stuck.

use crate::Controller;
use serde::{Deserialize, Serialize};

/// The state of a volume's queues at one moment; each queue as seen by its own thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dump {
    /// Name of the volume.
    pub volume: String,
    /// Feature bits that the driver has chosen, as numbered by virtio.
    pub features: u64,
    /// vhost-user protocol features that the front end has chosen.
    pub protocol_features: u64,
    /// The controller of an nvme volume. It has no features of virtio.
    pub controller: Option<Controller>,
    /// The queues of the device; of an nvme volume its submission queues, of which 0 is the admin queue.
    pub queues: Vec<QueueState>,
}

/// A virtqueue, with indices modulo 2^16 as in virtio; or an NVMe submission queue, with indices modulo its size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueState {
    /// Number of the queue.
    pub queue: u16,
    /// The thread that owns it.
    pub thread: usize,
    /// `running`, `running: ...` (what it waits for), `stopping`, `stopped`, `not set up`, or `broken: ...`.
    pub state: String,
    /// `split`, `packed` or `nvme`.
    pub format: String,
    /// Number of descriptors, or of commands.
    pub size: u16,
    /// Whether notifications are suppressed by index (NVMe: by shadow doorbells).
    pub event_index: bool,
    /// Index up to which the driver has made descriptors available; unknown, and 0, for packed queues. NVMe: the tail.
    pub driver_index: u16,
    /// Index up to which the volume has taken them. NVMe: the head.
    pub taken_index: u16,
    /// Index up to which the volume has given them back. NVMe: the tail of the completion queue.
    pub used_index: u16,
    /// Whether the volume asks for kicks.
    pub armed: bool,
    /// Number of kicks that were received.
    pub kicks: u64,
    /// Number of calls that were sent.
    pub calls: u64,
    /// Nanoseconds until the limits let the next request pass; 0 if none waits.
    pub throttled_ns: u64,
    /// Requests that were taken and not given back yet, the oldest first.
    pub in_flight: Vec<InFlight>,
}

/// A request in flight.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InFlight {
    /// Its head descriptor (for packed queues, its buffer id; NVMe: its command identifier).
    pub head: u16,
    /// The operation's word.
    pub operation: String,
    /// The disk (LUN).
    pub disk: u32,
    /// Offset on the disk, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Time since it was taken, in nanoseconds.
    pub age_ns: u64,
    /// What it waits for: `disk`, `limit`, `others` (it ends when all earlier requests have ended), or `operator` (it
    /// is held because its disk has failed it).
    pub waits_for: String,
    /// The error of its disk, if it is held.
    pub error: String,
}
