//! Many jobs in one segment.

use super::endless::Endless;
use super::{BOTH, MPICH, MPIS, SIZE, compiled, is_soak, run};
use kit::wait::wait_until;
use programs::verbs::{Verbs, used};

#[test]
fn successive_jobs_leave_nothing_behind() {
    kit::require_programs!(&BOTH);
    let files = |verbs: &Verbs| -> Vec<_> {
        let entries = std::fs::read_dir(verbs.world.path().join("shm")).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    };
    for mpi in MPIS {
        let verbs = Verbs::sized(SIZE);
        let program = compiled(&verbs, &mpi, "solvers");
        let before = (used(&verbs), files(&verbs));
        for job in 0..if is_soak() { 500 } else { 3 } {
            run(&verbs, &mpi, 2, &program);
            wait_until(&format!("the return of all memory after job {job} of {}", mpi.name), || {
                (used(&verbs), files(&verbs)) == before
            });
        }
    }
}

#[test]
fn concurrent_jobs_run_until_the_segment_is_full_and_report_it() {
    const JOBS: usize = 24;
    kit::require_programs!(&BOTH);
    let mpi = &MPICH;
    // Each rank of this MPI takes about 75 MB if it can get that much, but most of it can also lie outside the segment. No job ends
    // before all have started.
    let verbs = Verbs::sized("256M");
    let program = compiled(&verbs, mpi, "endless");
    let before = used(&verbs);
    let mut jobs: Vec<_> = (0..JOBS).map(|_| Endless::spawn(&verbs, mpi, 2, &program, "rests")).collect();
    let begun: Vec<_> = jobs.iter_mut().map(|job| job.begin(2)).collect();
    std::fs::write(verbs.world.files().join("stop"), "").unwrap();
    let ends: Vec<_> = jobs.into_iter().map(Endless::end).collect();
    let (good, bad): (Vec<_>, Vec<_>) = ends.into_iter().partition(|(is_good, _)| *is_good);
    println!("{} of {JOBS} jobs found room", good.len());
    assert!(good.iter().all(|(_, said)| said.contains("all sums are right")), "{good:?}");
    assert!(!good.is_empty() && !bad.is_empty(), "{begun:?}");
    for (_, said) in bad {
        assert!(said.contains("libibverbs: Warning: "), "{said}");
    }
    wait_until("the return of all memory", || used(&verbs) == before);
}
