//! The C functions with which this library interposes those of the C library.
//!
//! Each has the name, type, errors and blocking behaviour of the function that it replaces, and any thread may call it. For a
//! descriptor that this library does not handle, a call costs one lookup in a table.
#![allow(unsafe_code)] // C functions take pointers from the program.
#![allow(clippy::missing_safety_doc, reason = "the rules are those of the C function of the same name")]
#![allow(missing_docs, reason = "see the C function of the same name")]

mod aio;
mod aliases;
mod births;
mod descriptors;
mod formatted;
mod handlers;
mod inq;
mod io;
mod polling;
mod process;
mod sockets;
mod splice;
mod streams;
#[cfg(target_arch = "x86_64")]
mod system_calls;

/// Prepares the functions that need it when the library is loaded.
pub fn load() {
    births::load();
    streams::load();
    process::load();
}
