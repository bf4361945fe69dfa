//! A server and its clients under `ginnel run`, and what their report says.

use std::cell::Cell;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::world::{World, built_library, signal, wait_for};
use ginnel_report::{Record, Report};

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Modes of the library in which programs are tried.
pub const MODES: [&str; 2] = ["auto", "eager"];
/// The distribution's, whatever else is in the path.
pub const PYTHON: &str = "/usr/bin/python3";

/// Whether these programs are here. Says so if not.
pub fn have(programs: &[&str]) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let is_there = |program: &&&str| path.split(':').any(|folder| Path::new(folder).join(program).exists());
    match programs.iter().find(|program| !is_there(program)) {
        None => true,
        Some(missing) => {
            println!("SKIPPED {missing} is not installed: `scripts/setup test` installs it");
            false
        }
    }
}

/// A port that nobody listens at.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Whether somebody listens at a port, without a connection to it.
pub fn listens(port: u16) -> bool {
    let sockets =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|file| fs::read_to_string(file).unwrap_or_default());
    sockets.iter().flat_map(|text| text.lines()).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (local, state) = (words.next().unwrap_or(""), words.nth(1).unwrap_or(""));
        local.ends_with(&format!(":{port:04X}")) && state == "0A"
    })
}

/// A server and its clients, whose connections go into one report.
pub struct Stage {
    pub world: World,
    mode: &'static str,
    server: Option<Child>,
    /// Each run writes a report of its own.
    runs: Cell<u32>,
}

impl Stage {
    pub fn new(mode: &'static str) -> Self {
        Self { world: World::new(), mode, server: None, runs: Cell::new(0) }
    }

    pub fn command(&self, program: &[&str]) -> Command {
        let mut command = self.world.command("run");
        self.runs.set(self.runs.get() + 1);
        command
            .arg(format!("--report=report.{}", self.runs.get()))
            .args(["--mode", self.mode, "--"])
            .args(program)
            .env("GINNEL_PRELOAD", built_library("ginnel-preload", "libginnel_preload.so"))
            .env("PATH", std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub fn serve(&mut self, port: u16, program: &[&str]) {
        let mut command = self.command(program);
        // Nobody reads what a server says.
        let log = fs::File::create(self.world.files().join("server.log")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.server = Some(command.spawn().unwrap());
        wait_for("that the server listens", || listens(port));
    }

    /// Runs a client to its end; what it has printed.
    pub fn client(&self, program: &[&str]) -> String {
        let (status, out, err) = self.client_with(program, Stdio::null());
        assert!(status, "{program:?}: {out}\n{err}\n{}", self.log());
        out
    }

    pub fn client_with(&self, program: &[&str], input: Stdio) -> (bool, String, String) {
        let mut child = self.command(program).stdin(input).spawn().unwrap();
        let end = Instant::now() + PATIENCE;
        // Its output fits into the pipes.
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > end {
                child.kill().unwrap();
                panic!("{program:?} hangs: {:?}\n{}", child.wait_with_output(), self.log());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (status.success(), text(stdout), text(stderr))
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.world.files().join("server.log")).unwrap_or_default()
    }

    /// Ends the server, and tells what became of the connections.
    pub fn end(mut self) -> Vec<Record<'static>> {
        if let Some(mut server) = self.server.take() {
            if server.try_wait().unwrap().is_none() {
                signal(&server, "TERM");
            }
            let end = Instant::now() + PATIENCE;
            while server.try_wait().unwrap().is_none() {
                assert!(Instant::now() < end, "the server does not end: {}", self.log());
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let file = |run| fs::read(self.world.files().join(format!("report.{run}"))).unwrap();
        (1..=self.runs.get()).flat_map(|run| Report::read(&file(run)[..]).unwrap().connections).collect()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// The connections that have changed over both ways, of a program.
pub fn changed<'a>(connections: &'a [Record<'static>], program: &str) -> Vec<&'a Record<'static>> {
    let of = |record: &&Record<'_>| {
        record.program == program
            && record.sent_after_us.is_some()
            && record.received_after_us.is_some()
            && record.shared_sent + record.shared_received > 0
    };
    connections.iter().filter(of).collect()
}
