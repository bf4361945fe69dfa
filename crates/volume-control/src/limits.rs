//! How much a volume may do.

use ginnel_config::{Bytes, Period};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Bounds of a volume, for all of its queues together. Zero: none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Requests a second, of any kind that reaches the backend.
    pub iops: u64,
    /// Bytes read or written a second.
    pub bandwidth: Bytes,
    /// How much of what was not used may be used later at once, as the time in which it adds up. What passes in any
    /// second is at most the limit and this much of it.
    pub burst: Period,
}

impl Limits {
    /// So much that a worker which wakes late can catch up, and within 1 % over a second.
    pub const BURST: Period = Period(Duration::from_millis(10));
}

impl Default for Limits {
    fn default() -> Self {
        Self { iops: 0, bandwidth: Bytes(0), burst: Self::BURST }
    }
}

/// What to change of [`Limits`]; the rest stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitChange {
    /// Requests a second; 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes a second; 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bytes>,
    /// See [`Limits::burst`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<Period>,
}

impl LimitChange {
    /// The limits after the change.
    pub fn of(&self, limits: Limits) -> Limits {
        Limits {
            iops: self.iops.unwrap_or(limits.iops),
            bandwidth: self.bandwidth.unwrap_or(limits.bandwidth),
            burst: self.burst.unwrap_or(limits.burst),
        }
    }
}
