//! Bytes, and the change of their carrier between the kernel and rings. Moving bytes never sleeps: `passing`, `stdio` and `settle` wait
//! for a peer, for a bounded time.

pub mod advance;
pub mod attend;
pub mod bell;
pub mod change;
pub mod closing;
pub mod connection;
pub mod counted;
pub mod delays;
pub mod disconnecting;
pub mod grow;
pub mod input;
pub mod keeper;
pub mod look;
pub mod lowat;
pub mod output;
pub mod passing;
pub mod peek;
pub mod returning;
pub mod room;
pub mod settle;
pub mod stdio;
pub mod wakeups;
