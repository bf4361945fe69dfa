//! A real `ginneld` in folders of its own, and raw clients that speak the attach protocol to it.
#![allow(missing_docs)] // Most items do what their name says.

mod client;
pub mod holder;
pub mod qemu;

use crate::build;
use crate::wait::{wait_for, wait_until};
pub use client::{Attached, Channel, Client, Refused};
use ginnel_daemon::packet;
use ginnel_layout::Name;
use ginnel_layout::wire::{self, Kind};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Returns whether `fd` becomes readable within `timeout`.
pub fn readable(fd: impl AsFd, timeout: Duration) -> bool {
    let timeout = rustix::event::Timespec::try_from(timeout).unwrap();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

/// Forwards packets between a program and the daemon in both directions, after `change` has seen (and perhaps changed) each of
/// them. Packets that the program sent before it closed its end are still forwarded, although it does not receive answers any
/// more.
pub fn forward_packets(program: OwnedFd, daemon: OwnedFd, change: impl Fn(&mut [u8])) {
    let ends = [&program, &daemon];
    loop {
        let mut polled = ends.map(|end| PollFd::new(end, PollFlags::IN));
        poll(&mut polled, None).unwrap();
        let ready = polled.map(|end| !end.revents().is_empty());
        for (from, to, ready) in [(ends[0], ends[1], ready[0]), (ends[1], ends[0], ready[1])] {
            if !ready {
                continue;
            }
            let Ok(mut packet) = packet::receive(from.as_fd(), wire::MAX_PACKET, 8) else { return };
            change(&mut packet.bytes);
            let sent = packet::send(to.as_fd(), &packet.bytes, &packet.fds);
            if sent.is_err() && std::ptr::eq(to, &daemon) {
                return;
            }
        }
    }
}

/// Tells a program the path of its daemon's socket.
const PROGRAM_SOCKET: &str = "KIT_DAEMON_SOCKET";

/// Returns the path of the socket of the daemon that started this program (see [`Daemon::start_program`]).
pub fn program_socket() -> PathBuf {
    std::env::var_os(PROGRAM_SOCKET).expect("started with `Daemon::program`").into()
}

/// A running or stopped daemon with its own folders.
pub struct Daemon {
    pub dir: TempDir,
    child: Option<Child>,
}

impl Daemon {
    /// Starts a daemon with this configuration. The table `[daemon]` is written for it; `extra` is added to that table.
    pub fn start_with(extra: &str, config: &str) -> Self {
        let mut daemon = Self::prepare(extra, config);
        daemon.start();
        daemon
    }

    pub fn start_new(config: &str) -> Self {
        Self::start_with("", config)
    }

    /// Makes the folders and the configuration of a daemon without starting it. All of them are on a tmpfs, as segments must
    /// be.
    pub fn prepare(extra: &str, config: &str) -> Self {
        let dir = TempDir::with_prefix_in("ginneld-test-", "/dev/shm").unwrap();
        let daemon = Self { dir, child: None };
        daemon.write_config(extra, config);
        daemon
    }

    pub fn write_config(&self, extra: &str, config: &str) {
        let dir = self.dir.path().display();
        std::fs::create_dir_all(self.dir.path().join("shm")).unwrap();
        let daemon = format!(
            "[daemon]\nruntime_dir = \"{dir}/run\"\nstate_dir = \"{dir}/state\"\nshm_dir = \"{dir}/shm\"\n"
        );
        std::fs::write(self.config(), format!("{daemon}{extra}\n{config}")).unwrap();
    }

    pub fn config(&self) -> PathBuf {
        self.dir.path().join("ginneld.toml")
    }

    pub fn socket(&self) -> PathBuf {
        self.run("ginnel.sock")
    }

    pub fn run(&self, name: &str) -> PathBuf {
        self.dir.path().join("run").join(name)
    }

    pub fn shm(&self, name: &str) -> PathBuf {
        self.dir.path().join("shm/ginnel").join(name)
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(build::program("ginneld"));
        command.arg("host").arg("--config").arg(self.config());
        command
    }

    /// Starts the daemon and waits until it serves.
    pub fn start(&mut self) {
        self.start_by(self.command());
    }

    /// Does the same with this command.
    pub fn start_by(&mut self, mut command: Command) {
        let log =
            std::fs::OpenOptions::new().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        // Another process ends what the last daemon has left open, a moment after it.
        let socket = self.socket();
        wait_for("the end of the last daemon", || packet::connect_to(&socket).is_err().then_some(()));
        let mut child = command.env("GINNEL_LOG", "debug").stderr(log).stdin(Stdio::null()).spawn().unwrap();
        wait_until("the daemon's answer", || {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("the daemon ended: {status}\n{}", self.log());
            }
            Client::is_served(&socket)
        });
        self.child = Some(child);
    }

    /// Starts a program (see [`crate::program!`]) that reads the path of this daemon's socket with [`program_socket`] and ends when its
    /// standard input ends.
    pub fn start_program<F: Fn()>(&self, program: F) -> Child {
        self.program(program).spawn().unwrap()
    }

    /// Returns the command that [`Daemon::start_program`] starts.
    pub fn program<F: Fn()>(&self, program: F) -> Command {
        let mut command = crate::program::command(program);
        command.env(PROGRAM_SOCKET, self.socket()).stdin(Stdio::piped());
        command
    }

    /// Returns the process of the daemon's keeper.
    pub fn keeper(&self) -> Pid {
        let socket = self.run("keeper.sock").display().to_string();
        let is_keeper = |pid: &i32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.contains("\0keeper\0") && line.contains(&socket)
        };
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        Pid::from_raw(pids.find(is_keeper).expect("a keeper")).unwrap()
    }

    /// Runs the daemon with these arguments until it ends by itself, and returns its output.
    pub fn output(&self, args: &[&str]) -> Output {
        let mut child =
            self.command().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for("the daemon's end", || child.try_wait().unwrap());
        child.wait_with_output().unwrap()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Kills the daemon with SIGKILL.
    pub fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Kills the daemon with SIGKILL and starts another one.
    pub fn restart(&mut self) {
        self.kill();
        self.start();
    }

    pub fn signal(&self, signal: Signal) {
        crate::process::signal(self.child.as_ref().unwrap(), signal);
    }

    /// Returns whether all threads of the daemon are stopped (by SIGSTOP).
    pub fn is_stopped(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap().flatten();
        let stats = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
        stats
            .filter_map(|stat| stat.rsplit(") ").next().map(|rest| rest.starts_with('T')))
            .all(|stopped| stopped)
    }

    /// Waits until the daemon has ended by itself, and returns its exit status.
    pub fn ended(&mut self) -> std::process::ExitStatus {
        let mut child = self.child.take().unwrap();
        wait_for("the daemon's end", || child.try_wait().unwrap())
    }

    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    pub fn client(&self) -> Client {
        Client::hello(&self.socket())
    }

    pub fn attach(&self, segment: &str, name: &str) -> Attached {
        self.client().attach(segment, name).unwrap()
    }

    /// Returns the answer to an `INSPECT` request.
    pub fn inspect(&self) -> serde_json::Value {
        self.client().status()
    }

    /// Returns the answer to an `ADMIN` request.
    pub fn admin(&self, request: serde_json::Value) -> Result<String, Refused> {
        self.client().text(Kind::ADMIN, request.to_string().as_bytes())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- the daemon's log\n{}", self.log());
        }
        // The keeper ends when its socket is removed together with the folder.
    }
}

/// Returns the resident memory of the daemon in bytes, shared memory included.
pub fn resident(daemon: &Daemon) -> u64 {
    let pages = std::fs::read_to_string(format!("/proc/{}/statm", daemon.pid())).unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

pub fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}
