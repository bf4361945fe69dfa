//! A job that runs until it is told to stop.

use super::{Mpi, compiled, start};
use programs::verbs::{Killed, Verbs};
use std::io::{BufRead, BufReader, Read};
use std::process::ChildStdout;

/// A job that computes sums until it is stopped.
pub struct Endless {
    job: Killed,
    out: BufReader<ChildStdout>,
    /// The process identifiers of its ranks.
    pub pids: Vec<String>,
}

impl Endless {
    /// Starts the job.
    pub fn spawn(verbs: &Verbs, mpi: &Mpi, ranks: usize, program: &str, how: &str) -> Self {
        let stop = verbs.world.files().join("stop");
        let mut job = start(verbs, mpi, ranks, &format!("{program} {} {how}", stop.display()));
        let out = BufReader::new(job.stdout.take().unwrap());
        Self { job: Killed(Some(job)), out, pids: Vec::new() }
    }

    /// Waits until each rank is at work. Returns false if the job has ended.
    pub fn begin(&mut self, ranks: usize) -> bool {
        while self.pids.len() < ranks {
            let mut line = String::new();
            if self.out.read_line(&mut line).unwrap() == 0 {
                return false;
            }
            self.pids.extend(line.trim().strip_prefix("at work: ").map(str::to_owned));
        }
        true
    }

    /// Starts the job, and waits until each rank is at work.
    pub fn start(verbs: &Verbs, mpi: &Mpi, ranks: usize) -> Self {
        let program = compiled(verbs, mpi, "endless");
        let mut job = Self::spawn(verbs, mpi, ranks, &program, "");
        assert!(job.begin(ranks), "{} has ended: {:?}", mpi.name, job.end());
        job
    }

    /// Waits until the job has ended. Returns whether it succeeded, and what it printed.
    pub fn end(mut self) -> (bool, String) {
        let mut said = String::new();
        self.out.read_to_string(&mut said).unwrap();
        let output = self.job.0.take().unwrap().wait_with_output().unwrap();
        (output.status.success(), said + &String::from_utf8_lossy(&output.stderr))
    }
}
