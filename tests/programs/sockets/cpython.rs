//! CPython's own tests of sockets: each has the same outcome with the library and without it, while both ends of their
//! connections, which are in one process, change over.

use ginnel_report::Record;
use programs::life;
use programs::stage::{PYTHON, Stage};
use std::fs;
use std::process::{Command, Stdio};

/// How long a connection may wait for its change, in milliseconds. Connections whose other end comes later or never
/// wait in vain.
const WAIT: &str = "500";
/// How often tests are repeated whose outcome differs.
const TRIES: usize = 4;

/// Prints the outcome of each test of a module, one per line: `OUTCOMES MODULE PATTERN...`.
const RUNNER: &str = include_str!("cpython.py");

/// Tests that also fail over TCP with small buffers: they send a megabyte, and rely on one call to take all of it. (The transport tells
/// the wrong protocol that it may go on.) docs/sockets.md says how much a call takes.
const BUFFERS: [&str; 3] = [
    "test_sslproto.SelectorStartTLSTests.test_start_tls_client_buf_proto_1",
    "test_sslproto.SelectorStartTLSTests.test_start_tls_client_reg_proto_1",
    "test_sslproto.SelectorStartTLSTests.test_start_tls_server_1",
];

struct Module {
    name: &'static str,
    /// The tests that are always run: those of TCP that do not sleep for long.
    patterns: &'static [&'static str],
    /// The least number of ends of connections that must change over. The others may be closed before, depending on the
    /// machine.
    ends: usize,
    /// The same number if all tests are run, with `make soak-sockets`.
    all_ends: usize,
}

const MODULES: [Module; 4] = [
    Module {
        name: "test.test_socket",
        patterns: &[
            "*TCP*",
            "*FileObject*",
            "*SendfileUsing*",
            "*.BasicSocketPairTest.*",
            "*.InterruptedRecv*",
            "*.NetworkConnection*Create*",
            "*.GeneralModuleTests.*accept*",
            "*.ContextManagersTest.*",
            "*.CreateServer*",
        ],
        ends: 100,
        all_ends: 200,
    },
    Module { name: "test.test_selectors", patterns: &["*.EpollSelectorTestCase.*"], ends: 0, all_ends: 0 },
    Module {
        name: "test.test_ssl",
        patterns: &[
            "*.SimpleBackgroundTests.*",
            "*.TestPreHandshakeClose.*",
            "*.TestPostHandshakeAuth.*",
            "*.TestSSLDebug.*",
        ],
        ends: 40,
        all_ends: 160,
    },
    Module {
        name: "test.test_asyncio",
        patterns: &[
            "*.test_streams.*",
            "*.test_sendfile.*",
            "*.test_sock_lowlevel.*",
            "*.test_buffered_proto.*",
            "*.test_server.*",
        ],
        ends: 60,
        all_ends: 350,
    },
];

#[test]
fn cpython_tests_have_the_same_outcome_with_and_without_the_library() {
    let import = Command::new(PYTHON).args(["-c", "import test.test_socket"]).stderr(Stdio::null()).status();
    kit::require!(
        import.is_ok_and(|status| status.success()),
        "the tests of {PYTHON} are not installed: `scripts/setup test` installs them"
    );
    std::thread::scope(|scope| {
        for module in &MODULES {
            scope.spawn(|| module.compare());
        }
    });
}

/// Returns the tests whose outcome differs.
fn differences(plain: &[String], shared: &[String]) -> Vec<String> {
    let only = |here: &[String], there: &[String]| -> Vec<String> {
        here.iter().filter(|line| !there.contains(line)).cloned().collect()
    };
    let lines = [only(plain, shared), only(shared, plain)].concat();
    let mut names: Vec<String> =
        lines.iter().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect();
    names.retain(|name| !BUFFERS.iter().any(|known| name.ends_with(known)));
    names.sort();
    names.dedup();
    names
}

impl Module {
    fn compare(&self) {
        let all = std::env::var_os("GINNEL_SOAK").is_some();
        let patterns: Vec<String> = if all {
            vec!["*".into()]
        } else {
            self.patterns.iter().map(|&pattern| pattern.into()).collect()
        };
        let (plain, shared, ends) = self.run_both(&patterns);
        assert!(!plain.is_empty(), "{}: no tests", self.name);
        // Some of CPython's tests depend on timing, and sometimes fail on a busy machine, with the library or without
        // it.
        let mut other = differences(&plain, &shared);
        for _ in 0..TRIES {
            if other.is_empty() {
                break;
            }
            println!("{}: once more: {other:?}", self.name);
            let (plain, shared, _) = self.run_both(&other);
            other = differences(&plain, &shared);
        }
        assert!(other.is_empty(), "{}: not the same: {other:#?}", self.name);
        let changed =
            ends.iter().filter(|one| one.sent_after_us.is_some() && one.received_after_us.is_some()).count();
        let least = if all { self.all_ends } else { self.ends };
        println!("{}: {} tests, {changed} of {} ends changed over", self.name, plain.len(), ends.len());
        assert!(changed >= least, "{}: {changed} ends changed over, not {least}", self.name);
    }

    /// The outcomes of the tests without the library and with it, and the library's report.
    fn run_both(&self, patterns: &[String]) -> (Vec<String>, Vec<String>, Vec<Record<'static>>) {
        let [plain, shared] = ["off", "eager"].map(|mode| {
            let stage = Stage::new(mode);
            let outcomes = self.run(&stage, patterns);
            (outcomes, stage.end())
        });
        (plain.0, shared.0, shared.1)
    }

    /// Returns the outcomes of its tests, in order.
    fn run(&self, stage: &Stage, patterns: &[String]) -> Vec<String> {
        let files = stage.world.files();
        fs::write(files.join("runner.py"), RUNNER).unwrap();
        let log = fs::File::create(files.join("log")).unwrap();
        let mut program = vec![PYTHON, "runner.py", "outcomes", self.name];
        program.extend(patterns.iter().map(String::as_str));
        let mut child = stage
            .command(&program)
            .env("GINNEL_SOCKETS_WAIT", WAIT)
            .env("TMPDIR", &files)
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let log = || fs::read_to_string(files.join("log")).unwrap_or_default();
        let ended = life::end(&mut child);
        let status = ended.unwrap_or_else(|| panic!("{} hangs: {}", self.name, log()));
        assert!(status.success(), "{}: {}", self.name, log());
        let text = fs::read_to_string(files.join("outcomes")).unwrap();
        let mut outcomes: Vec<_> = text.lines().map(str::to_owned).collect();
        outcomes.sort();
        outcomes
    }
}
