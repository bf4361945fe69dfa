//! Measures a cache beside memcached.

mod hit_rate;
mod memcached;
mod requests;
mod trace;
mod ycsb;

use crate::report::Report;
use anyhow::Result;
use serde::{Deserialize, Serialize};

/// What a client has measured.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// The median time of a request, in microseconds.
    pub median: f64,
    /// The 99th percentile of the time of a request, in microseconds.
    pub p99: f64,
    /// Requests per second.
    pub rate: f64,
    /// CPU time of the process divided by wall time.
    pub cpu: f64,
}

impl Figures {
    /// Makes the figures from the times of requests in nanoseconds.
    pub fn of(mut nanoseconds: Vec<f64>, cpu: f64, rate: f64) -> Self {
        nanoseconds.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let at = (nanoseconds.len() as f64 * part) as usize;
            nanoseconds.get(at).map_or(f64::NAN, |time| time / 1000.0)
        };
        Self { median: at(0.5), p99: at(0.99), rate, cpu }
    }
}

/// The measurements, and the report to which they add rows.
pub struct Cache<'r> {
    /// The report to which rows are added.
    pub report: &'r mut Report,
    /// Pairs of runs for each row. `None` means the default of each kind of row.
    pub pairs: Option<usize>,
    /// Only rows whose names contain this, or that are compared with the same on the host.
    pub row: Option<&'r str>,
}

impl Cache<'_> {
    /// Measures which part of the same requests find their items, with the same amount of memory.
    pub fn hit_rate(&mut self) -> Result<()> {
        hit_rate::hit_rate(self)
    }

    fn wants(&self, row: &str) -> bool {
        self.row.is_none_or(|wanted| row.contains(wanted))
    }
}
