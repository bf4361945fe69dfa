//! Programs over a segment that is an RDMA device.

use crate::life::Life;
use crate::stage::{free_port, listens};
use kit::build;
use kit::wait::wait_until;
use kit::world::World;
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// The name of the device.
pub const DEVICE: &str = "ginnel_web";

/// A segment that is a device, and the libraries.
pub struct Verbs {
    /// The daemon.
    pub world: World,
    libraries: PathBuf,
    preload: PathBuf,
}

impl Verbs {
    /// Starts with a segment of 256 MiB.
    #[allow(clippy::new_without_default, reason = "it starts processes")]
    pub fn new() -> Self {
        Self::sized("256M")
    }

    /// Starts with a segment of this size.
    pub fn sized(size: &str) -> Self {
        Self::of(World::with(&format!("size = '{size}'\nverbs = true")))
    }

    /// Starts with this world, whose segment `web` is a device.
    pub fn of(world: World) -> Self {
        let libraries = build::libraries("crates/faces/verbs-capi", "verbs");
        Self { world, libraries, preload: build::library("libginnel_preload.so") }
    }

    /// Returns the command with its arguments and the path of the libraries.
    pub fn ginnel(&self, line: &str) -> Command {
        let mut command = self.world.command(line);
        command.env("GINNEL_VERBS", &self.libraries).env("GINNEL_PRELOAD", &self.preload);
        command.env_remove("LD_LIBRARY_PATH").stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Returns the command that runs a program with the libraries, and without the library for sockets.
    pub fn command(&self, program: &[&str]) -> Command {
        let mut command = self.ginnel("run --verbs --mode off --");
        command.args(program);
        command
    }

    /// Runs a program that must succeed. Returns what it has printed.
    pub fn good(&self, program: &[&str]) -> String {
        let child = self.command(program).spawn().unwrap();
        expect_good(program, child)
    }

    /// Runs a program as a server and as its client. Both must succeed.
    pub fn pair(&self, program: &[&str]) -> [String; 2] {
        // If the client has failed, the server is killed at the end of the test.
        let [mut server, mut client] = self.start(program);
        let client = expect_good(program, client.0.take().unwrap());
        [expect_good(program, server.0.take().unwrap()), client]
    }

    /// Starts a program as a server, and then as its client once the server listens at the port. The port is the last argument of both.
    pub fn start(&self, program: &[&str]) -> [Killed; 2] {
        let port = free_port();
        let number = port.to_string();
        let server = [program, &["-p", &number]].concat();
        let mut child = Killed(Some(self.command(&server).spawn().unwrap()));
        wait_until("a server", || {
            let ended = child.0.as_mut().unwrap().try_wait().unwrap();
            if ended.is_some() {
                let output = child.0.take().unwrap().wait_with_output().unwrap();
                panic!("{program:?}: the server has ended: {}", text(&output));
            }
            listens(port)
        });
        let client = [program, &["-p", &number, "127.0.0.1"]].concat();
        [child, Killed(Some(self.command(&client).spawn().unwrap()))]
    }
}

/// A child process that is killed at the end of the test.
pub struct Killed(pub Option<Child>);

impl Drop for Killed {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn inspect(verbs: &Verbs) -> ginnel_status::Inspect {
    let mut daemon = ginnel::Daemon::connect_to(&verbs.world.socket()).unwrap();
    serde_json::from_str(&daemon.inspect().unwrap()).unwrap()
}

/// Returns the used bytes of the segment, and the numbers of endpoints and blocks.
pub fn used(verbs: &Verbs) -> (u64, usize, usize) {
    let inspect = inspect(verbs);
    let segment = inspect.segments.iter().find(|segment| segment.name == "web").unwrap();
    (segment.used, inspect.endpoints.len(), inspect.blocks.len())
}

/// Returns all that a program has printed.
pub fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat()
}

/// Waits for the end of a program that must succeed. Returns what it has printed.
pub fn expect_good(program: &[&str], child: Child) -> String {
    let mut life = Life::of(child.id());
    let id = Pid::from_child(&child);
    let waiter = std::thread::spawn(move || child.wait_with_output().unwrap());
    let mut hangs = false;
    while !waiter.is_finished() {
        if !hangs && life.hangs() {
            hangs = true;
            // It may have ended meanwhile.
            let _ = kill_process(id, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = waiter.join().unwrap();
    let said = text(&output);
    assert!(!hangs, "{program:?} hangs: {said}");
    assert!(output.status.success(), "{program:?}: {}\n{said}", output.status);
    said
}

/// Ends the test unless programs that use verbs can be compiled here.
#[macro_export]
macro_rules! require_verbs_compiler {
    () => {
        kit::require_programs!(&["cc"]);
        kit::require!(
            std::path::Path::new("/usr/include/infiniband/verbs.h").exists(),
            "no libibverbs-dev: `scripts/setup test` installs it"
        );
    };
}

/// Compiles a C program or library from the tests of the libraries. Returns its path.
pub fn compiled(verbs: &Verbs, name: &str, flags: &[&str]) -> String {
    let program = verbs.world.files().join(name);
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../crates/faces/verbs-capi/tests/c/{name}.c"));
    let status = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .args([&program, &source])
        .args(flags)
        .status()
        .unwrap();
    assert!(status.success(), "{name}.c cannot be compiled");
    program.to_str().unwrap().to_owned()
}
