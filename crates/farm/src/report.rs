//! What happened in a job.

use std::time::Duration;

/// What happened in a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// From the start to the last result, or to now.
    pub time: Duration,
    /// Results that were consolidated.
    pub pieces: u64,
    /// Bytes of these pieces.
    pub bytes: u64,
    /// Pieces that were given to a second worker because the first died, left, was dismissed or failed.
    pub reassigned: u64,
    /// Everybody who had a part in it, in the order in which they came.
    pub workers: Vec<WorkerReport>,
}

impl Report {
    /// Workers that died.
    pub fn deaths(&self) -> usize {
        self.workers.iter().filter(|worker| matches!(worker.departure, Some(Departure::Died))).count()
    }
}

/// What one worker did in a job.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerReport {
    /// What it calls itself, and whose member it is.
    pub name: String,
    /// When it came, from the start of the job; zero if it was there before.
    pub joined: Duration,
    /// When its last result came, from the start of the job.
    pub last: Duration,
    /// Its results that were consolidated.
    pub pieces: u64,
    /// Bytes of these pieces.
    pub bytes: u64,
    /// Pieces that it could make nothing of.
    pub failed: u64,
    /// Pieces that were taken from it and given to others.
    pub lost: u64,
    /// How it went, if it did.
    pub departure: Option<Departure>,
}

impl WorkerReport {
    /// Bytes a second, from when it came to its last result.
    pub fn throughput(&self) -> f64 {
        let time = self.last.saturating_sub(self.joined).as_secs_f64();
        if time > 0.0 { self.bytes as f64 / time } else { 0.0 }
    }
}

/// How a worker went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Departure {
    /// Its process or its VM died.
    Died,
    /// It closed its channel.
    Left,
    /// It was dismissed, for this reason.
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
