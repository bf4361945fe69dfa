//! Connections under `ginnel run` whose rings grow while bytes flow.

use crate::epoll::PAIRS;
use programs::stage::{PYTHON, Stage, changed};
use std::fs;

/// Data bytes of the rings with which a connection begins, and of the largest rings.
const SMALLEST: u64 = 4 << 10;
const LARGEST: u64 = 256 << 10;

/// The module `streams`: streams between the ends of a pair. An end continues until the report says that all rings have the largest size.
pub const STREAMS: &str = include_str!("growth/streams.py");

#[test]
fn rings_grow_while_both_ends_wait() {
    kit::require_programs!(&[PYTHON]);
    for waits in ["poll", "epoll"] {
        let sizes = run(include_str!("growth/echo.py"), &[waits]);
        assert_eq!(sizes, [LARGEST; 2], "{waits}");
    }
}

fn run(program: &str, arguments: &[&str]) -> Vec<u64> {
    let stage = Stage::new("eager");
    fs::write(stage.world.files().join("pairs.py"), PAIRS).unwrap();
    fs::write(stage.world.files().join("streams.py"), STREAMS).unwrap();
    stage.client(&[&[PYTHON, "-c", program], arguments].concat());
    let connections = stage.end();
    let mut sizes: Vec<u64> =
        changed(&connections, "python3").iter().map(|connection| connection.ring_bytes).collect();
    sizes.sort_unstable();
    sizes
}

#[test]
fn rings_grow_under_threads_that_wait_in_their_calls() {
    kit::require_programs!(&[PYTHON]);
    let sizes = run(include_str!("growth/calls.py"), &[]);
    assert_eq!(sizes, [SMALLEST, SMALLEST, LARGEST, LARGEST]);
}

#[test]
fn rings_grow_under_one_thread_that_waits_for_many() {
    kit::require_programs!(&[PYTHON]);
    for selector in ["EpollSelector", "PollSelector"] {
        let sizes = run(include_str!("growth/many.py"), &[selector]);
        assert_eq!(sizes, [LARGEST; 8], "{selector}");
    }
}

#[test]
fn no_larger_ring_takes_over_behind_the_end_of_a_stream() {
    kit::require_programs!(&[PYTHON]);
    run(include_str!("growth/finished.py"), &[]);
}
