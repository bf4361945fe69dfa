//! A server and its clients under `ginnel run`, and their report.

use crate::life::{self, PATIENCE};
use ginnel_report::{Record, Report};
use kit::build;
use kit::process::signal;
use kit::wait::{retry, wait_until};
use kit::world::World;
use rustix::process::Signal;
use std::cell::Cell;
use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// The modes of the library in which programs are tested.
pub const MODES: [&str; 2] = ["auto", "eager"];
/// The distribution's program, whatever else is in the path.
pub const PYTHON: &str = "/usr/bin/python3";

/// Returns a port at which no program listens.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Returns whether a program listens at a port, without connecting to it.
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
    /// The daemon.
    pub world: World,
    mode: &'static str,
    /// The library that the programs load.
    library: PathBuf,
    /// Programs of any user may write reports.
    is_open: bool,
    /// Connections wait until they have changed over.
    settles: bool,
    servers: Vec<Child>,
    /// Further environment variables of the programs.
    variables: Vec<(&'static str, String)>,
    /// Each run writes a report of its own.
    runs: Cell<u32>,
}

impl Stage {
    /// Makes a stage with a world of its own.
    pub fn new(mode: &'static str) -> Self {
        Self::in_world(mode, World::new())
    }

    /// Makes a stage in this world.
    pub fn in_world(mode: &'static str, world: World) -> Self {
        let library = build::library("libginnel_preload.so");
        let (is_open, settles, servers, variables) = (false, false, Vec::new(), Vec::new());
        Self { world, mode, library, is_open, settles, servers, variables, runs: Cell::new(0) }
    }

    /// Makes a stage for programs that drop root's privileges and continue as this user.
    pub fn for_user(mode: &'static str, user: u32) -> Self {
        let world = World::with(&format!("size = '64M'\nallow_users = [{user}]"));
        let mut stage = Self::in_world(mode, world);
        let files = stage.world.files();
        for folder in [stage.world.path(), &files] {
            fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
        }
        // That user may not be able to enter the build folder.
        let library = files.join("libginnel_preload.so");
        fs::copy(&stage.library, &library).unwrap();
        (stage.library, stage.is_open) = (library, true);
        stage
    }

    /// Makes a stage where connections wait until they have changed over, for programs that have both ends.
    pub fn settling(mut self) -> Self {
        self.settles = true;
        self
    }

    /// Sets an environment variable of the programs started from now on.
    pub fn set(&mut self, name: &'static str, value: &str) {
        self.variables.retain(|(other, _)| *other != name);
        self.variables.push((name, value.into()));
    }

    /// Runs a program under strace: with the library and these variables, or natively. Returns its output and the trace.
    pub fn traced(&self, program: &Path, args: &[&str], with_library: Option<&[&str]>) -> (Output, String) {
        let trace = self.world.files().join("trace");
        let mut strace = Command::new("strace");
        strace.arg("-o").arg(&trace);
        if let Some(variables) = with_library {
            let library = format!("LD_PRELOAD={}", build::library("libginnel_preload.so").display());
            let socket = format!("GINNEL_SOCKET={}", self.world.socket().display());
            for variable in [&[&*library, &*socket], variables].concat() {
                strace.args(["-E", variable]);
            }
        }
        let output = strace.arg(program).args(args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        (output, fs::read_to_string(trace).unwrap())
    }

    /// Returns the command that runs a program with the library.
    pub fn command(&self, program: &[&str]) -> Command {
        let mut command = self.world.command("run");
        self.runs.set(self.runs.get() + 1);
        // Its path is absolute, because the caller may have the program run in another folder.
        let report = self.world.files().join(format!("report.{}", self.runs.get()));
        if self.is_open {
            let file = fs::File::create(&report).unwrap();
            file.set_permissions(Permissions::from_mode(0o666)).unwrap();
        }
        command
            .arg(format!("--report={}", report.display()))
            .args(["--mode", self.mode, "--"])
            .args(program)
            .env("GINNEL_PRELOAD", &self.library)
            // The program must not read a user's settings, or leave files in a user's folder.
            .env("HOME", self.world.files())
            .env("PATH", std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        if self.settles {
            command.env("GINNEL_SOCKETS_WAIT", PATIENCE.as_millis().to_string());
        }
        command
    }

    /// Compiles a program in C from these files, with these arguments of the compiler. Returns the program's path.
    pub fn compile(&self, name: &str, files: &[(&str, &str)], arguments: &[&str]) -> PathBuf {
        let folder = self.world.files();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
        let (program, sources) = (folder.join(name), files.iter().filter(|(name, _)| name.ends_with(".c")));
        let mut compiler = Command::new("cc");
        compiler.args(arguments).arg("-o").arg(&program).args(sources.map(|(name, _)| folder.join(name)));
        assert!(compiler.status().unwrap().success(), "{compiler:?}");
        program
    }

    /// Starts a server, and waits until it listens at this port.
    pub fn serve(&mut self, port: u16, program: &[&str]) {
        let command = self.command(program);
        self.start(port, command);
    }

    /// Does the same for a server that is not a program of the distribution.
    pub fn start(&mut self, port: u16, mut command: Command) {
        let log = self.world.files().join("server.log");
        let log = fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.servers.push(command.spawn().unwrap());
        wait_until("that the server listens", || listens(port));
    }

    /// Runs a client to its end and returns its output.
    pub fn client(&self, program: &[&str]) -> String {
        let (status, out, err) = self.client_with(program, Stdio::null());
        assert!(status, "{program:?}: {out}\n{err}\n{}", self.log());
        out
    }

    /// Does the same for a client that ends after a time. How far its connections get until then depends on the
    /// machine, so the client is run again until this many connections of one run have changed over, and as many of the
    /// server's.
    pub fn client_until_changed(&self, program: &[&str], least: usize, server: &str) -> String {
        let name = program[0].rsplit('/').next().unwrap();
        let before = changed(&self.connections(1), server).len();
        retry(|| {
            let out = self.client(program);
            let (own, servers) = (self.connections(self.runs.get()), self.connections(1));
            let is_enough =
                changed(&own, name).len() >= least && changed(&servers, server).len() >= before + least;
            if is_enough {
                Ok(out)
            } else {
                Err(format!("{} of {name}: {own:#?}", changed(&own, name).len()))
            }
        })
    }

    /// Returns what is known at present about the connections of a run; nothing if the run has not begun.
    fn connections(&self, run: u32) -> Vec<Record<'static>> {
        let report = fs::read(self.world.files().join(format!("report.{run}"))).unwrap_or_default();
        Report::read(&report[..]).unwrap().connections
    }

    /// Runs a client with this standard input. Returns whether it has succeeded, and its standard output and standard error.
    pub fn client_with(&self, program: &[&str], input: Stdio) -> (bool, String, String) {
        let files = ["stdout", "stderr"].map(|name| self.world.files().join(name));
        let [out, err] = files.each_ref().map(|path| fs::File::create(path).unwrap());
        let mut child = self.command(program).stdin(input).stdout(out).stderr(err).spawn().unwrap();
        let ended = life::end(&mut child);
        let [out, err] = files.map(|path| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned());
        let Some(status) = ended else {
            panic!("{program:?} hangs: {out}\n{err}\n{}", self.log());
        };
        (status.success(), out, err)
    }

    /// Returns the output of the servers so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.world.files().join("server.log")).unwrap_or_default()
    }

    /// Ends the servers, and returns the outcome of the connections.
    pub fn end(mut self) -> Vec<Record<'static>> {
        let ended = self.end_servers();
        assert!(ended, "a server does not end: {}", self.log());
        self.all_connections()
    }

    /// Returns whether all of them have ended when they were told.
    fn end_servers(&mut self) -> bool {
        let mut servers = std::mem::take(&mut self.servers);
        for server in &mut servers {
            // The command passes it on to the program. (It could not pass SIGKILL on.)
            if server.try_wait().unwrap().is_none() {
                signal(server, Signal::TERM);
            }
        }
        let ended = servers.iter_mut().filter_map(life::end).count();
        ended == servers.len()
    }

    /// Returns the outcome of the connections of the last run.
    pub fn last_connections(&self) -> Vec<Record<'static>> {
        self.connections(self.runs.get())
    }

    /// Returns what is known at present about the connections of all runs.
    pub fn all_connections(&self) -> Vec<Record<'static>> {
        (1..=self.runs.get()).flat_map(|run| self.connections(run)).collect()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.end_servers();
    }
}

/// Returns the records of a program's connections that have changed over in both directions.
pub fn changed<'a>(connections: &'a [Record<'static>], program: &str) -> Vec<&'a Record<'static>> {
    connections.iter().filter(|record| record.program == program && record.has_changed_over()).collect()
}
