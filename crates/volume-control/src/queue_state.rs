//! The state of queues, for whoever looks at a guest that is stuck.

use serde::{Deserialize, Serialize};

/// The state of a volume's queues at one moment; each queue as its own thread saw it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dump {
    /// The volume.
    pub volume: String,
    /// Feature bits that the driver has chosen, as virtio numbers them.
    pub features: u64,
    /// Feature bits of vhost-user that the front end has chosen.
    pub protocol_features: u64,
    /// Its queues.
    pub queues: Vec<QueueState>,
}

/// A virtqueue. Indices are as virtio has them: modulo 2^16.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueState {
    /// Its number.
    pub queue: u16,
    /// The thread that owns it.
    pub thread: usize,
    /// `running`, `stopped`, `not set up`, or `broken: ...`.
    pub state: String,
    /// `split` or `packed`.
    pub format: String,
    /// Descriptors.
    pub size: u16,
    /// Whether notifications are suppressed by index.
    pub event_index: bool,
    /// Up to where the driver has made descriptors available; packed: unknown, 0.
    pub driver_index: u16,
    /// Up to where the volume has taken them.
    pub taken_index: u16,
    /// Up to where the volume has given them back.
    pub used_index: u16,
    /// Whether the volume asks to be kicked.
    pub armed: bool,
    /// Kicks that came.
    pub kicks: u64,
    /// Calls that were made.
    pub calls: u64,
    /// Nanoseconds until the limits let the next request pass; 0: none waits.
    pub throttled_ns: u64,
    /// Requests that were taken and not given back yet, the oldest first.
    pub in_flight: Vec<InFlight>,
}

/// A request on its way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InFlight {
    /// Its head descriptor (packed: buffer id).
    pub head: u16,
    /// What it does, in a word.
    pub operation: String,
    /// The disk (LUN) that it is for.
    pub disk: u32,
    /// Where on the disk, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// For how long, in nanoseconds.
    pub age_ns: u64,
    /// What it waits for: `disk`, `limit`, `others` (it ends when all that came before it has ended), or `operator` (it is held
    /// because its disk has failed it).
    pub waits_for: String,
    /// How its disk has failed it, if it is held.
    pub error: String,
}
