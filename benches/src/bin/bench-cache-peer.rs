//! One client of a cache that times its requests: Ginnel's own client, or a bare client of memcached's protocol over a socket.
//!
//! Prints one JSON line. The bare client does as little as a client can: a prepared request, one write, and reads until the
//! answer is complete. So the cost of a real client's library is not counted against memcached.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use ginnel_bench::cache::Figures;
use ginnel_bench::measure::{cpu_seconds, pin};
use ginnel_cache_client::{Cache, Entry};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Times the requests of one client of a cache.
#[derive(Parser)]
struct Cli {
    /// `load`, `get`, `set`, `throughput` or `idle`.
    job: String,
    /// Use Ginnel's client with this cache: SEGMENT/NAME.
    #[arg(long)]
    own: Option<String>,
    /// Use a bare client at this Unix socket.
    #[arg(long)]
    unix: Option<String>,
    /// Use a bare client at this address and port.
    #[arg(long)]
    tcp: Option<String>,
    /// The number of keys.
    #[arg(long, default_value_t = 10_000)]
    keys: usize,
    /// The number of bytes of a value.
    #[arg(long, default_value_t = 100)]
    size: usize,
    /// The number of timed requests.
    #[arg(long, default_value_t = 20_000)]
    count: usize,
    /// The number of keys of one request, for `throughput`.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// How long `throughput` runs, in milliseconds.
    #[arg(long, default_value_t = 1000)]
    ms: u64,
    /// The CPU to stay on.
    #[arg(long)]
    cpu: Option<usize>,
}

/// A connection to a server of memcached's protocol.
trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

struct Bare {
    stream: Box<dyn Stream>,
    buffer: Vec<u8>,
}

impl Bare {
    /// Sends a request, and waits for an answer that ends with `end`.
    fn ask(&mut self, request: &[u8], end: &[u8]) -> Result<&[u8]> {
        self.stream.write_all(request)?;
        let mut len = 0;
        loop {
            if len == self.buffer.len() {
                self.buffer.resize(len * 2, 0);
            }
            let got = self.stream.read(&mut self.buffer[len..])?;
            ensure!(got > 0, "the server has closed the connection");
            len += got;
            if self.buffer[..len].ends_with(end) {
                return Ok(&self.buffer[..len]);
            }
        }
    }
}

enum Client {
    Own(Box<Cache>),
    Bare(Bare),
}

/// Yields the keys in an order that the processor cannot predict.
struct Order(u64);

impl Order {
    fn next(&mut self, keys: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % keys
    }
}

fn key(number: usize) -> String {
    format!("user:{number:010}")
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    if let Some(cpu) = cli.cpu {
        pin(cpu);
    }
    let bare = |stream| Client::Bare(Bare { stream, buffer: vec![0; 1 << 16] });
    let client = match (&cli.own, &cli.unix, &cli.tcp) {
        (Some(address), None, None) => Client::Own(Box::new(Cache::open(address)?)),
        (None, Some(path), None) => bare(Box::new(UnixStream::connect(path)?)),
        (None, None, Some(address)) => {
            let stream = TcpStream::connect(address).with_context(|| format!("connecting to {address}"))?;
            stream.set_nodelay(true)?;
            bare(Box::new(stream))
        }
        _ => bail!("give one of --own, --unix and --tcp"),
    };
    let figures = match &*cli.job {
        "load" => load(&cli, client)?,
        "get" | "set" => times(&cli, client)?,
        "throughput" => throughput(&cli, client)?,
        other => bail!("there is no job {other}: load, get, set or throughput"),
    };
    println!("{}", serde_json::to_string(&figures)?);
    Ok(())
}

/// Stores all items.
fn load(cli: &Cli, client: Client) -> Result<Figures> {
    let value = vec![b'v'; cli.size];
    let begun = Instant::now();
    let keys: Vec<String> = (0..cli.keys).map(key).collect();
    match client {
        Client::Own(cache) => {
            for keys in keys.chunks(64) {
                let entries: Vec<Entry<'_>> = keys
                    .iter()
                    .map(|key| Entry { key: key.as_bytes(), value: &value, flags: 0, ttl: 0 })
                    .collect();
                cache.set_many(&entries).into_iter().collect::<Result<Vec<_>, _>>()?;
            }
        }
        Client::Bare(mut bare) => {
            for keys in keys.chunks(64) {
                let mut request = Vec::new();
                for key in keys {
                    write!(request, "set {key} 0 0 {} noreply\r\n", value.len())?;
                    request.extend_from_slice(&value);
                    request.extend_from_slice(b"\r\n");
                }
                request.extend_from_slice(b"mn\r\n");
                bare.ask(&request, b"MN\r\n")?;
            }
        }
    }
    let rate = cli.keys as f64 / begun.elapsed().as_secs_f64();
    Ok(Figures { rate, ..Figures::default() })
}

/// Times single requests.
fn times(cli: &Cli, mut client: Client) -> Result<Figures> {
    let keys: Vec<String> = (0..cli.keys).map(key).collect();
    let value = vec![b'w'; cli.size];
    let is_get = cli.job == "get";
    let requests: Vec<Vec<u8>> = keys
        .iter()
        .map(|key| match is_get {
            true => format!("get {key}\r\n").into_bytes(),
            false => [format!("set {key} 0 0 {}\r\n", value.len()).as_bytes(), &value, b"\r\n"].concat(),
        })
        .collect();
    let mut order = Order(7);
    let mut out = Vec::with_capacity(1 << 16);
    let mut once = |number: usize| -> Result<()> {
        match &mut client {
            Client::Own(cache) if is_get => {
                out.clear();
                ensure!(cache.get(keys[number].as_bytes(), &mut out)?.is_some() && out.len() == cli.size);
            }
            Client::Own(cache) => {
                cache.set(keys[number].as_bytes(), &value, 0, 0)?;
            }
            Client::Bare(bare) if is_get => {
                ensure!(bare.ask(&requests[number], b"END\r\n")?.len() > cli.size, "a miss");
            }
            Client::Bare(bare) => {
                ensure!(bare.ask(&requests[number], b"\r\n")? == b"STORED\r\n");
            }
        }
        Ok(())
    };
    for _ in 0..cli.count / 10 {
        once(order.next(cli.keys))?;
    }
    let clock = clock();
    let (cpu, begun) = (cpu_seconds(), Instant::now());
    let mut samples = Vec::with_capacity(cli.count);
    for _ in 0..cli.count {
        let number = order.next(cli.keys);
        let start = Instant::now();
        once(number)?;
        samples.push(start.elapsed().as_nanos() as f64 - clock);
    }
    let wall = begun.elapsed().as_secs_f64();
    Ok(Figures::of(samples, (cpu_seconds() - cpu) / wall, cli.count as f64 / wall))
}

/// Returns how much the clock itself adds to each time, in nanoseconds. In an emulated guest that is as much as a GET from
/// memory takes.
fn clock() -> f64 {
    let mut samples: Vec<f64> = (0..1001).map(|_| Instant::now().elapsed().as_nanos() as f64).collect();
    samples.sort_by(f64::total_cmp);
    samples[500]
}

/// Makes requests as fast as possible for a while.
fn throughput(cli: &Cli, mut client: Client) -> Result<Figures> {
    let keys: Vec<String> = (0..cli.keys).map(key).collect();
    let mut order = Order(std::process::id().into());
    let (cpu, begun) = (cpu_seconds(), Instant::now());
    let mut gets = 0_u64;
    let (mut batch, mut request) = (Vec::with_capacity(cli.batch), Vec::new());
    while begun.elapsed() < Duration::from_millis(cli.ms) {
        // The clock is not read after each request.
        for _ in 0..16 {
            batch.clear();
            batch.extend((0..cli.batch).map(|_| &keys[order.next(cli.keys)]));
            match &mut client {
                Client::Own(cache) => {
                    let mut bytes = 0;
                    let found = cache.get_many(&batch, |_, item| {
                        bytes += item.map_or(0, |(_, value)| value.len());
                    })?;
                    ensure!(found == batch.len() && bytes == found * cli.size, "a miss");
                }
                Client::Bare(bare) => {
                    request.clear();
                    request.extend_from_slice(b"get");
                    for key in &batch {
                        request.push(b' ');
                        request.extend_from_slice(key.as_bytes());
                    }
                    request.extend_from_slice(b"\r\n");
                    ensure!(bare.ask(&request, b"END\r\n")?.len() > cli.size * batch.len(), "a miss");
                }
            }
            gets += batch.len() as u64;
        }
    }
    let wall = begun.elapsed().as_secs_f64();
    Ok(Figures { rate: gets as f64 / wall, cpu: (cpu_seconds() - cpu) / wall, ..Figures::default() })
}
