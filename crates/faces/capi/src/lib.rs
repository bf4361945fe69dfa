//! The C library. Each function is a thin layer over the Rust library: it checks its pointers, catches panics, and converts
//! errors to a number and a text. The code for that is in `boundary`.
//!
//! The doc comments of public items become the comments of `ginnel.h`, which is generated from this crate
//! (`scripts/header-check`), so they use the terms of C. The rules for callers that hold for all functions are at the head of
//! that file.
#![allow(unsafe_code)] // This is the boundary: pointers come from C, and symbols are exported by name.
#![allow(clippy::missing_safety_doc)] // See above: the rules are at the head of ginnel.h, in terms of C.

mod boundary;
mod handle_table;

// The empty lines keep rustfmt from sorting the modules: their order is that of ginnel.h.
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
    Err(_) => panic!("the version contains a zero byte"),
};

/// Returns the version of the running library, for example "0.1.0"; GINNEL_VERSION is that of the header. The result is
/// never NULL and must not be freed. Any thread may call it; it does not block.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_version() -> *const c_char {
    VERSION.as_ptr()
}
