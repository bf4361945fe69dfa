//! TCP connections under `ginnel run`: of unmodified programs, and of programs that do what is easily forgotten. Each test has a daemon
//! of its own.

mod cancelled;
mod closing;
mod cpython;
mod daemons;
mod differential;
mod epoll;
mod exports;
mod foreign;
mod full;
mod growth;
mod hostile;
mod load;
mod messages;
mod namespaces;
mod passing;
mod queued;
mod random;
mod relatives;
mod returning;
mod settling;
mod short;
mod signalled;
mod traps;
mod unmodified;
mod waking;

kit::test_that_skips_are_seen!();
