//! Measures how long programs wait for the successor of a killed daemon, when one user has as many endpoints and listeners as the limits
//! let him have.

use crate::report::{Better, Report, median};
use crate::stalls::Holders;
use anyhow::{Context, Result};
use ginnel::{AttachOptions, Endpoint, StreamChannel};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::Path;
use std::time::Instant;
use vmtest::TestBed;
use vmtest::installation::Plan;

/// What a user may have.
const ENDPOINTS: usize = 4096;
const LISTENERS: usize = 64;
/// The programs that have them. Each has a descriptor for each listener.
const PROGRAMS: usize = 16;
/// The longest permitted time, in milliseconds.
const LONGEST: f64 = 1000.0;
const RUNS: usize = 5;

const SEGMENT: &str = "restarting";
const CONFIG: &str = "[segment.restarting]\nsize = \"64M\"\nmembers = [\"host\"]\n";

/// What one of the programs does: it attaches, prints a line, makes its part of the endpoints and listeners, prints another, and waits.
pub fn hold(socket: &Path, number: usize) -> Result<()> {
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?;
    let mut input = std::io::stdin().lines();
    let mut say = |text: &str| -> Result<()> {
        println!("{text}");
        input.next().transpose()?;
        Ok(())
    };
    say("ready")?;
    let options = AttachOptions { socket: socket.to_owned(), ..AttachOptions::default() };
    // A few are left for the bench itself.
    let first = if number == 0 { RUNS } else { 0 };
    let mut endpoints = Vec::new();
    for n in first..ENDPOINTS / PROGRAMS {
        let endpoint = Endpoint::attach_with(SEGMENT, &options)?;
        for listener in 0..LISTENERS {
            endpoint.listen::<StreamChannel>(&format!("service-{number}-{n}-{listener}"))?.leave();
        }
        endpoints.push(endpoint);
    }
    say("listening")
}

/// Adds the row.
pub fn restarting(report: &mut Report) -> Result<()> {
    let bed = TestBed::new("restarting")?;
    let ginnel = Plan::new(&bed).config(CONFIG).start()?;
    let mut holders = Holders::start("listeners", &ginnel.socket(), PROGRAMS)?;
    holders.go_on()?;
    let options = AttachOptions { socket: ginnel.socket(), ..AttachOptions::default() };
    let restart = || -> Result<f64> {
        ginnel.kill_daemon()?;
        let begin = Instant::now();
        ginnel.start_daemon()?;
        // (If the daemon is killed at once, it may not know that this endpoint has ended.)
        Endpoint::attach_with(SEGMENT, &options).context("the new daemon does not serve")?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    };
    let times = (0..RUNS).map(|_| restart()).collect::<Result<Vec<_>>>()?;
    let case = format!("restart after kill -9, {ENDPOINTS} endpoints with {LISTENERS} listeners each");
    let middle = [median(times)];
    report.pairs(&case, "ms", Better::Lower, &middle, "what is allowed", &[LONGEST], Some(1.0), "median");
    Ok(())
}
