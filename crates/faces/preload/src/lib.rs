//! `libginnel-preload.so`: moves TCP connections of unmodified programs from the kernel to shared memory.
//!
//! The library is loaded before the C library (`LD_PRELOAD`, which `ginnel run` sets), so its socket functions
//! replace those of the C library. A connection begins on TCP, as without the library. Once it has carried some data,
//! the library reports the socket to the daemon of this host or VM (`daemon::session`). If the program at the other end uses
//! this library too, and both daemons agree that it is the same connection, both ends get a pair of rings. Each
//! direction then changes over to its ring at a byte that both sides have counted (`carrying::change`). The kernel's socket
//! stays open: it reports the peer's end, and a byte on it wakes a sleeping peer.
//!
//! The modules are floors: each uses only those below it, and `tests/architecture` checks that.
//!
//! ```text
//! load       what happens when the library is loaded
//! exports    the C functions: arguments, errno
//! calls      what they do: send and receive, poll, splice, descriptors that come and go, exec
//! served     sending and receiving over connections to caches
//! epoll      the program's epoll instances
//! waiting    sleeping until something is ready, and being woken
//! carrying   moving bytes without sleeping, and the change of the carrier: to a ring, to a larger ring, back to the kernel
//! daemon     the session with the daemon (reports, matches, rings), and the user's report
//! state      descriptors, sockets, directions, and the processes that share them
//! cache      what this process reads of caches' memory
//! process    settings, locks, signal handlers, this library's own descriptors
//! system     calls of the kernel and of the original C library
//! ```
//!
//! Rust programs do not call this library. No path that carries data allocates, takes a lock that another process can
//! hold (except after a fork, `state::family`), or waits for a daemon (except the first request to a cache).
#![cfg_attr(test, allow(dead_code, reason = "a program of tests is not to have its functions replaced"))]

mod cache;
mod calls;
mod carrying;
mod daemon;
mod epoll;
#[cfg(not(test))]
mod exports;
mod load;
mod process;
mod served;
mod state;
mod system;
mod waiting;
