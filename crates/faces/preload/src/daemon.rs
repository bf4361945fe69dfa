//! What this process asks of the daemon, and the user's report of it.

pub mod larger;
pub mod report;
pub mod session;
pub mod worth;
