//! Messages on Unix sockets that carry file descriptors (`SCM_RIGHTS`, see `unix(7)`).
//!
//! [`receive`] and [`send`] are one `recvmsg(2)` and one `sendmsg(2)` each. They work on stream and on seqpacket sockets
//! and hold no state, so any number of threads may call them. They guarantee:
//!
//! - Received descriptors are close-on-exec from the start, and each is owned by exactly one [`OwnedFd`](std::os::fd::OwnedFd).
//! - A message brings at most as many descriptors as its receiver asks for. If it carried more, or if the process could not
//!   take all of them (`RLIMIT_NOFILE`), those that did arrive are closed and [`Received::fds_lost`] is set. A caller never gets
//!   only a part of a message's descriptors.
//! - `EINTR` is never returned, and a closed peer raises no `SIGPIPE`.
//!
//! The receiver parses control messages itself because rustix represents the sender's process number as a nonzero integer,
//! while the kernel reports 0 for a process in a process namespace that is not visible from here.
#![allow(unsafe_code)] // Control messages are parsed by hand, for the reason above.

mod receive;
mod send;

pub use receive::{Received, receive, receive_from};
pub use rustix::net::{RecvFlags, SendFlags};
pub use send::{send, send_all};

/// The largest number of descriptors that one message can carry (`SCM_MAX_FD` of the kernel).
pub const MAX_FDS: usize = 253;
