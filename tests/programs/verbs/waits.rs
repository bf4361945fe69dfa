//! `ginnel verbs` shows which program waits for which other one, and `ginnel verbs top` shows their activity.

use super::ends::{compiled, start};
use kit::wait::wait_until;
use programs::verbs::{DEVICE, Killed, Verbs};
use std::io::{BufRead, BufReader, Lines};
use std::process::{ChildStdout, Stdio};

/// A running `ginnel verbs top`.
struct Top {
    lines: Lines<BufReader<ChildStdout>>,
    _child: Killed,
}

impl Top {
    fn start(verbs: &Verbs) -> Self {
        let mut command = verbs.world.command("verbs top web --interval 50ms --json");
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { lines, _child: Killed(Some(child)) }
    }

    /// Returns the next interval: its length in seconds, and the pairs of programs.
    fn next(&mut self) -> (f64, Vec<serde_json::Value>) {
        let said: serde_json::Value = serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap();
        (said["seconds"].as_f64().unwrap(), said["pairs"].as_array().unwrap().clone())
    }
}

#[test]
fn a_program_whose_peer_posts_no_receive_is_shown() {
    programs::require_verbs_compiler!();
    let verbs = Verbs::new();
    let program = compiled(&verbs, "waits");
    let mut ends = start(&verbs, &program, [&[], &[]]);
    // The request first waits until its peer is ready.
    wait_until("a request that waits", || verbs.world.good("verbs").out.contains(" for a receive of "));
    let json = || {
        let json = verbs.world.good("verbs web --json").json();
        let endpoints = json[0]["endpoints"].as_array().unwrap().clone();
        endpoints.iter().map(|endpoint| endpoint["queue_pairs"][0].clone()).collect::<Vec<_>>()
    };
    let shown = json();
    let of = |waits: bool| shown.iter().find(|pair| pair["waits"].is_object() == waits).unwrap();
    let (sender, receiver) = (of(true), of(false));
    assert_eq!((&sender["waits"]["requests"], &sender["executed"]), (&3.into(), &0.into()), "{sender}");
    assert_eq!((&sender["waits"]["reason"], &sender["peer"]), (&"receive".into(), &receiver["number"]));
    // The clock is that of the same machine, so the time of the wait grows.
    let waited = |pair: &serde_json::Value| pair["waits"]["nanoseconds"].as_u64();
    wait_until("a longer time", || json().iter().filter_map(waited).next() > waited(sender));
    let said = verbs.world.good("verbs").out;
    let line = said.lines().find(|line| line.contains(" for a receive of ")).unwrap();
    let [sender_number, receiver_number] =
        [sender, receiver].map(|pair| format!("{:#08x} (program waits", pair["number"].as_u64().unwrap()));
    let begins = format!("{DEVICE} {sender_number} ");
    let names = format!(" for a receive of {receiver_number} ");
    assert!(
        line.starts_with(&begins) && line.contains(&names) && line.ends_with("@host): 3 requests"),
        "{line}"
    );

    let mut top = Top::start(&verbs);
    let (seconds, pairs) = top.next();
    let [waits] = &pairs[..] else { panic!("{pairs:?}") };
    let waited = waits["waited_ns"].as_f64().unwrap() / 1e9;
    assert!(waited > seconds / 2.0 && waited <= seconds, "{waits} in {seconds} s");
    assert_eq!((&waits["waits_for"], &waits["requests"]), (&"receive".into(), &0.into()), "{waits}");

    ends[1].tell("go\n");
    for end in &mut ends {
        assert_eq!(end.line(), "done\n");
    }
    let (mut requests, mut bytes) = (0, 0);
    while requests < 3 {
        for pair in top.next().1 {
            requests += pair["requests"].as_u64().unwrap();
            bytes += pair["bytes"].as_u64().unwrap();
            assert!(pair["from_program"].as_str().unwrap().starts_with("waits "), "{pair}");
            assert_eq!(pair["to"], waits["to"]);
        }
    }
    assert_eq!((requests, bytes), (3, 3000));
    let table = verbs.world.good("verbs top --interval 20ms --count 1").out;
    assert!(
        table.starts_with("DEVICE ") && table.trim_end().lines().count() == 1,
        "nothing happens: {table}"
    );
    let said = verbs.world.good("verbs").out;
    assert!(!said.contains(" for a receive of ") && said.contains("2.9 KiB"), "{said}");
    let shown = json();
    let done: Vec<_> = shown.iter().map(|pair| (pair["executed"].as_u64(), pair["bytes"].as_u64())).collect();
    assert!(done.contains(&(Some(3), Some(3000))) && done.contains(&(Some(0), Some(0))), "{done:?}");
    for end in &mut ends {
        let (status, said) = end.ended();
        assert!(status.success(), "{said}");
    }
}
