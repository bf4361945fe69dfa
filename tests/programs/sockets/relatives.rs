//! Connections under `ginnel run` that several processes have after a fork.

use crate::epoll::PAIRS;
use programs::stage::{PYTHON, Stage, changed};
use std::fs;

#[test]
fn a_process_forks_while_its_threads_make_calls() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    fs::write(stage.world.files().join("pairs.py"), PAIRS).unwrap();
    stage.client(&[PYTHON, "-c", include_str!("relatives/forks.py")]);
    let connections = stage.end();
    assert!(changed(&connections, "python3").len() >= 2, "{connections:#?}");
}

#[test]
fn the_child_of_a_process_that_has_shut_down_has_the_connection_too() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    stage.client(&[PYTHON, "-c", include_str!("relatives/deaf.py")]);
    let connections = stage.end();
    assert!(changed(&connections, "python3").is_empty(), "{connections:#?}");
}
