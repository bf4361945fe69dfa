//! `ginnel-volume`: serves virtual disks over vhost-user and vfio-user. Each process serves one volume; an NVMe volume has two
//! processes.
//!
//! ```text
//!  server    accepts front ends, one at a time; handles signals and the requests of the control socket
//!  session   one front end: turns vhost-user messages into memory, queues and features
//!  worker    one thread with its queues, its io_uring and its counters; its data path takes no lock, and is made once
//!            for each kind of queues
//!  device    turns the bytes of a request into an operation on a backend, and the result into bytes (blk, scsi,
//!            nvme)
//!  backend   stores the data: in a file or block device, in memory, or nowhere
//!  ownership locks the images while the VM runs here
//!  turn      makes the processes of one volume run one after another
//!  holder    the process of an NVMe volume that has QEMU's connection; start_holder starts it where no unit does
//!  nvme      the engine of an NVMe volume: the controller behind a holder
//!  attach    the connection between the two
//! ```
//!
//! One worker owns each queue, from the moment at which the front end starts the queue until it stops it. The session
//! sends orders to the workers through a mailbox, and they answer. The threads share nothing else but counters.

pub mod attach;
pub mod backend;
pub mod control;
pub mod device;
pub mod disk;
pub mod flags;
pub mod holder;
mod hush;
pub mod limit;
pub mod lock;
pub mod nvme;
pub mod ownership;
pub mod sandbox;
pub mod server;
pub mod session;
pub mod sockets;
pub mod start_holder;
pub mod stats;
pub mod turn;
pub mod worker;
