//! Connections of one request and one answer. In `auto`, they make no system call that they would not make natively.

use kit::wait::retry;
use programs::stage::Stage;
use std::collections::BTreeMap;
use std::path::Path;

const FEW: u32 = 100;
const MANY: u32 = 300;

/// Runs the program, and returns how often it has made each system call. With a library, it loads that.
fn calls(stage: &Stage, program: &Path, kind: &str, count: u32, library: bool) -> BTreeMap<String, i64> {
    let with_library: Option<&[&str]> = library.then_some(&["GINNEL_SOCKETS=auto"]);
    let (output, trace) = stage.traced(program, &[kind, &count.to_string()], with_library);
    let said = if library { "with the library\n" } else { "without the library\n" };
    assert_eq!(String::from_utf8_lossy(&output.stdout), said);
    let mut calls = BTreeMap::new();
    for line in trace.lines() {
        if let Some((name, _)) = line.split_once('(') {
            *calls.entry(name.to_owned()).or_default() += 1;
        }
    }
    calls
}

/// Returns how often each system call is made for `MANY - FEW` connections, without what the program makes at its beginning and end.
fn calls_of_connections(stage: &Stage, program: &Path, kind: &str, library: bool) -> BTreeMap<String, i64> {
    let few = calls(stage, program, kind, FEW, library);
    let mut many = calls(stage, program, kind, MANY, library);
    for (name, count) in few {
        *many.entry(name).or_default() -= count;
    }
    many.retain(|_, count| *count != 0);
    many
}

#[test]
fn a_short_connection_makes_no_further_system_call() {
    kit::require_programs!(&["cc", "strace"]);
    let stage = Stage::new("auto");
    let files = [("short.c", include_str!("short/short.c"))];
    let program = stage.compile("short", &files, &["-O1"]);
    for kind in ["waits", "does not wait"] {
        // A connection that a busy machine stops for long in the middle is no short one, so the run is repeated then.
        retry(|| {
            let natively = calls_of_connections(&stage, &program, kind, false);
            let with_library = calls_of_connections(&stage, &program, kind, true);
            if natively == with_library {
                Ok(())
            } else {
                Err(format!("{kind}: natively {natively:?}, with the library {with_library:?}"))
            }
        });
    }
}
