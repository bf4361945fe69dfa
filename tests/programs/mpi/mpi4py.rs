//! The test suite of mpi4py.

use super::{Done, OPENMPI, SIZE, beside, is_soak, run, run_without};
use programs::stage::PYTHON;
use programs::verbs::{Verbs, text};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Tests that also fail without Ginnel.
const EXCLUDED: [&str; 1] = [
    // Open MPI 4.1 with osc/ucx crashes in MPI_Win_free after testAttachDetach, also with UCX over TCP or shared memory.
    "test_win.TestWinCreateDynamic",
];

/// Shared windows require Open MPI's component for shared memory, which the settings of these tests exclude.
const OF_SHARED_MEMORY: &str = "test_win.TestWinAllocateShared";

/// Returns the folder of the test suite. If there is none, records why.
fn folder() -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/mpi4py-tests");
    let output = Command::new(script).output().unwrap();
    if !output.status.success() {
        kit::skip!("{}", text(&output));
        return None;
    }
    Some(String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

/// Returns the tests for which the output contains this word.
fn named<'s>(said: &'s str, what: &str) -> BTreeSet<&'s str> {
    said.lines().filter_map(|line| line.strip_prefix(what)?.strip_prefix(' ')).collect()
}

#[test]
fn mpi4py_tests_pass_if_they_pass_without_ginnel() {
    kit::require_programs!(&["mpirun.openmpi"]);
    let library = Command::new(PYTHON).args(["-c", "import mpi4py; print(mpi4py.__version__)"]).output();
    kit::require!(
        library.is_ok_and(|output| output.status.success()),
        "python3-mpi4py is not installed: `scripts/setup test` installs it"
    );
    let Some(folder) = folder() else { return };
    let verbs = Verbs::sized(SIZE);
    let suite = beside("mpi4py_suite.py");
    let program = format!("{PYTHON} {} {folder} {}", suite.display(), EXCLUDED.join(" "));
    for &ranks in if is_soak() { &[2, 4][..] } else { &[2] } {
        let expected = run_without(&verbs, ranks, &program);
        let Done { said, .. } = run(&verbs, &OPENMPI, ranks, &program);
        assert!(said.contains("all ranks have run ") && named(&said, "failed").is_empty(), "{said}");
        let (expected, passed) = (named(&expected, "passed"), named(&said, "passed"));
        let missing: Vec<_> =
            expected.difference(&passed).filter(|name| !name.starts_with(OF_SHARED_MEMORY)).collect();
        assert!(expected.len() > 1000 && missing.is_empty(), "{ranks} ranks: {missing:#?}");
        // Without UCX, Open MPI's components for one-sided communication create few kinds of windows on one machine.
        let one_sided = passed.iter().filter(|name| name.starts_with("test_rma")).count();
        println!("{ranks} ranks: {} tests pass, {} without Ginnel", passed.len(), expected.len());
        assert!(one_sided > 40, "{ranks} ranks: {passed:#?}");
    }
}
