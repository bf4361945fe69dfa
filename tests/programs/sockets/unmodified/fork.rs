//! Processes that share a connection after a fork.

use programs::stage::{MODES, PYTHON, Stage, changed, free_port};

/// A server whose child continues a connection that has changed over, after other programs were executed.
const FORK: &str = include_str!("fork/child.py");

#[test]
fn trap_1_a_child_continues_a_connection_of_its_parent() {
    kit::require_programs!(&[PYTHON]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &[PYTHON, "-c", FORK, "serve", &at]);
        stage.client(&[PYTHON, "-c", FORK, "talk", &at]);
        let log = stage.log();
        let connections = stage.end();
        // Both ends, and the end of the child.
        assert_eq!(changed(&connections, "python3").len(), 3, "{mode}: {connections:#?} {log}");
    }
}

/// One process sends and another one receives, each more than a ring holds.
const SPLIT: &str = include_str!("fork/split.py");

#[test]
fn trap_1_one_process_sends_and_another_one_receives() {
    kit::require_programs!(&[PYTHON]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &[PYTHON, "-c", SPLIT, "serve", &at]);
        stage.client(&[PYTHON, "-c", SPLIT, "talk", &at]);
        stage.end();
    }
}

/// Processes of a server that share a connection send and receive in turn.
const TURNS: &str = include_str!("fork/turns.py");

#[test]
fn trap_1_processes_use_a_connection_in_turn() {
    kit::require_programs!(&[PYTHON]);
    for mode in MODES {
        for when in ["before", "after"] {
            let mut stage = Stage::new(mode);
            let port = free_port();
            let at = port.to_string();
            stage.serve(port, &[PYTHON, "-c", TURNS, "serve", &at, when]);
            stage.client(&[PYTHON, "-c", TURNS, "talk", &at, when]);
            let log = stage.log();
            let connections = stage.end();
            assert!(changed(&connections, "python3").len() >= 2, "{mode} {when}: {connections:#?} {log}");
        }
    }
}
