//! How the library finds out whether a server is a cache: no other server or proxy notices anything on the program's connections, and
//! neither does another process that gets one.

use crate::cached::{Cached, says_good};
use kit::wait::{retry, wait_until};
use programs::stage::{PYTHON, free_port, listens};
use std::process::{Child, Command, Stdio};

/// Servers that do not answer the question as a cache does.
const MUTE: &str = include_str!("asked/mute.py");
/// First bytes of many protocols.
const FIRST: &str = include_str!("asked/first.py");
/// A proxy, and its client.
const PROXY: &str = include_str!("asked/proxy.py");
const BEHIND_PROXY: &str = include_str!("asked/behind_proxy.py");
/// Connections that other processes get.
const PASSED: &str = include_str!("asked/passed.py");

/// Runs a program without the library, and ends it.
struct Alone(Child);

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_that_does_not_identify_itself() {
    kit::require_programs!(&[PYTHON]);
    let cached = Cached::new();
    says_good(&cached.stage.client(&[PYTHON, "-c", MUTE, &cached.at()]));
}

#[test]
fn any_first_bytes_arrive_unchanged() {
    kit::require_programs!(&[PYTHON]);
    let mut cached = Cached::new();
    let port = free_port().to_string();
    cached.set("GINNEL_CACHE", &port);
    says_good(&cached.stage.client(&[PYTHON, "-c", FIRST, &port, "400"]));
}

/// Runs a client of a proxy that treats unknown requests in this way. The client's report must give this reason.
fn through_proxy(way: &str, reason: &str) {
    kit::require_programs!(&[PYTHON]);
    let mut cached = Cached::new();
    let (port, log) = (free_port(), cached.stage.world.files().join("unknown"));
    let proxy = Command::new(PYTHON)
        .args(["-c", PROXY, &port.to_string(), &cached.at(), way])
        .arg(&log)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let _proxy = Alone(proxy);
    wait_until("that the proxy listens", || listens(port));
    // What the client must not see.
    const DIRECTLY: &str = "import socket, sys
c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
for key in b'k', b'only_in_the_cache':
    c.sendall(b'set %s 0 0 5\\r\\nwrong\\r\\n' % key)
    assert c.recv(100) == b'STORED\\r\\n'";
    cached.run(&[PYTHON, "-c", DIRECTLY, &cached.at()]);
    cached.set("GINNEL_CACHE", &port.to_string());
    let client = [PYTHON, "-c", BEHIND_PROXY, &port.to_string()];
    // On a busy machine, the proxy may answer too late.
    retry(|| {
        std::fs::write(&log, "").unwrap();
        let (out, from_memory, passed_on) = cached.run(&client);
        says_good(&out);
        assert_eq!((from_memory, passed_on), (0, 0));
        let questions = std::fs::read_to_string(&log).unwrap();
        assert!(questions.starts_with("stats ginnel 127.0.0.1:"), "{questions}");
        assert_eq!(questions.lines().count(), 1, "{questions}");
        let connections = cached.stage.last_connections();
        match connections.iter().all(|one| one.no_cache == reason) {
            true => Ok(()),
            false => Err(format!("{connections:#?}")),
        }
    });
}

#[test]
fn a_proxy_that_closes_connections() {
    through_proxy("closes", "its server is not a ginnel-cache, and closes when it is asked");
}

#[test]
fn a_proxy_that_answers_with_an_error() {
    through_proxy("errors", "its server is not a ginnel-cache");
}

#[test]
fn a_proxy_that_relays_the_question() {
    through_proxy("relays", "a proxy is between the program and the cache");
}

#[test]
fn waiting_answers_go_with_the_connection() {
    kit::require_programs!(&[PYTHON]);
    let mut cached = Cached::new();
    cached.set("SOURCE", PASSED);
    cached.run_from_memory(&[PYTHON, "-c", PASSED, &cached.at()], says_good, 250, u64::MAX);
}

/// Runs calls that are left in the middle.
fn interrupted(way: &str, least: u64) {
    kit::require_programs!(&["cc"]);
    let cached = Cached::new();
    let files = [("interrupted.c", include_str!("asked/interrupted.c"))];
    let program = cached.stage.compile("interrupted", &files, &["-O1", "-pthread"]);
    cached.run_from_memory(&[program.to_str().unwrap(), &cached.at(), way], says_good, least, u64::MAX);
}

#[test]
fn a_thread_that_asks_is_cancelled() {
    interrupted("cancelled", 0);
}

#[test]
fn a_signal_handler_receives_in_the_middle_of_a_call() {
    interrupted("signalled", 1000);
}
