//! The engine of an NVMe volume: a controller whose front end is a *holder*.
//!
//! The holder is a process of its own ([`crate::holder`]) that has QEMU's connection, and therefore must not end while
//! the VM runs. It shows the guest the registers, and keeps what QEMU has handed over: the guest's memory, the eventfds
//! of interrupts, the doorbells. This side serves the commands. It attaches to the holder when it starts, and may be
//! killed at any instruction: all that its successor must know lies in the *state*, a file in memory that the holder
//! keeps.
//!
//! - `controller` follows the registers: it enables, resets and shuts down the controller, and stops the queues while
//!   the guest's memory changes.
//! - `admin` executes the commands of the admin queue, on the main thread, since some of them wait for the workers.
//! - `features` and `events` are what these commands set and wait for.
//! - `doorbells` knows where the driver stores its tails and heads.
//! - `memory` is the guest's memory.
//!
//! The workers serve the I/O queues (`worker/`), and [`crate::device::nvme`] knows the commands in them.

mod admin;
pub mod attachment;
mod bell;
pub mod controller;
mod doorbells;
mod dump;
mod events;
mod features;
mod memory;

use crate::session::Queues;
use ginnel_nvme::log::Health;

/// Why a controller cannot go on: a worker does not give a queue back, or the VMM holds an interrupt up.
#[derive(Debug)]
pub struct Stuck(pub String);

/// What a controller needs of its volume.
pub trait Volume: Queues {
    /// Returns what was done so far.
    fn health(&self) -> Health;
}

#[cfg(test)]
mod tests;
