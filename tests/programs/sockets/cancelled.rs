//! Threads that are cancelled. What they leave after the change, `differential` compares.

use programs::stage::{Stage, changed};

#[test]
fn a_connection_changes_over_after_threads_were_cancelled_that_received() {
    kit::require_programs!(&["cc"]);
    let stage = Stage::new("eager");
    let sources = [("receivers.c", include_str!("cancelled/receivers.c"))];
    let program = stage.compile("receivers", &sources, &["-O1", "-Wall", "-Wno-unused-result", "-pthread"]);
    stage.client(&[program.to_str().unwrap()]);
    assert_eq!(changed(&stage.all_connections(), "receivers").len(), 2);
}
