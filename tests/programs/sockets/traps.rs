//! Calls that a layer between a program and the C library can easily forget, under `ginnel run`.

use crate::epoll::PAIRS;
use programs::stage::{PYTHON, Stage, changed};
use std::fs;

#[test]
fn trap_9_bytes_of_preadv2_and_pwritev2_are_in_the_stream() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    let program = include_str!("traps/vectors.py");
    fs::write(stage.world.files().join("pairs.py"), PAIRS).unwrap();
    stage.client(&[PYTHON, "-c", program]);
    assert_eq!(changed(&stage.end(), "python3").len(), 2);
}

#[test]
fn trap_15_a_handler_ends_a_call_that_waits_or_does_not_as_the_program_has_asked() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    let program = include_str!("traps/handlers.py");
    fs::write(stage.world.files().join("pairs.py"), PAIRS).unwrap();
    stage.client(&[PYTHON, "-c", program]);
    assert_eq!(changed(&stage.end(), "python3").len(), 4);
}

/// Runs a program that has both ends of its connections, all of which change over.
fn run(program: &str, ends: usize) {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    fs::write(stage.world.files().join("pairs.py"), PAIRS).unwrap();
    fs::write(stage.world.files().join("checks.py"), CHECKS).unwrap();
    stage.client(&[PYTHON, "-c", program]);
    let connections = stage.end();
    assert_eq!(changed(&connections, "python3").len(), ends, "{connections:#?}");
}

#[test]
fn trap_15_a_signal_that_a_call_unblocks_is_not_lost_while_it_looks() {
    run(include_str!("traps/unblocked.py"), 2);
}

/// The module `checks`, with which programs check that a connection still works.
const CHECKS: &str = include_str!("traps/checks.py");

#[test]
fn trap_2_a_daemon_outlives_the_processes_that_started_it() {
    run(include_str!("traps/daemon.py"), 2);
}

#[test]
fn trap_3_the_child_of_vfork_changes_nothing_for_its_parent() {
    run(include_str!("traps/vfork.py"), 2);
}

#[test]
fn trap_5_a_program_may_close_all_descriptors_that_it_does_not_know() {
    run(include_str!("traps/close_all.py"), 10);
}

#[test]
fn trap_12_an_epoll_instance_may_be_in_another_one() {
    run(include_str!("traps/nested_epoll.py"), 2);
}

#[test]
fn trap_13_edge_triggered_and_oneshot_events_are_reported_once() {
    run(include_str!("traps/edges.py"), 2);
}

#[test]
fn trap_14_a_waiting_thread_notices_what_another_thread_adds() {
    run(include_str!("traps/other_thread.py"), 2);
}

#[test]
fn trap_17_a_waiting_thread_uses_no_cpu() {
    run(include_str!("traps/idle.py"), 80);
}

#[test]
fn trap_17_a_byte_that_is_left_to_an_epoll_instance_keeps_nobody_awake() {
    run(include_str!("traps/left_byte.py"), 10);
}

#[test]
fn a_program_with_few_descriptors_may_use_all_of_them() {
    run(include_str!("traps/few_descriptors.py"), 6);
}
