//! Rsockets: sockets whose bytes pass through a channel of a segment.
//!
//! A process that sees a segment as a device gets rsockets of this library. In any other process rsockets belong to the real librdmacm,
//! and calls for unknown numbers are forwarded to it. A stream rsocket is a stream channel. Its listener uses the same names in the
//! segment as an identifier of `RDMA_PS_TCP`, so both share one port space (`ginnel_verbs::cm`). The number of an rsocket is that of a
//! file descriptor that this library keeps open, so nothing else can get the number.
//!
//! ```text
//! table        the numbers of this library's rsockets
//! waiting      threads that sleep until an rsocket or a descriptor is ready
//! direction         one direction of a stream, shared by several threads
//! stream       a connection
//! listening    a listener, and the connections that wait to be accepted
//! socket       an rsocket and its states
//! maps         I/O maps: riomap and riowrite
//! calls        the C functions that create, connect and close
//! transfer     the C functions that send and receive
//! options      the C functions for socket options
//! poll         rpoll and rselect
//! ```
#![allow(unsafe_code)] // C structures and functions.

mod calls;
mod direction;
mod listening;
mod maps;
mod options;
mod poll;
mod socket;
mod stream;
mod table;
mod transfer;
mod waiting;

use crate::context::fail;
pub use maps::{Held, hold};
use std::ffi::c_int;

/// Returns the value of a successful call, or sets `errno` and returns -1.
fn given(result: Result<usize, c_int>) -> isize {
    match result {
        Ok(value) => value.cast_signed(),
        Err(error) => {
            fail(error);
            -1
        }
    }
}

/// Returns the error number of the system, or `otherwise` if there is none.
fn code(error: &std::io::Error, otherwise: c_int) -> c_int {
    error.raw_os_error().unwrap_or(otherwise)
}
