//! Runs a real `ginneld` in folders of its own, and provides raw clients that speak the attach protocol to it.
#![allow(dead_code)] // Each test program uses only a part of this module.

pub mod qemu;

use ginnel_daemon::packet::{self, Packet};
use ginnel_layout::segment::RESERVED;
use ginnel_layout::wire::{self, Header, Kind};
use ginnel_layout::{Name, ring};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use rustix::event::{PollFd, PollFlags, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// The longest time that a test waits for anything.
pub const WATCHDOG: Duration = Duration::from_secs(20);

/// Calls `done` until it returns a value, and returns that value. Panics after [`WATCHDOG`]; `what` is for the message.
pub fn wait_for<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WATCHDOG;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns whether a thread of this process sleeps in the kernel.
pub fn is_asleep(thread: rustix::process::Pid) -> bool {
    let stat = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    let stat = std::fs::read_to_string(stat).expect("the thread is there");
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
}

/// Checks a bound on time: one of at most ten attempts must take less than `limit`. The machine that runs the test may delay
/// any process, but not each time, whereas a daemon that waits for something it should not wait for is late each time.
pub fn takes_less_than(limit: Duration, mut attempt: impl FnMut() -> Duration) {
    let mut took = Vec::new();
    while took.last().is_none_or(|&last| last >= limit) {
        assert!(took.len() < 10, "never less than {limit:?}: {took:?}");
        took.push(attempt());
    }
}

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

/// Returns the path of `ginneld`. Cargo builds the program for the tests of its own package and tells them the path; the tests
/// of another package build it here.
fn ginneld() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| option_env!("CARGO_BIN_EXE_ginneld").map_or_else(build_ginneld, PathBuf::from))
}

/// Builds `ginneld` with the profile of this test, and returns its path.
fn build_ginneld() -> PathBuf {
    // This test is target/PROFILE/deps/NAME.
    let programs = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_owned();
    let folder = programs.file_name().unwrap().to_str().unwrap();
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--locked", "--profile", if folder == "debug" { "dev" } else { folder }])
        // The packages that are built together, and their tests, determine the features of their dependencies. This is the
        // same selection as in `scripts/unit`, so nothing is built a second time with other features.
        .args(["--workspace", "--exclude", "vmtest", "--test", "header", "--bin", "ginneld"])
        .env("CARGO_TARGET_DIR", programs.parent().unwrap())
        .status()
        .unwrap();
    assert!(status.success(), "ginneld cannot be built");
    programs.join("ginneld")
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
        self.dir.path().join("shm").join(format!("ginnel-{name}"))
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(ginneld());
        command.arg("host").arg("--config").arg(self.config());
        command
    }

    /// Starts the daemon and waits until it serves.
    pub fn start(&mut self) {
        let log =
            std::fs::OpenOptions::new().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        let mut child =
            self.command().env("GINNEL_LOG", "debug").stderr(log).stdin(Stdio::null()).spawn().unwrap();
        let socket = self.socket();
        wait_for("the daemon's socket", || {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("the daemon ended: {status}\n{}", self.log());
            }
            packet::connect_to(&socket).ok()
        });
        self.child = Some(child);
    }

    /// Starts another process, which runs the ignored test `program` of the same file and ends when its standard input ends.
    pub fn start_program(&self) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "program", "--ignored"])
            .env("TEST_PROGRAM_SOCKET", self.socket())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
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

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
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

/// An `ERROR` answer.
#[derive(Debug)]
pub struct Refused {
    pub code: u32,
    pub text: String,
}

/// A connection that speaks the attach protocol.
pub struct Client {
    pub fd: OwnedFd,
    request: u32,
    pub events: Vec<Packet>,
}

impl Client {
    pub fn raw(socket: &Path) -> Self {
        let fd = wait_for("a connection", || packet::connect_to(socket).ok());
        Self { fd, request: 0, events: Vec::new() }
    }

    pub fn hello(socket: &Path) -> Self {
        let mut client = Self::raw(socket);
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        let ok: wire::HelloOk = client.ask(Kind::HELLO, hello.as_bytes(), Kind::HELLO_OK).unwrap().0;
        assert_eq!((ok.version, ok.member, ok.name.as_str()), (wire::VERSION, 0, "host"));
        client
    }

    pub fn send(&mut self, kind: Kind, body: &[u8]) -> u32 {
        self.request += 1;
        let mut packet = Header { kind, flags: 0, request: self.request }.as_bytes().to_vec();
        packet.extend_from_slice(body);
        self.send_raw(&packet).unwrap();
        self.request
    }

    /// Sends a request without waiting for room in the socket. Returns `None` if the daemon has dropped this client, or there
    /// is no room.
    pub fn try_send(&mut self, kind: Kind, body: &[u8]) -> Option<u32> {
        self.request += 1;
        let header = Header { kind, flags: 0, request: self.request };
        rustix::io::ioctl_fionbio(&self.fd, true).ok()?;
        self.send_raw(&[header.as_bytes(), body].concat()).ok()?;
        Some(self.request)
    }

    pub fn send_raw(&self, packet: &[u8]) -> Result<(), rustix::io::Errno> {
        packet::send::<OwnedFd>(self.fd.as_fd(), packet, &[])
    }

    /// Waits for the next packet. Returns `None` if the connection has ended.
    pub fn receive(&self) -> Option<Packet> {
        assert!(readable(&self.fd, WATCHDOG), "no packet came");
        packet::receive(self.fd.as_fd(), wire::MAX_PACKET, 8).ok()
    }

    /// Waits for the answer to a request. Events that arrive before it are kept in `events`.
    pub fn answer(&mut self, request: u32) -> Option<Packet> {
        loop {
            let packet = self.receive()?;
            let (header, _) = wire::split(&packet.bytes).unwrap();
            if header.request == request {
                return Some(packet);
            }
            assert_eq!(header.request, 0);
            self.events.push(packet);
        }
    }

    pub fn ask<T: FromBytes>(
        &mut self,
        kind: Kind,
        body: &[u8],
        expect: Kind,
    ) -> Result<(T, Vec<OwnedFd>), Refused> {
        let request = self.send(kind, body);
        let packet = self.answer(request).expect("the connection ended");
        parse(packet, expect)
    }

    /// Returns the whole status, of all pages.
    pub fn status(&mut self) -> serde_json::Value {
        let (mut text, mut from) = (Vec::new(), wire::Inspect::FIRST);
        loop {
            let request = self.send(Kind::INSPECT, from.as_bytes());
            from = loop {
                let packet = self.answer(request).expect("the connection ended");
                let (header, body) = wire::split(&packet.bytes).unwrap();
                if header.kind == Kind::PAGE {
                    let (next, rest) = wire::Inspect::read_from_prefix(body).unwrap();
                    text.extend_from_slice(rest);
                    break next;
                }
                assert_eq!(header.kind, Kind::TEXT);
                text.extend_from_slice(body);
            };
            if !from.is_more() {
                return serde_json::from_slice(&text).unwrap();
            }
        }
    }

    pub fn text(&mut self, kind: Kind, body: &[u8]) -> Result<String, Refused> {
        let request = self.send(kind, body);
        let mut text = Vec::new();
        loop {
            let packet = self.answer(request).expect("the connection ended");
            let (header, body) = wire::split(&packet.bytes).unwrap();
            if header.kind == Kind::OK {
                return Ok(String::new());
            }
            if header.kind != Kind::TEXT {
                return Err(refused(header.kind, body));
            }
            text.extend_from_slice(body);
            if header.flags & Header::MORE == 0 {
                return Ok(String::from_utf8(text).unwrap());
            }
        }
    }

    pub fn attach(self, segment: &str, name: &str) -> Result<Attached, Refused> {
        let body = wire::Attach {
            segment: self::name(segment),
            name: self::name(name),
            ..wire::Attach::new_zeroed()
        };
        self.attach_as(body)
    }

    pub fn attach_as(mut self, body: wire::Attach) -> Result<Attached, Refused> {
        let (wire, fds) = self.ask::<wire::Attached>(Kind::ATTACH, body.as_bytes(), Kind::ATTACHED)?;
        assert_eq!(fds.len(), 2, "memory and event");
        let len = wire.mapped_len().unwrap() as usize;
        let read_only = wire.access.is_read_only();
        let protection = if read_only { Protection::Read } else { Protection::ReadWrite };
        let memory = Mapping::of_file(&fds[0], wire.map_offset, len, protection).unwrap();
        let writable = Mapping::of_file(&fds[0], wire.map_offset, len, Protection::ReadWrite).is_ok();
        assert_eq!(writable, !read_only, "what the descriptor allows");
        let event = fds.into_iter().nth(1).unwrap();
        let back = wire::Attach { endpoint: wire.endpoint, epoch: wire.epoch, token: wire.token, ..body };
        Ok(Attached { client: self, wire, memory, event, back, nonce: 0 })
    }
}

fn refused(kind: Kind, body: &[u8]) -> Refused {
    assert_eq!(kind, Kind::ERROR, "an answer of another kind");
    let (error, text) = wire::Error::read_from_prefix(body).unwrap();
    Refused { code: error.code.0, text: String::from_utf8(text.to_vec()).unwrap() }
}

fn parse<T: FromBytes>(packet: Packet, expect: Kind) -> Result<(T, Vec<OwnedFd>), Refused> {
    let (header, body) = wire::split(&packet.bytes).unwrap();
    if header.kind != expect {
        return Err(refused(header.kind, body));
    }
    Ok((wire::body(body).expect("an answer of another length"), packet.fds))
}

/// Returns the resident memory of the daemon in bytes, shared memory included.
pub fn resident(daemon: &Daemon) -> u64 {
    let pages = std::fs::read_to_string(format!("/proc/{}/statm", daemon.pid())).unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

pub fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// An endpoint of a raw client.
pub struct Attached {
    pub client: Client,
    pub wire: wire::Attached,
    pub memory: Mapping,
    pub event: OwnedFd,
    /// The request that attaches this endpoint again on another connection.
    pub back: wire::Attach,
    nonce: u64,
}

impl Drop for Attached {
    /// Sends `DETACH`, as a program does that ends in order. A program that only loses its connection does not send it (see
    /// [`Attached::hang_up`]).
    fn drop(&mut self) {
        let header = Header { kind: Kind::DETACH, flags: 0, request: u32::MAX };
        let _ = self.client.send_raw(header.as_bytes());
    }
}

impl Attached {
    /// Closes the connection without `DETACH`. Returns the request that attaches the endpoint again.
    pub fn hang_up(mut self) -> wire::Attach {
        drop(self.take_connection());
        self.back
    }

    /// Clears the endpoint's doorbell.
    pub fn clear_doorbell(&self) {
        while readable(&self.event, Duration::ZERO) {
            rustix::io::read(&self.event, &mut [0; 8]).unwrap();
        }
    }

    /// Takes the connection out, so that it stays open when the endpoint is dropped.
    pub fn take_connection(&mut self) -> OwnedFd {
        let none = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        std::mem::replace(&mut self.client.fd, none)
    }

    /// Makes an endpoint of the answer to an attach request that the test has sent by itself.
    pub fn of(
        fd: OwnedFd,
        wire: wire::Attached,
        memory: Mapping,
        event: OwnedFd,
        back: wire::Attach,
    ) -> Self {
        let client = Client { fd, request: 100, events: Vec::new() };
        Self { client, wire, memory, event, back, nonce: 0 }
    }

    pub fn listen(&mut self, at: &str) -> Result<u32, Refused> {
        let body = wire::Listen { name: name(at), kind: 1, backlog: 0, capacity: 0, input_capacity: 0 };
        self.client
            .ask::<wire::Listening>(Kind::LISTEN, body.as_bytes(), Kind::LISTENING)
            .map(|(l, _)| l.listener)
    }

    pub fn connect(&mut self, to: &str) -> Result<Channel, Refused> {
        self.nonce += 1;
        self.connect_as(to, self.nonce, 4096)
    }

    pub fn connect_as(&mut self, to: &str, nonce: u64, capacity: u64) -> Result<Channel, Refused> {
        let body = wire::Connect { name: name(to), kind: 1, reserved: 0, capacity, input_capacity: 0, nonce };
        let (wire, fds) = self.client.ask(Kind::CONNECT, body.as_bytes(), Kind::CHANNEL)?;
        Ok(Channel::new(&self.memory, wire, fds))
    }

    /// Waits for the next `INCOMING` event and returns its channel.
    pub fn incoming(&mut self) -> Channel {
        let packet = match self.client.events.is_empty() {
            true => self.client.receive().expect("the connection ended"),
            false => self.client.events.remove(0),
        };
        let (wire, fds) = parse(packet, Kind::INCOMING).unwrap();
        Channel::new(&self.memory, wire, fds)
    }

    pub fn accepted(&mut self, channel: &Channel) {
        self.ask_about_channel(Kind::ACCEPTED, channel.wire.channel).unwrap();
    }

    pub fn close(&mut self, channel: u64) -> Result<(), Refused> {
        self.ask_about_channel(Kind::CLOSE, channel)
    }

    pub fn ask_about_channel(&mut self, kind: Kind, channel: u64) -> Result<(), Refused> {
        self.client.ask::<[u8; 0]>(kind, wire::ChannelRef { channel }.as_bytes(), Kind::OK).map(drop)
    }
}

/// A channel, as one side sees it.
pub struct Channel {
    pub wire: wire::Channel,
    pub bell: Option<OwnedFd>,
    pub output: Mapping,
    pub input: Mapping,
}

impl Channel {
    pub fn new(memory: &Mapping, wire: wire::Channel, mut fds: Vec<OwnedFd>) -> Self {
        let (output, input) = wire.capacities().rings(wire.initiator == 1);
        let block = (wire.offset - RESERVED) as usize; // The mapping begins at `RESERVED`.
        let part = |at, capacity| memory.part(block + at, ring::footprint(capacity as usize)).unwrap();
        let (output, input) = (part(output, wire.capacity), part(input, wire.input_capacity));
        Self { bell: fds.pop(), output, input, wire }
    }

    /// Returns the state of the peer, as written by the daemon or by the peer: as consumer of our output, and as producer of
    /// our input.
    pub fn peer_state(&self) -> (u32, u32) {
        (
            self.output.load_acquire_u32(ring::CONSUMER_STATE),
            self.input.load_acquire_u32(ring::PRODUCER_STATE),
        )
    }

    pub fn ring(&self) {
        rustix::io::write(self.bell.as_ref().unwrap(), &1u64.to_ne_bytes()).unwrap();
    }
}
