//! Connections under `ginnel run` that have changed over and then go to another process: by `exec`, by `posix_spawn`,
//! or in a message.

use ginnel_report::Record;
use programs::stage::{MODES, PYTHON, Stage, changed, free_port};
use std::fs;

/// The module `common`, which both programs have in common.
pub const COMMON: &str = include_str!("passing/common.py");

/// The server: answers until its connection has changed over, and then hands it to another process.
const SERVER: &str = include_str!("passing/server.py");

/// The program with which the other process continues.
const GO_ON: &str = include_str!("passing/go_on.py");

/// The client, which knows nothing of the handover.
const CLIENT: &str = include_str!("passing/client.py");

const WAYS: [&str; 7] =
    ["exec", "exec of nothing", "spawn", "fork and exec", "posix_spawn", "message", "message to a stranger"];

#[test]
fn a_connection_that_has_changed_over_can_go_to_another_process() {
    kit::require_programs!(&[PYTHON]);
    for (mode, few) in MODES.into_iter().zip(["0", "3000"]) {
        for how in WAYS {
            for unread in [few, "100000"] {
                let mut stage = Stage::new(mode);
                let port = free_port();
                let at = port.to_string();
                fs::write(stage.world.files().join("common.py"), COMMON).unwrap();
                fs::write(stage.world.files().join("go_on.py"), GO_ON).unwrap();
                stage.serve(port, &[PYTHON, "-c", SERVER, how, &at]);
                stage.client(&[PYTHON, "-c", CLIENT, how, &at, unread]);
                let log = stage.log();
                let connections = stage.end();
                assert!(!log.contains("Traceback"), "{mode} {how} {unread}: {log}");
                let changed = changed(&connections, "python3");
                // Both ends, and the end of a child.
                let ends = if how == "fork and exec" { 3 } else { 2 };
                assert_eq!(changed.len(), ends, "{mode} {how} {unread}: {connections:#?}");
                assert!(changed.iter().all(|end| end.returned == 2), "{mode} {how} {unread}: {changed:#?}");
            }
        }
    }
}

/// Runs a program that has both ends of its connections, until all of them have changed over. Returns what the report
/// says about them.
fn run(program: &str) -> Vec<Record<'static>> {
    let stage = Stage::new("eager").settling();
    fs::write(stage.world.files().join("common.py"), COMMON).unwrap();
    fs::write(stage.world.files().join("joined.py"), JOINED).unwrap();
    stage.client(&[PYTHON, "-c", program]);
    stage.end()
}

/// The module `joined`, which makes two ends of a connection that has changed over.
const JOINED: &str = include_str!("passing/joined.py");

#[test]
fn a_message_with_a_connection_waits_for_the_peer_for_a_limited_time() {
    kit::require_programs!(&[PYTHON]);
    let mut stage = Stage::new("eager");
    let port = free_port();
    let at = port.to_string();
    fs::write(stage.world.files().join("common.py"), COMMON).unwrap();
    stage.serve(port, &[PYTHON, "-c", REFUSED, "serve", &at]);
    stage.client(&[PYTHON, "-c", REFUSED, "talk", &at]);
    let log = stage.log();
    let connections = stage.end();
    assert!(!log.contains("Traceback"), "{log}");
    assert_eq!(changed(&connections, "python3").len(), 2, "{connections:#?}");
}

/// A server that tries to pass its connection on while its client is busy with something else.
const REFUSED: &str = include_str!("passing/refused.py");

#[test]
fn the_end_of_a_stream_goes_to_the_other_process_too() {
    kit::require_programs!(&[PYTHON]);
    let connections = run(include_str!("passing/stream_end.py"));
    assert_eq!(changed(&connections, "python3").len(), 4, "{connections:#?}");
}

#[test]
fn executing_another_program_does_not_affect_the_servers_connections() {
    kit::require_programs!(&[PYTHON]);
    let connections = run(include_str!("passing/executing.py"));
    // The ends of the children as well, which have done nothing.
    let changed = changed(&connections, "python3");
    assert!(changed.len() >= 2, "{connections:#?}");
    assert!(changed.iter().all(|end| end.returns == 0 && end.reason.is_empty()), "{changed:#?}");
}

#[test]
fn a_connection_whose_peer_only_sends_or_sleeps_in_epoll_is_passed_on() {
    kit::require_programs!(&[PYTHON]);
    let connections = run(include_str!("passing/peers.py"));
    assert_eq!(changed(&connections, "python3").len(), 6, "{connections:#?}");
}

#[test]
fn a_connection_that_a_relative_has_passed_on_stays_on_tcp() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    stage.client(&[PYTHON, "-c", include_str!("passing/relative.py")]);
    let connections = stage.end();
    let reason = "its descriptor was passed on";
    let left = connections.iter().filter(|connection| connection.reason == reason);
    assert!(left.count() >= 1, "{connections:#?}");
    assert!(changed(&connections, "python3").is_empty(), "{connections:#?}");
}
