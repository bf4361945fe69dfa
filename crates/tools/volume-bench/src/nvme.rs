//! An NVMe disk behind a vfio-user socket: the client is QEMU and the guest's driver in one.
//!
//! ```text
//!  client      the disk: queues that outlive a controller, and a connection
//!  start       what a driver asks a controller, and the queues that it creates
//!  device      the vfio-user device: registers, vectors, mapped doorbells, the guest's memory
//!  admin       the admin queues
//!  transport   a pair of I/O queues under the slots of a queue
//!  command     requests as commands
//!  layout      what lies where in the guest's memory
//! ```

mod admin;
mod client;
mod command;
mod device;
mod layout;
mod options;
mod start;
mod transport;

pub use client::NvmeClient;
pub use options::{Doorbells, NvmeOptions};
pub use transport::NvmeTransport;
