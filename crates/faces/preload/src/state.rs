//! What this library knows of descriptors, sockets, and the two directions of a connection.

pub mod carrier;
pub mod common;
pub mod direction;
pub mod early;
pub mod family;
pub mod inherited;
pub mod known;
pub mod lowat;
pub mod reasons;
pub mod rings;
pub mod sleepers;
pub mod socket;
pub mod sockets;
pub mod stash;
pub mod table;
pub mod taken;
pub mod watchers;
