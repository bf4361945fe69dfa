//! MPI libraries over a segment: on the host beside their own shared memory, and between VMs beside TCP.

mod host;
mod vms;

use crate::report::Report;

/// Exchanges messages between ranks; compiled for each MPI.
const EXCHANGE: &str = include_str!("mpi/exchange.c");

/// What is measured, and how.
pub struct Mpi<'r> {
    /// Where the rows go.
    pub report: &'r mut Report,
    /// Pairs of runs of each row on the host.
    pub pairs: usize,
    /// Pairs of runs of each row between VMs.
    pub vm_pairs: usize,
    /// Only rows whose names contain this.
    pub row: Option<&'r str>,
}

impl Mpi<'_> {
    fn is_wanted(&self, case: &str) -> bool {
        self.row.is_none_or(|row| case.contains(row))
    }
}
