//! One of two programs whose connection changes over to shared memory is killed: before and after each of its system
//! calls, from the first byte until it has closed the connection. The other program gets what TCP would have delivered:
//! everything that was sent, and then the end or a reset. Nothing is left behind, and the next connection changes over.
//!
//!     cargo test -p programs --test kill [-- --every N]         kills at one of N places only
#![allow(unsafe_code)] // fork, ptrace, and calls with flags that the standard library does not have.

mod end;
mod victim;

use end::{Connection, Side};
use ginnel::Daemon;
use ginnel_report::Report;
use ginnel_status::Inspect;
use kit::build;
use kit::wait::{WATCHDOG, wait_until};
use kit::world::World;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use victim::{Order, Victim};

/// The environment variable that distinguishes the driver, which has the library, from its parent.
const FILES: &str = "GINNEL_TEST_KILL_FILES";

fn main() {
    match std::env::var_os(FILES) {
        None => with_library(),
        Some(files) => drive(Path::new(&files)),
    }
}

/// Runs this program again with the library, beside a daemon.
fn with_library() {
    let world = World::new();
    let library = build::library("libginnel_preload.so");
    let status = Command::new(std::env::current_exe().unwrap())
        .args(std::env::args_os().skip(1))
        .env(FILES, world.files())
        .env("LD_PRELOAD", library)
        .env("GINNEL_SOCKET", world.socket())
        .env("GINNEL_SOCKETS", "eager")
        .env("GINNEL_SOCKETS_REPORT", world.files().join("report"))
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}

/// Runs in one thread, so that a victim can be forked from it.
fn drive(files: &Path) {
    let arguments: Vec<String> = std::env::args().collect();
    let every =
        arguments.iter().position(|a| a == "--every").and_then(|at| arguments.get(at + 1)?.parse().ok());
    let every = every.unwrap_or(if std::env::var_os("GINNEL_QUICK").is_some() { 20 } else { 1 });
    let mut stage = Stage::new(files);
    for side in [Side::Connector, Side::Acceptor] {
        let begun = Instant::now();
        // The first round has no kill, so that an endpoint exists whenever something is compared.
        assert_eq!(stage.case(side, usize::MAX), Outcome::Over);
        let mut kills = 0;
        let mut at = 0;
        while stage.case(side, at) == Outcome::Killed {
            kills += 1;
            at += every;
        }
        assert!(kills * every > 100, "the {side:?} was killed at only {kills} places");
        println!("the {side:?} was killed at {kills} places ({:.1} s)", begun.elapsed().as_secs_f64());
        // Now the case runs to its end without a kill.
        assert_eq!(stage.case(side, usize::MAX), Outcome::Over);
    }
}

#[derive(Debug, PartialEq)]
enum Outcome {
    Killed,
    /// There was no further system call at which to kill.
    Over,
}

/// The pause between two checks of the other processes.
const PACE: Duration = Duration::from_micros(200);

struct Stage {
    report: PathBuf,
    daemon: Daemon,
    /// The daemon's resources while there is no connection, once they are known.
    base: Option<Seen>,
}

/// The resources that the daemon reports.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    used: u64,
    channels: usize,
    listeners: usize,
    endpoints: usize,
}

impl Stage {
    fn new(files: &Path) -> Self {
        Self { report: files.join("report"), daemon: Daemon::connect().unwrap(), base: None }
    }

    fn look(&mut self) -> Seen {
        let inspect: Inspect = serde_json::from_str(&self.daemon.inspect().unwrap()).unwrap();
        Seen {
            used: inspect.segments.iter().map(|segment| segment.used).sum(),
            channels: inspect.channels.len(),
            listeners: inspect.listeners.len(),
            endpoints: inspect.endpoints.len(),
        }
    }

    /// Returns whether both ends have left TCP in both directions.
    fn has_changed(&self) -> bool {
        let Ok(file) = fs::File::open(&self.report) else { return false };
        let report = Report::read(std::io::BufReader::new(file)).unwrap();
        let changed =
            report.connections.iter().filter(|c| c.sent_after_us.is_some() && c.received_after_us.is_some());
        changed.count() == 2
    }

    /// Runs a connection from beginning to end, or until the victim has been stopped `kill` times and is killed.
    fn case(&mut self, side: Side, kill: usize) -> Outcome {
        let _ = fs::remove_file(&self.report);
        let (mut victim, stream) = Victim::begin(side, kill);
        let mut near = Connection::new(stream, side.other());
        let outcome = match self.script(&mut victim, &mut near) {
            Some(()) => Outcome::Over,
            None => Outcome::Killed,
        };
        let (sent, tried) = victim.sent();
        let received = near.drain(WATCHDOG);
        assert!(
            (sent..=tried).contains(&received),
            "{side:?} killed at {kill}: {received} bytes of {sent} to {tried}"
        );
        if outcome == Outcome::Over {
            assert_eq!((victim.received(), sent), (near.sent, received));
        }
        drop((victim, near));
        self.all_is_gone(&format!("{side:?} killed at {kill}"));
        outcome
    }

    /// Makes both ends act in turn. Returns `None` if the victim was killed.
    fn script(&self, victim: &mut Victim, near: &mut Connection) -> Option<()> {
        // On TCP, while some of the data is not received yet.
        victim.does(Order::Send(1000))?;
        near.send(700);
        victim.does(Order::Receive(300))?;
        near.receive(400);
        let end = Instant::now() + WATCHDOG;
        while !self.has_changed() {
            assert!(Instant::now() < end, "the connection does not change over");
            victim.does(Order::Send(50))?;
            near.receive(40);
            near.send(60);
            victim.does(Order::Receive(70))?;
            std::thread::sleep(PACE);
        }
        for _ in 0..3 {
            victim.does(Order::Send(2000))?;
            near.receive(1900);
            near.send(3000);
            victim.does(Order::Receive(2800))?;
        }
        // Half-closed: the other direction continues.
        victim.does(Order::Finish)?;
        while !near.receive(usize::MAX) {}
        near.send(500);
        victim.does(Order::Receive(100))?;
        near.finish();
        victim.does(Order::ReceiveAll)?;
        victim.does(Order::Close)
    }

    /// Checks that the daemon has nothing left of the connection or of the victim.
    fn all_is_gone(&mut self, what: &str) {
        let Some(base) = self.base.clone() else {
            wait_until("the end of the first victim", || {
                let seen = self.look();
                seen.endpoints == 1 && seen.channels == 0
            });
            self.base = Some(self.look());
            return;
        };
        let end = Instant::now() + WATCHDOG;
        loop {
            let seen = self.look();
            if seen == base {
                return;
            }
            assert!(Instant::now() < end, "{what}: {seen:?} is left, not {base:?}");
            std::thread::sleep(PACE);
            look_at_daemon();
        }
    }
}

/// Makes the library read the daemon's messages: opens a connection that is worth a report, whatever those before were, and leads to
/// nothing.
fn look_at_daemon() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut accepted = listener.accept().unwrap().0;
    for _ in 0..32 {
        stream.write_all(b"x").unwrap();
        accepted.read_exact(&mut [0]).unwrap();
        accepted.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
    }
}
