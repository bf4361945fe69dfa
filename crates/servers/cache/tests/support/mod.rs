//! Starts a daemon in temporary folders, caches, and the real memcached for comparison.
#![allow(dead_code)] // Each test program uses only a part of this module.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The time after which a test that waits for something fails.
const WATCHDOG: Duration = Duration::from_secs(60);

/// Waits until a condition holds. Panics after [`WATCHDOG`]; `what` names the condition in the message.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + WATCHDOG;
    while !condition() {
        assert!(Instant::now() < end, "{what} did not happen");
        sleep(Duration::from_millis(1));
    }
}

/// Returns the path of the daemon. The first call builds it with the same profile as this test.
fn ginneld() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let programs = Path::new(env!("CARGO_BIN_EXE_ginnel-cache")).parent().unwrap();
        let name = programs.file_name().unwrap().to_str().unwrap();
        let profile = if name == "debug" { "dev" } else { name };
        let status = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--locked", "--profile", profile])
            // This is the selection of packages in `scripts/unit`. The selection determines the features of dependencies, so
            // another selection would replace the ginneld that tests running at the same time use with a different one.
            .args(["--workspace", "--exclude", "vmtest", "--test", "header", "--bin", "ginneld"])
            .env("CARGO_TARGET_DIR", programs.parent().unwrap())
            .status()
            .unwrap();
        assert!(status.success(), "ginneld cannot be built");
        programs.join("ginneld")
    })
}

/// A child process that is killed when the value is dropped.
pub struct Process(pub Child);

impl Process {
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.0.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A daemon with the segments `items` and `web`. The host is the only member of both.
pub struct World {
    daemon: Process,
    folder: TempDir,
}

impl World {
    pub fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = folder.path().display();
        let text = format!(
            "[daemon]\nruntime_dir = '{at}/run'\nstate_dir = '{at}/state'\nshm_dir = '{at}/shm'\n\
             [segment.items]\nsize = '512M'\nmembers = ['host']\n\
             [segment.web]\nsize = '64M'\nmembers = ['host']\n"
        );
        for part in ["run", "state", "shm"] {
            fs::create_dir(folder.path().join(part)).unwrap();
        }
        fs::write(folder.path().join("ginneld.toml"), text).unwrap();
        let world = Self { daemon: Self::start(&folder), folder };
        wait_for("an answer of ginneld", || ginnel::Daemon::connect_to(&world.socket()).is_ok());
        world
    }

    fn start(folder: &TempDir) -> Process {
        let log = fs::OpenOptions::new().create(true).append(true).open(folder.path().join("log")).unwrap();
        let daemon = Command::new(ginneld())
            .args(["host", "--stop-keeper", "--config"])
            .arg(folder.path().join("ginneld.toml"))
            .stderr(log.try_clone().unwrap())
            .stdout(log)
            .spawn()
            .unwrap();
        Process(daemon)
    }

    /// Kills the daemon with SIGKILL, starts another, and waits until it answers.
    pub fn replace_daemon(&mut self) {
        self.daemon.0.kill().unwrap();
        self.daemon.0.wait().unwrap();
        self.daemon = Self::start(&self.folder);
        wait_for("an answer of ginneld", || ginnel::Daemon::connect_to(&self.socket()).is_ok());
    }

    /// Returns the path of the daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("run/ginnel.sock")
    }

    /// Returns a path in the temporary folder, which is removed when this value is dropped.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn attach(&self, segment: &str) -> ginnel::Endpoint {
        let options = ginnel::AttachOptions { socket: self.socket(), ..Default::default() };
        ginnel::Endpoint::attach_with(segment, &options).unwrap()
    }

    /// Returns the command that serves a cache in the segment `items`. The cache is `main`, unless `flags` name another.
    pub fn command(&self, flags: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel-cache"));
        command.args(["--segment", "items", "--socket"]).arg(self.socket());
        command.args(flags.split_whitespace());
        command
    }

    /// Starts a server that listens for TCP at a free port, and waits until it accepts a connection.
    pub fn serve(&self, flags: &str) -> Served {
        let port = free_port();
        let log = fs::OpenOptions::new().create(true).append(true).open(self.file("cache.log")).unwrap();
        let listen = format!("--listen 127.0.0.1:{port} {flags}");
        let child = self.command(&listen).stderr(log).stdin(Stdio::null()).spawn().unwrap();
        let mut process = Process(child);
        wait_for("a server", || {
            let ended = process.0.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", fs::read_to_string(self.file("cache.log")).unwrap());
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Served { process, port }
    }
}

/// A running server that listens at a TCP port of 127.0.0.1.
pub struct Served {
    pub process: Process,
    pub port: u16,
}

impl Served {
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        stream.set_write_timeout(Some(WATCHDOG)).unwrap();
        stream
    }

    /// Sends all bytes over a new connection, closes its sending side, and returns all answers until the server closes it.
    pub fn ask(&self, bytes: &[u8]) -> Vec<u8> {
        let mut stream = self.connect();
        let mut writer = stream.try_clone().unwrap();
        let mut answer = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // Writing fails if the server has closed the connection already.
                let _ = writer.write_all(bytes);
                let _ = writer.shutdown(Shutdown::Write);
            });
            // Reading fails if the server closes the connection with unread bytes, because that resets the connection.
            let _ = stream.read_to_end(&mut answer);
        });
        answer
    }

    /// Does the same as [`ask`](Self::ask) with text instead of bytes.
    pub fn text(&self, text: &str) -> String {
        String::from_utf8(self.ask(text.as_bytes())).unwrap()
    }

    /// Returns a number that the server reports in `stats`.
    pub fn stat(&self, name: &str) -> u64 {
        let stats = self.text("stats\r\n");
        let line = stats.lines().find_map(|line| line.strip_prefix(&format!("STAT {name} ")));
        line.unwrap_or_else(|| panic!("no {name} in {stats}")).parse().unwrap()
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts the real memcached. Returns `None` if it is not installed.
pub fn memcached() -> Option<Served> {
    let port = free_port();
    // `no_modern` switches off the threads that maintain items in the background. While such a thread holds an item, memcached
    // stores a new item instead of changing the old one in place, and the answers would differ.
    let child = Command::new("memcached")
        .args(["-U", "0", "-l", "127.0.0.1", "-m", "64", "-t", "1", "-u", "nobody", "-o", "no_modern", "-p"])
        .arg(port.to_string())
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(child) = child else {
        eprintln!("skipped: there is no memcached here; install the package memcached");
        return None;
    };
    let served = Served { process: Process(child), port };
    wait_for("memcached", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    Some(served)
}
