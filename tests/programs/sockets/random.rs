//! Random programs over TCP and under `ginnel run`: what each call returns must be what TCP could have returned. A model of the connection
//! says what that is: which bytes may come, which events must come, and which calls end. The same program is executed over TCP first, so
//! that a mistake of the model is not taken for one of the library.
//!
//! The test tells up to four processes ([`players`]) what to call, one call after the other, so that the model knows what has happened.
//! Calls that wait have threads of their own, and must return once there is a reason.

mod model;
mod players;
mod program;
mod run;

use players::Players;
use program::{Step, parse, report, step};
use programs::stage::{Stage, changed};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use run::{Outcome, execute};
use std::cell::RefCell;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How much a test does.
struct Length {
    /// How long it executes programs.
    time: Duration,
    /// It ends after so many programs that fail.
    failures: u32,
    /// How long it may shrink each of them.
    shrinking: Duration,
}

/// What `make test` does in each test. A failure must not take the time of the other tests.
const SHORT: Length =
    Length { time: Duration::from_secs(30), failures: 1, shrinking: Duration::from_secs(30) };
/// What `make soak-sockets` does. One failure says nothing of those behind it.
const LONG: Length =
    Length { time: Duration::from_secs(3600), failures: 5, shrinking: Duration::from_secs(120) };
/// Files with programs that have failed. They are executed before all others.
const FOUND: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/sockets/random/found");
/// How often each of them is executed, because some fail now and then only.
const REPEATS: u32 = 10;
/// What a failure over TCP begins with.
const MODEL: &str = "over TCP, so the model is wrong: ";

/// Players that are started anew after a failure.
struct Theatre<F> {
    start: F,
    players: Option<Players>,
}

impl<F: Fn() -> Players> Theatre<F> {
    fn execute(&mut self, is_settled: bool, turns: i64, steps: &[Step]) -> Outcome {
        let players = self.players.get_or_insert_with(&self.start);
        let outcome = execute(players, is_settled, turns, steps);
        if outcome.is_err() {
            self.players = None;
        }
        outcome
    }
}

/// Executes random programs, over TCP and on a stage.
fn compare(stage: &Stage, is_settled: bool, mut runner: TestRunner, length: &Length) {
    let source = [("player.c", include_str!("random/player.c"))];
    let program = stage.compile("player", &source, &["-O1", "-Wall", "-Werror", "-pthread"]);
    let program = program.to_str().unwrap();
    let path = |name: &str| stage.world.files().join(name);
    let over_tcp = || {
        Players::start(&path("tcp"), |arguments| {
            Command::new(program).args(arguments).stdin(Stdio::null()).spawn().unwrap()
        })
    };
    let over_rings = || {
        Players::start(&path("rings"), |arguments| {
            let mut command = stage.command(&[&[program], arguments].concat());
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap()
        })
    };
    let tcp = RefCell::new(Theatre { start: over_tcp, players: None });
    let rings = RefCell::new(Theatre { start: over_rings, players: None });
    let execute = |turns: i64, steps: &[Step]| {
        let over_tcp = tcp.borrow_mut().execute(true, turns, steps);
        over_tcp.map_err(|error| format!("{MODEL}{error}"))?;
        rings.borrow_mut().execute(is_settled, turns, steps)
    };
    if let Some(file) = std::env::var_os("GINNEL_RANDOM_PROGRAM") {
        let (turns, steps) = parse(&std::fs::read_to_string(file).unwrap());
        // It may fail now and then only.
        let repeat = |steps: &[Step]| (0..100).try_for_each(|_| execute(turns, steps));
        return repeat(&steps).unwrap_or_else(|error| {
            println!("to be shrunk: {}", report(turns, (steps.clone(), error.clone())));
            panic!("{}", report(turns, shrink(steps, error, LONG.shrinking, repeat)))
        });
    }
    let mut runs = 0;
    for file in std::fs::read_dir(FOUND).unwrap() {
        let file = file.unwrap().path();
        let (turns, steps) = parse(&std::fs::read_to_string(&file).unwrap());
        for _ in 0..REPEATS {
            runs += 1;
            execute(turns, &steps).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
    }
    let programs = (1..12_i64, prop::collection::vec(step(), 1..200));
    let begun = Instant::now();
    let mut failures = 0;
    while begun.elapsed() < length.time && failures < length.failures {
        let (turns, steps) = programs.new_tree(&mut runner).unwrap().current();
        runs += 1;
        if let Err(error) = execute(turns, &steps) {
            failures += 1;
            // Shrinking may be cut short, so the whole program comes first.
            println!("to be shrunk: {}", report(turns, (steps.clone(), error.clone())));
            let shrunk = shrink(steps, error, length.shrinking, |steps| execute(turns, steps));
            println!("{}", report(turns, shrunk));
        }
    }
    println!("{runs} programs in {:?}", begun.elapsed());
    assert!(failures == 0, "{failures} of {runs} programs have failed; they are printed above");
    let connections = stage.all_connections();
    let ends = changed(&connections, "player").len();
    println!("{ends} ends changed over");
    // After the change, all connections do that, unless the program has closed one before.
    assert!(
        ends >= if is_settled { runs as usize } else { 1 },
        "{ends} ends of {runs} programs have changed over"
    );
}

/// Removes steps from a program as long as it fails. Returns what is left, and how that fails.
fn shrink(
    mut steps: Vec<Step>,
    mut error: String,
    time: Duration,
    execute: impl Fn(&[Step]) -> Outcome,
) -> (Vec<Step>, String) {
    let is_models = error.starts_with(MODEL);
    let deadline = Instant::now() + time;
    let mut part = steps.len().div_ceil(2);
    loop {
        let mut begin = 0;
        while begin < steps.len() && Instant::now() < deadline {
            let end = (begin + part).min(steps.len());
            let fewer = [&steps[..begin], &steps[end..]].concat();
            match execute(&fewer) {
                // A mistake of the model and one of the library do not stand for each other.
                Err(new) if new.starts_with(MODEL) == is_models => (steps, error) = (fewer, new),
                _ => begin = end,
            }
        }
        if part <= 1 {
            return (steps, error);
        }
        part = part.div_ceil(2);
    }
}

/// Executes a fixed sequence of programs until the time is over; with `GINNEL_SOAK`, random programs.
fn run(stage: &Stage, is_settled: bool) {
    kit::require_programs!(&["cc"]);
    match std::env::var_os("GINNEL_SOAK") {
        Some(_) => compare(stage, is_settled, TestRunner::default(), &LONG),
        None => compare(stage, is_settled, TestRunner::deterministic(), &SHORT),
    }
}

#[test]
fn random_programs_see_tcp_after_the_change() {
    run(&Stage::new("eager").settling(), true);
}

#[test]
fn random_programs_see_tcp_during_the_change() {
    run(&Stage::new("eager"), false);
}
