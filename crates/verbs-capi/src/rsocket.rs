//! Rsockets: sockets whose bytes go through a channel of a segment.
//!
//! A process that sees a segment as a device gets rsockets of this library; otherwise they are the real librdmacm's, and so are all calls
//! for a number that is none of ours. A stream rsocket is a stream channel. Its listener has the names of its addresses in the segment, as
//! an identifier of `RDMA_PS_TCP` has, so both share one space of ports (`ginnel_verbs::cm`). The number of an rsocket is that of a
//! descriptor which nobody else can get meanwhile.
//!
//! ```text
//! table        which numbers are rsockets of ours
//! waiting      threads that sleep until an rsocket, or a descriptor, is ready
//! line         one direction of a stream, for several threads
//! stream       a connection
//! listening    a listener, and those who have come
//! socket       an rsocket, and its states
//! maps         I/O maps: riomap and riowrite
//! calls        the calls of C that make connections and end them
//! transfer     those that send and receive
//! options      those that ask and say what an rsocket is like
//! poll         rpoll and rselect
//! ```
#![allow(unsafe_code)] // Structures and functions of C.

mod calls;
mod line;
mod listening;
mod maps;
mod options;
mod poll;
mod socket;
mod stream;
mod table;
mod transfer;
mod waiting;

pub use maps::{Held, hold};

use crate::context::fail;
use std::ffi::c_int;

/// What a call gives, or -1 and an error in `errno`.
fn given(result: Result<usize, c_int>) -> isize {
    match result {
        Ok(value) => value.cast_signed(),
        Err(error) => {
            fail(error);
            -1
        }
    }
}

/// Number of the system's error, or this one.
fn code(error: &std::io::Error, otherwise: c_int) -> c_int {
    error.raw_os_error().unwrap_or(otherwise)
}
