//! Why connections stay on TCP, or return to it.

/// The reason why a connection returns if another process gets it,
pub const PASSED: &str = "its descriptor was passed on";
/// and if the program wants a signal when something comes, which only the kernel can send.
pub const SIGNALLED: &str = "the program asks for SIGIO (O_ASYNC)";
/// and if a standard stream gets it.
pub const STANDARD: &str = "it is standard input, output or error";
/// and if another process gets this process's memory or all of its descriptors.
pub const SHARED: &str = "a process shares memory or descriptors with this one";

/// The reasons for which a connection returns as soon as its peer takes part.
pub const LATER: [&str; 3] = [SIGNALLED, STANDARD, SHARED];
