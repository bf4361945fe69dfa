//! The kernel's facts about a TCP connection.
//!
//! A connection may leave TCP for shared memory only if both daemons have verified with their own kernels that the
//! two sockets are the two ends of one connection. Each direction may leave only at a byte on which the library and
//! the kernel agree. This crate reads those facts:
//!
//! - [`Identity`]: addresses, state, the socket's cookie and its network namespace;
//! - [`Clock`], [`SynTime`] and [`Connecting`]: the proof that one socket sent the SYN that the other received;
//! - [`Rendezvous`]: which two of the sockets that kernels report are the two ends of a connection;
//! - [`Counts`]: how many bytes the programs have received and sent, as the kernel counts them;
//! - [`round_trip`]: how long a segment and its acknowledgement take.
//!
//! The functions that ask the kernel do not block, allocate or hold state; any number of threads may ask about one
//! socket. All calls are raw system calls, so that a library that interposes `getsockopt` and `ioctl` can use them.
//! Sources: `tcp(7)`, `socket(7)`, `include/uapi/linux/tcp.h`, RFC 7323.

mod counts;
mod identity;
mod option;
mod proof;
mod rendezvous;

pub use counts::{Counts, Role, bytes_read, round_trip};
pub use identity::{Identity, NotTcp, Owner, addresses};
pub use proof::{Clock, Connecting, MAX_WINDOW, SynTime, save_syn};
pub use rendezvous::{Outcome, REPORTS_PER_MEMBER, Rendezvous, Report, Side, Socket};

#[cfg(test)]
kit::test_that_skips_are_seen!();
