//! A daemon in folders of its own, and the `ginnel` command that runs beside it.

use crate::build;
use crate::process::signal;
use crate::wait::wait_until;
use rustix::process::Signal;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Starts a daemon in a folder that contains its configuration.
fn start(folder: &Path) -> Child {
    let log = fs::OpenOptions::new().create(true).append(true).open(folder.join("log")).unwrap();
    Command::new(build::program("ginneld"))
        .args(["host", "--stop-keeper", "--config"])
        .arg(folder.join("ginneld.toml"))
        .stderr(log.try_clone().unwrap())
        .stdout(log)
        .spawn()
        .unwrap()
}

/// A daemon with the segments `web`, of which only the host is a member, and `shared`, of the host and the VM `vm-a`,
/// which never runs.
pub struct World {
    folder: TempDir,
    daemon: Child,
}

impl World {
    /// Makes a world whose segment `web` has 64 MiB.
    #[allow(clippy::new_without_default, reason = "it starts a process")]
    pub fn new() -> Self {
        Self::with("size = '64M'")
    }

    /// Makes a world in which these lines of the configuration describe `web`.
    pub fn with(web: &str) -> Self {
        Self::configured(web, "")
    }

    /// Makes a world with further tables of the configuration.
    pub fn configured(web: &str, tables: &str) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = folder.path().display();
        let text = format!(
            "[daemon]\nruntime_dir = '{at}/run'\nstate_dir = '{at}/state'\nshm_dir = '{at}/shm'\n[vm.vm-a]\n\
             [segment.web]\n{web}\nmembers = ['host']\n\
             [segment.shared]\nsize = '4M'\nmembers = ['host', 'vm-a']\n{tables}"
        );
        for part in ["run", "state", "shm", "files"] {
            fs::create_dir(folder.path().join(part)).unwrap();
        }
        fs::write(folder.path().join("ginneld.toml"), text).unwrap();
        let daemon = start(folder.path());
        let mut world = Self { folder, daemon };
        world.wait_for_daemon();
        world
    }

    /// Kills the daemon with SIGKILL, and starts another one.
    pub fn replace_daemon(&mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
        self.daemon = start(self.folder.path());
        self.wait_for_daemon();
    }

    /// Does the same with another configuration.
    pub fn reconfigure(&mut self, change: impl FnOnce(String) -> String) {
        let file = self.folder.path().join("ginneld.toml");
        fs::write(&file, change(fs::read_to_string(&file).unwrap())).unwrap();
        self.replace_daemon();
    }

    fn wait_for_daemon(&mut self) {
        wait_until("an answer of ginneld", || {
            let ended = self.daemon.try_wait().unwrap();
            assert!(ended.is_none(), "ginneld {ended:?}: {}", self.log());
            ginnel::Daemon::connect_to(&self.socket()).is_ok()
        });
    }

    /// Returns the daemon's process.
    pub fn daemon(&self) -> &Child {
        &self.daemon
    }

    /// Returns the path of the daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("run/ginnel.sock")
    }

    /// Returns the folder for files.
    pub fn files(&self) -> PathBuf {
        self.folder.path().join("files")
    }

    /// Returns the folder of this world.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Returns the command with its arguments, split at white space, in the folder for files.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(build::program("ginnel"));
        command.args(line.split_whitespace()).env("GINNEL_SOCKET", self.socket()).current_dir(self.files());
        command.stdin(Stdio::null());
        command
    }

    /// Runs the command, which must end with this status, and returns its output.
    pub fn expect(&self, status: i32, line: &str) -> Said {
        let Output { status: got, stdout, stderr } = self.command(line).output().unwrap();
        let said = Said { out: text(&stdout), err: text(&stderr) };
        assert_eq!(got.code(), Some(status), "ginnel {line}: {said:?}");
        assert!(!said.err.contains("panicked"), "ginnel {line}: {said:?}");
        said
    }

    /// Runs the command, which must succeed, and returns its output.
    pub fn good(&self, line: &str) -> Said {
        self.expect(0, line)
    }

    /// Starts a server, and waits until it prints that it is ready.
    pub fn server(&self, line: &str) -> Server {
        Server::start(self.command(line))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("ginneld said:\n{}", self.log());
        }
        // SIGTERM, so that the daemon ends its keeper too.
        signal(&self.daemon, Signal::TERM);
        let end = Instant::now() + Duration::from_secs(10);
        while matches!(self.daemon.try_wait(), Ok(None)) {
            if Instant::now() >= end {
                let _ = self.daemon.kill();
            }
            sleep(Duration::from_millis(2));
        }
    }
}

/// The output of a command.
#[derive(Debug)]
pub struct Said {
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
}

impl Said {
    /// Returns the standard output, which must be JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A command that runs until the value is dropped.
pub struct Server {
    /// Its process.
    pub child: Child,
    /// The first line of its output.
    pub first: String,
}

impl Server {
    /// Starts it, and waits until it prints that it is ready.
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let mut server = Self { child, first };
        if server.first.is_empty() {
            panic!("{command:?}: {:?}", server.end());
        }
        server
    }

    /// Kills it, and returns its error output.
    pub fn end(&mut self) -> String {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut said = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = std::io::Read::read_to_string(&mut stderr, &mut said);
        }
        said
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let said = self.end();
        if std::thread::panicking() && !said.is_empty() {
            eprintln!("a server said:\n{said}");
        }
    }
}
