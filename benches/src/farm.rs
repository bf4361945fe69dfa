//! The farm over TCP, for comparison. It has the same job state, source and work as the farm in shared memory. The manager has one
//! thread that never blocks, and workers read each piece into their own memory. Both sides wait in the same configurable way as
//! ours: they sleep in `poll`, or they poll first and yield the CPU meanwhile.

use anyhow::{Context, Result, ensure};
use ginnel::{Mapping, SharedMemory, SharedSlice, WaitMode};
use ginnel_farm::{Generated, JobState, Report, Source, count, equal};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// The number of bytes in front of each piece: its number and its length. A result is a number and a count.
const HEADER: usize = 16;

/// The manager's end of one connection.
struct Conn {
    stream: TcpStream,
    /// The header and the piece that are being written, and how much of them is left.
    out: Mapping,
    left: std::ops::Range<usize>,
    /// The result that is being read.
    result: [u8; HEADER],
    read: usize,
}

/// Lets `workers` workers that connect to `address` count `bytes` of generated text.
pub fn manage(
    address: &str,
    workers: usize,
    bytes: u64,
    piece: usize,
    window: usize,
    mode: WaitMode,
) -> Result<(u64, Report)> {
    let listener = TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    let mut conns = Vec::new();
    for _ in 0..workers {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let out = Mapping::anonymous((HEADER + piece).next_multiple_of(8))?;
        conns.push(Conn { stream, out, left: 0..0, result: [0; HEADER], read: 0 });
    }
    let mut source = Generated { seed: 1 };
    let mut state = JobState::new(equal(bytes, piece), 1);
    for worker in 0..workers {
        state.join(worker.to_string(), false);
    }
    let mut sum = 0;
    let mut waiting = Waiting::new(mode);
    loop {
        let mut worked = false;
        for (worker, conn) in conns.iter_mut().enumerate() {
            worked |= gather(conn, worker, &mut state, &mut sum)?;
            worked |= scatter(conn, worker, &mut state, window, &mut source)?;
        }
        if state.is_done() {
            return Ok((sum, state.report()));
        }
        if worked {
            waiting.over();
        } else if waiting.looks_enough() {
            let events = |conn: &Conn| match conn.left.is_empty() {
                true => PollFlags::IN,
                false => PollFlags::IN | PollFlags::OUT,
            };
            let mut fds: Vec<_> = conns.iter().map(|conn| PollFd::new(&conn.stream, events(conn))).collect();
            poll(&mut fds, None)?;
        }
    }
}

/// How long one side has been polling.
struct Waiting {
    mode: WaitMode,
    since: Option<Instant>,
}

impl Waiting {
    fn new(mode: WaitMode) -> Self {
        Self { mode, since: None }
    }

    fn over(&mut self) {
        self.since = None;
    }

    /// Called after a poll that found nothing. Returns whether it is time to sleep. If it is not, the thread has yielded this
    /// CPU.
    fn looks_enough(&mut self) -> bool {
        let enough = match self.mode {
            WaitMode::Interrupt => true,
            WaitMode::Poll => false,
            WaitMode::Adaptive { budget } => self.since.get_or_insert_with(Instant::now).elapsed() >= budget,
        };
        if !enough {
            std::thread::yield_now();
        }
        enough
    }
}

fn gather<I: Iterator<Item = std::ops::Range<u64>>>(
    conn: &mut Conn,
    worker: usize,
    state: &mut JobState<I>,
    sum: &mut u64,
) -> Result<bool> {
    let mut worked = false;
    // Only a worker that holds a piece can send anything.
    while state.holds(worker) > 0 {
        match (&conn.stream).read(&mut conn.result[conn.read..]) {
            Ok(0) => anyhow::bail!("a worker has gone"),
            Ok(n) => conn.read += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error.into()),
        }
        if conn.read == HEADER {
            conn.read = 0;
            worked = true;
            let [number, count] = words(&conn.result);
            ensure!(state.answered(worker, number).is_some(), "a result of nothing");
            *sum += count;
        }
    }
    Ok(worked)
}

fn scatter<I: Iterator<Item = std::ops::Range<u64>>>(
    conn: &mut Conn,
    worker: usize,
    state: &mut JobState<I>,
    window: usize,
    source: &mut Generated,
) -> Result<bool> {
    let mut worked = false;
    loop {
        if conn.left.is_empty() {
            if state.holds(worker) >= window {
                return Ok(worked);
            }
            let Some(piece) = state.give(worker) else { return Ok(worked) };
            conn.out.write(0, &piece.number.to_le_bytes());
            conn.out.write(8, &(piece.len as u64).to_le_bytes());
            source.fill(piece.offset, SharedSlice::new(&conn.out, HEADER, piece.len))?;
            conn.left = 0..HEADER + piece.len;
            worked = true;
        }
        let rest = SharedSlice::new(&conn.out, conn.left.start, conn.left.len());
        match rest.write_to(conn.stream.as_fd()) {
            Ok(n) => {
                conn.left.start += n;
                worked = true;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(worked),
            Err(error) => return Err(error.into()),
        }
    }
}

fn words(bytes: &[u8; HEADER]) -> [u64; 2] {
    let words = bytes.as_chunks::<8>().0;
    [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]
}

/// Reads until `read` has filled everything; 0 from `read` means the end. Returns `false` if the end came before the first
/// byte.
fn read_all(
    stream: &TcpStream,
    len: usize,
    waiting: &mut Waiting,
    mut read: impl FnMut(usize) -> std::io::Result<usize>,
) -> Result<bool> {
    let mut got = 0;
    while got < len {
        match read(got) {
            Ok(0) if got == 0 => return Ok(false),
            Ok(0) => anyhow::bail!("the manager has gone"),
            Ok(n) => {
                got += n;
                waiting.over();
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset && got == 0 => return Ok(false),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if waiting.looks_enough() {
                    poll(&mut [PollFd::new(stream, PollFlags::IN)], None)?;
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

/// Works for the manager at `address` until it hangs up.
pub fn work(address: &str, piece: usize, mode: WaitMode) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut stream = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= deadline => return Err(error).context("no manager"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    stream.set_nodelay(true)?;
    // A worker that sleeps at once sleeps in read, which saves one system call.
    stream.set_nonblocking(mode != WaitMode::Interrupt)?;
    let memory = Mapping::anonymous(piece.next_multiple_of(8))?;
    let mut waiting = Waiting::new(mode);
    let mut header = [0; HEADER];
    loop {
        if !read_all(&stream, HEADER, &mut waiting, |got| (&stream).read(&mut header[got..]))? {
            return Ok(());
        }
        let [number, len] = words(&header);
        ensure!(len <= piece as u64, "a piece of {len} bytes");
        let text = SharedSlice::new(&memory, 0, len as usize);
        let whole =
            read_all(&stream, text.len(), &mut waiting, |got| text.skip(got).read_from(stream.as_fd()))?;
        ensure!(whole, "the manager has gone");
        let mut result = number.to_le_bytes().to_vec();
        result.extend_from_slice(&count::characters(text).to_le_bytes());
        // Results are short and few, so there is always room for them.
        stream.write_all(&result)?;
    }
}
