//! Endpoints and the processes that own them: connections that end, forks, and processes that execute another program.
#![allow(unsafe_code)] // Some tests call fork.

use ginnel_daemon::packet;
use ginnel_layout::ring::{PRODUCER_STATE, SideState};
use ginnel_layout::wire::{Header, Kind};
use ginnel_shmem::SharedMemory;
use kit::daemon::*;
use kit::wait::{WATCHDOG, wait_for};
use serde_json::json;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

const WEB: &str = "[segment.web]\nsize = \"8M\"\nmembers = [\"host\"]\n";
const DEAD: (u32, u32) = (SideState::DEAD.0, SideState::DEAD.0);

fn wait_for_input() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Attaches and listens, as each of these programs does first.
fn own() -> Attached {
    let mut own = Client::hello(&program_socket()).attach("web", "program").unwrap();
    own.listen("program").unwrap();
    own
}

/// Ends the process without a word to the daemon.
fn vanish() -> ! {
    // SAFETY: it needs nothing, and nothing runs after it.
    unsafe { libc::_exit(0) }
}

kit::program! {
    fn forks() {
        let own = own();
        wait_for_input();
        // SAFETY: this process has one thread.
        if unsafe { libc::fork() } != 0 {
            // As a program does that goes to the background.
            vanish();
        }
        let join = Header { kind: Kind::JOIN, flags: 0, request: 1 };
        packet::send::<OwnedFd>(own.client.fd.as_fd(), join.as_bytes(), &[]).unwrap();
        let mut again = Client::hello(&program_socket()).attach_as(own.back).unwrap();
        // Tells the test that this process does not need the daemon any more, so the test may stop it.
        again.listen("child").unwrap();
        wait_for_input();
        vanish();
    }
}

kit::program! {
    fn executes_another() {
        let _own = own();
        wait_for_input();
        panic!("{}", Command::new("sleep").arg("600").exec());
    }
}

kit::program! {
    fn finishes() {
        let channel = own().connect("sink").unwrap();
        channel.output.store_release_u32(PRODUCER_STATE, SideState::FINISHED.0);
        vanish();
    }
}

/// Returns the processes that own the endpoint of this name.
fn pids(daemon: &Daemon, name: &str) -> Option<serde_json::Value> {
    let status = daemon.inspect();
    Some(status["endpoints"].as_array()?.iter().find(|e| e["name"] == name)?["pids"].clone())
}

#[test]
fn a_connection_that_is_closed_while_its_process_lives_costs_nothing() {
    let mut daemon = Daemon::start_new(WEB);
    let (mut a, mut b) = (daemon.attach("web", "a"), daemon.attach("web", "b"));
    let listener = a.listen("x").unwrap();
    let there = b.connect("x").unwrap();
    let here = a.incoming();
    a.accepted(&here);
    let waiting = b.connect("x").unwrap();
    let back = a.hang_up();
    wait_for("the end of the connection", || {
        let status = daemon.inspect();
        let mut all = status["endpoints"].as_array()?.iter();
        (all.find(|e| e["name"] == "a")?["attached"] == json!(false)).then_some(())
    });
    assert_eq!(pids(&daemon, "a"), Some(json!([std::process::id()])));
    assert_ne!(there.peer_state(), DEAD);
    let mut a = daemon.client().attach_as(back).unwrap();
    assert_eq!((a.wire.endpoint, a.wire.epoch), (back.endpoint, back.epoch));
    assert_eq!(a.incoming().wire.channel, waiting.wire.channel);
    assert_eq!(a.listen("x").unwrap(), listener);
    there.ring();
    assert!(readable(&a.event, WATCHDOG));
    // The endpoint also survives a restart of the daemon without a connection.
    let back = a.hang_up();
    daemon.restart();
    let _a = daemon.client().attach_as(back).unwrap();
    assert_ne!(there.peer_state(), DEAD);
}

#[test]
fn requests_sent_before_a_connection_ends_are_executed() {
    let daemon = Daemon::start_new(WEB);
    let mut b = daemon.attach("web", "b");
    for round in 0..20 {
        let mut a = daemon.attach("web", "a");
        a.listen("x").unwrap();
        let channel = b.connect_as("x", 100 + round, 4096).unwrap();
        // The client reads neither the answers nor the announcement of the channel.
        for _ in 0..5 {
            a.client.send(Kind::INSPECT, &[]);
        }
        drop(a);
        wait_for("its end", || (channel.peer_state() == DEAD).then_some(()));
    }
}

#[test]
fn a_parent_that_exits_leaves_the_endpoint_to_its_child() {
    let mut daemon = Daemon::start_new(WEB);
    let mut own = daemon.attach("web", "own");
    let mut parent = daemon.start_program(forks);
    let channel = wait_for("its listener", || own.connect("program").ok());
    let number = parent.id();
    let mut stdin = parent.stdin.take().unwrap();
    stdin.write_all(b"\n").unwrap();
    parent.wait().unwrap();
    wait_for("the child", || {
        let pids = pids(&daemon, "program").expect("the endpoint is there all the time");
        (pids.as_array()?.len() == 1 && pids[0] != json!(number)).then_some(())
    });
    assert_ne!(channel.peer_state(), DEAD);
    own.connect("program").unwrap();
    wait_for("the child's listener", || own.connect("child").ok());
    // The next daemon knows which process owns the endpoint.
    daemon.restart();
    assert_ne!(channel.peer_state(), DEAD);
    drop(stdin);
    wait_for("the child's end", || (channel.peer_state() == DEAD).then_some(()));
}

#[test]
fn a_process_that_executes_another_program_has_lost_its_endpoint() {
    let daemon = Daemon::start_new(WEB);
    let mut own = daemon.attach("web", "own");
    let mut program = daemon.start_program(executes_another);
    let channel = wait_for("its listener", || own.connect("program").ok());
    assert!(!readable(&own.event, Duration::ZERO));
    let mut stdin = program.stdin.take().unwrap();
    stdin.write_all(b"\n").unwrap();
    wait_for("its death", || (channel.peer_state() == DEAD).then_some(()));
    assert!(readable(&own.event, WATCHDOG));
    assert!(program.try_wait().unwrap().is_none(), "the process lives");
    program.kill().unwrap();
    program.wait().unwrap();
}

#[test]
fn a_sender_that_finishes_and_exits_has_finished() {
    let daemon = Daemon::start_new(WEB);
    let mut own = daemon.attach("web", "own");
    own.listen("sink").unwrap();
    let mut program = daemon.start_program(finishes);
    let channel = own.incoming();
    program.wait().unwrap();
    let died = Instant::now();
    // As a consumer the program is dead; as a producer it has finished.
    let expected = (SideState::DEAD.0, SideState::FINISHED.0);
    wait_for("its end", || (channel.peer_state().0 == DEAD.0).then_some(()));
    assert_eq!(channel.peer_state(), expected, "after {:?}", died.elapsed());
}
