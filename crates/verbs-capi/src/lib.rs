//! `libibverbs.so.1` and `librdmacm.so.1`: they take the place of the system's libraries of these names, for programs that know
//! nothing of it. What is ours is done here; everything else goes on to the real libraries.
//!
//! Which is which says the table `libibverbs.map` (and `librdmacm.map`), line by line. To make a function ours, write
//! `ginnel_NAME`, with the C interface of `NAME`; put `ours` where the table says `forward`; and if objects may be foreign, declare
//! the real function in `real.rs`, and call that for them.
#![allow(unsafe_code)] // The modules below declare what C calls, by name.
#![allow(clippy::missing_safety_doc)] // The manual pages of libibverbs say what a caller must keep to.

mod address;
mod channel;
mod cm;
mod completion;
mod context;
mod devices;
mod drivers;
mod entries;
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
mod threads;
mod warning;
mod words;
