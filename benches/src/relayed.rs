//! Requests of a program in a VM, which the VM's daemon passes on to the host's daemon: many under way at the same time,
//! compared with one at a time.

use crate::report::{Better, Report, median};
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use ginnel_layout::Name;
use ginnel_layout::channel::ChannelKind;
use ginnel_layout::wire::{self, Header, Kind};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with, socketpair,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use vmtest::TestBed;
use vmtest::installation::{Plan, program};
use zerocopy::{FromZeros, IntoBytes};

/// The number of requests under way at the same time.
const MANY: usize = 64;
/// The greatest permitted ratio of the time of many requests to that of one.
const TIMES: f64 = 4.0;
/// The number of measurements of each kind.
const ROUNDS: usize = 200;
const SEGMENT: &str = "relayed";
/// The longest time that an answer, or the whole measurement, may take.
const WATCHDOG: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(120);

/// The kind of request.
#[derive(Clone, Copy, ValueEnum)]
pub enum Request {
    /// Open a block that does not exist: the daemon looks it up and changes nothing.
    Look,
    /// Listen at a name: the daemon records it.
    Listen,
}

impl Request {
    fn name(self) -> &'static str {
        match self {
            Self::Look => "look",
            Self::Listen => "listen",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Look => "that change nothing",
            Self::Listen => "that are recorded",
        }
    }
}

/// The times of requests in seconds. Each pair was measured one right after the other.
#[derive(Serialize, Deserialize)]
struct Times {
    one: Vec<f64>,
    many: Vec<f64>,
    /// The same sends and receives by one program alone over a socket pair.
    own: Vec<f64>,
    /// How often the VM's daemon has slept during many requests, on average.
    sleeps: f64,
}

/// Returns how often the VM's daemon has gone to sleep so far.
fn sleeps() -> Result<u64> {
    for entry in std::fs::read_dir("/proc")? {
        let process = entry?.path();
        let says = |file: &str| std::fs::read_to_string(process.join(file)).unwrap_or_default();
        // The keeper has the same name.
        if says("comm").trim() == "ginneld" && says("cmdline").contains("guest") {
            let status = says("status");
            let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            return Ok(line.context("no count of context switches")?.trim().parse()?);
        }
    }
    bail!("there is no ginneld")
}

/// A program's connection to the daemon. It does not use the library, whose threads and locks are not to be measured.
struct Asker {
    socket: OwnedFd,
    next: u32,
    buffer: Vec<u8>,
}

impl Asker {
    fn attach() -> Result<Self> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(WATCHDOG))?;
        connect(&socket, &SocketAddrUnix::new(wire::SOCKET)?)?;
        let mut asker = Self { socket, next: 1, buffer: vec![0; wire::MAX_PACKET] };
        asker
            .say(Kind::HELLO, wire::Hello { version: wire::VERSION, reserved: 0, features: 0 }.as_bytes())?;
        asker.expect(Kind::HELLO_OK)?;
        let mut attach = wire::Attach::new_zeroed();
        (attach.segment, attach.name) = (name(SEGMENT)?, name("asker")?);
        asker.say(Kind::ATTACH, attach.as_bytes())?;
        asker.expect(Kind::ATTACHED)?;
        Ok(asker)
    }

    fn say(&mut self, kind: Kind, body: &[u8]) -> Result<u32> {
        let request = self.next;
        self.next += 1;
        let packet = [Header { kind, flags: 0, request }.as_bytes(), body].concat();
        send(&self.socket, &packet, SendFlags::NOSIGNAL)?;
        Ok(request)
    }

    /// Receives the next answer.
    fn hear(&mut self) -> Result<(Header, Vec<u8>)> {
        // Descriptors that come with it are dropped.
        let (len, _) =
            recv(&self.socket, &mut self.buffer[..], RecvFlags::empty()).context("waiting for an answer")?;
        let (header, body) = wire::split(&self.buffer[..len]).context("an answer too short")?;
        Ok((header, body.to_vec()))
    }

    fn expect(&mut self, kind: Kind) -> Result<()> {
        let (header, body) = self.hear()?;
        let text = String::from_utf8_lossy(&body);
        ensure!(header.kind == kind, "an answer of kind {}, not {}: {text}", header.kind.0, kind.0);
        Ok(())
    }

    /// Sends `count` requests at once, and waits for all answers. Returns the time in seconds, and the listeners that must be
    /// closed.
    fn ask(&mut self, what: Request, count: usize) -> Result<(f64, Vec<Vec<u8>>)> {
        let names: Vec<Name> = (0..count).map(|n| name(&format!("nothing{n}"))).collect::<Result<_>>()?;
        let mut waits = BTreeSet::new();
        let mut listeners = Vec::new();
        let begin = Instant::now();
        for name in names {
            waits.insert(match what {
                Request::Look => {
                    let mut open = wire::BlockOpen::new_zeroed();
                    (open.name, open.rights) = (name, wire::Rights::READ);
                    self.say(Kind::BLOCK_OPEN, open.as_bytes())?
                }
                Request::Listen => {
                    let kind = ChannelKind::MESSAGE.0;
                    let listen = wire::Listen { name, kind, backlog: 0, capacity: 0, input_capacity: 0 };
                    self.say(Kind::LISTEN, listen.as_bytes())?
                }
            });
        }
        while !waits.is_empty() {
            let (header, body) = self.hear()?;
            ensure!(waits.remove(&header.request), "an answer to nothing");
            match (what, header.kind) {
                (Request::Look, Kind::ERROR) => {}
                (Request::Listen, Kind::LISTENING) => listeners.push(body),
                _ => bail!("an answer of kind {}: {}", header.kind.0, String::from_utf8_lossy(&body)),
            }
        }
        Ok((begin.elapsed().as_secs_f64(), listeners))
    }

    fn close(&mut self, listeners: Vec<Vec<u8>>) -> Result<()> {
        for listener in listeners {
            self.say(Kind::UNLISTEN, &listener)?;
            self.expect(Kind::OK)?;
        }
        Ok(())
    }
}

fn name(text: &str) -> Result<Name> {
    Name::new(text).map_err(|error| anyhow::anyhow!("{text}: {error}"))
}

/// Returns how long it takes to send and receive as many bytes as [`MANY`] requests, without any other process.
fn alone() -> Result<f64> {
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let mut buffer = vec![0; wire::MAX_PACKET];
    let packet = vec![0; size_of::<Header>() + size_of::<wire::BlockOpen>()];
    let begin = Instant::now();
    for _ in 0..MANY {
        send(&near, &packet, SendFlags::NOSIGNAL)?;
    }
    for _ in 0..MANY {
        recv(&far, &mut buffer[..], RecvFlags::empty())?;
    }
    Ok(begin.elapsed().as_secs_f64())
}

/// What the program in the VM does: it measures and prints the times.
pub fn ask(what: Request) -> Result<()> {
    let mut asker = Asker::attach()?;
    let mut times = Times { one: Vec::new(), many: Vec::new(), own: Vec::new(), sleeps: 0.0 };
    let mut slept = 0;
    let (_, listeners) = asker.ask(what, MANY)?;
    asker.close(listeners)?;
    for _ in 0..ROUNDS {
        let (one, listeners) = asker.ask(what, 1)?;
        asker.close(listeners)?;
        let before = sleeps()?;
        let (many, listeners) = asker.ask(what, MANY)?;
        slept += sleeps()? - before;
        asker.close(listeners)?;
        times.one.push(one);
        times.many.push(many);
        times.own.push(alone()?);
    }
    times.sleeps = slept as f64 / ROUNDS as f64;
    println!("{}", serde_json::to_string(&times)?);
    Ok(())
}

/// Adds the rows.
pub fn relayed(report: &mut Report) -> Result<()> {
    let bed = TestBed::new("relayed")?;
    let ginnel = Plan::new(&bed).vm("a").segment(SEGMENT, 16, &["host", "a"]).start()?;
    let vm = ginnel.vm("a")?.program(program("bench-daemon")?).start()?;
    vm.wait_ready()?;
    let _daemon = ginnel.start_guest(&vm)?;
    for what in [Request::Look, Request::Listen] {
        let said = vm.run_within(PATIENCE, &format!("bench-daemon --ask {}", what.name()))?.ok()?.stdout;
        let line = said.lines().last().unwrap_or_default();
        let times: Times = serde_json::from_str(line).with_context(|| format!("no times: {said:?}"))?;
        let ms = |times: Vec<f64>| [median(times.into_iter().map(|time| time * 1e3).collect())];
        let case = format!("{MANY} relayed requests {} at once", what.what());
        let (many, one, [own]) = (ms(times.many), ms(times.one), ms(times.own));
        let note = format!(
            "medians of {ROUNDS}; a VM whose daemon relays, and sleeps {:.0} times; the program's sends and receives alone: \
             {own:.2} ms",
            times.sleeps
        );
        report.pairs(&case, "ms", Better::Lower, &many, "one alone", &one, Some(1.0 / TIMES), &note);
    }
    Ok(())
}
