//! NVMe queues, both sides, and what a controller needs around them: the record from which a killed device continues, PRP lists, and
//! the answers to Identify and Get Log Page (NVM Express base specification, revision 1.4; section numbers are of that revision).
//!
//! All access goes through [`ginnel_shmem::SharedMemory`], so the tests model, fuzz and sanitize the same code that runs in the product.
//! The other side may be hostile: each value is read once, checked, then used. A driver that breaks its queues gets [`Broken`], never a
//! panic. No function blocks, allocates in steady state, or calls the kernel.
//!
//! # The device's side
//!
//! The [`State`] says which queues exist, and has the commands in flight. A [`QueueGroup`] serves a completion queue and its submission
//! queues.
//!
//! ```
//! use ginnel_layout::nvme::{Opcode, Status};
//! use ginnel_nvme::{Broken, QueueGroup};
//! use ginnel_shmem::SharedMemory;
//!
//! /// Completes all commands that are there. Returns whether the interrupt must be raised.
//! fn turn<M: SharedMemory>(group: &mut QueueGroup<M>) -> Result<bool, Broken> {
//!     while let Some((ticket, command)) = group.take()? {
//!         let known = command.opcode == Opcode::FLUSH;
//!         let status = if known { Status::SUCCESS } else { Status::INVALID_OPCODE.for_good() };
//!         group.complete(ticket, status, 0);
//!     }
//!     Ok(group.publish())
//! }
//! ```
//!
//! Before the device sleeps, it calls [`QueueGroup::arm`], and does not sleep if that returns `true`. The device looks at a new group once
//! without a notification, and publishes once without having completed anything: its predecessor may have died between the two halves
//! of either.

mod completions;
mod doorbell;
mod driver;
mod error;
mod group;
pub mod identify;
pub mod log;
pub mod prp;
mod ring;
mod slots;
mod state;
mod submissions;

pub use completions::CompletionState;
pub use doorbell::Doorbell;
pub use driver::{DriverCompletions, DriverDoorbell, DriverSubmissions};
pub use error::{Broken, Corrupt, SetupError};
use ginnel_guest_memory::Area;
pub use group::{QueueGroup, Ticket};
pub use state::{CompletionRecord, Constants, State, SubmissionRecord};
pub use submissions::SubmissionState;

/// A queue that exists in the [`State`]: where it lies in this process's memory.
pub struct QueueSetup<M> {
    /// Number of the queue: 0 is the admin queue.
    pub id: u16,
    /// The guest's memory that the queue's address and size name.
    pub ring: Area<M>,
    /// The tail of a submission queue, or the head of a completion queue.
    pub doorbell: Doorbell<M>,
}
