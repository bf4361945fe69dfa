//! How programs under `ginnel run` that sleep are woken: by their doorbell, or by a byte on the connection.

use crate::epoll::PAIRS;
use programs::stage::{MODES, PYTHON, Stage, changed, free_port};
use std::fs;

/// The number of doorbells rung, and of bytes sent to wake a peer.
struct Wakes {
    rings: u64,
    bytes: u64,
}

fn run(program: &str, arguments: &[&str], ends: usize) -> Wakes {
    let stage = Stage::new("eager");
    fs::write(stage.world.files().join("pairs.py"), PAIRS).unwrap();
    fs::write(stage.world.files().join("sleepers.py"), SLEEPERS).unwrap();
    stage.client(&[&[PYTHON, "-c", program], arguments].concat());
    let connections = stage.end();
    let connections = changed(&connections, "python3");
    assert_eq!(connections.len(), ends, "{connections:#?}");
    Wakes {
        rings: connections.iter().map(|connection| connection.rings_sent).sum(),
        bytes: connections.iter().map(|connection| connection.wakes_sent).sum(),
    }
}

/// The module `sleepers`: ways of waiting for a byte, and threads that answer each byte with the next one.
const SLEEPERS: &str = include_str!("waking/sleepers.py");

#[test]
fn a_sleeper_is_woken_by_its_doorbell_however_it_waits() {
    kit::require_programs!(&[PYTHON]);
    for wait in ["recv", "poll", "select", "epoll"] {
        let program = include_str!("waking/doorbell.py");
        let Wakes { rings, bytes } = run(program, &[wait], 2);
        println!("{wait}: {rings} rings, {bytes} bytes");
        assert!(rings >= 100, "{wait}: {rings} rings, {bytes} bytes");
        assert!(bytes <= 50, "{wait}: {rings} rings, {bytes} bytes");
    }
}

/// The doorbell has room for only a few sleepers of a process.
#[test]
fn sleepers_without_room_at_the_doorbell_are_woken_by_bytes() {
    kit::require_programs!(&[PYTHON]);
    for wait in ["recv", "poll", "epoll"] {
        let program = include_str!("waking/crowd.py");
        let Wakes { rings, bytes } = run(program, &[wait], 24);
        println!("{wait}: {rings} rings, {bytes} bytes");
        assert!(rings >= 20, "{wait}: {rings} rings, {bytes} bytes");
        assert!(bytes >= 20, "{wait}: {rings} rings, {bytes} bytes");
    }
}

/// The bytes must neither keep a thread busy that does not wait for them, nor hide a wake byte behind them from it.
#[test]
fn a_thread_sleeps_beside_bytes_that_tcp_still_has() {
    kit::require_programs!(&[PYTHON]);
    for way in ["poll", "epoll", "select"] {
        println!("{way}");
        run(include_str!("waking/ended.py"), &[way], 2);
    }
}

/// The byte or the doorbell that wakes another thread must not keep it asleep.
#[test]
fn a_thread_is_woken_that_has_slept_since_before_the_change() {
    kit::require_programs!(&[PYTHON]);
    for way in ["poll", "select", "epoll", "edges"] {
        println!("{way}");
        run(include_str!("waking/unaware.py"), &[way], 10);
    }
}

/// A child that takes the byte must not keep a thread of its parent asleep.
#[test]
fn a_thread_is_woken_that_has_slept_since_before_the_change_and_a_fork() {
    kit::require_programs!(&[PYTHON]);
    run(include_str!("waking/unaware_child.py"), &[], 40);
}

#[test]
fn a_thread_sleeps_where_the_keeper_cannot() {
    kit::require_programs!(&[PYTHON]);
    for way in ["no events", "edges", "many"] {
        println!("{way}");
        run(include_str!("waking/beside.py"), &[way], 2);
    }
}

/// A thread that waits for room, in a call that sends and in `poll`.
#[test]
fn a_sender_that_sleeps_is_woken_when_there_is_room() {
    kit::require_programs!(&[PYTHON]);
    let program = include_str!("waking/room.py");
    run(program, &[], 2);
}

/// Each process has slots of its own, even in epoll instances that it has inherited from its parent.
#[test]
fn a_child_sleeps_on_its_own_doorbell() {
    kit::require_programs!(&[PYTHON]);
    let program = include_str!("waking/child.py");
    let Wakes { rings, .. } = run(program, &[], 2 + 4 * 6);
    assert!(rings >= 4 * 3 * 25, "{rings}");
}

/// A client that waits in `recv`, and has slept there.
#[test]
fn the_library_uses_few_descriptors_for_one_connection() {
    kit::require_programs!(&[PYTHON]);
    let server = include_str!("waking/descriptors_server.py");
    let client = include_str!("waking/descriptors_client.py");
    for mode in MODES {
        let port = free_port();
        let mut stage = Stage::new(mode);
        stage.serve(port, &[PYTHON, "-c", server, &port.to_string()]);
        print!("{mode}: {}", stage.client(&[PYTHON, "-c", client, &port.to_string()]));
        let connections = stage.end();
        // The server may end before it has reported everything.
        assert!(!changed(&connections, "python3").is_empty(), "{connections:#?}");
    }
}

/// The kernel refuses more entries than the number of descriptors that the program may have.
#[test]
fn a_program_may_poll_as_many_descriptors_as_it_may_open() {
    kit::require_programs!(&[PYTHON]);
    let program = include_str!("waking/many.py");
    run(program, &[], 2);
}
