//! Connections under `ginnel run` that go back to TCP because their receiver does something else for a while, and then
//! change over again.

use crate::epoll::PAIRS;
use crate::growth::STREAMS;
use programs::stage::{PYTHON, Stage, changed};
use std::fs;

/// The module `returns`: what the report says about this process's connections.
const RETURNS: &str = include_str!("returning/returns.py");

/// Runs a program, and returns how often its connections have gone back to TCP.
fn run(program: &str, arguments: &[&str], ends: usize) -> u64 {
    let stage = Stage::new("eager");
    for (name, text) in [("pairs.py", PAIRS), ("streams.py", STREAMS), ("returns.py", RETURNS)] {
        fs::write(stage.world.files().join(name), text).unwrap();
    }
    stage.client(&[&[PYTHON, "-c", program], arguments].concat());
    let connections = stage.end();
    let connections = changed(&connections, "python3");
    assert_eq!(connections.len(), ends);
    connections.iter().map(|connection| connection.returns).sum()
}

#[test]
fn a_program_may_send_much_before_it_receives() {
    kit::require_programs!(&[PYTHON]);
    // TCP's buffers take this much data, and the peer receives nothing before all of it is sent.
    let returns = run(include_str!("returning/much.py"), &[], 2);
    // Each change is counted at both ends.
    assert!(returns >= 2, "{returns}");
}

#[test]
fn connections_that_have_gone_back_end_as_over_tcp() {
    kit::require_programs!(&[PYTHON]);
    run(include_str!("returning/ends.py"), &[], 6);
}

#[test]
fn connections_that_go_back_and_change_over_again_lose_nothing() {
    kit::require_programs!(&[PYTHON]);
    // A thousand times in a soak test. Each time with new connections, because a connection that has often gone back
    // rests for a long time.
    let rounds = if std::env::var_os("GINNEL_SOAK").is_some() { 25 } else { 1 };
    for seed in 0..rounds {
        for selector in ["EpollSelector", "PollSelector"] {
            let returns = run(STUTTER, &[selector, &seed.to_string(), "40"], 24);
            assert!(returns >= 40, "{selector} {seed}: {returns}");
        }
    }
}

/// Streams whose receivers stop now and then, until connections have gone back this often.
const STUTTER: &str = include_str!("returning/stutter.py");

#[test]
fn a_nonblocking_call_takes_all_of_a_short_message() {
    kit::require_programs!(&[PYTHON]);
    // TCP's buffers take this much data, and programs rely on that.
    run(include_str!("returning/short.py"), &[], 8);
}
