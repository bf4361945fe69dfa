//! `ginnel-volume`: virtual disks over vhost-user, one process each.
//!
//! ```text
//!  server    accepts front ends, one at a time; signals; what the control socket asks for
//!  session   one front end: vhost-user messages -> memory, queues, features
//!  worker    one thread: its queues, its io_uring, its counters; no lock on the way
//!  device    bytes of a request -> operation on a backend -> bytes of the answer (blk, scsi)
//!  backend   where the bytes lie: a file or block device, memory, nowhere
//!  ownership when the images are locked: while the VM runs here
//!  turn      one process after the other
//! ```
//!
//! A queue has one owner, the worker that it was given to, from the front end's start of the queue to its stop. The
//! session talks to workers through a mailbox, and they answer; nothing else is shared between threads but counters.

pub mod backend;
pub mod control;
pub mod device;
pub mod disk;
pub mod flags;
pub mod limit;
pub mod lock;
pub mod ownership;
pub mod sandbox;
pub mod server;
pub mod session;
pub mod sockets;
pub mod stats;
pub mod turn;
pub mod worker;
