//! The control daemon, in its two roles. What a program on the host or in a guest sees of either is the attach protocol
//! ([`ginnel_layout::wire`]); the two roles of one VM speak [`ginnel_layout::relay`] over its control memory.
//!
//! A library only so that tests and fuzzers can reach the parsers; the program is `ginneld`.

pub mod allowance;
pub mod closer;
pub mod control_link;
pub mod excluded;
pub mod guest;
pub mod host;
pub mod keeper;
pub mod loan;
pub mod logging;
pub mod packet;
pub mod pidwatch;
pub mod poller;
pub mod user_connections;
