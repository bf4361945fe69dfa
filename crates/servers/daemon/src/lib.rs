//! The control daemon, in its two roles. Programs on the host and in guests speak the attach protocol with it
//! ([`ginnel_layout::wire`]). The two daemons of one VM speak [`ginnel_layout::relay`] over its control memory.
//!
//! This is a library only so that tests and fuzzers can reach the parsers; the program is `ginneld`.

mod at_hand;
pub mod closer;
pub mod control_link;
pub mod descriptors;
pub mod excluded;
pub mod folder_lock;
mod forked;
pub mod guest;
pub mod hangup;
pub mod host;
pub mod interrupt;
pub mod keeper;
mod length;
pub mod logging;
pub mod namer;
mod no_answer;
pub mod packet;
mod patience;
pub mod pidwatch;
pub mod poller;
pub mod spawned;
pub mod strangers;
pub mod user_connections;
pub mod users;
pub mod watches;
