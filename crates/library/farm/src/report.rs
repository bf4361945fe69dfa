//! What happened in a job.

use std::time::Duration;

/// A report of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The time from the start to the last result, or to now.
    pub time: Duration,
    /// Results that were passed to `fold` and accepted.
    pub pieces: u64,
    /// The bytes of these pieces.
    pub bytes: u64,
    /// Pieces that were given to another worker because the first died, left, was dismissed or failed.
    pub reassigned: u64,
    /// All workers of the job, in the order in which they came.
    pub workers: Vec<WorkerReport>,
}

impl Report {
    /// Returns the number of workers that died.
    pub fn deaths(&self) -> usize {
        self.workers.iter().filter(|worker| matches!(worker.departure, Some(Departure::Died))).count()
    }
}

/// A report of one worker in a job.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerReport {
    /// The name that the worker gives itself, and the member that it belongs to.
    pub name: String,
    /// When the worker came, from the start of the job; zero if it was there before.
    pub joined: Duration,
    /// When the worker's last result came, from the start of the job.
    pub last: Duration,
    /// The worker's results that were accepted.
    pub pieces: u64,
    /// The bytes of these pieces.
    pub bytes: u64,
    /// Pieces that the worker reported as failed.
    pub failed: u64,
    /// Pieces that were taken from the worker and given to others.
    pub lost: u64,
    /// How the worker departed, if it did.
    pub departure: Option<Departure>,
}

impl WorkerReport {
    /// Returns the bytes per second, from the worker's arrival to its last result.
    pub fn throughput(&self) -> f64 {
        let time = self.last.saturating_sub(self.joined).as_secs_f64();
        if time > 0.0 { self.bytes as f64 / time } else { 0.0 }
    }
}

/// How a worker departed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Departure {
    /// The worker's process or its VM died.
    Died,
    /// The worker closed its channel.
    Left,
    /// The manager dismissed the worker, for this reason.
    Dismissed(String),
}

impl std::fmt::Display for Departure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Died => f.write_str("died"),
            Self::Left => f.write_str("left"),
            Self::Dismissed(why) => write!(f, "dismissed: {why}"),
        }
    }
}
