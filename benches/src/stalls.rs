//! Measures how long a program waits for the daemon while others use the daemon heavily: they open tens of thousands of
//! handles, close them, end suddenly with them, or have thousands of locks.

use crate::report::{Better, Report, median};
use anyhow::{Context, Result, ensure};
use ginnel::{AttachOptions, BlockOptions, Endpoint, Rights};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmtest::TestBed;
use vmtest::installation::Plan;

/// The number of programs that open handles at the same time, and the number of handles of each.
const HOLDERS: usize = 4;
const HANDLES: usize = 30_000;
/// The longest permitted wait, in milliseconds.
const LONGEST: f64 = 50.0;
/// The number of locks, and of users of each lock.
const LOCKS: usize = 4096;
const USERS: usize = 63;
/// The longest permitted time of a request beside them, in milliseconds.
const REQUEST: f64 = 1.0;
const REQUESTS: usize = 2_000;
const PAGE: usize = 4096;
/// The time between two checks.
const LOOK: Duration = Duration::from_millis(1);
const WATCHDOG: Duration = Duration::from_secs(60);

const SEGMENT: &str = "stalls";
const CONFIG: &str = "[segment.stalls]\nsize = \"64M\"\npage = \"4K\"\nmembers = [\"host\"]\n[limits]\n\
    handles_per_member = 2000000\n";

fn attach(socket: &Path) -> Result<Endpoint> {
    let options = AttachOptions { socket: socket.to_owned(), ..AttachOptions::default() };
    Ok(Endpoint::attach_with(SEGMENT, &options)?)
}

/// Makes a request that changes nothing, because there is no such block. Returns the time that it took.
fn ask(endpoint: &Endpoint) -> Result<Duration> {
    let begin = Instant::now();
    ensure!(endpoint.open_block("nothing", Rights::READ).is_err(), "there should be no such block");
    Ok(begin.elapsed())
}

/// What a holder process does: it opens `blocks` or `locks`, prints a line, and then closes them or waits to be killed.
pub fn hold(what: &str, socket: &Path, number: usize) -> Result<()> {
    let endpoint = attach(socket)?;
    let mut input = BufReader::new(std::io::stdin()).lines();
    let mut say = |text: String| -> Result<()> {
        println!("{text}");
        std::io::stdout().flush()?;
        input.next().transpose()?;
        Ok(())
    };
    say("attached".into())?;
    let begin = Instant::now();
    if what == "locks" {
        let mut locks = Vec::new();
        for _ in 0..USERS.div_ceil(HOLDERS).min(USERS - number * USERS.div_ceil(HOLDERS)) {
            for lock in 0..LOCKS {
                locks.push(endpoint.mutex(&format!("lock{lock}"))?);
            }
        }
        return say(begin.elapsed().as_secs_f64().to_string());
    }
    let mut blocks = Vec::with_capacity(HANDLES);
    for _ in 0..HANDLES {
        blocks.push(endpoint.open_block("shared", Rights::READ)?);
    }
    say(begin.elapsed().as_secs_f64().to_string())?;
    for block in blocks {
        block.close()?;
    }
    say("closed".into())
}

/// The holder processes, all at the same step.
pub struct Holders(Vec<(Child, BufReader<std::process::ChildStdout>)>);

impl Holders {
    /// Starts this many processes, which attach.
    pub fn start(what: &str, socket: &Path, count: usize) -> Result<Self> {
        let own = std::env::current_exe()?;
        let one = |number: usize| -> Result<_> {
            let mut command = Command::new(&own);
            command.args(["--hold", what, "--number", &number.to_string(), "--socket"]).arg(socket);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let output = BufReader::new(child.stdout.take().context("its output")?);
            Ok((child, output))
        };
        let mut holders = Self((0..count).map(one).collect::<Result<_>>()?);
        holders.hear()?;
        Ok(holders)
    }

    /// Returns the next line that each of them prints.
    fn hear(&mut self) -> Result<Vec<String>> {
        let one = |(_, output): &mut (Child, BufReader<_>)| {
            let mut line = String::new();
            ensure!(output.read_line(&mut line)? > 0, "a holder has ended");
            Ok(line.trim().to_owned())
        };
        self.0.iter_mut().map(one).collect()
    }

    /// Lets them do the next step, and waits until all have done it.
    pub fn go_on(&mut self) -> Result<Vec<String>> {
        for (child, _) in &mut self.0 {
            writeln!(child.stdin.as_mut().context("its input")?)?;
        }
        self.hear()
    }

    fn kill(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|(child, _)| child.kill())?;
        self.0.iter_mut().try_for_each(|(child, _)| child.wait().map(drop))?;
        Ok(())
    }
}

impl Drop for Holders {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Makes requests without a pause while `done` runs. Returns the longest time of a request in milliseconds, and the result of
/// `done`.
fn longest<T>(socket: &Path, done: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let (endpoint, over) = (attach(socket)?, AtomicBool::new(false));
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !over.load(Ordering::Relaxed) {
                longest = longest.max(ask(&endpoint)?);
            }
            Ok(longest.as_secs_f64() * 1e3)
        });
        let result = done();
        over.store(true, Ordering::Relaxed);
        let waited: Result<f64> = asking.join().map_err(|_| anyhow::anyhow!("the one who asks panicked"))?;
        Ok((waited?, result?))
    })
}

/// Adds the rows.
pub fn stalls(report: &mut Report) -> Result<()> {
    let bed = TestBed::new("stalls")?;
    let ginnel = Plan::new(&bed).config(CONFIG).start()?;
    let socket = ginnel.socket();
    let mut row = |case: &str, unit, value: f64, limit: f64| {
        report.pairs(case, unit, Better::Lower, &[value], "what is allowed", &[limit], Some(1.0), "maximum");
    };
    let owner = attach(&socket)?;
    let options = BlockOptions { others: Rights::READ, ..BlockOptions::default() };
    let mut shared = owner.create_block("shared", 2 * PAGE, &options)?;
    let mut holders = Holders::start("blocks", &socket, HOLDERS)?;
    let (opening, times) = longest(&socket, || holders.go_on())?;
    let (closing, _) = longest(&socket, || holders.go_on())?;
    drop(holders);
    let mut holders = Holders::start("blocks", &socket, HOLDERS)?;
    holders.go_on()?;
    let (ending, ()) = longest(&socket, || {
        holders.kill()?;
        // A block can be shrunk only when no other endpoint has it open, that is, when all handles have been given back.
        let begin = Instant::now();
        while shared.resize(PAGE).is_err() {
            ensure!(begin.elapsed() < WATCHDOG, "the handles of killed programs are not given back");
            std::thread::sleep(LOOK);
        }
        Ok(())
    })?;
    let what = format!("{HOLDERS} x {HANDLES} handles of one block");
    row(&format!("longest wait while {what} are opened"), "ms", opening, LONGEST);
    row(&format!("longest wait while {what} are closed"), "ms", closing, LONGEST);
    row(&format!("longest wait at the sudden end of {what}"), "ms", ending, LONGEST);
    let times: Vec<f64> = times.iter().map(|time| time.parse()).collect::<Result<_, _>>()?;
    let alone = {
        let mut blocks = Vec::new();
        let begin = Instant::now();
        for _ in 0..1000 {
            blocks.push(owner.open_block("shared", Rights::READ)?);
        }
        begin.elapsed().as_secs_f64() / 1000.0 * HANDLES as f64
    };
    let case = format!("open {HANDLES} handles, {HOLDERS} programs at once, each");
    report.pairs(&case, "s", Better::Lower, &[median(times)], "one program alone", &[alone], None, "");
    locks(&socket, report)
}

fn locks(socket: &Path, report: &mut Report) -> Result<()> {
    let mut holders = Holders::start("locks", socket, HOLDERS)?;
    holders.go_on()?;
    let endpoint = attach(socket)?;
    let asked = (0..REQUESTS).map(|_| Ok(ask(&endpoint)?.as_secs_f64() * 1e3)).collect::<Result<Vec<_>>>()?;
    let case = format!("a request beside {LOCKS} locks with {USERS} users each");
    let middle = [median(asked)];
    report.pairs(&case, "ms", Better::Lower, &middle, "what is allowed", &[REQUEST], Some(1.0), "median");
    Ok(())
}
