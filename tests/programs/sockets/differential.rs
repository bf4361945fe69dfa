//! The same program over TCP and under `ginnel run`. Each case has two executed processes that print what their calls return, and the
//! output must be one that TCP can give. So TCP, and not a list of ours, says what is right.

use kit::wait::retry;
use programs::stage::{MODES, Stage, changed};
use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, Stdio};

const SOURCES: &[(&str, &str)] = &[
    ("case.h", include_str!("differential/case.h")),
    ("main.c", include_str!("differential/main.c")),
    ("socket.c", include_str!("differential/socket.c")),
    ("connecting.c", include_str!("differential/connecting.c")),
    ("relatives.c", include_str!("differential/relatives.c")),
    ("tcp.c", include_str!("differential/tcp.c")),
    ("poll.c", include_str!("differential/poll.c")),
    ("epoll.c", include_str!("differential/epoll.c")),
    ("options.c", include_str!("differential/options.c")),
    ("pointers.c", include_str!("differential/pointers.c")),
    ("select.c", include_str!("differential/select.c")),
    ("splice.c", include_str!("differential/splice.c")),
    ("vain.c", include_str!("differential/vain.c")),
    ("stdio.c", include_str!("differential/stdio.c")),
    ("fork.c", include_str!("differential/fork.c")),
    ("peek.c", include_str!("differential/peek.c")),
    ("signal.c", include_str!("differential/signal.c")),
    ("threads.c", include_str!("differential/threads.c")),
    ("waiting.c", include_str!("differential/waiting.c")),
    ("ends.c", include_str!("differential/ends.c")),
    ("found.c", include_str!("differential/found.c")),
    ("changing.c", include_str!("differential/changing.c")),
];

/// The cases whose output differs. docs/sockets.md says why.
const DIFFERENCES: [&str; 2] = ["options_set_peek_off", "select_beyond_the_table"];

/// How often a case that differs is run over TCP again.
const TRIES: u32 = 10;

/// Splits the output into cases: each has a name, and what its two processes have printed.
fn cases(output: &str) -> Vec<(&str, &str)> {
    output.split("== ").skip(1).map(|case| case.split_once('\n').unwrap()).collect()
}

/// Returns whether the output of a case can also come from TCP, whose results may depend on the time that a busy machine takes.
fn is_from_tcp(program: &Path, crowd: &[&str], (name, found): &(&str, &str)) -> bool {
    (0..TRIES).any(|_| {
        let again = Command::new(program).args(crowd).arg(name).stdin(Stdio::null()).output().unwrap();
        cases(&String::from_utf8(again.stdout).unwrap()) == [(*name, *found)]
    })
}

/// Runs cases over TCP and on the stage. Returns how many there are.
fn compare(stage: &Stage, names: &[&str]) -> usize {
    // The cases pass lengths and addresses that no program should pass.
    let arguments = ["-O1", "-Wall", "-Werror", "-Wno-stringop-overflow", "-Wno-nonnull", "-pthread"];
    let program = stage.compile("differential", SOURCES, &arguments);
    let over_tcp = Command::new(&program).args(names).stdin(Stdio::null()).output().unwrap();
    assert!(over_tcp.status.success(), "{over_tcp:?}");
    let over_tcp = String::from_utf8(over_tcp.stdout).unwrap();
    let over_rings = stage.client(&[&[program.to_str().unwrap()], names].concat());
    let (expected, found) = (cases(&over_tcp), cases(&over_rings));
    assert_eq!(expected.len(), found.len());
    let differ = expected.iter().zip(&found).filter(|(expected, found)| expected != found);
    let (known, new): (Vec<_>, Vec<_>) = differ.partition(|(expected, _)| DIFFERENCES.contains(&expected.0));
    let crowd: Vec<_> = names.iter().copied().filter(|name| *name == "crowded").collect();
    let new: Vec<_> = new.iter().filter(|(_, found)| !is_from_tcp(&program, &crowd, found)).collect();
    for ((name, expected), (_, found)) in &new {
        println!("== {name}, over TCP:\n{expected}\n== {name}, under `ginnel run`:\n{found}");
    }
    let names: Vec<_> = new.iter().map(|((name, _), _)| name).collect();
    assert!(names.is_empty(), "{names:?} differ");
    println!("{} cases, {} known to differ", expected.len(), known.len());
    expected.len()
}

#[test]
fn results_are_those_of_tcp_after_the_change() {
    kit::require_programs!(&["cc"]);
    let stage = Stage::new("eager").settling();
    let cases = compare(&stage, &["all"]);
    // Some cases make further connections, and a process that has got a connection by a fork reports it too.
    let connections = stage.all_connections();
    let ends: HashSet<_> =
        changed(&connections, "differential").iter().map(|end| (end.local, end.remote)).collect();
    assert!(ends.len() >= cases * 2, "not all connections have changed over");
}

/// Bytes go to and from pipes while the connections change over, and while they go back to TCP and change over again.
#[test]
fn pipes_get_the_same_bytes_during_the_change() {
    kit::require_programs!(&["cc"]);
    let names = [
        "splice_much",
        "splice_much_without_waiting",
        "splice_among_other_calls",
        "splice_by_two_threads",
        "splice_one_pipe_by_two_threads",
    ];
    for mode in MODES {
        let stage = Stage::new(mode);
        retry(|| {
            compare(&stage, &names);
            let connections = stage.last_connections();
            let moved: u64 = connections.iter().map(|record| record.shared_received).sum();
            if moved > 1 << 20 { Ok(()) } else { Err(format!("{mode}: {connections:#?}")) }
        });
    }
}

#[test]
fn results_are_those_of_tcp_before_the_change() {
    kit::require_programs!(&["cc", "bash"]);
    compare(&Stage::new("eager"), &["early"]);
}

/// Threads that find no wait point at the doorbell are woken by bytes on the connection.
#[test]
fn results_are_those_of_tcp_with_all_wait_points_taken() {
    kit::require_programs!(&["cc"]);
    let stage = Stage::new("eager").settling();
    let cases = compare(&stage, &["crowded", "all"]);
    let connections = stage.all_connections();
    let ends: HashSet<_> =
        changed(&connections, "differential").iter().map(|end| (end.local, end.remote)).collect();
    assert!(ends.len() >= cases * 4, "not all connections have changed over");
}
