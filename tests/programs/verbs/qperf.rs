//! qperf: messages and one-sided access on connected queue pairs, with and without acknowledgement, and datagrams.

use kit::wait::wait_until;
use programs::stage::{free_port, listens};
use programs::verbs::{DEVICE, Killed, Verbs, expect_good};

/// The tests of qperf. Those that begin with `ver` also check the data that comes back.
const TESTS: [&str; 11] = [
    "rc_lat",
    "rc_bw",
    "rc_rdma_write_lat",
    "rc_rdma_write_poll_lat",
    "rc_rdma_read_bw",
    "rc_fetch_add_mr",
    "ver_rc_fetch_add",
    "ver_rc_compare_swap",
    "ud_lat",
    "ud_bw",
    "uc_lat",
];

#[test]
fn qperf() {
    kit::require_programs!(&["qperf"]);
    let verbs = Verbs::new();
    let port = free_port().to_string();
    let server = ["qperf", "-lp", &port];
    let mut running = Killed(Some(verbs.command(&server).spawn().unwrap()));
    wait_until("a server", || listens(port.parse().unwrap()));
    // The last one ends the server.
    let client = ["qperf", "-lp", &port, "-i", DEVICE, "-v", "-t", "1", "127.0.0.1"];
    let client = [&client[..], &TESTS, &["quit"]].concat();
    let said = expect_good(&client, verbs.command(&client).spawn().unwrap());
    println!("{said}");
    let parts: Vec<_> = said.split_inclusive(":\n").skip(1).take(TESTS.len()).collect();
    for (test, part) in TESTS.iter().zip(&parts) {
        let is_measured = ["latency ", "bw ", "msg_rate "].iter().any(|words| part.contains(words));
        let is_ours = part.lines().any(|line| line.trim_start().starts_with("id ") && line.ends_with(DEVICE));
        assert!(said.contains(&format!("{test}:\n")) && is_measured && is_ours, "{test}: {said}");
    }
    assert_eq!(parts.len(), TESTS.len(), "{said}");
    expect_good(&server, running.0.take().unwrap());
}
