//! Readers that run while a server changes all items all the time.
#![cfg(not(loom))]

mod common;

use common::{create, key, memory, value, which};
use ginnel_cache_store::reader::{Found, Reader};
use ginnel_cache_store::store::Store;
use ginnel_shmem::{Mapping, SharedMemory};
use kit::wait::{AtEnd, Watchdog, wait_until};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

const LEN: usize = 64 << 10;
const KEYS: u16 = 120;

/// Looks keys up until `stop` is set. Checks that values are not torn, and not older than values that it has seen before.
fn reads(memory: &Mapping, stop: &AtomicBool, hits: &AtomicU64) {
    let reader = Reader::new(memory.clone()).unwrap();
    let mut seen: HashMap<u16, (u64, u64)> = HashMap::new();
    let (mut number, mut bytes) = (0, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        number = (number + 7) % KEYS;
        bytes.clear();
        if let Found::Hit(meta) = reader.get(&key(number), &mut bytes) {
            let which = which(number, &bytes);
            let (version, before) = seen.insert(number, (meta.version, which)).unwrap_or_default();
            assert!(meta.version >= version && which >= before, "an older value came back");
            assert!(meta.version != version || which == before, "one version has two values");
            hits.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn readers_find_whole_values_and_never_older_ones() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    let (stop, hits) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
    thread::scope(|scope| {
        for hits in &hits {
            scope.spawn(|| reads(&memory, &stop, hits));
        }
        let _stop = AtEnd(|| stop.store(true, Ordering::Relaxed));
        let (mut which, mut evictions) = (0_u64, 0);
        let mut watchdogs = [0, 1].map(|k| Watchdog::new(&format!("hits of reader {k}")));
        // Each reader must have run often enough while the server works.
        while which < 200_000 || hits.iter().any(|hits| hits.load(Ordering::Relaxed) < 20_000) {
            watchdogs.iter_mut().zip(&hits).for_each(|(dog, hits)| dog.look(hits.load(Ordering::Relaxed)));
            which += 1;
            let number = (which * 31 % u64::from(KEYS)) as u16;
            match which % 50 {
                0 => drop(store.delete(&key(number))),
                1 => drop(store.touch(&key(number), u32::MAX)),
                2 => store.tick(which),
                // The lengths vary, so the value is stored in place of the one before, or elsewhere.
                _ => {
                    let len = if which.is_multiple_of(3) { 20 + (which % 900) as usize } else { 64 };
                    store.set(&key(number), &[&value(number, which, len)], 0, 0).unwrap();
                }
            }
            if which.is_multiple_of(20_000) {
                evictions += store.counters().evictions;
                store = Store::open(memory.clone(), which).unwrap();
            }
        }
        assert!(evictions > 0);
    });
}

#[test]
fn an_item_that_a_killed_server_has_not_finished_is_unknown_until_there_is_another_one() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    store.set(&key(1), &[&value(1, 0, 30)], 0, 0).unwrap();
    let reader = Reader::new(memory.clone()).unwrap();
    // The place of the item's version.
    let version = store.peek(&key(1)).unwrap().version;
    let at = (0..LEN).step_by(8).rfind(|at| memory.load_relaxed_u64(*at) == version).unwrap();
    memory.store_relaxed_u64(at, 0);
    assert_eq!(reader.get(&key(1), &mut Vec::new()), Found::Unknown);
    let mut successor = Store::open(memory, 0).unwrap();
    assert_eq!(successor.peek(&key(1)), None);
    assert_eq!(reader.get(&key(1), &mut Vec::new()), Found::Miss);
}

#[test]
fn items_with_an_end_are_unknown_while_the_clock_stands() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    store.set(&key(1), &[&value(1, 0, 30)], 0, 1_000_000).unwrap();
    store.set(&key(2), &[&value(2, 0, 30)], 0, 0).unwrap();
    let reader = Reader::new(memory).unwrap();
    let find = |number| reader.get(&key(number), &mut Vec::new());
    assert!(matches!(find(1), Found::Hit(_)));
    wait_until("an item with an end to be served no more", || {
        assert!(matches!(find(2), Found::Hit(_)));
        find(1) == Found::Unknown
    });
    assert!(matches!(find(2), Found::Hit(_)));
    store.tick(5000);
    assert!(matches!(find(1), Found::Hit(_)));
}
