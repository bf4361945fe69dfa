//! What a message costs once its connection has changed over: none of the calls that move it makes a system call, and none of the others
//! makes more of them than natively.

use programs::stage::Stage;
use std::collections::BTreeMap;
use std::path::Path;

/// The system calls for each kind of messages.
type Calls = BTreeMap<String, Vec<String>>;

/// The number of messages of each kind.
const MESSAGES: usize = 500;
/// The library looks at some things now and then, by the clock.
const NOW_AND_THEN: usize = MESSAGES / 10;

/// How often the program is run at most.
const TRIES: usize = 3;

/// Runs the program, and returns the system calls that it has made for the messages of each kind.
fn calls(stage: &Stage, program: &Path, situation: &str, library: bool) -> Calls {
    let with_library: Option<&[&str]> =
        library.then_some(&["GINNEL_SOCKETS=eager", "GINNEL_SOCKETS_WAIT=20000"]);
    let (output, trace) = stage.traced(program, &[situation, &MESSAGES.to_string()], with_library);
    assert_eq!(output.stdout, b"done\n");
    let mut kinds = Calls::new();
    let mut kind = None;
    for line in trace.lines() {
        let name = line.strip_prefix("write(-1, \"").map(|line| line.split('"').next().unwrap());
        match (name, &kind) {
            (Some(""), _) => kind = None,
            (Some(name), _) => {
                kinds.entry(name.to_owned()).or_default();
                kind = Some(name.to_owned());
            }
            (None, Some(kind)) => kinds.entry(kind.clone()).or_default().push(line.to_owned()),
            (None, None) => {}
        }
    }
    kinds
}

/// Describes the kinds of messages that make more system calls with the library than they should.
fn costs(natively: &Calls, with_library: &Calls) -> Vec<String> {
    let mut costly = Vec::new();
    for (kind, natively) in natively {
        let calls = &with_library[kind];
        // The kernel is asked as well about what it may know, such as the end of a connection that has nothing.
        let is_question = ["after_", "with_questions", "by_calls_that_do_not_wait"]
            .iter()
            .any(|some| kind.starts_with(some));
        let most = if is_question { natively.len() + NOW_AND_THEN } else { NOW_AND_THEN };
        if calls.len() > most {
            let last = calls[calls.len() - 5..].join("\n");
            costly.push(format!("{kind}: {} system calls instead of at most {most}:\n{last}", calls.len()));
        }
    }
    costly
}

#[test]
fn a_message_over_a_ring_makes_no_system_call() {
    kit::require_programs!(&["cc", "strace"]);
    let stage = Stage::new("eager");
    let files = [("messages.c", include_str!("messages/messages.c"))];
    let program = stage.compile("messages", &files, &["-O1", "-pthread"]);
    for situation in ["alone", "nonblocking", "shared"] {
        let natively = calls(&stage, &program, situation, false);
        assert!(natively.len() >= 15 && natively.values().all(|calls| calls.len() >= MESSAGES * 2));
        // A busy machine may stop the program for long, and what is done by the clock is done more often then.
        let costly = || costs(&natively, &calls(&stage, &program, situation, true));
        let costly = (1..TRIES).fold(costly(), |found, _| if found.is_empty() { found } else { costly() });
        assert!(costly.is_empty(), "{situation}:\n{}", costly.join("\n"));
    }
}
