//! Rings between two parties that do not trust each other, and the one way to wait on them.
//!
//! A ring has one producer and one consumer. What lies in memory is drawn in [`ginnel_layout::ring`]; this crate is
//! what the two sides do with it:
//!
//! - [`message`]: messages with boundaries. One cache line moves for a small message.
//! - [`stream`]: a stream of bytes.
//! - [`Cursor`]: one process goes on where another has stopped.
//! - [`wait`]: poll, sleep, or both in turn; and when to ring the doorbell.
//! - [`carrier`]: taking over a stream that another carrier has begun.
//! - [`board`]: waiting for tens of thousands of rings at once.
//!
//! Each side keeps its own state in private memory and takes from the ring only what it has checked: a header, a
//! counter, a state word, each loaded once. What does not hold up is [`Corrupt`], an error that ends the ring; it is
//! never a panic, a hang or an access outside the ring. "Not now" ([`RecvError::Empty`], [`SendError::Full`]) is a
//! different variant from "the peer is broken".
//!
//! There is no unsafe code here: all access goes through [`ginnel_shmem::Memory`].
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
