//! A guest program that shares blocks and locks with others, honestly or not. Each role prints lines that tests wait for.
#![allow(unsafe_code)] // Stores through a block's pointer, as programs do that work in place.

use anyhow::{Context, Result, bail, ensure};
use ginnel::sync::{Barrier, Condvar, Mutex, Once, RwLock, Semaphore};
use ginnel::{
    AttachOptions, Block, BlockOptions, Endpoint, Error, ErrorCode, Rights, SharedMemory, WaitMode,
};
use ginnel_layout::PAGE;
use ginnel_layout::sync::{ARMED, KIND, SEATED, SIZE, SLOTS, STATE, SyncKind, TURN, WAITING, slot};
use std::collections::BTreeMap;
use std::env;
use std::time::{Duration, Instant};
use vmtest::guest_program::Random;

const USAGE: &str = "share use SEGMENT NAME SECONDS [strict] | scribble SEGMENT SECONDS | member SEGMENT \
                     | owner SEGMENT MEMBER | guest SEGMENT | poke SEGMENT BLOCK";

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let arg = |n: usize| args.get(n).map(String::as_str).context(USAGE);
    let number = |n: usize| -> Result<u64> { arg(n)?.parse().context(USAGE) };
    let endpoint = attach(arg(1)?)?;
    match arg(0)? {
        "use" => use_all(&endpoint, arg(2)?, Duration::from_secs(number(3)?), arg(4).is_ok()),
        "scribble" => scribble(&endpoint, Duration::from_secs(number(2)?)),
        "member" => {
            println!("{}", endpoint.member());
            Ok(())
        }
        "owner" => owner(&endpoint, u32::try_from(number(2)?)?),
        "guest" => guest(&endpoint),
        "poke" => poke(&endpoint, arg(2)?),
        _ => bail!(USAGE),
    }
}

/// Attaches so that a caller that has to wait sleeps.
fn attach(segment: &str) -> Result<Endpoint> {
    let options = AttachOptions { mode: WaitMode::Interrupt, ..AttachOptions::default() };
    Ok(Endpoint::attach_with(segment, &options)?)
}

/// How long a call may wait while others scribble (`BRIEF`), and how much longer it may take on a busy machine (`SLACK`).
const BRIEF: Duration = Duration::from_millis(100);
const SLACK: Duration = Duration::from_secs(10);
/// The timeout of a wait when all users are honest; nothing takes that long.
const PATIENT: Duration = Duration::from_secs(30);

/// One object of each kind, and a block with two words that are equal while nobody has the mutex.
struct Objects {
    mutex: Mutex,
    condvar: Condvar,
    rwlock: RwLock,
    semaphore: Semaphore,
    barrier: Barrier,
    once: Once,
    block: Block,
}

impl Objects {
    fn open(endpoint: &Endpoint, name: &str, wait: Duration) -> Result<Self, Error> {
        let part = |what: &str| format!("{name}-{what}");
        let shared = match endpoint.create_block(&part("b"), PAGE, &BlockOptions::default()) {
            Err(error) if error.code() == Some(ErrorCode::IN_USE) => {
                endpoint.open_block(&part("b"), Rights::READ_WRITE)?
            }
            other => other?,
        };
        let mut objects = Self {
            mutex: endpoint.mutex(&part("m"))?,
            condvar: endpoint.condvar(&part("c"))?,
            rwlock: endpoint.rwlock(&part("r"))?,
            semaphore: endpoint.semaphore(&part("s"), 4, 2)?,
            barrier: endpoint.barrier(&part("t"), 2)?,
            once: endpoint.once(&part("o"))?,
            block: shared,
        };
        objects.mutex.set_timeout(Some(wait));
        objects.condvar.set_timeout(Some(BRIEF));
        objects.rwlock.set_timeout(Some(wait));
        objects.semaphore.set_timeout(Some(wait));
        objects.barrier.set_timeout(Some(BRIEF));
        objects.once.set_timeout(Some(wait));
        Ok(objects)
    }

    /// Uses one of the objects. Returns `false` if the data were half-written although no death was reported.
    fn act(&mut self, which: u64) -> Result<bool, Error> {
        let mut whole = true;
        match which % 6 {
            0 => {
                let mut guard = self.mutex.lock()?;
                whole = work(&self.block, guard.owner_died())?;
                if guard.owner_died() {
                    guard.make_consistent()?;
                }
                guard.unlock()?;
            }
            1 => {
                let mut guard = self.mutex.lock()?;
                if guard.owner_died() {
                    guard.make_consistent()?;
                }
                self.condvar.notify_one();
                let (mut guard, _) = self.condvar.wait(guard)?;
                if guard.owner_died() {
                    guard.make_consistent()?;
                }
                self.condvar.notify_all();
                guard.unlock()?;
            }
            2 => {
                let mut guard = self.rwlock.write()?;
                if guard.owner_died() {
                    guard.make_consistent()?;
                }
                drop(guard);
                drop(self.rwlock.read()?);
            }
            3 => {
                self.semaphore.acquire()?;
                self.semaphore.release(1)?;
            }
            4 => match self.barrier.wait() {
                // The other party may be busy with another object.
                Err(Error::TimedOut) | Ok(_) => {}
                Err(error) => {
                    self.barrier.reset()?;
                    return Err(error);
                }
            },
            _ => _ = self.once.call(|_| Ok::<_, Error>(()))?,
        }
        Ok(whole)
    }
}

/// Changes one word of the pair and then the other. Returns whether they were equal before, or `repair` is set.
fn work(block: &Block, repair: bool) -> Result<bool, Error> {
    let mut pair = [0; 16];
    block.read(0, &mut pair)?;
    let (first, second) = pair.split_at(8);
    let whole = repair || first == second;
    let mut next = [0; 8];
    next.copy_from_slice(first);
    let next = u64::from_le_bytes(next).wrapping_add(1).to_le_bytes();
    block.write(0, &next)?;
    (0..200).for_each(|_| std::hint::spin_loop());
    block.write(8, &next)?;
    Ok(whole)
}

/// Uses all kinds of objects for a while. Every call must return in time; with `strict` also without an error.
fn use_all(endpoint: &Endpoint, name: &str, time: Duration, strict: bool) -> Result<()> {
    let wait = if strict { PATIENT } else { BRIEF };
    let mut random = Random(0x0b5e_55ed ^ u64::from(std::process::id()));
    let mut ends = BTreeMap::<String, u64>::new();
    let (mut calls, mut half, mut slowest) = (0u64, 0u64, Duration::ZERO);
    let mut objects = None;
    println!("using");
    let end = Instant::now() + time;
    while Instant::now() < end {
        let begin = Instant::now();
        let which = random.next();
        let done = match &mut objects {
            Some(objects) => Objects::act(objects, which),
            None => Objects::open(endpoint, name, wait).map(|opened| {
                objects = Some(opened);
                true
            }),
        };
        let took = begin.elapsed();
        slowest = slowest.max(took);
        // A call waits up to three times.
        ensure!(took < 3 * wait + SLACK, "call {} took {took:?} and ended with {done:?}", which % 6);
        calls += 1;
        match done {
            Ok(whole) => half += u64::from(!whole),
            Err(error) if strict => return Err(error).context("with nobody hostile around"),
            Err(error) => {
                let what = format!("{error:?}");
                let what = what.split([' ', '(', '{']).next().unwrap_or_default();
                *ends.entry(what.into()).or_default() += 1;
                if random.next().is_multiple_of(8) {
                    // Like a program that gives up and begins again, with new objects if it can.
                    for kind in ["m", "c", "r", "s", "t", "o"] {
                        let _ = endpoint.unlink_sync(&format!("{name}-{kind}"));
                    }
                    objects = None;
                }
            }
        }
    }
    ensure!(!strict || half == 0, "half-written {half} times, and nobody was said to have died");
    println!("done {calls} calls, half-written {half}, slowest {slowest:?}, errors {ends:?}");
    Ok(())
}

/// Writes valid and invalid values into locks, and random values everywhere else.
fn scribble(endpoint: &Endpoint, time: Duration) -> Result<()> {
    let memory = endpoint.memory();
    let pages = memory.len() / PAGE;
    let mut random = Random(0xbad_5eed ^ u64::from(std::process::id()));
    let (mut seen, mut locks, mut words) = (Vec::<usize>::new(), 0, 0u64);
    println!("scribbling");
    let end = Instant::now() + time;
    while Instant::now() < end {
        // Find new locks by what the daemon has written there. Their kinds are not overwritten, so that they can be found
        // again.
        seen.clear();
        seen.extend((0..pages.min(2048)).map(|page| page * PAGE).filter(|&at| {
            SyncKind(memory.load_relaxed_u32(at + KIND)).is_known()
                && memory.load_relaxed_u64(at + SEATED) != 0
        }));
        locks = locks.max(seen.len());
        let until = Instant::now() + Duration::from_millis(50);
        while Instant::now() < until {
            for &page in &seen {
                let k = random.next() as usize % SLOTS;
                let at = match random.next() % 8 {
                    0..4 => STATE,
                    4 => ARMED,
                    5 => WAITING,
                    6 => TURN,
                    _ => slot(k) + random.next() as usize % 4 * 8,
                };
                // A possible owner with flags, zero, all bits, one bit, or random bits.
                let word = match random.next() % 5 {
                    0 => {
                        (random.next() % 3 + 1)
                            | (random.next() & 0x0f00)
                            | 1 << 16
                            | (random.next() % 8) << 32
                    }
                    1 => 0,
                    2 => u64::MAX,
                    3 => 1 << (random.next() % 64),
                    _ => random.next(),
                };
                debug_assert!(at + 8 <= SIZE);
                memory.store_relaxed_u64(page + at, word);
                words += 1;
            }
            // The rest of the segment: contents of blocks.
            for _ in 0..64 {
                let page = random.next() as usize % pages * PAGE;
                if !seen.contains(&page) {
                    memory.write(page + random.next() as usize % 64 * 8, &random.next().to_le_bytes());
                    words += 1;
                }
            }
            // Give honest users time to do something in between.
            std::thread::sleep(Duration::from_micros(random.next() % 2000));
        }
    }
    ensure!(locks > 0, "no lock was found to scribble on");
    println!("done {words} words, {locks} locks at a time");
    Ok(())
}

/// The block that the roles `owner` and `guest` share.
const BLOCK: &str = "rights";
const LEN: usize = 3 * PAGE;
const PROMPT: Duration = Duration::from_secs(60);

fn steps(endpoint: &Endpoint) -> Result<[Semaphore; 2]> {
    let mut steps = [endpoint.semaphore("owner-did", 9, 0)?, endpoint.semaphore("guest-did", 9, 0)?];
    steps.iter_mut().for_each(|step| step.set_timeout(Some(PROMPT)));
    Ok(steps)
}

fn bytes<const N: usize>(block: &Block, at: usize) -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    block.read(at, &mut bytes)?;
    Ok(bytes)
}

/// Grants rights to a member and revokes them.
fn owner(endpoint: &Endpoint, member: u32) -> Result<()> {
    let [mut mine, mut theirs] = steps(endpoint)?;
    let options = BlockOptions { others: Rights::NONE, ..BlockOptions::default() };
    let block = endpoint.create_block(BLOCK, LEN, &options)?;
    block.write(PAGE, b"mine ")?;
    let unchanged = |what: &str, wanted: &[u8; 5]| -> Result<()> {
        let found = bytes::<5>(&block, PAGE)?;
        ensure!(&found == wanted, "{what}: {found:?} stands in the block");
        Ok(())
    };
    let options = BlockOptions { others: Rights::READ, ..BlockOptions::default() };
    let readable = endpoint.create_block("readable", PAGE, &options)?;
    println!("made");
    mine.release(1)?;
    theirs.acquire().context("refused at first")?;

    block.grant(member, 0, Rights::READ)?;
    mine.release(1)?;
    theirs.acquire().context("stores of a reader")?;
    unchanged("a reader has written", b"mine ")?;

    block.grant(member, 0, Rights::READ_WRITE)?;
    mine.release(1)?;
    theirs.acquire().context("stores of a writer")?;
    unchanged("a writer has not written", b"yours")?;

    block.grant(member, 0, Rights::READ)?;
    mine.release(1)?;
    theirs.acquire().context("stores of one who was a writer")?;
    unchanged("one who may not any more has written", b"yours")?;
    block.write(PAGE, b"again")?;
    mine.release(1)?;
    theirs.acquire().context("what the reader sees")?;

    block.revoke(member, 0)?;
    mine.release(1)?;
    theirs.acquire().context("one who may nothing any more")?;
    unchanged("one who may nothing has written", b"again")?;
    ensure!(bytes(&readable, 0)? == [0], "a store without the right has come through");
    println!("done");
    Ok(())
}

/// Stores at the pointer, as a program does by itself.
fn store(block: &Block, at: usize, bytes: &[u8]) -> Result<()> {
    let slice = block.slice()?;
    ensure!(at + bytes.len() <= slice.len(), "outside the block");
    for (k, byte) in bytes.iter().enumerate() {
        // SAFETY: inside the mapping, which lives while `slice` is borrowed; where the right is missing this faults.
        unsafe { slice.as_ptr().add(at + k).write_volatile(*byte) };
    }
    Ok(())
}

fn denied(what: &str, result: Result<(), Error>, left: Rights) -> Result<()> {
    match result {
        Err(Error::Denied { rights }) if rights == left => Ok(()),
        other => bail!("{what}: {other:?}"),
    }
}

fn refused(what: &str, result: Result<Block, Error>, code: ErrorCode) -> Result<()> {
    match result {
        Err(error) if error.code() == Some(code) => Ok(()),
        other => bail!("{what}: {:?}", other.map(|block| block.number())),
    }
}

/// Waits until a handle has exactly these rights.
fn wait_for_rights(endpoint: &Endpoint, block: &Block, left: Rights) -> Result<()> {
    let end = Instant::now() + PROMPT;
    while block.rights() != left {
        ensure!(Instant::now() < end, "the handle still has {} rights", block.rights().name());
        endpoint.process_events();
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Gets rights and loses them, and stores with and without them.
fn guest(endpoint: &Endpoint) -> Result<()> {
    let [mut theirs, mut mine] = steps(endpoint)?;
    theirs.acquire()?;
    refused("no rights", endpoint.open_block(BLOCK, Rights::READ), ErrorCode::DENIED)?;
    mine.release(1)?;

    theirs.acquire()?;
    refused("only to read", endpoint.open_block(BLOCK, Rights::READ_WRITE), ErrorCode::DENIED)?;
    let reader = endpoint.open_block(BLOCK, Rights::READ)?;
    ensure!(&bytes::<5>(&reader, PAGE)? == b"mine ", "the reader sees something else");
    denied("a reader's write", reader.write(PAGE, b"wrong"), Rights::READ)?;
    reader.guard_writes()?;
    store(&reader, PAGE, b"wrong")?;
    denied("after a reader's store", reader.read(0, &mut [0]), Rights::READ)?;
    ensure!(&bytes::<5>(&reader, PAGE)? == b"mine ", "a store without the right is still seen");
    println!("reader refused");
    mine.release(1)?;

    theirs.acquire()?;
    let writer = endpoint.open_block(BLOCK, Rights::READ_WRITE)?;
    writer.guard_writes()?;
    store(&writer, PAGE, b"yours")?;
    ensure!(&bytes::<5>(&reader, PAGE)? == b"yours", "a store with the right is not seen");
    mine.release(1)?;

    theirs.acquire()?;
    wait_for_rights(endpoint, &writer, Rights::READ)?;
    denied("a write", writer.write(PAGE, b"wrong"), Rights::READ)?;
    store(&writer, PAGE, b"wrong")?;
    denied("after a store", writer.read(0, &mut [0]), Rights::READ)?;
    ensure!(&bytes::<5>(&writer, PAGE)? == b"yours", "a store after the right was taken away is still seen");
    println!("writer refused");
    mine.release(1)?;
    theirs.acquire()?;
    ensure!(&bytes::<5>(&writer, PAGE)? == b"again", "the mapping is not the block any more");
    mine.release(1)?;

    theirs.acquire()?;
    wait_for_rights(endpoint, &writer, Rights::NONE)?;
    denied("a read", writer.read(PAGE, &mut [0]), Rights::NONE)?;
    refused("no rights any more", endpoint.open_block(BLOCK, Rights::READ), ErrorCode::DENIED)?;
    mine.release(1)?;
    println!("done");
    Ok(())
}

/// Stores into a block that may only be read, without a guard.
fn poke(endpoint: &Endpoint, name: &str) -> Result<()> {
    let block = endpoint.open_block(name, Rights::READ)?;
    println!("poking");
    store(&block, 0, b"!")?;
    println!("survived");
    Ok(())
}
