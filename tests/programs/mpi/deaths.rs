//! The effect on a job of the death of a daemon or of one of its ranks.

use super::endless::Endless;
use super::{BOTH, MPIS, SIZE};
use kit::wait::{WATCHDOG, wait_until};
use programs::verbs::{Verbs, used};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

#[test]
fn jobs_outlast_a_daemon_and_end_with_a_rank() {
    const RANKS: usize = 3;
    kit::require_programs!(&BOTH);
    for mpi in MPIS {
        let mut verbs = Verbs::sized(SIZE);
        let before = used(&verbs);
        let job = Endless::start(&verbs, &mpi, RANKS);
        for _ in 0..3 {
            verbs.world.replace_daemon();
        }
        std::fs::write(verbs.world.files().join("stop"), "").unwrap();
        let (is_good, said) = job.end();
        assert!(is_good && said.contains("all sums are right: 3 ranks"), "{}: {said}", mpi.name);
        wait_until("the return of all memory", || used(&verbs) == before);

        std::fs::remove_file(verbs.world.files().join("stop")).unwrap();
        let job = Endless::start(&verbs, &mpi, RANKS);
        let pids = job.pids.clone();
        let killed = Instant::now();
        let status = Command::new("kill").args(["-KILL", &pids[1]]).status().unwrap();
        assert!(status.success());
        let (is_good, said) = job.end();
        let took = killed.elapsed();
        assert!(!is_good && !said.contains("all sums are right"), "{}: {said}", mpi.name);
        println!("{}: a job has ended {took:?} after one of its ranks", mpi.name);
        // Far from the five minutes after which the ranks would end by themselves.
        assert!(took < WATCHDOG, "{}: {took:?}: {said}", mpi.name);
        let is_there = |pid: &String| Path::new(&format!("/proc/{pid}")).exists();
        wait_until("the end of all ranks", || !pids.iter().any(is_there));
        wait_until("the return of all memory", || used(&verbs) == before);
    }
}
