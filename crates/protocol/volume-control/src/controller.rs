//! The state of the controller of an nvme volume, for debugging a guest that is stuck.

use serde::{Deserialize, Serialize};

/// An NVMe controller. Registers are as in NVMe 1.4, section 3.1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Controller {
    /// Controller Configuration, which the guest writes.
    pub cc: u32,
    /// Controller Status.
    pub csts: u32,
    /// How the guest's doorbells arrive: `mapped` (in shared memory), `shadow` (in the guest's memory, by Doorbell Buffer
    /// Config), or `trapped` (through QEMU and the holder).
    pub doorbells: String,
    /// Asynchronous Event Requests that wait for an event.
    pub event_requests: u32,
    /// The completion queues. The submission queues are the queues of [`Dump`](crate::Dump).
    pub completion_queues: Vec<CompletionQueue>,
}

/// A completion queue of a controller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CompletionQueue {
    /// Number of the queue; 0 is that of the admin queue.
    pub queue: u16,
    /// The submission queues whose commands it completes. They have the same thread.
    pub submission_queues: Vec<u16>,
    /// Number of entries.
    pub size: u16,
    /// The entry that the volume writes next.
    pub tail: u16,
    /// The entry up to which the driver has taken completions, by its doorbell.
    pub driver_head: u32,
    /// Number of completions that were ever posted.
    pub posted: u64,
    /// Number of commands that may be taken before the driver takes completions.
    pub room: i32,
    /// Its interrupt vector, if it has one.
    pub vector: Option<u16>,
}

impl Controller {
    /// Returns in words whether the controller works: CC.EN, and CSTS.RDY, CFS and SHST.
    pub fn condition(&self) -> &'static str {
        let (enabled, ready) = (self.cc & 1 != 0, self.csts & 1 != 0);
        match () {
            () if self.csts & 0b10 != 0 => "fatal error: the driver must reset it",
            () if self.csts & 0b1100 == 0b0100 => "shutting down",
            () if self.csts & 0b1100 == 0b1000 => "shut down",
            () if enabled && ready => "ready",
            () if enabled => "being enabled",
            () if ready => "being disabled",
            () => "disabled",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_told_in_words() {
        for (cc, csts, words) in [
            (0, 0, "disabled"),
            (0x46_0001, 0, "being enabled"),
            (0x46_0001, 1, "ready"),
            (0x46_0001, 3, "fatal error"),
            (0x46_4001, 0b0101, "shutting down"),
            (0x46_4001, 0b1001, "shut down"),
            (0, 1, "being disabled"),
        ] {
            let controller = Controller { cc, csts, ..Default::default() };
            assert!(controller.condition().starts_with(words), "{cc:#x} {csts:#x}");
        }
    }
}
