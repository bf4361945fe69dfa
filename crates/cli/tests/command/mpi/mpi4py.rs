//! mpi4py's own tests.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use super::{Done, OPENMPI, SIZE, beside, is_soak, run_within, run_without_within};
use crate::stage::{PATIENCE, PYTHON, have};
use crate::verbs::{Verbs, text};

/// Tests that fail without Ginnel, too.
const EXCLUDED: [&str; 1] = [
    // Open MPI 4.1 with osc/ucx dies in MPI_Win_free after testAttachDetach, with UCX over TCP or shared memory as well.
    "test_win.TestWinCreateDynamic",
];

/// Shared windows are those of Open MPI's component for shared memory, which the settings of these tests leave out.
const OF_SHARED_MEMORY: &str = "test_win.TestWinAllocateShared";

/// The folder of the tests. Says why if there is none.
fn folder() -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/mpi4py-tests");
    let output = Command::new(script).output().unwrap();
    if !output.status.success() {
        println!("SKIPPED {}", text(&output).trim());
        return None;
    }
    Some(String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

/// The tests of which this is said.
fn named<'s>(said: &'s str, what: &str) -> BTreeSet<&'s str> {
    said.lines().filter_map(|line| line.strip_prefix(what)?.strip_prefix(' ')).collect()
}

#[test]
fn mpi4py_tests_pass_if_they_pass_without_ginnel() {
    if !have(&["mpirun.openmpi"]) {
        return;
    }
    let library =
        Command::new(PYTHON).args(["-c", "import mpi4py; print(mpi4py.__version__)"]).output().unwrap();
    if !library.status.success() {
        println!("SKIPPED python3-mpi4py is not installed: `scripts/setup test` installs it");
        return;
    }
    let Some(folder) = folder() else { return };
    let verbs = Verbs::sized(SIZE);
    let suite = beside("mpi4py_suite.py");
    let program = format!("{PYTHON} {} {folder} {}", suite.display(), EXCLUDED.join(" "));
    for &ranks in if is_soak() { &[2, 4][..] } else { &[2] } {
        let expected = run_without_within(&verbs, ranks, &program, PATIENCE * 5);
        let Done { said, .. } = run_within(&verbs, &OPENMPI, ranks, &program, PATIENCE * 5);
        assert!(said.contains("all ranks have run ") && named(&said, "failed").is_empty(), "{said}");
        let (expected, passed) = (named(&expected, "passed"), named(&said, "passed"));
        let missing: Vec<_> =
            expected.difference(&passed).filter(|name| !name.starts_with(OF_SHARED_MEMORY)).collect();
        assert!(expected.len() > 1000 && missing.is_empty(), "{ranks} ranks: {missing:#?}");
        // Open MPI's components for one-sided communication without UCX make few kinds of windows on one machine.
        let one_sided = passed.iter().filter(|name| name.starts_with("test_rma")).count();
        println!("{ranks} ranks: {} tests pass, {} without Ginnel", passed.len(), expected.len());
        assert!(one_sided > 40, "{ranks} ranks: {passed:#?}");
    }
}
