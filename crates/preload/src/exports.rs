//! The C functions that this library has in front of the C library's.
//!
//! Each has the name, type, errors and blocking behaviour of the function that it stands for, and may be called by any thread. A descriptor
//! that is none of ours costs a look into a table.
#![allow(unsafe_code)] // C functions, with pointers of the program.
#![allow(clippy::missing_safety_doc, reason = "the rules are those of the C function of the same name")]
#![allow(missing_docs, reason = "see the C function of the same name")]

mod aio;
mod aliases;
mod births;
mod descriptors;
mod formatted;
mod io;
mod polling;
mod process;
mod sockets;
mod streams;
#[cfg(target_arch = "x86_64")]
mod system_calls;

pub use process::owns_tables;

/// Runs when the library is loaded.
pub fn load() {
    births::load();
    process::owns_tables();
    crate::wait::load();
    crate::epoll::load();
    crate::hidden::load();
    ginnel::keep_descriptors(crate::hidden::hide);
    crate::family::load();
    crate::exec::load();
}
