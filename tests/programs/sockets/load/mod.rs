//! Thousands of connections that change over to shared memory under load, at random positions, and the resources that
//! remain after them.

mod program;
pub mod talk;

use self::program::{PHASES, ROLE};
use self::talk::{Plan, Sums};
use ginnel_report::Report;
use ginnel_status::Inspect;
use kit::build;
use kit::process::signal;
use kit::world::World;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fs;
use std::io::BufReader;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Number of connections before the first measurement, and between the two measurements. Each has two directions that
/// change over.
const WARM: u64 = 1000;
const CONNECTIONS: u64 = 2000;
/// How much private memory a process may have in addition after them, in KiB.
const MORE: u64 = 4 << 10;
/// Number of slots at their doorbell that programs allocate when the first thread sleeps there.
const PLACES: usize = 4;
/// How often `make soak` does this, each time with other connections: a hundred thousand changes in all. `GINNEL_SOAK_ROUNDS` is another
/// number.
const ROUNDS: u64 = 6;
/// How many connections there are between the measurements of `make soak`.
const MANY: u64 = 9000;
/// The reasons why a connection stays on TCP if its peer's report was matched with that of a socket that is gone, before
/// the daemon learned of that.
const IN_VAIN: [&str; 2] =
    ["more than one socket could be its other end", "the daemon did not open the rings"];
/// How long to wait without any progress.
const WATCHDOG: Duration = Duration::from_secs(120);

/// A process, and the resources that it uses.
#[derive(Debug)]
struct Footprint {
    fds: usize,
    /// Private memory, in KiB.
    memory: u64,
}

impl Footprint {
    fn of(process: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let memory = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        Self {
            fds: fs::read_dir(format!("/proc/{process}/fd")).unwrap().count(),
            memory: memory.split_whitespace().next().unwrap().parse().unwrap(),
        }
    }
}

struct Load {
    world: World,
    /// The server and the client.
    programs: Vec<Child>,
}

impl Load {
    fn start(phases: &str) -> Self {
        let mut load = Self { world: World::new(), programs: Vec::new() };
        for role in ["server", "client"] {
            let files = load.world.files();
            let log = fs::File::create(files.join(format!("{role}.log"))).unwrap();
            let mut command = load.world.command("run --mode eager");
            let child = program::run_by(command.arg(format!("--report={role}.report")).arg("--"))
                .env("GINNEL_PRELOAD", build::library("libginnel_preload.so"))
                .env(ROLE, role)
                .env(PHASES, phases)
                .stdin(Stdio::null())
                .stdout(log.try_clone().unwrap())
                .stderr(log)
                .spawn()
                .unwrap();
            load.programs.push(child);
            if role == "server" {
                load.wait_for("the server", || files.join("port").exists());
            }
        }
        load
    }

    fn said(&self) -> String {
        let log =
            |role| fs::read_to_string(self.world.files().join(format!("{role}.log"))).unwrap_or_default();
        ["server", "client"].map(log).concat()
    }

    /// Waits for a condition while the programs run.
    fn wait_for(&mut self, what: &str, mut condition: impl FnMut() -> bool) {
        let (mut size, mut end) = (0, Instant::now() + WATCHDOG);
        while !condition() {
            for i in 0..self.programs.len() {
                let ended = self.programs[i].try_wait().unwrap();
                assert!(ended.is_none(), "{ended:?} before {what}: {}", self.said());
            }
            // As long as the programs report connections, they do not hang.
            let now = self.reported();
            if std::mem::replace(&mut size, now) != now {
                end = Instant::now() + WATCHDOG;
            }
            assert!(Instant::now() < end, "{what} did not happen: {}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn reported(&self) -> u64 {
        fs::metadata(self.world.files().join("client.report")).map_or(0, |meta| meta.len())
    }

    /// Waits for the end of a phase, and compares the bytes sent with those received.
    fn phase(&mut self, phase: usize) -> u64 {
        let files = self.world.files();
        let results = ["client", "server"].map(|role| files.join(format!("{role}.{phase}")));
        self.wait_for("the end of a phase", || results.iter().all(|file| file.exists()));
        let [client, server] = results.map(|file| sums(&file));
        assert_eq!(client.len(), server.len());
        for (number, (sent, received)) in &client {
            assert_eq!(server[number], (*received, *sent), "connection {number}");
        }
        client.len() as u64
    }

    fn go(&self, phase: usize) {
        fs::write(self.world.files().join(format!("go.{phase}")), "").unwrap();
    }

    fn inspect(&self) -> Inspect {
        let mut daemon = ginnel::Daemon::connect_to(&self.world.socket()).unwrap();
        serde_json::from_str(&daemon.inspect().unwrap()).unwrap()
    }

    /// Returns the resources of the daemon and the programs once all connections are gone.
    fn footprints(&mut self) -> (u64, Vec<Footprint>) {
        let end = Instant::now() + WATCHDOG;
        let inspect = loop {
            let inspect = self.inspect();
            if inspect.channels.is_empty() {
                break inspect;
            }
            assert!(Instant::now() < end, "channels are left: {:#?}", inspect.channels);
        };
        let mut processes = vec![inspect.daemon.pid];
        for endpoint in &inspect.endpoints {
            processes.extend(endpoint.pid);
        }
        assert_eq!(processes.len(), 3, "{:#?}", inspect.endpoints);
        let used = inspect.segments.iter().map(|segment| segment.used).sum();
        (used, processes.into_iter().map(Footprint::of).collect())
    }

    /// Lets the programs end. Counts the directions that have changed over, and the ends that were reported in vain
    /// because later connections use the same addresses and ports.
    fn end(mut self) -> (u64, u64) {
        for program in &mut self.programs {
            let status = program.wait().unwrap();
            let said = fs::read_to_string(self.world.files().join("client.log")).unwrap_or_default();
            assert!(status.success(), "{status}: {said}");
        }
        let (mut directions, mut in_vain) = (0, 0);
        for role in ["server", "client"] {
            let file = fs::File::open(self.world.files().join(format!("{role}.report"))).unwrap();
            let report = Report::read(BufReader::new(file)).unwrap();
            let sent = report.connections.iter().filter(|connection| connection.sent_after_us.is_some());
            directions += sent.count() as u64;
            let others =
                report.connections.iter().filter(|connection| IN_VAIN.contains(&&*connection.reason));
            in_vain += others.count() as u64;
        }
        (directions, in_vain)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for program in &mut self.programs {
            if matches!(program.try_wait(), Ok(None)) {
                // `ginnel run` passes the signal on.
                signal(program, Signal::TERM);
                let _ = program.wait();
            }
        }
    }
}

/// Bytes sent and received, by connection.
fn sums(file: &Path) -> BTreeMap<u64, Sums> {
    let text = fs::read_to_string(file).unwrap();
    let line = |line: &str| {
        let [number, sent, received] =
            line.split(' ').map(|n| n.parse().unwrap()).collect::<Vec<u64>>().try_into().unwrap();
        (number, (sent, received))
    };
    text.lines().map(line).collect()
}

#[test]
fn thousands_of_connections_change_over_under_load_and_leave_nothing() {
    let quick = std::env::var_os("GINNEL_QUICK").is_some();
    let (rounds, count) = match std::env::var_os("GINNEL_SOAK") {
        Some(_) => (soak_rounds(), MANY),
        None => (1, if quick { CONNECTIONS / 2 } else { CONNECTIONS }),
    };
    for round in 0..rounds {
        change_over(round * (WARM + count), count);
    }
}

fn soak_rounds() -> u64 {
    std::env::var("GINNEL_SOAK_ROUNDS")
        .map_or(ROUNDS, |rounds| rounds.parse().expect("GINNEL_SOAK_ROUNDS is a number"))
}

/// Runs connections whose numbers begin with `first`.
fn change_over(first: u64, count: u64) {
    let mut load = Load::start(&format!("{first} {WARM} {count}"));
    assert_eq!(load.phase(0), WARM);
    let (used, before) = load.footprints();
    let begun = Instant::now();
    load.go(0);
    assert_eq!(load.phase(1), count);
    let took = begun.elapsed();
    // While the programs wait, they make a connection now and then, whose descriptors come and go.
    let end = Instant::now() + WATCHDOG;
    let (used_after, after) = loop {
        let (used, after) = load.footprints();
        // The daemon comes first.
        let most = [0, PLACES, PLACES];
        let more = before.iter().zip(&after).map(|(before, after)| after.fds.saturating_sub(before.fds));
        if more.zip(most).all(|(more, most)| more <= most) {
            break (used, after);
        }
        assert!(Instant::now() < end, "descriptors: {before:?}, then {after:?}");
    };
    assert_eq!(used_after, used, "bytes of segments");
    for (before, after) in before.iter().zip(&after) {
        println!("memory: {} KiB, then {} KiB", before.memory, after.memory);
        assert!(after.memory < before.memory + MORE, "from {before:?} to {after:?}");
    }
    load.go(1);
    let (changed, in_vain) = load.end();
    // At least one direction for each sender that was told to continue until it has changed over.
    let expected = (first..first + WARM + count).filter(|number| Plan::new(*number).changes).count() as u64;
    println!(
        "{changed} directions changed over, those of {count} connections in {took:?}; {in_vain} ends in vain"
    );
    assert!(changed + in_vain >= expected, "{changed} changed over, not {expected}; {in_vain} in vain");
}
