//! A cache beside memcached.

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
    /// The median of what a request took, in microseconds.
    pub median: f64,
    /// What one of a hundred took longer than.
    pub p99: f64,
    /// Requests a second.
    pub rate: f64,
    /// CPU time of the process over wall time.
    pub cpu: f64,
}

impl Figures {
    /// Of so many times in nanoseconds.
    pub fn of(mut nanoseconds: Vec<f64>, cpu: f64, rate: f64) -> Self {
        nanoseconds.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let at = (nanoseconds.len() as f64 * part) as usize;
            nanoseconds.get(at).map_or(f64::NAN, |time| time / 1000.0)
        };
        Self { median: at(0.5), p99: at(0.99), rate, cpu }
    }
}

/// What is measured, and where the rows go.
pub struct Cache<'r> {
    /// Where the rows go.
    pub report: &'r mut Report,
    /// Only rows whose names contain this.
    pub row: Option<&'r str>,
}

impl Cache<'_> {
    /// How many of the same requests find their items, at the same memory.
    pub fn hit_rate(&mut self) -> Result<()> {
        hit_rate::hit_rate(self)
    }

    fn wants(&self, row: &str) -> bool {
        self.row.is_none_or(|wanted| row.contains(wanted))
    }
}
