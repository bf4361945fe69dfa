//! `GINNEL_SOCKETS_WAIT`, with which connections whose ends are in one process change over before they carry any data.

use programs::stage::{PYTHON, Stage};

fn run(program: &str, arguments: &[&str], ends: usize) {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager").settling();
    stage.client(&[&[PYTHON, "-c", program], arguments].concat());
    let connections = stage.end();
    let changed = |one: &&_| {
        let one: &ginnel_report::Record<'_> = one;
        one.sent_after_us.is_some() && one.received_after_us.is_some() && one.tcp_sent + one.tcp_received == 0
    };
    assert_eq!(connections.iter().filter(changed).count(), ends, "{connections:#?}");
}

#[test]
fn both_ends_may_be_in_one_thread() {
    run(include_str!("settling/one_thread.py"), &[], 2);
}

/// A thread may sleep in the kernel for a connection that another thread changes over.
#[test]
fn a_thread_that_polls_meanwhile_is_woken() {
    for wait in ["poll", "select", "select for a time"] {
        run(include_str!("settling/polls.py"), &[wait], 2);
    }
}
