//! A hostile member of the segment, which writes into the tables and rings of other members while unmodified programs use them.
//! It may write anything, so anything may happen to the messages of a program. A program may even wait without end for a message that
//! the member has removed. But each call returns, no program is killed by a signal, other memory stays unchanged, and programs work as
//! before when the member has gone.

use super::ends;
use ginnel::{AttachOptions, Block, BlockOptions, Endpoint, Mapping, Rights, SharedMemory};
use ginnel_layout::verbs::{CHUNK_TABLE, Kind, Place, QP, QP_TABLE, REGION, REGION_TABLE, completion, qp};
use kit::random::Random;
use kit::wait::wait_until;
use programs::lie::lie;
use programs::verbs::{DEVICE, Killed, Verbs, text};
use std::collections::{HashMap, HashSet};
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{iter, thread};

/// Limits of the search: endpoints, queue pairs of each, and arenas.
const ENDPOINTS: u32 = 16;
const PAIRS: usize = 8;
const ARENAS: u16 = 4;

/// The target of the writes.
#[derive(Clone, Copy, Debug)]
enum Aim {
    /// The words of queue pairs that their peers write.
    Peers,
    /// All words of queue pairs.
    Pairs,
    /// Regions and chunks, by which peers find memory.
    Regions,
    /// Receive rings and completion rings.
    Rings,
    /// All of the tables, including the header.
    All,
}

/// The rings come most often, because the code reads them in the most ways.
const AIMS: [Aim; 6] = [Aim::Peers, Aim::Rings, Aim::Regions, Aim::Rings, Aim::Pairs, Aim::All];

/// An endpoint of another program.
struct Other {
    tables: Mapping,
    arenas: HashMap<u16, Mapping>,
    known: HashSet<usize>,
    /// Its rings: the memory, the offset, and the length in bytes.
    rings: Vec<(Mapping, usize, usize)>,
}

/// The hostile member. What it has opened stays open until it ends, so a new one is used for each pair of programs.
struct Adversary {
    endpoint: Endpoint,
    random: Random,
    others: HashMap<u32, Other>,
    blocks: Vec<Block>,
}

impl Adversary {
    fn new(verbs: &Verbs, seed: u64) -> Self {
        let options = AttachOptions { socket: verbs.world.socket(), ..AttachOptions::default() };
        let endpoint = Endpoint::attach_with("web", &options).unwrap();
        Self { endpoint, random: Random::new(seed), others: HashMap::new(), blocks: Vec::new() }
    }

    fn open(&mut self, name: &str) -> Option<Mapping> {
        let block = self.endpoint.open_block(name, Rights::READ_WRITE).ok()?;
        let memory = block.memory().unwrap();
        self.blocks.push(block);
        Some(memory)
    }

    /// Looks for unknown endpoints and rings. It must learn where the rings are before it writes false places, because the arenas also
    /// contain pages of programs, whose contents the library does not protect.
    fn look(&mut self) {
        for number in 1..=ENDPOINTS {
            if !self.others.contains_key(&number)
                && let Some(tables) = self.open(&format!("verbs.{number}"))
            {
                let other =
                    Other { tables, arenas: HashMap::new(), known: HashSet::new(), rings: Vec::new() };
                self.others.insert(number, other);
            }
        }
        let numbers: Vec<_> = self.others.keys().copied().collect();
        for number in numbers {
            for index in 1..PAIRS {
                self.learn(number, index);
            }
        }
    }

    fn learn(&mut self, number: u32, index: usize) {
        let other = &self.others[&number];
        let (tables, at) = (&other.tables, QP_TABLE + index * QP);
        let has_state = tables.load_acquire_u64(at + qp::STATE) != 0;
        let is_used = Kind(tables.load_relaxed_u32(at + qp::KIND)) != Kind::NONE;
        if !has_state || !is_used || other.known.contains(&index) {
            return;
        }
        let entries = tables.load_relaxed_u32(at + qp::ENTRIES) as usize;
        let stride = tables.load_relaxed_u32(at + qp::STRIDE) as usize;
        let places = [(qp::RING, entries * stride), (qp::COMPLETIONS, entries * completion::ENTRY)]
            .map(|(word, len)| (Place(tables.load_relaxed_u64(at + word)), len));
        for (place, len) in places.into_iter().filter(|(_, len)| *len > 0) {
            let arena = place.arena();
            if arena >= ARENAS {
                return;
            }
            if !self.others[&number].arenas.contains_key(&arena) {
                let Some(memory) = self.open(&format!("verbs.{number}.{arena}")) else { return };
                self.others.get_mut(&number).unwrap().arenas.insert(arena, memory);
            }
            let other = self.others.get_mut(&number).unwrap();
            other.rings.push((other.arenas[&arena].clone(), place.offset() as usize, len));
        }
        self.others.get_mut(&number).unwrap().known.insert(index);
    }

    /// Returns the next place to write to.
    fn pick(&mut self, aim: Aim) -> Option<(Mapping, usize)> {
        let (random, n) = (&mut self.random, self.others.len());
        let other = self.others.values().nth(random.index(n.max(1)))?;
        let aim = match aim {
            Aim::All => AIMS[random.index(AIMS.len())],
            aim => aim,
        };
        let mut pair = |words: &[usize]| {
            let index = other.known.iter().nth(random.index(other.known.len().max(1)))?;
            Some(QP_TABLE + index * QP + words[random.index(words.len())])
        };
        let at = match aim {
            Aim::Peers => pair(&[qp::HEAD, qp::EXECUTING, qp::ERROR, qp::SENDERS])?,
            Aim::Pairs => pair(&(0..QP).step_by(8).collect::<Vec<_>>())?,
            Aim::Regions if random.index(3) == 0 => CHUNK_TABLE + 8 * random.index(8),
            Aim::Regions => REGION_TABLE + REGION * random.index(4) + 8 * random.index(4),
            Aim::Rings => {
                let (memory, at, len) = other.rings.get(random.index(other.rings.len().max(1)))?;
                // Most false values concern entries that will be used soon.
                let within = len.min(&[4096, usize::MAX][random.index(2)]) / 8;
                return Some((memory.clone(), at + 8 * random.index(within)));
            }
            Aim::All => 8 * random.index(8),
        };
        Some((other.tables.clone(), at))
    }

    /// Writes until it has to stop, this many words in a row. Returns how many words it has written.
    fn write(&mut self, aim: Aim, burst: usize, is_over: &AtomicBool) -> u64 {
        let mut words = 0;
        while !is_over.load(Ordering::Relaxed) {
            self.look();
            for _ in 0..burst {
                let Some((memory, at)) = self.pick(aim) else { break };
                let lie = lie(&mut self.random, memory.load_relaxed_u64(at));
                match self.random.index(3) {
                    0 => memory.store_relaxed_u32(at + 4 * self.random.index(2), lie as u32),
                    _ => memory.store_relaxed_u64(at, lie),
                }
                words += 1;
            }
            thread::sleep(Duration::from_micros(200));
        }
        words
    }
}

/// A block of an endpoint that is not involved.
struct Bystander(Block);

impl Bystander {
    const BYTES: usize = 1 << 20;

    fn pattern() -> Vec<u8> {
        (0..Self::BYTES).map(|i| (i * 31 % 251) as u8).collect()
    }

    fn new(verbs: &Verbs) -> Self {
        let options = AttachOptions { socket: verbs.world.socket(), ..AttachOptions::default() };
        let endpoint = Endpoint::attach_with("web", &options).unwrap();
        let block = endpoint.create_block("bystander", Self::BYTES, &BlockOptions::default()).unwrap();
        block.memory().unwrap().write(0, &Self::pattern());
        Self(block)
    }

    fn check(&self) {
        let mut bytes = vec![0; Self::BYTES];
        self.0.memory().unwrap().read(0, &mut bytes);
        assert!(bytes == Self::pattern(), "memory that the member must not access has changed");
    }
}

/// Waits for the end of a program, which a signal must not cause.
fn expect_no_crash(what: &str, child: &mut Killed) {
    let mut child = child.0.take().unwrap();
    wait_until(&format!("the end of {what}"), || child.try_wait().unwrap().is_some());
    let output = child.wait_with_output().unwrap();
    let said = text(&output);
    let is_well = output.status.signal().is_none() && output.status.code().is_some_and(|code| code < 126);
    assert!(is_well && !said.contains("panicked"), "{what}: {}\n{said}", output.status);
}

fn has_ended(child: &mut Killed) -> bool {
    child.0.as_mut().is_some_and(|child: &mut Child| child.try_wait().unwrap().is_some())
}

fn kill(child: &mut Killed) {
    drop(std::mem::replace(child, Killed(None)));
}

/// What the member does in a round.
struct Attack {
    aim: Aim,
    burst: usize,
    time: Duration,
    seed: u64,
}

impl Attack {
    /// Writes until the time is over, or all programs have ended. Returns how many words it has written.
    fn run(&self, verbs: &Verbs, mut are_all_gone: impl FnMut() -> bool) -> u64 {
        let mut adversary = Adversary::new(verbs, self.seed);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let writer = scope.spawn(|| adversary.write(self.aim, self.burst, &is_over));
            let end = Instant::now() + self.time;
            while Instant::now() < end && !are_all_gone() {
                thread::sleep(Duration::from_millis(1));
            }
            is_over.store(true, Ordering::Relaxed);
            writer.join().unwrap()
        })
    }
}

/// Programs of perftest, which are not prepared for such a member.
const PROGRAMS: [&[&str]; 4] = [
    &["ib_send_lat", "-n", "5000000"],
    &["ib_send_bw", "--use-srq", "-q", "2", "-D", "60"],
    &["ib_write_bw", "-D", "60"],
    &["ib_send_bw", "-e", "-n", "5000000"],
];

/// Runs a round with one of them. Returns the number of words written, and whether a program has ended early.
fn perftest(
    verbs: &Verbs,
    program: &[&str],
    attack: &Attack,
    random: &mut Random,
    what: &str,
) -> (u64, bool) {
    let mut both = verbs.start(&[program, &["-d", DEVICE, "-F"]].concat());
    // The member starts at a random time: some programs are connecting then, most are at work.
    thread::sleep(Duration::from_millis(random.below(300)));
    let words = attack.run(verbs, || both.each_mut().map(has_ended).iter().all(|ended| *ended));
    let is_early = both.each_mut().map(has_ended).contains(&true);
    // Programs that are still running may be waiting for a message that was removed. If one is killed, the other one notices; but
    // nothing tells a server with a shared receive queue that its client has ended.
    let is_deaf = program.contains(&"--use-srq");
    if is_deaf && !has_ended(&mut both[0]) {
        kill(&mut both[0]);
    } else if !is_early {
        kill(&mut both[random.index(2)]);
    }
    for (child, side) in iter::zip(&mut both, ["server", "client"]) {
        if child.0.is_some() {
            expect_no_crash(&format!("{what}: the {side}"), child);
        }
    }
    (words, is_early)
}

/// Runs a round with a program that reports whether a call did not return, or memory has changed.
fn soak(verbs: &Verbs, program: &str, receives: &str, attack: &Attack, what: &str) -> (u64, bool) {
    let arguments = [receives, "any", "free", "100000000", "1"];
    let mut both = ends::start(verbs, program, [&arguments, &arguments]);
    let words = attack.run(verbs, || both.each_mut().map(|end| end.has_ended().is_some()) == [true, true]);
    let statuses = both.each_mut().map(|end| {
        // Without an attack, it would run for a long time.
        let end_by = Instant::now() + Duration::from_secs(5);
        while end.has_ended().is_none() && Instant::now() < end_by {
            thread::sleep(Duration::from_millis(1));
        }
        end.has_ended()
    });
    for (end, status) in iter::zip(both, statuses) {
        let Some(status) = status else {
            end.kill();
            continue;
        };
        let mut end = end;
        let said = end.ended().1;
        // A message arrived changed, or there was no progress.
        let is_well = matches!(status.code(), Some(1 | 3));
        assert!(is_well && !said.contains("panicked"), "{what}: {status}\n{said}");
    }
    (words, statuses.iter().any(Option::is_some))
}

#[test]
fn a_hostile_member_can_only_make_requests_fail() {
    kit::require_programs!(&["ib_send_lat", "ib_send_bw", "ib_write_bw"]);
    let is_soak = std::env::var_os("GINNEL_SOAK").is_some();
    let (rounds, time) = if is_soak { (300, 500) } else { (6, 200) };
    let time = Duration::from_millis(time);
    let verbs = Verbs::new();
    let program = ends::compiled(&verbs, "soak");
    let bystander = Bystander::new(&verbs);
    let mut random = Random::new(1);
    let (mut words, mut early) = (0, 0);
    for round in 0..rounds {
        let (aim, burst) = (AIMS[(round + round / 6) % AIMS.len()], [1, 1, 10, 1000][random.index(4)]);
        let attack = Attack { aim, burst, time, seed: round as u64 };
        let what = format!("round {round}, {aim:?}, {burst} words at once");
        let (written, is_early) = match round % 6 {
            4 => soak(&verbs, &program, "own", &attack, &what),
            5 => soak(&verbs, &program, "shared", &attack, &what),
            n => perftest(&verbs, PROGRAMS[n], &attack, &mut random, &format!("{what}, {:?}", PROGRAMS[n])),
        };
        words += written;
        early += u32::from(is_early);
        bystander.check();
    }
    assert!(early > 0, "{words} words were written, and no program has noticed");
    println!("{words} words in {rounds} rounds; in {early} of them a program has ended early");
    for name in ["ib_send_lat", "ib_send_bw", "ib_write_bw"] {
        verbs.pair(&[name, "-d", DEVICE, "-F", "-n", "1000"]);
    }
    verbs.world.good("verbs web");
}
