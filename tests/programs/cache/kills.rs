//! A server that is killed at random moments, while clients change and read items. Each value contains its key and
//! version.

use super::options;
use super::served::{CacheServer, unix};
use ginnel_cache_client::{Cache, Error, Options};
use kit::wait::{AtEnd, wait_until};
use kit::world::World;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use xxhash_rust::xxh64::xxh64;

const WRITERS: usize = 2;

/// The knowledge about a key.
#[derive(Default)]
struct Known {
    /// A reader that begins now must not find an earlier version.
    least: AtomicU64,
    /// No later version was ever sent.
    most: AtomicU64,
}

fn key(number: usize) -> String {
    format!("key {number}")
}

/// Makes a value with the key, the version and a checksum, whose length changes with the version.
fn value(number: usize, version: u64) -> Vec<u8> {
    let mut value = format!("{number} {version} ").into_bytes();
    let len = [20, 100, 101, 3000, 40][version as usize % 5];
    value.extend((0..len).map(|at| (version as u8).wrapping_add(at as u8)));
    let sum = xxh64(&value, 0);
    value.extend_from_slice(&sum.to_le_bytes());
    value
}

/// Returns the version of a value, which must be complete and belong to this key.
fn version(number: usize, found: &[u8]) -> u64 {
    let (rest, sum) = found.split_at(found.len().checked_sub(8).expect("a torn value"));
    assert_eq!(xxh64(rest, 0).to_le_bytes(), sum, "a torn value of key {number}: {found:?}");
    let mut words = rest.split(|&byte| byte == b' ').map(|word| String::from_utf8_lossy(word).into_owned());
    assert_eq!(words.next().unwrap(), number.to_string(), "a value of another key");
    words.next().unwrap().parse().unwrap()
}

struct Load {
    known: Vec<Known>,
    /// Number of keys of each writer.
    keys: usize,
    stop: AtomicBool,
    gets: AtomicU64,
    changes: AtomicU64,
    lost: AtomicU64,
    missing: AtomicU64,
}

/// Looks up a key. Returns whether there is an item.
fn look(load: &Load, cache: &Cache, number: usize, found: &mut Vec<u8>) -> Option<u64> {
    found.clear();
    let least = load.known[number].least.load(Ordering::SeqCst);
    match cache.get(key(number).as_bytes(), found) {
        Ok(Some(_)) => {
            let version = version(number, found);
            let most = load.known[number].most.load(Ordering::SeqCst);
            assert!(
                (least..=most).contains(&version),
                "key {number}: version {version}, not {least} to {most}"
            );
            Some(version)
        }
        Ok(None) => None,
        // The server was killed while it changed this very item, and there is no new server yet.
        Err(Error::NoServer { .. } | Error::Lost { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

fn read(load: &Load, cache: &Cache) {
    let (mut found, mut number) = (Vec::new(), 0_usize);
    while !load.stop.load(Ordering::Relaxed) {
        number = (number + 7) % load.known.len();
        look(load, cache, number, &mut found);
        load.gets.fetch_add(1, Ordering::Relaxed);
    }
}

/// Stores a value under each key, with the number of the key within its writer's keys as its version.
fn fill(load: &Load, cache: &Cache) {
    for (number, known) in load.known.iter().enumerate() {
        let version = (number % load.keys) as u64;
        known.most.store(version, Ordering::SeqCst);
        cache.set(key(number).as_bytes(), &value(number, version), 0, 0).unwrap();
        known.least.store(version, Ordering::SeqCst);
    }
}

fn write(load: &Load, cache: &Cache, writer: usize) {
    // The versions before these were stored by `fill`.
    let (mut found, mut next) = (Vec::new(), load.keys as u64);
    while !load.stop.load(Ordering::Relaxed) {
        next += 1;
        let number = writer * load.keys + (next as usize * 31) % load.keys;
        let (name, known) = (key(number), &load.known[number]);
        known.most.store(next, Ordering::SeqCst);
        let done = match next % 7 {
            0 => cache.delete(name.as_bytes()).map(|_| ()),
            1 => {
                let bytes = value(number, next);
                let stored = cache.set_many(&[ginnel_cache_client::Entry {
                    key: name.as_bytes(),
                    value: &bytes,
                    ..Default::default()
                }]);
                stored.into_iter().next().unwrap().map(|_| ())
            }
            _ => cache.set(name.as_bytes(), &value(number, next), 0, 0).map(|_| ()),
        };
        match done {
            Ok(()) => {
                // After a delete, no version up to this one may be found any more.
                let is_deleted = next.is_multiple_of(7);
                known.least.store(next + u64::from(is_deleted), Ordering::SeqCst);
                load.changes.fetch_add(1, Ordering::Relaxed);
                let now = look(load, cache, number, &mut found);
                if is_deleted {
                    assert_eq!(now, None, "key {number} is back");
                } else if now.is_none() {
                    load.missing.fetch_add(1, Ordering::Relaxed);
                }
            }
            Err(Error::Lost { .. }) => drop(load.lost.fetch_add(1, Ordering::Relaxed)),
            Err(error) => panic!("{error}"),
        }
    }
}

fn kills(in_soak: u64) -> u64 {
    if std::env::var_os("GINNEL_SOAK").is_some() { in_soak } else { 100 }
}

#[test]
fn no_value_is_wrong_torn_or_outdated_after_kills() {
    let ended = kill(kills(2000), "16M", 64);
    // There is room for all items; only one that was being replaced may be missing.
    assert_eq!((ended.kept, ended.missing), (64 * WRITERS, 0));
}

#[test]
fn no_value_is_wrong_torn_or_outdated_while_items_are_evicted() {
    let ended = kill(kills(1000), "1M", 2000);
    // The cache has no room for all items, so the server has to evict some.
    assert!(ended.kept < 2000 * WRITERS * 3 / 4, "{} items were kept", ended.kept);
}

/// What a test of kills found.
struct Ended {
    /// The number of items in the cache after each key had been stored once.
    kept: usize,
    /// The number of values that had just been stored and were missing.
    missing: u64,
}

/// Kills servers of a cache with this much memory, while each writer has this many keys.
fn kill(kills: u64, memory: &str, keys: usize) -> Ended {
    let world = World::new();
    let more = format!("--max-item-size 8K --memory {memory}");
    let mut server = CacheServer::serving(&world, &more);
    let patient = |changes: &str| {
        let options = Options { patience: Duration::from_secs(30), ..options(&world, changes) };
        Cache::open_with("web/c", &options).unwrap()
    };
    let writers = [patient("auto"), patient(&format!("unix {}", unix(&world).display()))];
    // Readers never wait.
    let reader = Cache::open_with("web/c", &options(&world, "auto")).unwrap();
    let load = Load {
        known: (0..keys * WRITERS).map(|_| Known::default()).collect(),
        keys,
        stop: AtomicBool::new(false),
        gets: AtomicU64::new(0),
        changes: AtomicU64::new(0),
        lost: AtomicU64::new(0),
        missing: AtomicU64::new(0),
    };
    // The cache is full before the first kill: how many changes follow depends on how busy the machine is.
    fill(&load, &writers[0]);
    let kept = reader.survey().unwrap().items as usize;
    std::thread::scope(|scope| {
        // The other threads must stop even if this test fails.
        let _stop = AtEnd(|| load.stop.store(true, Ordering::Relaxed));
        scope.spawn(|| read(&load, &reader));
        for (number, writer) in writers.iter().enumerate() {
            let load = &load;
            scope.spawn(move || write(load, writer, number));
        }
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        for _ in 0..kills {
            let before = load.changes.load(Ordering::Relaxed);
            wait_until("a change with this server", || load.changes.load(Ordering::Relaxed) > before);
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            std::thread::sleep(Duration::from_micros((random >> 33) % 10_000));
            server.kill();
            let gets = load.gets.load(Ordering::Relaxed);
            wait_until("gets without a server", || load.gets.load(Ordering::Relaxed) > gets + 100);
            server = CacheServer::start(&world, &more);
        }
        // An answer of the previous server may be counted only now.
        let before = load.changes.load(Ordering::Relaxed) + 10;
        wait_until("changes with the last server", || load.changes.load(Ordering::Relaxed) > before);
    });
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let counted = reader.counters();
    println!(
        "{kept} items, {kills} kills: {} changes, {} lost, {} missing, {} gets, {} of them hits, {} asked",
        count(&load.changes),
        count(&load.lost),
        count(&load.missing),
        count(&load.gets),
        counted.hits,
        counted.asked
    );
    // Only a few servers are killed before they serve.
    assert!(reader.survey().is_some_and(|survey| survey.servers > kills / 2));
    assert!(count(&load.changes) > kills && counted.hits > count(&load.gets) / 8);
    Ended { kept, missing: count(&load.missing) }
}
