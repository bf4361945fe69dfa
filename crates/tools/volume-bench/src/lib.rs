//! A polling front end for vhost-user disks and for NVMe controllers behind vfio-user. It drives a disk server
//! (`ginnel-volume`, QEMU's storage daemon, or any other) from user space, as a VM would, without a VM.
//!
//! It is a tool for measurements and tests, so it does what a guest and its QEMU do, and no more: memory in a memfd,
//! the standard rings, messages in QEMU's order, and an in-flight region that is kept and handed to the server's
//! successor.
//!
//! ```no_run
//! use ginnel_volume_bench::{Client, Options, Request};
//!
//! let mut disk = Client::connect(Options { queues: 2, ..Options::new("/run/ginnel/volumes/web.sock") })?;
//! // One request at a time, blocking:
//! disk.write(4096, b"sixteen bytes...".repeat(32).as_slice())?;
//! disk.flush()?;
//! // Many requests at a time, polling; each queue can have a thread of its own:
//! let queue = disk.queue(1);
//! while let Some(slot) = queue.claim() {
//!     queue.submit(slot, Request::read(4096 * slot.index() as u64, 4096))?;
//! }
//! queue.publish()?;
//! while queue.submitted() > 0 {
//!     if let Some(done) = queue.poll()? {
//!         println!("{}: {}", done.request, done.status);
//!         queue.release(done.slot);
//!     }
//! }
//! // The server was killed and restarted: the requests in flight stay in flight.
//! disk.reconnect()?;
//! # Ok::<(), ginnel_volume_bench::Error>(())
//! ```
//!
//! [`workload`] runs streams of requests and measures them; [`verify`] writes and checks blocks that identify
//! themselves.

mod client;
mod connection;
mod device;
mod disk;
mod echo;
mod error;
mod events;
mod front;
mod memory;
mod nvme;
mod options;
mod queue;
mod request;
mod request_stream;
mod scsi;
mod session;
mod slots;
mod transport;
pub mod verify;
mod virtio;
pub mod workload;

pub use client::{Client, Recovery};
pub use device::Device;
pub use disk::Disk;
pub use error::Error;
pub use front::Front;
pub use nvme::{Doorbells, NvmeClient, NvmeOptions, NvmeTransport};
pub use options::{Options, Ring};
pub use queue::{Queue, sleep};
pub use request::{Operation, Request, Status};
pub use slots::{Done, Slot};
pub use transport::{Answer, Transport};
pub use virtio::VirtioTransport;

/// A pair of NVMe I/O queues.
pub type NvmeQueue = Queue<NvmeTransport>;
