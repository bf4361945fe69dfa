//! A hold, as the books have it.

use crate::process::Process;

/// A hold of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The duration in milliseconds.
    pub millis: u32,
    /// The process that has adopted the endpoint with the hold's token. The hold does not keep the endpoint alive after that.
    pub adopter: Option<Process>,
}
