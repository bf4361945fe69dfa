//! A cache beside memcached.

mod hit_rate;
mod memcached;
mod trace;

use crate::report::Report;
use anyhow::Result;

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
