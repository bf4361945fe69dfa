//! Unmodified clients of a cache under `ginnel run`: their gets are answered from memory, and everything else is as
//! without it.

use ginnel_report::Record;
use kit::build;
use kit::skip::missing;
use kit::wait::{Watchdog, retry, wait_until};
use programs::life;
use programs::stage::{PYTHON, Stage, free_port, listens};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Uses the commands of both protocols, with a client library.
const PYMEMCACHE: &str = include_str!("cached/pymemcache.py");
/// Sends requests of many kinds over Node's sockets.
const NODE: &str = include_str!("cached/pipelined.js");
/// A client that keeps running while servers end and start.
const LOAD: &str = include_str!("cached/load.py");

/// A server, and the programs that are its clients.
pub(super) struct Cached {
    pub(super) stage: Stage,
    memory: &'static str,
    server: Option<Child>,
    port: u16,
}

impl Cached {
    pub(super) fn new() -> Self {
        Self::with("40M")
    }

    /// Starts a server with this much memory.
    fn with(memory: &'static str) -> Self {
        let mut cached = Self { stage: Stage::new("auto"), memory, server: None, port: free_port() };
        cached.serve();
        cached.set("GINNEL_CACHE", &cached.at());
        cached
    }

    pub(super) fn at(&self) -> String {
        self.port.to_string()
    }

    pub(super) fn set(&mut self, name: &'static str, value: &str) {
        self.stage.set(name, value);
    }

    fn spawn(&mut self, command: &mut Command) {
        let mut options = std::fs::OpenOptions::new();
        let log =
            options.create(true).append(true).open(self.stage.world.files().join("server.log")).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.server = Some(command.spawn().unwrap());
        wait_until("that the server listens", || listens(self.port));
    }

    fn serve(&mut self) {
        let mut command = Command::new(build::program("ginnel-cache"));
        command
            .args(["--segment", "web", "--memory", self.memory, "--channel", "none", "--listen"])
            .arg(format!("127.0.0.1:{}", self.port))
            .arg("--socket")
            .arg(self.stage.world.socket());
        self.spawn(&mut command);
    }

    /// The real memcached.
    fn serve_memcached(&mut self) {
        self.kill();
        let at = self.at();
        self.spawn(Command::new("memcached").args(["-u", "root", "-l", "127.0.0.1", "-p", &at, "-U", "0"]));
    }

    fn kill(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.kill().unwrap();
            server.wait().unwrap();
            wait_until("that nobody listens", || !listens(self.port));
        }
    }

    /// Runs a client. Returns its output, and how many of its gets were answered from memory and how many were passed
    /// on.
    pub(super) fn run(&self, program: &[&str]) -> (String, u64, u64) {
        let out = self.stage.client(program);
        let connections = self.stage.last_connections();
        let sum = |of: fn(&Record) -> u64| connections.iter().map(of).sum();
        for one in &connections {
            let is_served = one.gets_from_memory + one.gets_passed_on > 0;
            assert!(!is_served || one.cache == "web/main", "{one:?}");
        }
        (out, sum(|one| one.gets_from_memory), sum(|one| one.gets_passed_on))
    }

    /// Runs a client whose gets, at least this many, must be answered from memory, and at most that many be passed on. On a busy machine,
    /// the library may not find the memory in the time in which it must, so the client may be run again; `check` looks at the output of
    /// each run. Returns the last output.
    pub(super) fn run_from_memory(
        &self,
        program: &[&str],
        check: impl Fn(&str),
        least: u64,
        most: u64,
    ) -> String {
        retry(|| {
            let (out, from_memory, passed_on) = self.run(program);
            check(&out);
            if from_memory >= least && passed_on <= most {
                return Ok(out);
            }
            Err(format!("{program:?}: {from_memory} from memory, {passed_on} passed on"))
        })
    }

    /// Does the same, and runs the client with a server without the memory and with a real memcached too. The output must be the same
    /// each time.
    fn run_thrice(&mut self, program: &[&str], check: impl Fn(&str), least: u64, most: u64) {
        let out = self.run_from_memory(program, check, least, most);
        self.set("GINNEL_CACHE", "off");
        assert_eq!(self.run(program), (out.clone(), 0, 0), "off");
        self.set("GINNEL_CACHE", &self.at());
        if missing(&["memcached"]).is_some() {
            kit::skip!(
                "no comparison with memcached, which is not installed: `scripts/setup test` installs it"
            );
        } else {
            self.serve_memcached();
            assert_eq!(self.run(program), (out, 0, 0), "a memcached");
        }
    }

    /// Compiles the client in C.
    fn compiled(&self) -> PathBuf {
        let files = [("client.c", include_str!("cached/client.c"))];
        self.stage.compile("client", &files, &["-O1", "-pthread"])
    }
}

impl Drop for Cached {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs the client in C in one way: at least this many gets must come from memory, and at most this many may be passed
/// on.
fn in_c(way: &str, least: u64, most: u64) {
    kit::require_programs!(&["cc"]);
    let mut cached = Cached::new();
    let program = cached.compiled();
    let at = cached.at();
    cached.run_thrice(&[program.to_str().unwrap(), &at, way], |_| (), least, most);
}

#[test]
fn requests_are_answered_in_their_order() {
    in_c("order", 15, 7);
}

#[test]
fn threads_have_a_connection_each() {
    in_c("threads", 15_900, 100);
}

#[test]
fn level_triggered() {
    in_c("level", 400, 20);
}

#[test]
fn edge_triggered() {
    in_c("edge", 450, 30);
}

#[test]
fn told_once() {
    // The kernel alone handles these requests.
    in_c("oneshot", 0, 600);
}

#[test]
fn poll_select_and_ioctl() {
    in_c("asked", 190, 20);
}

#[test]
fn sleeping_threads_are_woken() {
    in_c("asleep", 0, 1800);
}

#[test]
fn forked_processes_and_executed_programs() {
    // The child has a connection of its own too.
    in_c("forked", 100, 10);
}

#[test]
fn pymemcache() {
    kit::require_programs!(&[PYTHON]);
    let mut cached = Cached::new();
    let at = cached.at();
    cached.run_thrice(&[PYTHON, "-c", PYMEMCACHE, &at], says_good, 1400, 149);
}

#[test]
fn libmemcached() {
    kit::require_programs!(&["memccapable", "memccp", "memccat", "memcslap", "memcaslap"]);
    let cached = Cached::new();
    let at = cached.at();
    let server = format!("--servers=127.0.0.1:{at}");
    let (out, ..) = cached.run(&["memccapable", "-h", "127.0.0.1", "-p", &at]);
    assert!(out.contains("All tests passed"), "{out}");
    let text = ["memcslap", &server, "--test=get", "--concurrency=3", "--execute-number=3000"];
    let binary = ["memcslap", &server, "--binary", "--test=get", "--concurrency=3", "--execute-number=3000"];
    for line in [&text[..], &binary] {
        cached.run_from_memory(line, |_| (), 9000 * 95 / 100, u64::MAX);
    }
    // The client checks each value that it gets, and takes an item that was evicted for a wrong one. So it stores no more than there is
    // memory for, however fast the machine is.
    let address = format!("127.0.0.1:{at}");
    for protocol in [&[][..], &["-B"]] {
        let line = ["memcaslap", "-s", &address, "-x", "20000", "-T", "2", "-c", "8", "-v", "1", "-w", "1k"];
        let is_right = |out: &str| {
            assert!(out.contains("get_misses: 0") && out.contains("verify_failed: 0"), "{out}");
        };
        cached.run_from_memory(&[&line, protocol].concat(), is_right, 1001, u64::MAX);
    }
    let value: String =
        (0..900_000_u32).map(|i| char::from(b'a' + (i.wrapping_mul(2_654_435_761) >> 28) as u8)).collect();
    let folder = cached.stage.world.files();
    std::fs::write(folder.join("value"), &value).unwrap();
    cached.run(&["memccp", &server, "value"]);
    for protocol in [&[][..], &["--binary"]] {
        let line = ["memccat", &server, "--file=back", "value"];
        cached.run_from_memory(&[&line, protocol].concat(), |_| (), 1, u64::MAX);
        let back = std::fs::read_to_string(folder.join("back")).unwrap();
        assert!(back.trim_end() == value, "{} bytes come back", back.len());
    }
}

#[test]
fn node() {
    kit::require_programs!(&["node"]);
    let mut cached = Cached::new();
    let at = cached.at();
    cached.run_thrice(&["node", "-e", NODE, &at], says_good, 1501, 1499);
}

#[test]
fn clients_survive_servers_that_are_killed_under_load() {
    kit::require_programs!(&[PYTHON]);
    let mut cached = Cached::new();
    let at = cached.at();
    let mut client = cached.stage.command(&[PYTHON, "-c", LOAD, &at]).stdout(Stdio::piped()).spawn().unwrap();
    let file = cached.stage.world.files().join("progress");
    // The numbers of connections and of gets.
    let progress = || {
        let text = std::fs::read_to_string(&file).unwrap_or("0 0".into());
        let (connections, gets) = text.split_once(' ').unwrap();
        (connections.parse::<u64>().unwrap(), gets.parse::<u64>().unwrap())
    };
    let mut seen = (0, 0);
    let mut gets_from_this_server = || {
        wait_until("gets over a connection to this server", || {
            let now = progress();
            now.0 > seen.0 && now.1 >= seen.1 + 200
        });
        seen = progress();
    };
    // A server that dies, or that answers late because the machine is busy, while the library asks it whether it is a cache is not
    // asked again for ten seconds. So any number of kills may pass without a get from memory, but never a minute.
    let mut dog = Watchdog::new("gets from memory");
    let mut kills = 0;
    loop {
        gets_from_this_server();
        let connections = cached.stage.last_connections();
        let from_memory: u64 = connections.iter().map(|one| one.gets_from_memory).sum();
        if kills >= 8 && from_memory > 1000 {
            break;
        }
        dog.look(from_memory);
        kills += 1;
        cached.kill();
        std::thread::sleep(Duration::from_millis(50));
        cached.serve();
    }
    std::fs::write(cached.stage.world.files().join("enough"), "").unwrap();
    assert!(life::end(&mut client).is_some(), "the client hangs");
    let said = client.wait_with_output().unwrap();
    assert!(said.status.success(), "{said:?}");
    let connections = cached.stage.last_connections();
    let from_memory: u64 = connections.iter().map(|one| one.gets_from_memory).sum();
    assert!(connections.len() > 8 && from_memory > 1000, "{connections:#?}");
}

#[test]
fn hits_are_reported_to_a_cache_that_is_short_of_memory() {
    kit::require_programs!(&[PYTHON]);
    let cached = Cached::with("24M");
    let program = [PYTHON, "-c", include_str!("cached/pressed.py"), &cached.at()];
    cached.run_from_memory(&program, says_good, 401, u64::MAX);
}

/// Panics unless this is the output of a client that has found everything right.
pub(super) fn says_good(out: &str) {
    assert_eq!(out.trim(), "good");
}
