//! `libginnel-preload.so`: moves TCP connections of unmodified programs from the kernel to shared memory.
//!
//! The library is loaded before the C library (`LD_PRELOAD`, which `ginnel run` sets), so its socket functions
//! replace those of the C library. A connection begins on TCP, as without the library. Once it has carried some data,
//! the library reports the socket to the daemon of this host or VM (`daemon`). If the program at the other end uses
//! this library too, and both daemons agree that it is the same connection, both ends get a pair of rings. Each
//! direction then changes over to its ring at a byte that both sides have counted (`change`). The kernel's socket
//! stays open: it reports the peer's end, and a byte on it wakes a sleeping peer.
//!
//! ```text
//! exports    the C functions: arguments, errno
//! poll, epoll, wait     sleeping until something is ready
//! splice                copies between connections and pipes
//! send, receive         the two directions of a socket
//! change                from the kernel to a ring
//! disconnecting         the end of a connection whose socket remains
//! returning, passing    from a ring to the kernel: for lack of room, or because another process gets the socket
//! stdio                 descriptors of standard streams
//! doorbell              doorbells, by which peers are woken
//! settle                waiting in tests until connections have changed over
//! daemon                the daemon: reports, matches, channels
//! table, socket         descriptors and their state
//! lock, section, handlers     state on which one thread works at a time, and signal handlers not at all
//! hidden                this library's own descriptors
//! kernel, real          calls of the kernel and of the original C library
//! ```
//!
//! Rust programs do not call this library. No path that carries data allocates, takes a lock that another process can
//! hold, or waits for a daemon.

#![cfg_attr(test, allow(dead_code, reason = "a program of tests is not to have its functions replaced"))]

mod cache;
mod cancel;
mod change;
mod confined;
mod daemon;
mod direction;
mod disconnecting;
mod doorbell;
mod epoll;
mod errno;
mod exec;
#[cfg(not(test))]
mod exports;
mod family;
mod grow;
mod handlers;
mod hidden;
mod kernel;
mod lock;
mod lowat;
mod memory;
mod passing;
mod peek;
mod poll;
mod real;
mod receive;
mod report;
mod returning;
mod rings;
mod section;
mod send;
mod settings;
mod settle;
mod signals;
mod socket;
mod splice;
mod stdio;
mod table;
mod thread;
mod wait;
mod wakes;
