//! epoll under `ginnel run`, for connections that have changed over, compared with the kernel's behaviour.

use programs::stage::{PYTHON, Stage, changed};
use std::fs;

/// The module `pairs`, which the programs have in common: connections with both ends in one process, which have changed over.
pub const PAIRS: &str = include_str!("epoll/pairs.py");

/// Runs a program that uses them.
fn run(program: &str, ends: usize) {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    fs::write(stage.world.files().join("pairs.py"), PAIRS).unwrap();
    stage.client(&[PYTHON, "-c", program]);
    let connections = stage.end();
    assert_eq!(changed(&connections, "python3").len(), ends, "{connections:#?}");
}

#[test]
fn sockets_can_be_removed_and_added_again() {
    run(include_str!("epoll/again.py"), 4);
}

#[test]
fn exclusive_registrations_work_as_in_the_kernel() {
    run(include_str!("epoll/exclusive.py"), 2);
}

#[test]
fn several_threads_can_wait_in_one_instance() {
    run(include_str!("epoll/threads.py"), 8);
}

#[test]
fn a_thread_that_sleeps_where_there_was_room_is_told_of_room_later() {
    run(include_str!("epoll/room.py"), 2);
}

#[test]
fn no_edge_is_lost_between_input_and_room() {
    kit::require_programs!(&["cc"]);
    let stage = Stage::new("eager");
    let files = [("both.c", include_str!("epoll/both.c"))];
    let program = stage.compile("both", &files, &["-O1", "-Wall", "-Werror"]);
    stage.client(&[program.to_str().unwrap(), "100000"]);
    let connections = stage.end();
    assert_eq!(changed(&connections, "both").len(), 2, "{connections:#?}");
}
