//! The daemon is killed while connections change over: no byte is lost, and changes that were not finished begin again.

use kit::wait::wait_until;
use programs::stage::{PYTHON, Stage, changed, free_port};
use std::fs;
use std::process::{Child, Stdio};

/// A program that is killed if the test fails.
struct Program(Child);

impl Program {
    fn start(stage: &Stage, program: &str, arguments: &[&str]) -> Self {
        let errors = fs::File::create(stage.world.files().join("errors")).unwrap();
        let mut command = stage.command(&[&[PYTHON, "-c", program], arguments].concat());
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).spawn().unwrap())
    }

    /// Waits for its end, which must be successful.
    fn ends_well(mut self, stage: &Stage) {
        wait_until("the program's end", || self.0.try_wait().unwrap().is_some());
        let errors = fs::read_to_string(stage.world.files().join("errors")).unwrap();
        assert!(self.0.wait().unwrap().success(), "{errors}");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_report_is_repeated_to_the_next_daemon() {
    kit::require_programs!(&[PYTHON]);
    let mut stage = Stage::new("eager");
    let program = include_str!("daemons/report.py");
    let child = Program::start(&stage, program, &[]);
    let reports =
        |stage: &Stage| stage.world.good("status --json").json()["reports"].as_array().unwrap().len();
    wait_until("the report of one end", || reports(&stage) == 1);
    stage.world.replace_daemon();
    wait_until("its report to the next daemon", || reports(&stage) == 1);
    fs::write(stage.world.files().join("go"), "").unwrap();
    child.ends_well(&stage);
    let connections = stage.end();
    assert_eq!(changed(&connections, "python3").len(), 2, "{connections:#?}");
}

const SERVER: &str = include_str!("daemons/server.py");

const CLIENT: &str = include_str!("daemons/client.py");

#[test]
fn no_byte_is_lost_while_daemons_are_killed() {
    kit::require_programs!(&[PYTHON]);
    let mut stage = Stage::new("auto");
    let port = free_port();
    stage.serve(port, &[PYTHON, "-c", SERVER, &port.to_string()]);
    let child = Program::start(&stage, CLIENT, &[&port.to_string()]);
    let conversed = stage.world.files().join("conversed");
    let conversations = || fs::metadata(&conversed).map_or(0, |file| file.len());
    for round in 0..10 {
        let (conversations_before, changed_before) =
            (conversations(), changed(&stage.all_connections(), "python3").len());
        stage.world.replace_daemon();
        wait_until("another connection's whole life", || conversations() > conversations_before);
        // The next daemon is killed at a random time, or when connections are known to have changed over again.
        if round % 3 == 0 {
            let is_more = || changed(&stage.all_connections(), "python3").len() > changed_before;
            wait_until("another connection's change", is_more);
        }
    }
    fs::write(stage.world.files().join("stop"), "").unwrap();
    child.ends_well(&stage);
    stage.end();
}
