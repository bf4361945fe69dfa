//! Sleeping until something is ready.

pub mod call;
pub mod in_kernel;
pub mod limit;
pub mod points;
pub mod readiness;
pub mod sleep;
pub mod unaware;
pub mod wait;

/// The number of descriptors of a call for which it needs no allocation. A signal handler may jump out of `poll`, but not out of an
/// allocator.
pub const FEW: usize = 32;
