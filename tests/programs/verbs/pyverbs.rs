//! pyverbs: verbs for Python.

use kit::wait::wait_until;
use programs::stage::{PYTHON, free_port, listens};
use programs::verbs::{DEVICE, Killed, Verbs, expect_good};
use std::fs;
use std::process::Command;

/// Messages, events, and access to the peer's memory. The program checks the data.
const PROGRAM: &str = include_str!("pingpong.py");

#[test]
fn pyverbs() {
    let import = Command::new(PYTHON).args(["-c", "import pyverbs.device"]).output();
    kit::require!(
        import.is_ok_and(|output| output.status.success()),
        "python3-pyverbs is not installed: `scripts/setup test` installs it"
    );
    let verbs = Verbs::new();
    let file = verbs.world.files().join("pingpong.py");
    fs::write(&file, PROGRAM).unwrap();
    let port = free_port().to_string();
    let server = [PYTHON, file.to_str().unwrap(), DEVICE, &port, "200"];
    let mut running = Killed(Some(verbs.command(&server).spawn().unwrap()));
    wait_until("a server", || listens(port.parse().unwrap()));
    let client = [&server[..], &["127.0.0.1"]].concat();
    let client = expect_good(&client, verbs.command(&client).spawn().unwrap());
    for said in [client, expect_good(&server, running.0.take().unwrap())] {
        assert!(said.contains(&format!("{DEVICE}: 200 rounds, all data are right")), "{said}");
    }
}
