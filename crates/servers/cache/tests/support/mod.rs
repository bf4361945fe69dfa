//! A daemon with caches, and the real memcached for comparison.
#![allow(dead_code)] // Each test program uses only a part of this module.

use kit::daemon::Daemon;
use kit::process::Process;
use kit::wait::{WATCHDOG, wait_until};
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A daemon with the segments `items` and `web`. The host is the only member of both.
pub struct World {
    daemon: Daemon,
}

impl World {
    pub fn new() -> Self {
        let config = "[segment.items]\nsize = '512M'\nmembers = ['host']\n\
                      [segment.web]\nsize = '64M'\nmembers = ['host']\n";
        Self { daemon: Daemon::start_new(config) }
    }

    /// Kills the daemon with SIGKILL, starts another, and waits until it answers.
    pub fn replace_daemon(&mut self) {
        self.daemon.restart();
    }

    /// Returns the path of the daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.daemon.socket()
    }

    /// Returns a path in the temporary folder, which is removed when this value is dropped.
    pub fn file(&self, name: &str) -> PathBuf {
        self.daemon.dir.path().join(name)
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

    /// Starts a server that listens for TCP at a free port, and waits until it answers. A connection alone does not show
    /// that it is ready: the kernel accepts it before the server has bound its Unix socket.
    pub fn serve(&self, flags: &str) -> Served {
        let port = free_port();
        let log = fs::OpenOptions::new().create(true).append(true).open(self.file("cache.log")).unwrap();
        let listen = format!("--listen 127.0.0.1:{port} {flags}");
        let child = self.command(&listen).stderr(log).stdin(Stdio::null()).spawn().unwrap();
        let mut process = Process(child);
        wait_until("a server", || {
            let ended = process.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", fs::read_to_string(self.file("cache.log")).unwrap());
            TcpStream::connect(("127.0.0.1", port)).is_ok_and(answers)
        });
        Served { process, port }
    }
}

/// Asks a server for its version, and waits for the answer. A server that ends instead closes the connection.
fn answers(mut stream: TcpStream) -> bool {
    let mut answer = [0; 8];
    let asked = stream.set_read_timeout(Some(WATCHDOG)).and_then(|()| stream.write_all(b"version\r\n"));
    asked.is_ok() && stream.read_exact(&mut answer).is_ok() && &answer == b"VERSION "
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

/// Starts the real memcached, which must be installed.
pub fn memcached() -> Served {
    let port = free_port();
    // `no_modern` switches off the threads that maintain items in the background. While such a thread holds an item, memcached
    // stores a new item instead of changing the old one in place, and the answers would differ.
    let child = Command::new("memcached")
        .args(["-U", "0", "-l", "127.0.0.1", "-m", "64", "-t", "1", "-u", "nobody", "-o", "no_modern", "-p"])
        .arg(port.to_string())
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let served = Served { process: Process(child), port };
    wait_until("memcached", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    served
}
