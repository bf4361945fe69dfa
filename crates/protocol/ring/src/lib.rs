//! Rings between two parties that do not trust each other, and the only implementation of waiting on them.
//!
//! A ring has one producer and one consumer. [`ginnel_layout::ring`] describes the memory; this crate has the operations of
//! the two sides:
//!
//! - [`message`]: messages with boundaries. A small message moves one cache line.
//! - [`stream`]: a stream of bytes.
//! - [`Cursor`]: one process continues where another has stopped.
//! - [`wait`]: polling, sleeping, or one after the other; and when a doorbell must be rung.
//! - [`carrier`]: taking over a stream that another carrier has begun.
//! - [`board`]: waiting for tens of thousands of rings at once.
//!
//! Each side keeps its own state in private memory. It takes from the ring only headers, counters and state words, loads each
//! of them once, and checks it. A value that fails the check is [`Corrupt`], an error that ends the ring; it never causes a
//! panic, a hang or an access outside the ring. "Not now" ([`RecvError::Empty`], [`SendError::Full`]) is a different variant
//! from "the peer is broken".
//!
//! This crate contains no unsafe code: all access to shared memory goes through [`ginnel_shmem::SharedMemory`].
#![forbid(unsafe_code)]

pub mod board;
pub mod carrier;
mod cursor;
mod error;
pub mod message;
mod side;
pub mod stream;
pub mod wait;

pub use cursor::Cursor;
pub use error::{Corrupt, RecvError, SendError};
