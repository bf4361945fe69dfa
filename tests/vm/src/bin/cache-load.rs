//! A guest program that puts a checked load on a cache. Each value contains its number and a checksum of its key, its number and
//! its bytes, so a wrong, torn or old value is noticed.
//!
//! A writer owns its keys: it knows the possible values of each of them, and checks the key after each change. Readers check
//! that the numbers of a key only grow. Items may disappear at any time, as in every cache.

use anyhow::{Context, Result, bail, ensure};
use ginnel_cache_client::{Cache, Error, Options};
use ginnel_layout::cache;
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use std::fs::File;
use std::time::{Duration, Instant};
use std::{env, fs};
use vmtest::guest_program::{Random, say};

const USAGE: &str = "cache-load write CACHE WRITER SECONDS | read CACHE WRITERS SECONDS | scribble";
/// The number of keys of each writer.
const KEYS: u64 = 500;
/// The longest value, in bytes.
const LONGEST: u64 = 3000;

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["write", cache, writer, seconds] => write(cache, writer.parse()?, seconds.parse()?),
        ["read", cache, writers, seconds] => read(cache, writers.parse()?, seconds.parse()?),
        ["scribble"] => scribble(),
        _ => bail!(USAGE),
    }
}

fn key(writer: u64, number: u64) -> String {
    format!("writer{writer}:key{number}")
}

fn sum(key: &str, number: u64, bytes: &[u8]) -> u64 {
    let all = key.bytes().chain(number.to_le_bytes()).chain(bytes.iter().copied());
    all.fold(bytes.len() as u64, |sum, byte| sum.rotate_left(5).wrapping_mul(31) ^ u64::from(byte))
}

/// Returns a value for a key, with this number.
fn value(key: &str, number: u64, random: &mut Random) -> Vec<u8> {
    let bytes: Vec<u8> = (0..random.next() % LONGEST).map(|i| ((i * 131) ^ (number * 7)) as u8).collect();
    let sum = sum(key, number, &bytes);
    [&number.to_le_bytes()[..], &sum.to_le_bytes(), &bytes].concat()
}

/// Checks a value of this key and returns its number.
fn number_of(key: &str, value: &[u8]) -> Result<u64> {
    let word =
        |at: usize| -> Option<u64> { Some(u64::from_le_bytes(value.get(at..at + 8)?.try_into().ok()?)) };
    let (number, found) = word(0).zip(word(8)).with_context(|| format!("{key}: {} bytes", value.len()))?;
    let expected = sum(key, number, &value[16..]);
    ensure!(found == expected, "{key} has a wrong or torn value, which says that its number is {number}");
    Ok(number)
}

fn open(address: &str) -> Result<Cache> {
    let options = Options { patience: Duration::from_secs(30), ..Options::default() };
    Cache::open_with(address, &options).with_context(|| format!("opening {address}"))
}

/// The possible numbers of a key's value. The key may also be missing.
#[derive(Clone, Default)]
struct Known {
    may_be: Vec<u64>,
}

fn write(address: &str, writer: u64, seconds: u64) -> Result<()> {
    let cache = open(address)?;
    let mut random = Random(writer.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut known = vec![Known::default(); KEYS as usize];
    let (mut next, mut changes, mut lost, mut hits, mut value_read) = (0, 0_u64, 0_u64, 0_u64, Vec::new());
    say(format_args!("begun"));
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        let at = random.next() % KEYS;
        let (key, known) = (key(writer, at), &mut known[at as usize]);
        next += 1;
        let result = if random.next().is_multiple_of(5) {
            cache.delete(key.as_bytes()).map(|_| Vec::new())
        } else {
            let value = value(&key, next, &mut random);
            cache.set(key.as_bytes(), &value, 0, 0).map(|_| vec![next])
        };
        match result {
            Ok(may_be) => known.may_be = may_be,
            // The change may have been made or not.
            Err(Error::Lost { .. }) => {
                lost += 1;
                known.may_be.push(next);
            }
            Err(Error::NoServer { .. }) => {}
            Err(error) => return Err(error).context(key),
        }
        changes += 1;
        value_read.clear();
        match cache.get(key.as_bytes(), &mut value_read) {
            Ok(Some(_)) => {
                let number = number_of(&key, &value_read)?;
                ensure!(
                    known.may_be.contains(&number),
                    "{key} has number {number}, and may have {:?} only",
                    known.may_be
                );
                hits += 1;
            }
            Ok(None) => {}
            // The memory did not answer the question, and the server was dead.
            Err(Error::Lost { .. } | Error::NoServer { .. }) => {}
            Err(error) => return Err(error).context(key),
        }
    }
    say(format_args!("written: {changes} changes, {lost} lost, {hits} hits; {:?}", cache.counters()));
    ensure!(hits > 0, "nothing was found");
    Ok(())
}

fn read(address: &str, writers: u64, seconds: u64) -> Result<()> {
    let cache = open(address)?;
    let mut random = Random(0x1234_5678_9abc_def1);
    let mut newest = vec![0; (writers * KEYS) as usize];
    let (mut hits, mut misses, mut bytes) = (0_u64, 0_u64, Vec::new());
    let mut pause = (Instant::now(), Duration::ZERO);
    say(format_args!("begun"));
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        let (writer, at) = (random.next() % writers, random.next() % KEYS);
        let key = key(writer, at);
        bytes.clear();
        match cache.get(key.as_bytes(), &mut bytes) {
            Ok(Some(_)) => {
                let number = number_of(&key, &bytes)?;
                let newest = &mut newest[(writer * KEYS + at) as usize];
                ensure!(number >= *newest, "{key} has number {number} after {newest}");
                *newest = number;
                hits += 1;
                pause.1 = pause.1.max(pause.0.elapsed());
                pause.0 = Instant::now();
            }
            Ok(None) => misses += 1,
            Err(Error::Lost { .. } | Error::NoServer { .. }) => {}
            Err(error) => return Err(error).context(key),
        }
    }
    let pause = pause.1.as_millis();
    say(format_args!(
        "read: {hits} hits, {misses} misses, longest pause between hits {pause} ms; {:?}",
        cache.counters()
    ));
    ensure!(hits > 0, "nothing was found");
    Ok(())
}

/// Acts as a hostile reader: writes to all DAX devices that contain a cache. Its stores must have no effect.
fn scribble() -> Result<()> {
    let mut found = 0;
    for device in fs::read_dir("/sys/bus/dax/devices")?.flatten() {
        let len: usize = fs::read_to_string(device.path().join("size"))?.trim().parse()?;
        let path = std::path::Path::new("/dev").join(device.file_name());
        let file = File::options().read(true).write(true).open(&path)?;
        let memory = Mapping::of_file(&file, 0, len, Protection::ReadWrite)?;
        let at = (0..len).step_by(4096).find(|at| memory.load_relaxed_u64(*at) == cache::READY);
        let Some(at) = at else { continue };
        found += 1;
        let before: Vec<u64> = (at..len).step_by(8).map(|at| memory.load_relaxed_u64(at)).collect();
        for word in (at..len).step_by(8) {
            memory.store_relaxed_u64(word, !0);
        }
        let kept = (at..len).step_by(8).filter(|at| memory.load_relaxed_u64(*at) == !0).count();
        let were = before.iter().filter(|word| **word == !0).count();
        say(format_args!(
            "{}: {} words written, {kept} have the value, {were} had it",
            path.display(),
            before.len()
        ));
        ensure!(kept <= were, "stores of a reader have reached the memory");
    }
    ensure!(found > 0, "there is no cache in any DAX device");
    say(format_args!("scribbled: {found}"));
    Ok(())
}
