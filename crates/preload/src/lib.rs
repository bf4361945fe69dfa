//! `libginnel-preload.so`: TCP connections of unmodified programs leave the kernel for shared memory.
//!
//! The library is loaded before the C library (`LD_PRELOAD`; `ginnel run` does that) and has its functions on sockets first. A
//! connection begins on TCP, as without the library. Once it has shown life, the library hands the socket to the daemon of this
//! host or VM (`meet`). If a program with this library is at the other end, and both daemons agree that it is, both get a
//! pair of rings, and each direction changes over to its ring at a byte that both sides count alike (`change`). The kernel's socket stays open: it
//! says when the peer ends, and a byte on it wakes a peer that sleeps.
//!
//! ```text
//! exports    the C functions: arguments, errno
//! poll, epoll, wait     sleeping until something is ready
//! send, receive         what the two directions of a socket do
//! change                from the kernel to a ring
//! returning, passing    from a ring to the kernel: for lack of room, or because another process gets the socket
//! bell                  doorbells, by which peers are woken
//! settle                waiting for that, in tests
//! meet                  the daemon: reports, matches, channels
//! table, socket         descriptors and what is known of them
//! hidden                this library's own descriptors
//! kernel, real          what the kernel and the C library do without us
//! ```
//!
//! Nothing here is called by Rust programs. No path that carries data allocates, takes a lock that another process can hold, or
//! waits for a daemon.

#![cfg_attr(test, allow(dead_code, reason = "a program of tests is not to have its functions replaced"))]

mod cache;
mod change;
mod confined;
mod direction;
mod doorbell;
mod epoll;
mod errno;
mod exec;
#[cfg(not(test))]
mod exports;
mod family;
mod grow;
mod hidden;
mod kernel;
mod lock;
mod meet;
mod passing;
mod poll;
mod real;
mod receive;
mod report;
mod returning;
mod rings;
mod send;
mod settings;
mod settle;
mod signals;
mod socket;
mod table;
mod wait;
