//! Test suites of other projects, and programs on the runtimes of others, under `ginnel run`. Each test that passes over TCP must pass.
//!
//! `scripts/foreign-suites` unpacks the suites. A few seconds of each run always, and all of it with `GINNEL_SOAK`.

mod calls;
mod tasks;

use programs::life;
use programs::stage::Stage;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// How often a test is tried until it counts as failed. Some depend on time, or on a port that another program may have.
const TRIES: usize = 3;
/// None of the tests takes nearly as long.
const LONGEST: Duration = Duration::from_secs(180);
/// How long a connection may wait for its change, in milliseconds. Most would end before it otherwise. Connections whose other end comes
/// later or never wait in vain.
const WAIT: &str = "100";

/// How programs run.
#[derive(Clone, Copy, Debug)]
struct Way {
    mode: &'static str,
    /// Connections wait for their change.
    waits: bool,
}

/// In the soak also `eager` without waiting, where few connections of such short tests change over.
const WAYS: [Way; 3] = [
    Way { mode: "auto", waits: false },
    Way { mode: "eager", waits: true },
    Way { mode: "eager", waits: false },
];

impl Way {
    fn stage(self) -> Stage {
        let mut stage = Stage::new(self.mode);
        if self.waits {
            stage.set("GINNEL_SOCKETS_WAIT", WAIT);
        }
        stage
    }
}

fn is_soak() -> bool {
    std::env::var_os("GINNEL_SOAK").is_some()
}

/// How long a program of ours runs.
fn duration() -> Duration {
    Duration::from_secs(if is_soak() { 300 } else { 1 })
}

/// Returns the folder of a suite. If there is none, records why.
fn folder(name: &str) -> Option<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/foreign-suites");
    let Output { status, stdout, stderr } = Command::new(script).arg(name).output().unwrap();
    if !status.success() {
        kit::skip!("{}", String::from_utf8_lossy(&stderr));
        return None;
    }
    Some(String::from_utf8(stdout).unwrap().trim().into())
}

/// Returns what a program prints.
fn output(program: &Path, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env("UV_RUN_AS_ROOT", "1").output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

struct Suite {
    /// What the script calls it.
    name: &'static str,
    /// The folder in which its tests run.
    place: &'static str,
    /// The program of its tests, whose argument is the name of a test.
    program: &'static str,
    /// Returns the names of its tests.
    list: fn(&Path) -> Vec<String>,
    /// How the names of those begin that always run: tests of TCP that do not sleep for long.
    quick: &'static [&'static str],
    /// The tests that are left out.
    excluded: &'static [&'static str],
    /// The tests that are left out where connections wait, because they allow less time than that may take.
    hasty: &'static [&'static str],
    /// The tests that may fail, because of a difference that docs/sockets.md names.
    differences: &'static [&'static str],
    /// The least number of ends of connections that must change over, if they wait for it: of the tests that always run, and of all.
    ends: [usize; 2],
}

const LIBUV: Suite = Suite {
    name: "libuv",
    place: "",
    program: "build/uv_run_tests_a",
    list: |folder| {
        let list = output(&folder.join("build/uv_run_tests_a"), &["--list"]);
        list.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
    },
    quick: &[
        "getsockname_tcp",
        "ipc_heavy_traffic",
        "ipc_send_recv_tcp",
        "ipc_tcp_connection",
        "not_",
        "poll_duplex",
        "poll_multiple_handles",
        "poll_nested_epoll",
        "readable_on_eof",
        "shutdown_",
        "tcp6_ping_pong",
        "tcp_alloc_cb_fail",
        "tcp_bind_error_addrinuse",
        "tcp_close_accept",
        "tcp_close_reset",
        "tcp_create_early_accept",
        "tcp_open",
        "tcp_ping_pong",
        "tcp_read_stop",
        "tcp_ref",
        "tcp_rst",
        "tcp_shutdown_after_write",
        "tcp_try_write",
        "tcp_write_after_connect",
        "tcp_write_fail",
        "tcp_write_to_half_open_connection",
        "tcp_writealot",
    ],
    // They need a host that does not answer.
    excluded: &["tcp_close_while_connecting", "tcp_connect_timeout"],
    hasty: &[],
    // Urgent data on connections that have changed over.
    differences: &["poll_oob", "tcp_oob"],
    ends: [10, 20],
};

const LIBEVENT: Suite = Suite {
    name: "libevent",
    place: "test",
    program: "build/bin/regress",
    list: |folder| {
        let list = output(&folder.join("build/bin/regress"), &["--list-tests"]);
        let names = list.lines().filter_map(|line| line.strip_prefix("    "));
        names.filter(|name| !name.ends_with("(Off by default)")).map(str::to_owned).collect()
    },
    quick: &[
        "bufferevent/bufferevent_connect",
        "http/allowed_methods",
        "http/autofree_connection",
        "http/basic",
        "http/chunk_out",
        "http/connection",
        "http/delete",
        "http/incomplete",
        "http/on_complete",
        "http/persist_connection",
        "http/post",
        "http/request",
        "http/simple",
        "http/stream",
        "http/terminate_chunked",
        "listener/",
        "rpc/basic",
    ],
    excluded: &[],
    // 10 ms for a request.
    hasty: &["http/bad_request"],
    differences: &[],
    ends: [10, 50],
};

const NODE: Suite = Suite {
    name: "node",
    place: "test/parallel",
    program: "/usr/bin/node",
    list: |folder| {
        let files = fs::read_dir(folder.join("test/parallel")).unwrap();
        let mut names: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name.ends_with(".js") || name.ends_with(".mjs"));
        names.sort();
        names
    },
    quick: &[
        "test-net-bytes-stats",
        "test-net-during-close",
        "test-net-end-without-connect",
        "test-net-error-twice",
        "test-net-large-string",
        "test-net-pause-resume",
        "test-net-persistent-keepalive",
        "test-net-pingpong.js",
        "test-net-reconnect",
        "test-net-sync-cork",
        "test-net-write-slow",
    ],
    // These never end with Node.js 20, which is newer than the tests.
    excluded: &[
        "test-http-keep-alive-drop-requests.js",
        "test-http-malformed-request.js",
        "test-http-pipeline-assertionerror-finish.js",
        "test-http-pipeline-requests-connection-leak.js",
        "test-http-pipeline-socket-parser-typeerror.js",
        "test-http-response-splitting.js",
        "test-http-should-keep-alive.js",
    ],
    hasty: &[],
    differences: &[],
    ends: [20, 100],
};

#[test]
fn libuv_tests_pass_that_pass_over_tcp() {
    LIBUV.pass();
}

#[test]
fn libevent_tests_pass_that_pass_over_tcp() {
    LIBEVENT.pass();
}

#[test]
fn node_tests_pass_that_pass_over_tcp() {
    kit::require_programs!(&["/usr/bin/node"]);
    NODE.pass();
}

/// How a test ends.
enum End {
    Passes,
    /// Over TCP too.
    Fails,
    /// Each time, and over TCP it passes each time.
    FailsHere,
}

impl Suite {
    /// Runs its tests, and fails if there is one that passes over TCP only.
    fn pass(&self) {
        let Some(folder) = folder(self.name) else { return };
        let mut tests = (self.list)(&folder);
        tests.retain(|test| !self.excluded.contains(&test.as_str()));
        if !is_soak() {
            tests.retain(|test| self.quick.iter().any(|&beginning| test.starts_with(beginning)));
        }
        assert!(tests.len() >= 10, "{}: {tests:?}", self.name);
        let mut worse = Vec::new();
        for &way in if is_soak() { &WAYS[..] } else { &WAYS[..2] } {
            let stage = way.stage();
            let (mut passed, mut failed, mut differ) = (0, Vec::new(), Vec::new());
            for test in &tests {
                if way.waits && self.hasty.contains(&test.as_str()) {
                    continue;
                }
                match self.run(&folder, &stage, test) {
                    End::Passes => passed += 1,
                    End::Fails => failed.push(test),
                    End::FailsHere if self.differences.contains(&test.as_str()) => differ.push(test),
                    End::FailsHere => worse.push(format!("{test}, {way:?}")),
                }
            }
            let connections = stage.all_connections();
            let changed = connections.iter().filter(|end| end.has_changed_over()).count();
            println!(
                "{}, {way:?}: {passed} tests pass, {differ:?} differ, {failed:?} fail over TCP too; {changed} of {} ends changed over",
                self.name,
                connections.len()
            );
            let least = self.ends[usize::from(is_soak())];
            assert!(
                !way.waits || changed >= least,
                "{}: {changed} ends changed over, not {least}",
                self.name
            );
        }
        assert!(worse.is_empty(), "{}: pass over TCP only: {worse:#?}", self.name);
    }

    fn run(&self, folder: &Path, stage: &Stage, test: &str) -> End {
        let program = folder.join(self.program);
        let program = program.to_str().unwrap();
        let over_tcp = || {
            let mut command = Command::new(program);
            command.arg(test).env("HOME", stage.world.files()).stdin(Stdio::null());
            command
        };
        for _ in 0..TRIES {
            let Err(reason) = self.try_once(folder, stage, stage.command(&[program, test])) else {
                return End::Passes;
            };
            if (0..TRIES).all(|_| self.try_once(folder, stage, over_tcp()).is_err()) {
                return End::Fails;
            }
            println!("{}: {test} fails, and passes over TCP: {reason}", self.name);
        }
        End::FailsHere
    }

    /// Runs a test. Returns why it has failed, if it has.
    fn try_once(&self, folder: &Path, stage: &Stage, mut command: Command) -> Result<(), String> {
        let files = stage.world.files();
        let log = fs::File::create(files.join("log")).unwrap();
        let mut child = command
            .current_dir(folder.join(self.place))
            .env("UV_RUN_AS_ROOT", "1")
            .env("NODE_TEST_DIR", &files)
            .env("TMPDIR", &files)
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        let group = Pid::from_child(&child);
        let ended = life::end_within(LONGEST, &mut child);
        if ended.is_some_and(|status| status.success()) {
            return Ok(());
        }
        // What it has started may have the ports that the next test needs.
        match kill_process_group(group, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => panic!("{error}"),
        }
        let said = fs::read(files.join("log")).unwrap();
        let how = ended.map_or("hangs".into(), |status| status.to_string());
        Err(format!("{how}: {}", String::from_utf8_lossy(&said)))
    }
}
