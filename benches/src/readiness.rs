//! One thread serves many channels with a readiness set. It is compared with a thread that serves one channel with such a set,
//! and with one that serves as many Unix sockets with epoll.

use crate::measure::cpu_seconds;
use crate::report::{Better, Report, median};
use anyhow::{Context, Result, ensure};
use ginnel::{AttachOptions, ChannelOptions, Endpoint, Error, MessageChannel, ReadySet};
use ginnel_layout::ring;
use rustix::event::epoll;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use vmtest::TestBed;
use vmtest::installation::Plan;

/// The number of channels, of which one is busy.
pub const CHANNELS: usize = 10_000;
/// The number of round trips in a measurement, and the number of measurements.
const ROUNDS: usize = 4_000;
const PAIRS: usize = 15;
/// The number of round trips in which the server sleeps in between.
const SLOW_ROUNDS: usize = 200;
const PAUSE: Duration = Duration::from_millis(1);
/// The duration without traffic in which CPU time is measured.
const IDLE: Duration = Duration::from_secs(2);
const MESSAGE: [u8; 8] = [7; 8];

/// The greatest permitted ratio to the latency of one channel alone.
const AMONG_MANY: f64 = 1.2;
/// The target for opening all channels, in seconds.
const OPENING: f64 = 2.0;
const DESCRIPTORS: f64 = 8.0;
const BYTES: f64 = 16.0;

const SEGMENT: &str = "many";
const CONFIG: &str = "[segment.many]\nsize = \"256M\"\nmembers = [\"host\"]\n";

fn attach(socket: &Path) -> Result<Endpoint> {
    let options = AttachOptions { socket: socket.to_owned(), ..AttachOptions::default() };
    Ok(Endpoint::attach_with(SEGMENT, &options)?)
}

fn small() -> ChannelOptions {
    ChannelOptions { capacity: ring::MIN_CAPACITY, ..ChannelOptions::default() }
}

fn descriptors() -> Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

/// Raises the limit for open file descriptors as far as possible.
fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.map(|most| most.max(1 << 16));
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
}

/// What a server process does: it accepts `count` channels, prints what that cost, and echoes.
pub fn serve(socket: &Path, count: usize) -> Result<()> {
    let endpoint = attach(socket)?;
    let name = format!("echo{count}");
    let listener = endpoint.listen_with::<MessageChannel>(&name, &small())?;
    let before = descriptors()?;
    let mut set = ReadySet::new()?;
    println!("listening");
    let mut channels = Vec::with_capacity(count);
    for key in 0..count as u64 {
        let mut channel = listener.accept()?;
        channel.receiver().register(&set, key)?;
        channels.push(channel);
    }
    println!("{}", descriptors()? - before);
    let (mut keys, mut buffer) = (Vec::new(), [0; 64]);
    loop {
        set.wait(&mut keys, None)?;
        for key in &keys {
            let channel = &mut channels[*key as usize];
            loop {
                match channel.recv_into(&mut buffer) {
                    Ok(len) => channel.send(&buffer[..len])?,
                    Err(Error::WouldBlock) => break,
                    Err(_) => return Ok(()),
                }
            }
        }
    }
}

/// Does the same with Unix sockets and epoll.
pub fn serve_sockets(path: &Path, count: usize) -> Result<()> {
    raise_limit();
    let listener = UnixListener::bind(path)?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    println!("listening");
    let mut sockets = Vec::with_capacity(count);
    for key in 0..count {
        let (socket, _) = listener.accept()?;
        socket.set_nonblocking(true)?;
        epoll::add(&epoll, &socket, epoll::EventData::new_u64(key as u64), epoll::EventFlags::IN)?;
        sockets.push(socket);
    }
    println!("{count}");
    let empty = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
    let (mut events, mut buffer) = ([empty; 64], [0; 64]);
    loop {
        let ready = epoll::wait(&epoll, &mut events, None)?;
        for event in &events[..ready] {
            let mut socket = &sockets[event.data.u64() as usize];
            match socket.read(&mut buffer)? {
                0 => return Ok(()),
                len => socket.write_all(&buffer[..len])?,
            }
        }
    }
}

/// A server process, which is killed when this value is dropped.
struct Server {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Server {
    fn start(kind: &str, path: &Path, count: usize) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--serve", kind, "--count", &count.to_string(), "--socket"]).arg(path);
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let output = BufReader::new(child.stdout.take().context("its output")?);
        let mut server = Self { child, output };
        ensure!(server.line()? == "listening", "a server that does not listen");
        Ok(server)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.output.read_line(&mut line)? > 0, "a server has ended");
        Ok(line.trim().to_owned())
    }

    /// Returns the CPU time that it has used, in seconds.
    fn cpu(&self) -> Result<f64> {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.child.id()))?;
        let nanoseconds: f64 = text.split(' ').next().context("CPU time")?.parse()?;
        Ok(nanoseconds * 1e-9)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// Returns the median time one way, in nanoseconds.
fn one_way(
    rounds: usize,
    pause: Option<Duration>,
    mut there_and_back: impl FnMut() -> Result<()>,
) -> Result<f64> {
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        if let Some(pause) = pause {
            std::thread::sleep(pause);
        }
        let begin = Instant::now();
        there_and_back()?;
        times.push(begin.elapsed().as_nanos() as f64 / 2.0);
    }
    Ok(median(times))
}

/// Adds the rows.
pub fn readiness(report: &mut Report) -> Result<()> {
    raise_limit();
    let bed = TestBed::new("readiness")?;
    let ginnel = Plan::new(&bed).config(CONFIG).start()?;
    let endpoint = attach(&ginnel.socket())?;
    let used = || -> Result<f64> {
        let status: serde_json::Value = serde_json::from_str(&endpoint.inspect()?)?;
        status["segments"][0]["used"].as_f64().context("bytes in use")
    };

    let mut many = Server::start("channels", &ginnel.socket(), CHANNELS)?;
    let (before, begin, had) = (used()?, Instant::now(), descriptors()?);
    let name = format!("echo{CHANNELS}");
    let options = ChannelOptions { patience: Duration::from_secs(10), ..small() };
    let mut channels = Vec::with_capacity(CHANNELS);
    while channels.len() < CHANNELS {
        match endpoint.connect_with::<MessageChannel>(&name, &options) {
            Ok(channel) => channels.push(channel),
            // The server has not accepted the earlier ones yet.
            Err(error) if error.code() == Some(ginnel::ErrorCode::LIMIT) => std::thread::yield_now(),
            Err(error) => return Err(error.into()),
        }
    }
    let theirs: f64 = many.line()?.parse()?;
    let opening = begin.elapsed().as_secs_f64();
    let descriptors = theirs.max((descriptors()? - had) as f64);
    let each = (used()? - before) / CHANNELS as f64 / 1024.0;
    let limit = "what is allowed";
    let case = |what: &str| format!("{what}, {CHANNELS} channels");
    report.pairs(case("opening all"), "s", Better::Lower, &[opening], limit, &[OPENING], Some(1.0), "");
    report.pairs(
        case("descriptors of a process"),
        "",
        Better::Lower,
        &[descriptors],
        limit,
        &[DESCRIPTORS],
        Some(1.0),
        "beyond those before the first",
    );
    report.pairs(
        case("segment of one"),
        "KiB",
        Better::Lower,
        &[each],
        limit,
        &[BYTES],
        Some(0.999),
        "and a board",
    );

    // When the server answers over the last channel, it has tried all of them.
    let mut buffer = [0; 64];
    channels[CHANNELS - 1].send(&MESSAGE)?;
    channels[CHANNELS - 1].recv_into(&mut buffer)?;
    std::thread::sleep(PAUSE);
    let (theirs, ours) = (many.cpu()?, cpu_seconds());
    std::thread::sleep(IDLE);
    let idle = (many.cpu()? - theirs + cpu_seconds() - ours) / IDLE.as_secs_f64() * 100.0;
    report.pairs(
        case("CPU while idle"),
        "%",
        Better::Lower,
        &[idle],
        limit,
        &[0.1],
        Some(1.0),
        "both processes",
    );

    let mut alone = Server::start("channels", &ginnel.socket(), 1)?;
    let mut single = endpoint.connect_with::<MessageChannel>("echo1", &options)?;
    alone.line()?;
    let path = bed.dir().join("sockets");
    let mut sockets = Server::start("sockets", &path, CHANNELS)?;
    let mut connected =
        (0..CHANNELS).map(|_| UnixStream::connect(&path)).collect::<std::io::Result<Vec<_>>>()?;
    sockets.line()?;

    for (what, rounds, pause) in
        [("awake", ROUNDS, None), ("asleep between messages", SLOW_ROUNDS, Some(PAUSE))]
    {
        let (mut busy, mut one, mut socket) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..PAIRS {
            let mut time = |channel: &mut MessageChannel| {
                one_way(rounds, pause, || {
                    channel.send(&MESSAGE)?;
                    channel.recv_into(&mut buffer)?;
                    Ok(())
                })
            };
            busy.push(time(&mut channels[CHANNELS / 2])?);
            one.push(time(&mut single)?);
            let stream = &mut connected[CHANNELS / 2];
            socket.push(one_way(rounds, pause, || {
                stream.write_all(&MESSAGE)?;
                stream.read_exact(&mut buffer[..MESSAGE.len()])?;
                Ok(())
            })?);
        }
        let case = format!("8 B, one busy among {CHANNELS}, {what}");
        let lower = Better::Lower;
        report.pairs(
            &case,
            "ns",
            lower,
            &busy,
            "one channel in a set",
            &one,
            Some(1.0 / AMONG_MANY),
            "one way",
        );
        report.pairs(&case, "ns", lower, &busy, "Unix sockets, epoll", &socket, None, "one way");
    }
    Ok(())
}
