//! This process: its settings, threads and signals, the locks and sections in which its threads work, and this library's own
//! descriptors in it.

#[cfg(all(debug_assertions, not(test)))]
pub mod allocator;
pub mod buffers;
pub mod busy;
pub mod handlers;
pub mod hidden;
pub mod ids;
pub mod interrupted;
pub mod lock;
pub mod owner;
pub mod section;
pub mod settings;
pub mod signals;
pub mod spin;
pub mod thread;
