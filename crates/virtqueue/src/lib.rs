//! Virtqueues, both sides: the device's, which a volume serves, and the driver's, which the poll-mode client drives.
//!
//! Split and packed rings (virtio 1.2, sections 2.7 and 2.8), indirect descriptors, notifications suppressed by flag or by
//! event index, in-flight tracking for a device that may be killed (vhost-user specification, "Inflight I/O tracking"),
//! and the log of dirty pages for a guest that migrates.
//!
//! Everything works over [`ginnel_shmem::Memory`], so the code of the product is the code that is modelled, fuzzed and
//! sanitized. The other side is hostile: each value is read once, checked, then used; a broken ring is [`Corrupt`], never
//! a panic. Nothing here blocks, allocates in steady state, or calls the kernel. A queue has one owner at a time (`Send`
//! if the memory is).
//!
//! # The device's side
//!
//! ```
//! use ginnel_shmem::Memory;
//! use ginnel_virtqueue::{Chain, Corrupt, DeviceQueue, GuestMemory};
//!
//! /// Answers all requests that are there with one byte; says whether the driver is to be called.
//! fn turn<M: Memory>(
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
//! Before it sleeps on its kick eventfd the device calls [`DeviceQueue::arm`], and does not sleep if that says `true`. A new
//! queue is looked at once without a kick, and published once without anything pushed: a predecessor may have died between
//! the two halves of either.
//!
//! # Who is called, and the fence
//!
//! Each side, after it has published an index or a descriptor, asks whether the other sleeps; each side, before it
//! sleeps, says so and looks once more. Both have a full fence in between (store, fence, load), so at least one of them sees
//! the other: a wake-up cannot be lost. `tests/loom.rs` has the models.

mod chain;
mod device;
mod driver;
mod error;
mod event;
mod inflight;
mod log;
mod memory;
mod packed;
mod ring;
mod split;

pub use chain::Chain;
pub use device::{DeviceQueue, DeviceState, Setup, Ticket};
pub use driver::{DriverQueue, DriverSetup, IndirectTables, Segment};
pub use error::{AddError, Corrupt, MemoryError, SetupError};
pub use inflight::InflightQueue;
pub use log::DirtyLog;
pub use memory::{Area, Buffer, GuestMemory, Region};

/// The two formats of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Virtio 1.2, section 2.7.
    Split,
    /// Virtio 1.2, section 2.8 (feature `RING_PACKED`).
    Packed,
}
