//! Sleeping until something is ready.

pub mod call;
pub mod in_kernel;
pub mod limit;
pub mod points;
pub mod readiness;
pub mod sleep;
pub mod unaware;
pub mod wait;
