//! The C library. Each function is a thin line over the Rust library: its pointers are looked at, a panic is stopped,
//! an error becomes a number and a text. How that is done is written once, in `boundary`.
//!
//! The comments of what is public here are the comments of `ginnel.h`, which is generated from this crate
//! (`scripts/header-check`), so they speak C. What a caller must keep to is said on top of that file, for all functions.
#![allow(unsafe_code)] // This is the boundary: pointers come from C, and symbols go there by name.
#![allow(clippy::missing_safety_doc)] // See above: the rules stand on top of ginnel.h, in C's words.

mod boundary;
mod handle_table;

// The empty lines keep the order, which is that of ginnel.h.
pub mod status;

pub mod daemon;

pub mod endpoint;

pub mod listener;

pub mod channel;

pub mod message;

pub mod stream;

pub mod ready;

pub mod handover;

pub mod block;

pub mod lock;

pub mod list;

pub mod farm;

pub mod cache;

use std::ffi::{CStr, c_char};

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version without a zero in it"),
};

/// The version of the library that runs, for example "0.1.0"; GINNEL_VERSION is that of the header. Never NULL, never to
/// be freed. Any thread; does not block.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_version() -> *const c_char {
    VERSION.as_ptr()
}
