//! One end of one measurement, on the host or in a guest. `serve` prints `listening` when the other end may connect; `time`
//! prints one JSON line.

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use ginnel::{AttachOptions, ChannelOptions, Endpoint, MessageChannel, StreamChannel, WaitMode};
use ginnel_bench::measure::bare::{BarePing, BareStores, DoubleBuffer, bare_pong, reset, stop};
use ginnel_bench::measure::doorbell::Doorbell;
use ginnel_bench::measure::ends::{Bytes, Channel, serve_messages};
use ginnel_bench::measure::locks::{self, Ours, Signal};
use ginnel_bench::measure::pingpong::Echo;
use ginnel_bench::measure::posix::Posix;
use ginnel_bench::measure::{Timing, pin, pingpong, shared_block, transfer};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    end: End,
}

#[derive(Subcommand)]
enum End {
    /// Be the end that answers.
    Serve(What),
    /// Be the end that measures.
    Time(What),
}

#[derive(Args, Clone)]
struct What {
    kind: Kind,
    /// The segment of the channel, or the segment whose bare memory is used.
    #[arg(long, default_value = "bench")]
    segment: String,
    /// The address of a socket.
    #[arg(long, default_value = "")]
    address: String,
    /// The number of bytes of a message or chunk.
    #[arg(long, default_value_t = 8)]
    size: usize,
    /// The number of round trips or transfers.
    #[arg(long, default_value_t = 20000)]
    rounds: u32,
    /// The number of chunks in a transfer.
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// The number of data bytes of the rings.
    #[arg(long, default_value_t = 0)]
    capacity: usize,
    #[arg(long, default_value = "poll")]
    mode: Mode,
    /// How long to sleep between two round trips, in microseconds.
    #[arg(long, default_value_t = 0)]
    pause: u64,
    /// How many bytes of each message are read or written, one word in each cache line.
    #[arg(long, default_value_t = 64)]
    touch: usize,
    /// Use the C library's lock instead of ours.
    #[arg(long)]
    posix: bool,
    /// Use a bare word instead of a lock.
    #[arg(long)]
    bare: bool,
    /// The CPU to stay on.
    #[arg(long)]
    cpu: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
enum Kind {
    Bare,
    /// Lines one way, as fast as possible.
    BareStores,
    Message,
    /// Messages one way, as fast as possible.
    Pipelined,
    Unix,
    Tcp,
    Pipe,
    Doorbell,
    DoubleBuffer,
    Stream,
    /// Round trips over a stream channel.
    StreamPing,
    TcpStream,
    Copying,
    InPlace,
    Attach,
    Idle,
    /// Lock and unlock, without another user.
    Lock,
    /// Both ends lock as often as they can.
    LockCrowd,
    /// The ends hand over a turn under a lock.
    LockTurns,
    /// The ends hand over a turn with a condition variable.
    Condvar,
    /// A writer and a reader share a block, or with `--posix` a mapped file.
    Block,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    Poll,
    Interrupt,
    Adaptive,
}

impl What {
    fn endpoint(&self) -> Result<Endpoint> {
        let mode = match self.mode {
            Mode::Poll => WaitMode::Poll,
            Mode::Interrupt => WaitMode::Interrupt,
            Mode::Adaptive => WaitMode::default(),
        };
        let options = AttachOptions { mode, ..AttachOptions::default() };
        Ok(Endpoint::attach_with(&self.segment, &options)?)
    }

    fn channel<C: ginnel::Channel>(&self) -> Result<C> {
        let options = ChannelOptions {
            capacity: self.capacity,
            patience: Duration::from_secs(10),
            ..Default::default()
        };
        Ok(self.endpoint()?.connect_with("bench", &options)?)
    }

    fn accept<C: ginnel::Channel>(&self) -> Result<C> {
        let listener = self.endpoint()?.listen::<C>("bench")?;
        println!("listening");
        Ok(listener.accept_timeout(Duration::from_secs(60))?)
    }

    /// Returns the path of the daemon's socket.
    fn socket(&self) -> std::path::PathBuf {
        AttachOptions::default().socket
    }
}

/// Runs one of the measurements of two ends with locks. Words and the C library's locks lie in the segment that has no objects.
fn locks(what: &What, me: u64) -> Result<Timing> {
    let bare = Endpoint::attach("bare")?;
    let memory = bare.memory();
    let first = me == 1 || what.kind == Kind::Lock;
    if first {
        locks::reset(memory);
    }
    let mut pair: Box<dyn Signal> = match what.posix {
        true => Box::new(Posix::open(memory, first)?),
        false => Box::new(Ours::open(&what.endpoint()?)?),
    };
    if me == 1 {
        println!("listening");
    }
    let timing = match what.kind {
        Kind::LockCrowd => locks::crowd(&mut *pair, memory, me, what.rounds),
        Kind::LockTurns => locks::hand_over(&mut *pair, memory, me, what.rounds),
        Kind::Condvar => locks::signals(&mut *pair, memory, me, what.rounds),
        _ => locks::alone(&mut *pair, what.rounds),
    }?;
    if me == 0 {
        // The other end may sleep until it is told.
        pair.lock()?;
        locks::stop(memory);
        pair.notify()?;
        pair.unlock()?;
    }
    Ok(timing)
}

/// Makes the writer or the reader of a block; `--address` is the file for `--posix`.
fn block_end(what: &What, reader: bool) -> Result<shared_block::End> {
    if what.posix {
        let bare = Endpoint::attach("bare")?;
        let pair = Box::new(Posix::open(bare.memory(), reader)?);
        let file = Box::new(shared_block::map(&what.address, what.size)?);
        return shared_block::End::new(file, pair, what.size);
    }
    let endpoint = what.endpoint()?;
    let block = match reader {
        true => shared_block::make(&endpoint, what.size),
        false => shared_block::open(&endpoint, what.size),
    }?;
    let pair: Box<dyn Signal> = match what.bare {
        true => Box::new(shared_block::Bare::new(Endpoint::attach("bare")?.memory().clone(), reader)),
        false => Box::new(Ours::open(&endpoint)?),
    };
    shared_block::End::new(Box::new(block), pair, what.size)
}

fn main() -> Result<()> {
    match Cli::parse().end {
        End::Serve(what) => {
            what.cpu.inspect(|cpu| pin(*cpu));
            serve(&what)
        }
        End::Time(what) => {
            what.cpu.inspect(|cpu| pin(*cpu));
            println!("{}", serde_json::to_string(&time(&what)?)?);
            Ok(())
        }
    }
}

fn serve(what: &What) -> Result<()> {
    match what.kind {
        Kind::Lock | Kind::LockCrowd | Kind::LockTurns | Kind::Condvar => locks(what, 1).map(|_| ()),
        Kind::Block => {
            let mut end = block_end(what, true)?;
            end.reset();
            println!("listening");
            end.read()
        }
        Kind::Bare => {
            let endpoint = what.endpoint()?;
            reset(endpoint.memory(), what.size);
            println!("listening");
            bare_pong(endpoint.memory(), what.size);
            Ok(())
        }
        Kind::Message | Kind::Idle | Kind::Attach => serve_messages(what.accept()?),
        Kind::StreamPing => {
            let (output, input) = what.accept::<StreamChannel>()?.split();
            Bytes { input, output }.serve(what.size)
        }
        Kind::Unix => {
            let listener = UnixListener::bind(&what.address)?;
            println!("listening");
            let (stream, _) = listener.accept()?;
            Bytes { input: stream.try_clone()?, output: stream }.serve(what.size)
        }
        Kind::Tcp => {
            let stream = accept_tcp(&what.address)?;
            Bytes { input: stream.try_clone()?, output: stream }.serve(what.size)
        }
        Kind::Pipe => Bytes { input: std::io::stdin(), output: std::io::stdout() }.serve(what.size),
        Kind::Doorbell => Doorbell::open(&what.socket(), &what.segment, false)?.serve(),
        Kind::BareStores => {
            let endpoint = what.endpoint()?;
            let mut stores = BareStores::new(endpoint.memory().clone(), what.size, true);
            println!("listening");
            loop {
                stores.read(what.count);
            }
        }
        Kind::Pipelined => {
            let (mut to, mut from) = what.accept::<MessageChannel>()?.split();
            let mut message = vec![0; what.size];
            while transfer::drain_messages(&mut from, &mut to, &mut message, what.count)? {}
            Ok(())
        }
        Kind::DoubleBuffer => {
            let endpoint = what.endpoint()?;
            let mut target = vec![0; what.size];
            let mut buffers = DoubleBuffer::new(endpoint.memory().clone(), what.size, true);
            println!("listening");
            loop {
                buffers.drain(&mut target);
            }
        }
        Kind::Stream => {
            let (mut to, mut from) = what.accept::<StreamChannel>()?.split();
            let mut chunk = vec![0; what.size];
            while transfer::drain_stream(&mut from, &mut to, &mut chunk, what.count)? {}
            Ok(())
        }
        Kind::TcpStream => {
            let mut stream = accept_tcp(&what.address)?;
            let mut chunk = vec![0; what.size];
            use std::io::{Read, Write};
            loop {
                for _ in 0..what.count {
                    if stream.read_exact(&mut chunk).is_err() {
                        return Ok(());
                    }
                }
                stream.write_all(&[1])?;
            }
        }
        Kind::Copying => {
            let (mut to, mut from) = what.accept::<MessageChannel>()?.split();
            let mut chunk = vec![0; what.size];
            while transfer::drain_copying(&mut from, &mut to, &mut chunk, what.touch, what.count)? {}
            Ok(())
        }
        Kind::InPlace => {
            let (mut to, mut from) = what.accept::<MessageChannel>()?.split();
            while transfer::drain_in_place(&mut from, &mut to, what.touch, what.count)? {}
            Ok(())
        }
    }
}

fn accept_tcp(address: &str) -> Result<TcpStream> {
    let listener = TcpListener::bind(address).with_context(|| format!("binding {address}"))?;
    println!("listening");
    let (stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn connect_tcp(address: &str) -> Result<TcpStream> {
    let stream = TcpStream::connect(address).with_context(|| format!("connecting to {address}"))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn time(what: &What) -> Result<Timing> {
    let total = what.size as u64 * what.count;
    match what.kind {
        Kind::Lock | Kind::LockCrowd | Kind::LockTurns | Kind::Condvar => locks(what, 0),
        Kind::Block => block_end(what, false)?.write(what.count),
        Kind::Bare => {
            let endpoint = what.endpoint()?;
            let mut ping = BarePing::new(endpoint.memory().clone(), what.size);
            let timing = pingpong::run(&mut ping, what.size, what.rounds);
            stop(endpoint.memory(), what.size);
            timing
        }
        Kind::Message if what.pause > 0 => paused(what),
        Kind::Message => pingpong::run(&mut Channel(what.channel()?), what.size, what.rounds),
        Kind::StreamPing => {
            let (output, input) = what.channel::<StreamChannel>()?.split();
            pingpong::run(&mut Bytes { input, output }, what.size, what.rounds)
        }
        Kind::Unix => {
            let stream = UnixStream::connect(&what.address)?;
            pingpong::run(&mut Bytes { input: stream.try_clone()?, output: stream }, what.size, what.rounds)
        }
        Kind::Tcp => {
            let stream = connect_tcp(&what.address)?;
            pingpong::run(&mut Bytes { input: stream.try_clone()?, output: stream }, what.size, what.rounds)
        }
        Kind::Pipe => {
            let mut child = Command::new(std::env::current_exe()?)
                .args(["serve", "pipe", "--size", &what.size.to_string(), "--cpu", "1"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let (Some(output), Some(input)) = (child.stdin.take(), child.stdout.take()) else {
                bail!("no pipes to the other end")
            };
            let timing = pingpong::run(&mut Bytes { input, output }, what.size, what.rounds);
            child.wait()?;
            timing
        }
        Kind::Doorbell => {
            pingpong::run(&mut Doorbell::open(&what.socket(), &what.segment, true)?, what.size, what.rounds)
        }
        Kind::BareStores => {
            let endpoint = what.endpoint()?;
            let mut stores = BareStores::new(endpoint.memory().clone(), what.size, false);
            transfer::each(what.count, what.rounds, || {
                stores.write(what.count);
                Ok(())
            })
        }
        Kind::Pipelined => {
            let (mut to, mut from) = what.channel::<MessageChannel>()?.split();
            let message = vec![0x5a; what.size];
            transfer::each(what.count, what.rounds, || {
                transfer::fill_messages(&mut to, &mut from, &message, what.count)
            })
        }
        Kind::DoubleBuffer => {
            let endpoint = what.endpoint()?;
            let source = vec![0x5a; what.size];
            let mut buffers = DoubleBuffer::new(endpoint.memory().clone(), what.size, false);
            transfer::run(total, what.rounds, || {
                buffers.fill(&source, what.count);
                Ok(())
            })
        }
        Kind::Stream => {
            let (mut to, mut from) = what.channel::<StreamChannel>()?.split();
            let chunk = vec![0x5a; what.size];
            transfer::run(total, what.rounds, || {
                transfer::fill_stream(&mut to, &mut from, &chunk, what.count)
            })
        }
        Kind::TcpStream => {
            use std::io::{Read, Write};
            let mut stream = connect_tcp(&what.address)?;
            let chunk = vec![0x5a; what.size];
            transfer::run(total, what.rounds, || {
                for _ in 0..what.count {
                    stream.write_all(&chunk)?;
                }
                Ok(stream.read_exact(&mut [0])?)
            })
        }
        Kind::Copying => {
            let (mut to, mut from) = what.channel::<MessageChannel>()?.split();
            let mut chunk = vec![0x5a; what.size];
            transfer::run(total, what.rounds, || {
                transfer::fill_copying(&mut to, &mut from, &mut chunk, what.touch, what.count)
            })
        }
        Kind::InPlace => {
            let (mut to, mut from) = what.channel::<MessageChannel>()?.split();
            transfer::run(total, what.rounds, || {
                transfer::fill_in_place(&mut to, &mut from, what.size, what.touch, what.count)
            })
        }
        Kind::Attach => {
            let begin = Instant::now();
            let mut channel = what.channel::<MessageChannel>()?;
            channel.send(b"first")?;
            channel.recv()?;
            Ok(Timing::of(vec![begin.elapsed().as_nanos() as f64], 0.0))
        }
        Kind::Idle => idle(what),
    }
}

/// Measures one exchange at a time, after a pause that does not count.
fn paused(what: &What) -> Result<Timing> {
    let mut echo = Channel(what.channel()?);
    let mut message = vec![0x5a; what.size];
    let mut samples = Vec::new();
    for _ in 0..what.rounds {
        std::thread::sleep(Duration::from_micros(what.pause));
        let begin = Instant::now();
        echo.exchange(&mut message)?;
        samples.push(begin.elapsed().as_nanos() as f64 / 2.0);
    }
    Ok(Timing::of(samples, 0.0))
}

/// Lets both ends of a channel wait for as many seconds as `--rounds` says; `cpu` is the time that this end has used.
fn idle(what: &What) -> Result<Timing> {
    let mut channel = what.channel::<MessageChannel>()?;
    channel.send(b"hello")?;
    channel.recv()?;
    channel.set_timeout(Some(Duration::from_secs(what.rounds.into())));
    let cpu = ginnel_bench::measure::cpu_seconds();
    let begin = Instant::now();
    let Err(ginnel::Error::TimedOut) = channel.recv() else { bail!("something came where nothing was sent") };
    let used = ginnel_bench::measure::cpu_seconds() - cpu;
    Ok(Timing::of(vec![begin.elapsed().as_nanos() as f64], used / begin.elapsed().as_secs_f64()))
}
