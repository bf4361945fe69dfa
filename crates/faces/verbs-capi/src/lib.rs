//! `libibverbs.so.1` and `librdmacm.so.1`: replacements of the system's libraries of these names, for unmodified programs. They
//! implement what concerns the devices of this library, and forward everything else to the real libraries. In the comments, "ours" means
//! an object or a function of this library, and "the real library" means the system's.
//!
//! The tables `libibverbs.map` and `librdmacm.map` say for each function which of the two it is. To implement a function here, write
//! `ginnel_NAME` with the C interface of `NAME`, and replace `forward` by `ours` in the table. If the function can be called with
//! objects of the real library, declare the real function in `real.rs`, and call it for those objects.
#![allow(unsafe_code)] // The modules below declare functions that C calls by name.
#![allow(clippy::missing_safety_doc)] // The manual pages of libibverbs define the duties of a caller.

mod address;
mod channel;
mod cm;
mod completion;
mod context;
mod devices;
mod drivers;
mod entry_points;
mod events;
mod extended_poll;
mod forks;
mod library;
mod memory;
mod pages;
mod post;
mod program;
mod queue_pair;
mod real;
mod refused;
mod rsocket;
mod shared_receive_queue;
mod strings;
mod threads;
mod warning;
