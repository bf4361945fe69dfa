//! Two processes exchange messages over the smallest ring, polling, and check every byte and the order.
//!
//!     cargo test --release -p ginnel-ring --test soak                   20,000 messages of each size
//!     GINNEL_SOAK=1 cargo test --release -p ginnel-ring --test soak    a thousand million (or `make soak`)
//!     ... --test soak -- flood                                         the games whose names contain one of the words
//!     ... --test soak -- flood 119 120                                 and messages of these sizes only
//!
//! `GINNEL_SOAK=n` with n > 1 runs n messages of each size. The sizes lie around the boundaries of a record: the header takes
//! 8 bytes of the first cache line, so 56 and 120 bytes are the most that fit into one and into two.
//!
//! Each game runs three times: with both processes free to run anywhere; with a third process that is always busy, so that on
//! two processors each side is preempted at any instruction; and with both processes on one processor, where a side that
//! polls without yielding would keep the other from running.
//!
//! A side that makes no progress for [`STALL`] prints its cursors, the ring's words, and how long the kernel has let each
//! process wait for a processor. It makes the other side print the same, and fails.
#![cfg_attr(loom, allow(dead_code, unused_imports))]

use ginnel_layout::ring::{
    CONSUMER_STATE, DATA_ARMED, HEAD, HEADER, PRODUCER_STATE, RECORD_ALIGN, SPACE_ARMED, TAIL, footprint,
};
use ginnel_ring::wait::{Sleeper, WaitMode, Waitable, wait};
use ginnel_ring::{RecvError, SendError, message, stream};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use kit::random::Random;
use rustix::thread::CpuSet;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const CAPACITY: usize = 4096;
const SIZES: [usize; 11] = [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 121];
/// Length of the longest message that a side has a buffer for.
const LONGEST: usize = 128;
/// Longer than a side is ever kept from running, whatever else the machine does.
const STALL: Duration = Duration::from_secs(20);
/// Time after which a waiting side checks itself and the other.
const TURN: Duration = Duration::from_millis(100);

/// The file has a page for the two processes, then a ring in each direction.
const PAGE: usize = 4096;
const STALLED: usize = 0;
const READY: usize = 64;

/// Which data the processes send to each other.
#[derive(Clone, Copy, PartialEq)]
enum Game {
    /// Messages in one direction, as fast as possible.
    Flood,
    /// A message there and back.
    Exchange,
    /// Bytes in one direction.
    Stream,
    /// Bytes there and back.
    StreamExchange,
}

const GAMES: [(&str, Game, u64); 4] = [
    ("flood", Game::Flood, 1),
    // The number of messages is divided by this, because each costs more.
    ("exchange", Game::Exchange, 100),
    ("stream", Game::Stream, 10),
    ("stream-exchange", Game::StreamExchange, 100),
];

/// Where the two processes run, and what else runs there.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Free,
    Crowded,
    OneCpu,
}

const PLACES: [(&str, Place, u64); 3] = [
    ("", Place::Free, 1),
    (" beside a busy process", Place::Crowded, 10),
    (" on one processor", Place::OneCpu, 100),
];

#[cfg(loom)]
fn main() {}

#[cfg(not(loom))]
fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    if let [role, rest @ ..] = args.as_slice() {
        match role.as_str() {
            "far" => return far(rest),
            "busy" => loop {
                std::hint::spin_loop();
            },
            _ => {}
        }
    }
    let count = match std::env::var("GINNEL_SOAK").map(|n| n.parse()) {
        Ok(Ok(n)) if n > 1 => n,
        Ok(_) => 1_000_000_000,
        Err(_) => 20_000,
    };
    let (numbers, words): (Vec<_>, Vec<_>) = args.iter().partition(|arg| arg.parse::<usize>().is_ok());
    let mut sizes: Vec<usize> = numbers.iter().filter_map(|arg| arg.parse().ok()).collect();
    if let Some(size) = sizes.iter().find(|size| **size > LONGEST) {
        eprintln!("soak: no messages of {size} bytes: give sizes up to {LONGEST}");
        std::process::exit(2);
    }
    if sizes.is_empty() {
        sizes = SIZES.to_vec();
    }
    for (place_name, place, fewer_there) in PLACES {
        let busy = (place == Place::Crowded).then(|| Helper::start(&["busy"]));
        for (name, game, fewer) in GAMES {
            if !words.is_empty() && !words.iter().any(|word| name.contains(word.as_str())) {
                continue;
            }
            let mut all = Duration::ZERO;
            let count = (count / fewer / fewer_there).max(100);
            for &size in &sizes {
                // An empty write sends nothing in a stream.
                if size > 0 || matches!(game, Game::Flood | Game::Exchange) {
                    all += near(game, place, size, count);
                }
            }
            println!(
                "test {name}: {} sizes, {count} messages each{place_name} ... ok ({:.1} s)",
                sizes.len(),
                all.as_secs_f64()
            );
        }
        drop(busy);
    }
}

/// Another process of this program, which ends when this is dropped.
struct Helper(Child);

impl Helper {
    fn start(args: &[&str]) -> Self {
        Self(Command::new(std::env::current_exe().unwrap()).args(args).spawn().unwrap())
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Bytes that do not repeat within any message, or from one to the next.
struct Pattern(Vec<u8>);

impl Pattern {
    /// A prime, so that positions of all alignments meet all bytes.
    const PERIOD: usize = 65_521;

    fn new() -> Self {
        let mut bytes = vec![0; Self::PERIOD];
        Random::new(1).fill(&mut bytes);
        bytes.extend_from_within(..);
        Self(bytes)
    }

    /// Returns the `len` bytes at a position of an endless stream; `len` is at most the period.
    fn at(&self, position: u64, len: usize) -> &[u8] {
        let start = (position % Self::PERIOD as u64) as usize;
        &self.0[start..start + len]
    }

    fn message(&self, number: u64, size: usize) -> &[u8] {
        self.at(number.wrapping_mul(7919), size)
    }
}

/// One process's state in the game.
struct Side {
    name: &'static str,
    page: Mapping,
    there: Mapping,
    back: Mapping,
    pattern: Pattern,
    /// Process id of the other process.
    other: u32,
    longest: Duration,
}

struct Awake;

impl Sleeper for Awake {
    fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
        unreachable!("a side that polls does not sleep")
    }
}

impl Side {
    fn open(name: &'static str, path: &Path, other: u32) -> Self {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let len = PAGE + 2 * footprint(CAPACITY);
        let all = Mapping::of_file(&file, 0, len, Protection::ReadWrite).unwrap();
        let ring = |n| all.part(PAGE + n * footprint(CAPACITY), footprint(CAPACITY)).unwrap();
        let (page, there, back) = (all.part(0, PAGE).unwrap(), ring(0), ring(1));
        Self { name, page, there, back, pattern: Pattern::new(), other, longest: Duration::ZERO }
    }

    /// Polls until `what` is ready.
    fn until<W: Waitable + Debug>(&mut self, what: &mut W, done: u64) {
        let begin = Instant::now();
        while !wait(what, WaitMode::Poll, &mut Awake, Some(Instant::now() + TURN)).unwrap() {
            let stalled = self.page.load_relaxed_u32(STALLED) != 0;
            if stalled || begin.elapsed() >= STALL || gone(self.other) {
                self.page.store_relaxed_u32(STALLED, 1);
                self.dump(what, done, begin.elapsed());
                // Waits for the other side's dump, which comes within a turn if that side waits too.
                std::thread::sleep(2 * TURN);
                std::process::exit(101);
            }
        }
        self.longest = self.longest.max(begin.elapsed());
    }

    fn dump(&self, what: &dyn Debug, done: u64, waited: Duration) {
        eprintln!("{}: no progress for {waited:?} after {done} messages\n  {what:?}", self.name);
        for (name, ring) in [("there", &self.there), ("back", &self.back)] {
            let (head, tail) = (ring.load_relaxed_u64(HEAD), ring.load_relaxed_u64(TAIL));
            eprintln!(
                "  ring {name}: head {head} tail {tail} space_armed {} data_armed {} producer {} consumer {}",
                ring.load_relaxed_u32(SPACE_ARMED),
                ring.load_relaxed_u32(DATA_ARMED),
                ring.load_relaxed_u32(PRODUCER_STATE),
                ring.load_relaxed_u32(CONSUMER_STATE),
            );
            let lines = (0..CAPACITY).step_by(RECORD_ALIGN).map(|at| ring.load_relaxed_u64(HEADER + at));
            eprintln!("    first words of the lines: {:x?}", lines.collect::<Vec<_>>());
        }
        for pid in [std::process::id(), self.other] {
            // Time on a processor and time waiting for one, in nanoseconds, and the number of time slices.
            let schedule = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
            let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let state = state.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
            eprintln!("  process {pid}: state {state:?}, schedstat {}", schedule.trim());
        }
    }
}

/// Returns whether a process has ended.
fn gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.trim_start().starts_with(['Z', 'X']) || rest.is_empty())
}

/// Runs the near side of a game, and the far side in a child.
fn near(game: Game, place: Place, size: usize, count: u64) -> Duration {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.as_file().set_len((PAGE + 2 * footprint(CAPACITY)) as u64).unwrap();
    let (name, _, _) = GAMES.iter().find(|(_, g, _)| *g == game).unwrap();
    let own = rustix::thread::sched_getaffinity(None).unwrap();
    if place == Place::OneCpu {
        // The child inherits the CPU set.
        let mut one = CpuSet::new();
        one.set((0..CpuSet::MAX_CPU).find(|&cpu| own.is_set(cpu)).unwrap());
        rustix::thread::sched_setaffinity(None, &one).unwrap();
    }
    let (path, me) = (file.path().to_str().unwrap(), std::process::id().to_string());
    let mut child = Helper::start(&["far", name, path, &size.to_string(), &count.to_string(), &me]);
    let mut side = Side::open("near", file.path(), child.0.id());
    let begin = Instant::now();
    let (mut from, mut to) = (0, 0);
    match game {
        Game::Flood => {
            let mut input = message::Consumer::new(side.there.clone(), CAPACITY);
            side.page.store_release_u32(READY, 1);
            receive(&mut side, &mut input, size, count);
        }
        Game::Exchange => {
            let mut output = message::Producer::new(side.there.clone(), CAPACITY);
            let mut input = message::Consumer::new(side.back.clone(), CAPACITY);
            side.page.store_release_u32(READY, 1);
            for number in 0..count {
                send(&mut side, &mut output, number, size);
                take(&mut side, &mut input, number, size);
            }
        }
        Game::Stream => {
            let mut input = stream::Consumer::new(side.there.clone(), CAPACITY);
            side.page.store_release_u32(READY, 1);
            while from < count * size as u64 {
                let left = count * size as u64 - from;
                read(&mut side, &mut input, &mut from, left.min(2 * size as u64 + 1));
            }
        }
        Game::StreamExchange => {
            let mut output = stream::Producer::new(side.there.clone(), CAPACITY);
            let mut input = stream::Consumer::new(side.back.clone(), CAPACITY);
            side.page.store_release_u32(READY, 1);
            for _ in 0..count {
                write(&mut side, &mut output, &mut to, size);
                while from < to {
                    let left = to - from;
                    read(&mut side, &mut input, &mut from, left);
                }
            }
        }
    }
    let took = begin.elapsed();
    assert!(child.0.wait().unwrap().success(), "{name} of {size} bytes: the far end failed");
    if place == Place::OneCpu {
        rustix::thread::sched_setaffinity(None, &own).unwrap();
    }
    if std::env::var_os("GINNEL_SOAK").is_some() {
        let each = took.as_nanos() as f64 / count as f64;
        println!(
            "  {name}, {size} bytes: {count} in {took:.1?}, {each:.0} ns each, longest wait {:?}",
            side.longest
        );
    }
    took
}

/// Runs the far side, in a process of its own.
fn far(args: &[String]) {
    let [name, path, size, count, near] = args else { panic!("far NAME PATH SIZE COUNT PID") };
    let (_, game, _) = GAMES.iter().find(|(n, _, _)| n == name).unwrap();
    let (size, count): (usize, u64) = (size.parse().unwrap(), count.parse().unwrap());
    let mut side = Side::open("far", &PathBuf::from(path), near.parse().unwrap());
    while side.page.load_acquire_u32(READY) == 0 {
        if gone(side.other) {
            return;
        }
        std::thread::yield_now();
    }
    let (mut from, mut to) = (0, 0);
    match game {
        Game::Flood => {
            let mut output = message::Producer::new(side.there.clone(), CAPACITY);
            for number in 0..count {
                // The message is sent in each of the possible ways in turn.
                match number >> 10 & 3 {
                    0 | 1 => send(&mut side, &mut output, number, size),
                    2 => claim(&mut side, &mut output, number, size, true),
                    _ => claim(&mut side, &mut output, number, size, number & 7 == 7),
                }
            }
            let _ = output.finish();
        }
        Game::Exchange => {
            let mut input = message::Consumer::new(side.there.clone(), CAPACITY);
            let mut output = message::Producer::new(side.back.clone(), CAPACITY);
            for number in 0..count {
                take(&mut side, &mut input, number, size);
                send(&mut side, &mut output, number, size);
            }
        }
        Game::Stream => {
            let mut output = stream::Producer::new(side.there.clone(), CAPACITY);
            for _ in 0..count {
                write(&mut side, &mut output, &mut to, size);
            }
        }
        Game::StreamExchange => {
            let mut input = stream::Consumer::new(side.there.clone(), CAPACITY);
            let mut output = stream::Producer::new(side.back.clone(), CAPACITY);
            for _ in 0..count {
                let end = from + size as u64;
                while from < end {
                    let left = end - from;
                    read(&mut side, &mut input, &mut from, left);
                }
                write(&mut side, &mut output, &mut to, size);
            }
        }
    }
}

fn send(side: &mut Side, output: &mut message::Producer<Mapping>, number: u64, size: usize) {
    loop {
        match output.send(side.pattern.message(number, size)) {
            Ok(_) => return,
            Err(SendError::Full) => side.until(output.want(size), number),
            Err(error) => panic!("message {number} of {size} bytes: {error}"),
        }
    }
}

/// Sends by a claim. Without `publish`, the message is sent with one of the next.
fn claim(side: &mut Side, output: &mut message::Producer<Mapping>, number: u64, size: usize, publish: bool) {
    loop {
        match output.claim(size) {
            Ok(claim) => {
                claim.slice().write(0, side.pattern.message(number, size));
                match publish {
                    true => _ = claim.publish(size),
                    false => claim.commit(size),
                }
                return;
            }
            Err(SendError::Full) => {
                // Committed messages must be published first, or the consumer could never make room.
                let _ = output.publish();
                side.until(output.want(size), number);
            }
            Err(error) => panic!("message {number} of {size} bytes: {error}"),
        }
    }
}

/// Receives all messages, in each of the possible ways in turn.
fn receive(side: &mut Side, input: &mut message::Consumer<Mapping>, size: usize, count: u64) {
    let (mut number, mut buffer) = (0, [0; LONGEST]);
    loop {
        let got = match number / 1536 % 3 {
            0 => match input.take(&mut buffer, 256) {
                Some((len, _)) => Ok(len),
                None => input.recv(&mut buffer),
            },
            1 => input.recv(&mut buffer),
            _ => input.peek().map(|message| {
                let len = message.len();
                message.slice().read(0, &mut buffer);
                message.release();
                len
            }),
        };
        match got {
            Ok(len) => {
                assert_eq!(
                    &buffer[..len],
                    side.pattern.message(number, size),
                    "message {number} of {size} bytes"
                );
                number += 1;
            }
            Err(RecvError::Empty) => side.until(input, number),
            Err(end) => {
                assert_eq!((end, number), (RecvError::Finished, count), "of {size} bytes");
                return;
            }
        }
    }
}

/// Receives one message, as the library does.
fn take(side: &mut Side, input: &mut message::Consumer<Mapping>, number: u64, size: usize) {
    let mut buffer = [0; LONGEST];
    let len = loop {
        if let Some((len, _)) = input.take(&mut buffer, 256) {
            break len;
        }
        match input.recv(&mut buffer) {
            Ok(len) => break len,
            Err(RecvError::Empty) => side.until(input, number),
            Err(error) => panic!("message {number} of {size} bytes: {error}"),
        }
    };
    assert_eq!(&buffer[..len], side.pattern.message(number, size), "message {number} of {size} bytes");
}

fn write(side: &mut Side, output: &mut stream::Producer<Mapping>, to: &mut u64, size: usize) {
    let end = *to + size as u64;
    while *to < end {
        match output.write(side.pattern.at(*to, (end - *to) as usize), || {}) {
            Ok(n) => *to += n as u64,
            Err(SendError::Full) => side.until(output, *to),
            Err(error) => panic!("byte {to}: {error}"),
        }
    }
}

/// Reads some bytes, at most `most`.
fn read(side: &mut Side, input: &mut stream::Consumer<Mapping>, from: &mut u64, most: u64) {
    let mut buffer = [0; 256];
    let most = buffer.len().min(most as usize);
    loop {
        match input.read(&mut buffer[..most], || {}) {
            Ok(n) => {
                assert_eq!(&buffer[..n], side.pattern.at(*from, n), "from byte {from}");
                *from += n as u64;
                return;
            }
            Err(RecvError::Empty) => side.until(input, *from),
            Err(error) => panic!("byte {from}: {error}"),
        }
    }
}
