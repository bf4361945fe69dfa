//! The C library and the kernel, as this library calls them: by descriptor, and without any knowledge of connections.

pub mod cancel;
pub mod clock;
pub mod confined;
pub mod errno;
pub mod kernel;
pub mod memory;
pub mod real;
