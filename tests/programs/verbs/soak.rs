//! A long exchange of messages between two processes: each message arrives once, in order and unchanged, and no process sleeps for ever.
//!
//! `GINNEL_SOAK=1` sends 10^8 messages, and `GINNEL_SOAK=n` with n > 1 sends n.

use super::ends::{self, End};
use programs::verbs::Verbs;

/// How the processes receive, which completions they ask to be notified of, and on which CPUs they run; and the factor by which there
/// are fewer messages because each costs more.
const RUNS: [([&str; 3], u64); 5] = [
    (["own", "any", "free"], 1),
    (["shared", "any", "free"], 1),
    (["own", "solicited", "free"], 4),
    (["shared", "solicited", "free"], 4),
    (["shared", "any", "one"], 10),
];

/// The test fails after this many seconds without a message.
const STALL: &str = "30";

#[test]
fn messages_arrive_once_and_in_order_and_no_wake_is_lost() {
    programs::require_verbs_compiler!();
    let count: u64 = match std::env::var("GINNEL_SOAK").map(|n| n.parse()) {
        Ok(Ok(n)) if n > 1 => n,
        Ok(_) => 100_000_000,
        Err(_) if std::env::var_os("GINNEL_QUICK").is_some() => 20_000,
        Err(_) => 400_000,
    };
    let verbs = Verbs::new();
    let program = ends::compiled(&verbs, "soak");
    for (how, fewer) in RUNS {
        let count = (count / fewer / 2).to_string();
        let arguments = [&how[..], &[&count, STALL]].concat();
        let mut both = ends::start(&verbs, &program, [&arguments, &arguments]);
        for said in both.each_mut().map(End::line) {
            println!("{how:?}: {}", said.trim_end());
        }
        for mut end in both {
            let (status, said) = end.ended();
            assert!(status.success(), "{how:?}: {status}, {said}");
        }
    }
}
