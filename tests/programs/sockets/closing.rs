//! Connections end for their peers as they do without the library.

use kit::wait::wait_until;
use programs::stage::{PYTHON, Stage, changed, free_port};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::fs;

/// Connections that are reported and closed in this order, in both ways of closing. The first one is for the daemon's greeting.
const CLOSE: &str = include_str!("closing/close.py");

#[test]
fn the_peer_sees_the_end_whatever_the_daemon_does() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    let daemon = Pid::from_child(stage.world.daemon());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("that the program is ready", || stage.world.files().join("ready").exists());
            kill_process(daemon, Signal::STOP).unwrap();
            let stopped = WaitIdOptions::STOPPED;
            assert!(waitid(WaitId::Pid(daemon), stopped).unwrap().is_some());
            fs::write(stage.world.files().join("stopped"), "").unwrap();
        });
        stage.client(&[PYTHON, "-c", CLOSE]);
        wait_until("the end of the last connection", || stage.world.files().join("ended").exists());
    });
    kill_process(daemon, Signal::CONT).unwrap();
    stage.world.good("status");
}

/// Prints what the two ends of a closed connection are told. Each pair has changed over when `pair` returns.
const ENDS: &str = include_str!("closing/ends.py");

#[test]
fn both_ends_are_told_the_same_as_over_tcp() {
    kit::require_programs!(&[PYTHON]);
    for (mode, ends) in [("off", 0), ("eager", 12)] {
        let stage = Stage::new(mode).settling();
        stage.client(&[PYTHON, "-c", ENDS]);
        let connections = stage.end();
        let over = connections.iter().filter(|one| one.sent_after_us.is_some()).count();
        assert_eq!(over, ends, "{mode}: {connections:#?}");
    }
}

/// A server whose child is the only owner of the connection, and ends it while a wake byte is still in the kernel's
/// socket: an epoll instance has asked for the byte, and no thread waits there. (A child has no doorbell that could wake
/// it.) The child has received everything, so the connection ends in order, whether the child closes it or
/// is killed.
const UNREAD: &str = include_str!("closing/unread.py");

#[test]
fn a_program_that_has_received_everything_ends_the_connection_in_order() {
    kit::require_programs!(&[PYTHON]);
    for how in ["killed", "closed"] {
        let mut stage = Stage::new("eager");
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &[PYTHON, "-c", UNREAD, "serve", &at, how]);
        stage.client(&[PYTHON, "-c", UNREAD, "talk", &at, how]);
        let log = stage.log();
        let connections = stage.end();
        // Both ends, and the child's end if the child had time to report it.
        assert!(changed(&connections, "python3").len() >= 2, "{how}: {connections:#?} {log}");
    }
}
