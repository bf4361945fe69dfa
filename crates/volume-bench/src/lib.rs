//! A poll-mode vhost-user front end: drives a disk server (`ginnel-volume`, QEMU's storage daemon, any other) from user space,
//! as a VM would, without a VM.
//!
//! It is an instrument to measure with and a driver for tests, so it does what a guest and its QEMU do, and no more: memory in a
//! memfd, the stock rings, the messages in QEMU's order, the in-flight account kept and handed to the server's successor.
//!
//! ```no_run
//! use ginnel_volume_bench::{Client, Options, Request};
//!
//! let mut disk = Client::connect(Options { queues: 2, ..Options::new("/run/ginnel/volumes/web.sock") })?;
//! // One at a time, blocking:
//! disk.write(4096, b"sixteen bytes...".repeat(32).as_slice())?;
//! disk.flush()?;
//! // Many at a time, polling; each queue can have a thread of its own:
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
//! // The server was killed, and started again: what was on its way is still.
//! disk.reconnect()?;
//! # Ok::<(), ginnel_volume_bench::Error>(())
//! ```
//!
//! [`workload`] runs streams of requests and measures them; [`verify`] makes and checks blocks that know themselves.

mod client;
mod connection;
mod device;
mod disk;
mod echo;
mod error;
mod events;
mod lane;
mod memory;
mod options;
mod queue;
mod request;
mod scsi;
mod session;
pub mod verify;
pub mod workload;

pub use client::{Carried, Client};
pub use device::Device;
pub use disk::Disk;
pub use error::Error;
pub use options::{Options, Ring};
pub use queue::{Done, Queue, Slot, sleep};
pub use request::{Operation, Request, Status};
