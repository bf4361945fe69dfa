//! The limits of a volume.

use ginnel_config::{Bytes, Period};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The limits of a volume, for all of its queues together. Zero means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Requests per second, of any kind that reaches the backend.
    pub iops: u64,
    /// Bytes read or written per second.
    pub bandwidth: Bytes,
    /// How much unused allowance may be used later at once, as the time in which it accumulates. In any second, at most
    /// the limit and this much of it passes.
    pub burst: Period,
}

impl Limits {
    /// The default burst: enough for a worker that wakes late to catch up, and within 1 % over a second.
    pub const BURST: Period = Period(Duration::from_millis(10));
}

impl Default for Limits {
    fn default() -> Self {
        Self { iops: 0, bandwidth: Bytes(0), burst: Self::BURST }
    }
}

/// Changes to [`Limits`]. `None` keeps a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitChange {
    /// Requests per second; 0 means no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes per second; 0 means no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bytes>,
    /// See [`Limits::burst`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<Period>,
}

impl LimitChange {
    /// Returns the limits after the change.
    pub fn of(&self, limits: Limits) -> Limits {
        Limits {
            iops: self.iops.unwrap_or(limits.iops),
            bandwidth: self.bandwidth.unwrap_or(limits.bandwidth),
            burst: self.burst.unwrap_or(limits.burst),
        }
    }
}
