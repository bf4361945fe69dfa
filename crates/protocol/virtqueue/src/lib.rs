//! Virtqueues, both sides: the device's side, which a volume uses to serve requests, and the driver's side, which the
//! poll-mode client uses.
//!
//! The crate supports split and packed rings (virtio 1.2, sections 2.7 and 2.8), indirect descriptors, notifications that are
//! suppressed by flag or by event index, in-flight tracking for a device that may be killed (vhost-user specification,
//! "Inflight I/O tracking"), and the log of dirty pages for a guest that migrates.
//!
//! All access goes through [`ginnel_shmem::SharedMemory`], so the tests model, fuzz and sanitize the same code that runs in the
//! product. The other side may be hostile: each value is read once, checked, then used. A broken ring is [`Corrupt`], never a
//! panic. No function blocks, allocates in steady state, or calls the kernel. A queue has one owner at a time (it is `Send`
//! if the memory is).
//!
//! # The device's side
//!
//! ```
//! use ginnel_guest_memory::GuestMemory;
//! use ginnel_shmem::SharedMemory;
//! use ginnel_virtqueue::{Chain, Corrupt, DeviceQueue};
//!
//! /// Answers all requests that are there with one byte. Returns whether the driver must be called.
//! fn turn<M: SharedMemory>(
//!     queue: &mut DeviceQueue<M>, memory: &GuestMemory<M>, chain: &mut Chain,
//! ) -> Result<bool, Corrupt> {
//!     while let Some(ticket) = queue.pop(memory, chain)? {
//!         let written = memory.write(chain.writable(), 0, &[0]);
//!         queue.push(ticket, written as u32);
//!     }
//!     Ok(queue.publish())
//! }
//! ```
//!
//! Before the device sleeps on its kick eventfd, it calls [`DeviceQueue::arm`], and does not sleep if that returns `true`.
//! The device looks at a new queue once without a kick, and publishes once without having pushed anything: the previous
//! device process may have died between the two halves of either.
//!
//! # Notifications and the fence
//!
//! After it has published an index or a descriptor, each side checks whether the other one sleeps. Before it sleeps, each
//! side stores that it wants to be notified, and looks once more. Both have a full fence in between (store, fence, load), so
//! at least one of them sees the other, and no wake-up is lost. The models are in `tests/loom.rs`.

mod chain;
mod device;
mod driver;
mod error;
mod event;
mod inflight;
mod log;
mod packed;
mod ring;
mod split;

pub use chain::Chain;
pub use device::{DeviceQueue, DeviceState, Setup, Ticket};
pub use driver::{DriverQueue, DriverSetup, IndirectTables, Segment};
pub use error::{AddError, Corrupt, SetupError};
pub use inflight::InflightQueue;
pub use log::DirtyLog;

/// The two formats of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Split (virtio 1.2, section 2.7).
    Split,
    /// Packed (virtio 1.2, section 2.8; feature `RING_PACKED`).
    Packed,
}
