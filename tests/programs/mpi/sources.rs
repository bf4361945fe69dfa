//! Programs of this project, which check all their data.

use super::{BOTH, Done, MPIS, OPENSHMEM, SIZE, compiled, compiled_with, is_soak, run};
use programs::verbs::Verbs;

#[test]
fn data_is_correct_and_passes_through_the_segment() {
    kit::require_programs!(&BOTH);
    for mpi in MPIS {
        let verbs = Verbs::sized(SIZE);
        let program = compiled(&verbs, &mpi, "checks");
        for &ranks in if is_soak() { &[2, 4, 8][..] } else { &[4] } {
            let Done { said, sent } = run(&verbs, &mpi, ranks, &format!("{program} {}", mpi.options));
            assert!(said.contains(&format!("all data are right: {ranks} ranks")), "{}: {said}", mpi.name);
            // Each rank sends 2 MB in one message, and more in others, to its neighbour alone.
            assert!(sent.iter().all(|bytes| *bytes > 4_000_000), "{} with {ranks} ranks: {sent:?}", mpi.name);
        }
    }
}

#[test]
fn solvers_find_the_known_solutions() {
    kit::require_programs!(&BOTH);
    for mpi in MPIS {
        let verbs = Verbs::sized(SIZE);
        let program = compiled(&verbs, &mpi, "solvers");
        for &ranks in if is_soak() { &[2, 4, 8][..] } else { &[2, 4] } {
            let Done { said, .. } = run(&verbs, &mpi, ranks, &program);
            assert!(said.contains(&format!("both are solved: {ranks} ranks")), "{}: {said}", mpi.name);
        }
    }
}

#[test]
fn windows_contain_the_right_data_under_stress() {
    kit::require_programs!(&BOTH);
    for mpi in MPIS {
        let verbs = Verbs::sized(SIZE);
        let program = compiled(&verbs, &mpi, "rma");
        let (all_ranks, rounds) = if is_soak() { (&[2, 4, 8][..], 5) } else { (&[2, 4][..], 1) };
        for &ranks in all_ranks {
            let Done { said, sent } = run(&verbs, &mpi, ranks, &format!("{program} {rounds}"));
            assert!(said.contains(&format!("all windows are right: {ranks} ranks")), "{}: {said}", mpi.name);
            assert!(sent.iter().all(|bytes| *bytes > 500_000), "{} with {ranks} ranks: {sent:?}", mpi.name);
        }
    }
}

#[test]
fn global_arrays_contain_the_right_data() {
    kit::require_programs!(&BOTH);
    kit::require_programs!(&["ga-config"]);
    for mpi in MPIS {
        let verbs = Verbs::sized(SIZE);
        let (own, others) = (["ga", "scalapack", "armci"], ["lapack", "blas", "gfortran"]);
        let [ga, scalapack, armci] = own.map(|library| format!("-l{library}-{}", mpi.name));
        let [lapack, blas, gfortran] = others.map(|library| format!("-l{library}"));
        let libraries = [&ga, &scalapack, &lapack, &blas, &armci, &gfortran].map(String::as_str);
        let program = compiled_with(&verbs, &mpi, "arrays", &libraries);
        // In windows that MPICH 4.0 allocates, Global Arrays sees its own part at another address than other ranks do, also without
        // Ginnel.
        let program = format!("env ARMCI_USE_WIN_ALLOCATE=0 {program}");
        for &ranks in if is_soak() { &[2, 4, 8][..] } else { &[2, 4] } {
            let Done { said, .. } = run(&verbs, &mpi, ranks, &program);
            assert!(said.contains(&format!("all arrays are right: {ranks} ranks")), "{}: {said}", mpi.name);
        }
    }
}

#[test]
fn symmetric_memory_is_accessible_to_all() {
    kit::require_programs!(&BOTH);
    kit::require_programs!(&["oshcc", "oshrun"]);
    let verbs = Verbs::sized(SIZE);
    let program = compiled(&verbs, &OPENSHMEM, "symmetric");
    for &pes in if is_soak() { &[2, 4, 8][..] } else { &[2] } {
        let Done { said, .. } = run(&verbs, &OPENSHMEM, pes, &program);
        assert!(said.contains(&format!("all of the memory is right: {pes} PEs")), "{said}");
    }
}
