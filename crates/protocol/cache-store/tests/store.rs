//! Comparison of a store with a map, and of a successor's items with those that were stored before a kill.
#![cfg(not(loom))]

mod common;

use common::{create, key, memory, value, which};
use ginnel_cache_store::reader::{Found, Reader};
use ginnel_cache_store::store::{NotACache, NotStored, Store};
use ginnel_layout::cache::{BOOT_TIME, CLOCK, MAGIC, MOST_CONTACT, MOST_KEY, Room, item, log, marks};
use ginnel_shmem::{Mapping, SharedMemory};
use kit::mortal::Mortal;
use proptest::prelude::*;
use std::collections::HashMap;

const LEN: usize = 64 << 10;

fn get<M: SharedMemory>(store: &mut Store<M>, number: u16) -> Option<u64> {
    let mut bytes = Vec::new();
    store.get(&key(number), &mut bytes).map(|_| which(number, &bytes))
}

fn read(reader: &Reader<Mapping>, number: u16) -> Option<u64> {
    let mut bytes = b"before".to_vec();
    match reader.get(&key(number), &mut bytes) {
        Found::Hit(_) => {
            assert_eq!(bytes[..6], *b"before");
            Some(which(number, &bytes[6..]))
        }
        Found::Miss => {
            assert_eq!(bytes, b"before");
            None
        }
        Found::Unknown => panic!("nothing changes meanwhile"),
    }
}

#[derive(Clone, Debug)]
enum Op {
    Set(u16, usize),
    Get(u16),
    Delete(u16),
    Touch(u16, u32),
    Flush,
    Tick(u64),
    Limit(usize),
    Tidy,
    Successor,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let number = 0..200_u16;
    let op = prop_oneof![
        30 => (number.clone(), 20..1500_usize).prop_map(|(number, len)| Op::Set(number, len)),
        20 => (number.clone(), 20..60_usize).prop_map(|(number, len)| Op::Set(number, len)),
        30 => number.clone().prop_map(Op::Get),
        8 => number.clone().prop_map(Op::Delete),
        5 => (number, 0..100_u32).prop_map(|(number, expiry)| Op::Touch(number, expiry)),
        1 => Just(Op::Flush),
        3 => (0..5000_u64).prop_map(Op::Tick),
        2 => (0..14_usize).prop_map(Op::Limit),
        2 => Just(Op::Tidy),
        2 => Just(Op::Successor),
    ];
    prop::collection::vec(op, 1..400)
}

proptest! {
    #[test]
    fn a_reader_finds_the_value_that_was_stored_last(ops in ops()) {
        let memory = memory(LEN);
        let mut store = create(memory.clone(), LEN);
        // The number of each key's value, and its expiry time.
        let mut model: HashMap<u16, (u64, u32)> = HashMap::new();
        // The highest number of segments that may be in use.
        let mut most = store.segments().1;
        let mut now = 1000;
        for (which, op) in ops.into_iter().enumerate() {
            let which = which as u64;
            match op {
                Op::Set(number, len) => {
                    store.set(&key(number), &[&value(number, which, len)], 0, 0).unwrap();
                    model.insert(number, (which, 0));
                    prop_assert_eq!(get(&mut store, number), Some(which));
                }
                Op::Get(number) => {
                    let clock = store.clock() / 1000;
                    let is_there = |(_, expiry): &&(u64, u32)| *expiry == 0 || u64::from(*expiry) > clock;
                    let expected = model.get(&number).filter(is_there).map(|(which, _)| *which);
                    let found = get(&mut store, number);
                    prop_assert!(found.is_none() || found == expected, "{found:?}, not {expected:?}");
                    if found.is_none() {
                        model.remove(&number);
                    }
                }
                Op::Delete(number) => {
                    store.delete(&key(number));
                    model.remove(&number);
                    prop_assert_eq!(get(&mut store, number), None);
                }
                Op::Touch(number, expiry) => {
                    if store.touch(&key(number), expiry) && let Some((_, ends)) = model.get_mut(&number) {
                        *ends = expiry;
                    }
                }
                Op::Flush => {
                    store.flush();
                    model.clear();
                }
                Op::Tick(time) => {
                    now += time;
                    store.tick(now);
                }
                Op::Limit(segments) => {
                    store.set_limit(segments);
                    most = most.max(store.segments().1);
                }
                Op::Tidy => {
                    while store.tidy() {}
                    let (used, limit) = store.segments();
                    prop_assert!(used <= limit);
                    most = limit;
                }
                Op::Successor => store = Store::open(memory.clone(), now).unwrap(),
            }
            prop_assert!(store.segments().0 <= most);
        }
        let reader = Reader::new(memory).unwrap();
        for number in 0..200 {
            prop_assert_eq!(read(&reader, number), get(&mut store, number));
        }
    }
}

#[test]
fn memory_is_filled_and_then_items_go() {
    let memory = memory(LEN);
    let mut store = create(memory, LEN);
    let mut stored = 0;
    while store.counters().evictions == 0 {
        store.set(&key(stored), &[&value(stored, 0, 100)], 0, 0).unwrap();
        stored += 1;
    }
    // Items fill the memory except for the last free segment, the ends of segments, and the index.
    assert!(store.live_bytes() > LEN * 6 / 10, "{} of {LEN}", store.live_bytes());
    assert!(usize::from(stored) >= store.len());
    for number in stored..5000 {
        store.set(&key(number), &[&value(number, 0, 100)], 0, 0).unwrap();
        assert_eq!(get(&mut store, number), Some(0));
        let (used, limit) = store.segments();
        assert!(used <= limit);
    }
    assert!(store.counters().evictions + store.counters().collisions + store.len() as u64 == 5000);
}

#[test]
fn items_that_are_used_outlast_a_scan() {
    let memory = memory(1 << 20);
    let mut store = create(memory, 1 << 20);
    let value_of = |number| value(number, 1, 60);
    // Half of the items that fit are read again and again, while other items are stored once each.
    for round in 0..20_u16 {
        for number in 0..1000 {
            if get(&mut store, number).is_none() {
                store.set(&key(number), &[&value_of(number)], 0, 0).unwrap();
            }
        }
        for number in 0..2000 {
            let number = 1000 + round * 2000 + number;
            store.set(&key(number), &[&value_of(number)], 0, 0).unwrap();
        }
    }
    let found = (0..1000).filter(|number| get(&mut store, *number).is_some()).count();
    assert!(found > 900, "{found} of 1000 are left");
}

#[test]
fn uses_by_readers_count() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    let reader = Reader::new(memory).unwrap();
    for number in 0..3000 {
        store.set(&key(number), &[&value(number, 0, 100)], 0, 0).unwrap();
        for wanted in 0..20 {
            if read(&reader, wanted).is_some() {
                store.used_by_reader(reader.hash(&key(wanted)));
            }
        }
    }
    let found = (0..20).filter(|number| read(&reader, *number).is_some()).count();
    assert_eq!(found, 20);
    store.used_by_reader(12_345);
}

#[test]
fn items_end_with_their_time_and_a_flush() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    let reader = Reader::new(memory).unwrap();
    let both = |store: &mut Store<Mapping>, number| {
        let found = read(&reader, number);
        assert_eq!(found, get(store, number));
        found.is_some()
    };
    store.set(&key(1), &[&value(1, 0, 30)], 7, 3).unwrap();
    store.set(&key(2), &[&value(2, 0, 30)], 8, 0).unwrap();
    store.tick(2999);
    assert!(both(&mut store, 1) && both(&mut store, 2));
    assert!(store.touch(&key(2), 4) && !store.touch(&key(3), 4));
    store.tick(3000);
    assert!(!both(&mut store, 1) && both(&mut store, 2));
    // When the time is set back, the clock stops; then it continues.
    store.tick(100);
    assert!(both(&mut store, 2));
    store.tick(1100);
    assert!(!both(&mut store, 2));
    store.set(&key(2), &[&value(2, 1, 30)], 9, 0).unwrap();
    assert_eq!(store.peek(&key(2)).map(|meta| meta.flags), Some(9));
    store.flush();
    assert!(!both(&mut store, 2));
    store.set(&key(2), &[&value(2, 2, 30)], 9, 0).unwrap();
    assert!(both(&mut store, 2));
}

#[test]
fn versions_are_never_given_out_twice() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    let mut last = 0;
    for _ in 0..5 {
        for number in 0..50 {
            let version = store.set(&key(number), &[&value(number, 0, 30)], 0, 0).unwrap();
            assert!(version > last && store.peek(&key(number)).unwrap().version == version);
            last = version;
        }
        store = Store::open(memory.clone(), 0).unwrap();
        assert!(store.get(&key(7), &mut Vec::new()).is_some());
    }
    assert_eq!(store.server(), 6);
}

#[test]
fn keys_and_values_have_their_limits() {
    let mut store = create(memory(LEN), LEN);
    assert_eq!(store.set(b"", &[b"x"], 0, 0), Err(NotStored::Key));
    assert_eq!(store.set(&[b'k'; MOST_KEY + 1], &[b"x"], 0, 0), Err(NotStored::Key));
    let most = store.most();
    let large = vec![7; most - 3];
    assert_eq!(store.set(b"four", &[&large], 0, 0), Err(NotStored::TooLarge(most)));
    store.set(b"key", &[&large[..100], &large[100..]], 0, 0).unwrap();
    let mut found = Vec::new();
    assert!(store.get(b"key", &mut found).is_some() && found == large);
    store.set(b"key", &[], 0, 0).unwrap();
    found.clear();
    assert!(store.get(b"key", &mut found).is_some() && found.is_empty());
}

#[test]
fn a_block_that_is_not_a_cache_is_refused() {
    let memory = memory(LEN);
    assert_eq!(Store::open(memory.clone(), 0).err(), Some(NotACache::Unknown));
    assert_eq!(Reader::new(memory.clone()).err(), Some(NotACache::Unknown));
    create(memory.clone(), LEN);
    for word in [0x08, 0x10, 0x18] {
        let was = memory.load_relaxed_u64(word);
        for lie in [0, u64::MAX, was * 2 + 1] {
            memory.store_relaxed_u64(word, lie);
            assert_eq!(Store::open(memory.clone(), 0).err(), Some(NotACache::Corrupt));
            assert_eq!(Reader::new(memory.clone()).err(), Some(NotACache::Corrupt));
        }
        memory.store_relaxed_u64(word, was);
    }
    assert!(Store::open(memory.clone(), 0).is_ok());
    memory.store_relaxed_u64(MAGIC, 0);
    assert_eq!(Reader::new(memory).err(), Some(NotACache::Unknown));
}

#[test]
fn a_lie_about_room_does_not_reach_behind_a_segment() {
    let memory = memory(LEN);
    let shape = common::shape(LEN);
    let mut store = create(memory.clone(), LEN);
    // Two items fill the first segment.
    let small = item::room(2, 100);
    let room = shape.segment - small;
    let len = room - item::BYTES - 2;
    store.set(b"k1", &[&[1; 100]], 0, 0).unwrap();
    store.set(b"k2", &[&vec![2; len]], 0, 0).unwrap();
    let at = shape.segment(0) + small;
    let word = Room(memory.load_relaxed_u64(at + item::ROOM));
    assert_eq!(word.bytes(), room);
    memory.store_relaxed_u64(at + item::ROOM, Room::new(room + small, word.used()).0);
    store.set(b"k2", &[&vec![3; len + 50]], 0, 0).unwrap();
    // The next segment begins with another item.
    assert_ne!(memory.load_relaxed_u64(shape.segment(1)), u64::from_ne_bytes([3; 8]));
    let mut found = Vec::new();
    assert!(store.get(b"k2", &mut found).is_some() && found == vec![3; len + 50]);
}

#[test]
fn a_lie_about_the_order_of_segments_ends_no_server() {
    let memory = memory(LEN);
    let shape = common::shape(LEN);
    let mut store = create(memory.clone(), LEN);
    (0..200).for_each(|number| assert!(store.set(&key(number), &[&value(number, 0, 100)], 0, 0).is_ok()));
    for segment in 0..shape.segments {
        memory.store_relaxed_u64(shape.log(segment) + log::SEQUENCE, u64::MAX);
    }
    let mut store = Store::open(memory, 0).unwrap();
    (0..200).for_each(|number| assert!(store.set(&key(number), &[&value(number, 1, 1000)], 0, 0).is_ok()));
}

#[test]
fn a_flush_that_is_due_later_is_known_to_a_successor() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    store.set(b"k", &[b"v"], 0, 0).unwrap();
    store.flush_later(5);
    store.tick(4999);
    assert!(store.peek(b"k").is_some());
    let mut store = Store::open(memory.clone(), 4999).unwrap();
    assert!(store.peek(b"k").is_some());
    let mut store = Store::open(memory.clone(), 5000).unwrap();
    assert!(store.peek(b"k").is_none());
    store.set(b"k", &[b"v"], 0, 0).unwrap();
    store.tick(9000);
    let mut store = Store::open(memory, 9000).unwrap();
    assert!(store.peek(b"k").is_some(), "it was done once");
}

#[test]
fn a_lie_about_the_bytes_of_a_segment_ends_no_server() {
    let memory = memory(LEN);
    let shape = common::shape(LEN);
    let mut store = create(memory.clone(), LEN);
    store.set(b"k", &[b"v"], 0, 0).unwrap();
    for segment in 0..shape.segments {
        memory.store_relaxed_u64(shape.log(segment) + log::USED, 13);
    }
    let mut store = Store::open(memory, 0).unwrap();
    (0..200).for_each(|number| assert!(store.set(&key(number), &[&value(number, 1, 1000)], 0, 0).is_ok()));
}

#[test]
fn a_lie_about_the_time_ends_no_item() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    store.set(b"k", &[b"v"], 0, store.second() + 10).unwrap();
    for time in 1001..=1100 {
        memory.store_relaxed_u64(BOOT_TIME, 0);
        store.tick(time);
    }
    assert_eq!(store.clock(), 1100);
    assert!(store.peek(b"k").is_some());
    // If the clock were beyond the highest expiry time, no item with an expiry time would ever be found.
    memory.store_relaxed_u64(CLOCK, u64::from(u32::MAX) * 1000);
    assert_eq!(Store::open(memory, 0).err(), Some(NotACache::Corrupt));
}

/// A server is killed after each of many numbers of stores. For each key, its successor must find the value that was stored
/// last, or the value that was being stored, or nothing. A deleted item must not return.
#[test]
fn a_successor_finds_whole_items_wherever_its_predecessor_was_killed() {
    // Runs a server that is killed after this many stores. Returns whether it was killed before its last operation ended.
    let run = |stores: u64| {
        let memory = memory(32 << 10);
        create(memory.clone(), 32 << 10);
        let mortal = Mortal::new(&memory, stores);
        let mut dying = Store::open(mortal.clone(), 0).ok();
        let mut expected: HashMap<u16, [Option<u64>; 2]> = HashMap::new();
        for which in 0..400_u64 {
            let (Some(store), false) = (&mut dying, mortal.is_dead()) else { break };
            let number = (which * 7 % 60) as u16;
            let before = expected.get(&number).and_then(|states| states[0]);
            let key = key(number);
            let len = 20 + (which * 37 % 500) as usize;
            let after = match which % 19 {
                8 | 17 => {
                    store.delete(&key);
                    None
                }
                3 => {
                    store.renew(&key, marks::STALE, None);
                    before
                }
                5 => {
                    store.mark(&key, marks::WON);
                    before
                }
                11 => {
                    store.touch(&key, u32::MAX);
                    before
                }
                13 => {
                    store.used_by_reader(store.hash(&key));
                    store.tidy();
                    before
                }
                15 => {
                    // The limit decreases and increases in turn.
                    store.set_limit(if which % 2 == 0 { 4 } else { 100 });
                    store.tidy();
                    before
                }
                kind => {
                    let marks = if kind == 1 { marks::BINARY_KEY } else { 0 };
                    store.set_marked(&key, &[&value(number, which, len)], 0, 0, marks).unwrap();
                    Some(which)
                }
            };
            // If the server died in the middle of the operation, either state is right.
            let or = if mortal.is_dead() { before } else { after };
            expected.insert(number, [after, or]);
        }
        let is_dead = mortal.is_dead();
        let mut successor = Store::open(memory.clone(), 0).unwrap();
        let reader = Reader::new(memory).unwrap();
        let check = |successor: &mut Store<Mapping>| {
            for number in 0..60 {
                let mut bytes = Vec::new();
                if let Found::Hit(_) = reader.get(&key(number), &mut bytes) {
                    let states = expected.get(&number).copied().unwrap_or_default();
                    assert!(states.contains(&Some(which(number, &bytes))), "{number} after {stores} stores");
                }
                let found = get(successor, number);
                let states = expected.get(&number).copied().unwrap_or_default();
                assert!(
                    found.is_none() || states.contains(&found),
                    "{number} after {stores} stores: {found:?}"
                );
            }
        };
        check(&mut successor);
        // The successor continues until all items have been moved or evicted.
        for number in 100..200 {
            successor.set(&key(number), &[&value(number, 0, 400)], 0, 0).unwrap();
            assert_eq!(get(&mut successor, number), Some(0));
        }
        check(&mut successor);
        is_dead
    };
    let mut stores = 0;
    // The server is killed at each of the first 300 stores, and then at every seventh.
    while run(stores) {
        stores += if stores < 300 { 1 } else { 7 };
    }
    assert!(stores > 2500, "only {stores} stores");
}

#[test]
fn marks_and_uses_of_an_item_are_kept() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    let reader = Reader::new(memory).unwrap();
    let first = store.set(b"k", &[b"value"], 7, 0).unwrap();
    assert_eq!((store.peek(b"k").unwrap().marks, store.last_use(b"k")), (0, Some(1)));
    store.tick(5000);
    let mut bytes = Vec::new();
    assert_eq!(store.get(b"k", &mut bytes).unwrap().len, 5);
    assert_eq!((store.peek(b"k").unwrap().marks, store.last_use(b"k")), (marks::FETCHED, Some(5)));

    let second = store.renew(b"k", marks::STALE, Some(100)).unwrap();
    assert!(second > first && store.mark(b"k", marks::STALE | marks::WON));
    bytes.clear();
    let Found::Hit(meta) = reader.get(b"k", &mut bytes) else { panic!() };
    assert_eq!((&*bytes, meta.version, meta.flags, meta.expiry), (&b"value"[..], second, 7, 100));
    assert_eq!(meta.marks, marks::STALE | marks::WON);

    store.set(b"k", &[b"new"], 0, 0).unwrap();
    assert_eq!((store.peek(b"k").unwrap().marks, store.last_use(b"k")), (0, Some(5)));
    store.used_by_reader(reader.hash(b"k"));
    assert_eq!(store.peek(b"k").unwrap().marks, marks::FETCHED);
    assert!(!store.mark(b"none", 0) && store.renew(b"none", 0, None).is_none());
    assert!(store.last_use(b"none").is_none());
}

#[test]
fn readers_find_the_server_and_notice_another_cache() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    store.set(b"k", &[b"value"], 0, 0).unwrap();
    let reader = Reader::new(memory.clone()).unwrap();
    assert_eq!((reader.id(), &*reader.contact()), (store.id(), ""));
    store.set_contact("tcp 10.0.0.1:11211\nunix /run/x");
    assert_eq!(reader.contact(), "tcp 10.0.0.1:11211\nunix /run/x\n");
    // Lines that do not fit are left out as a whole.
    store.set_contact(&format!("channel web\nunix {}\n", "x".repeat(MOST_CONTACT)));
    assert_eq!(reader.contact(), "channel web\n");
    drop(store);
    let store = Store::open(memory.clone(), 0).unwrap();
    assert!(store.id() == reader.id() && reader.is_current());

    let mut store_of_another = Store::create(memory, common::shape(LEN), [8, 9], 0).unwrap();
    store_of_another.set(b"k", &[b"other"], 0, 0).unwrap();
    assert!(store_of_another.id() != reader.id() && !reader.is_current());
    assert_eq!(reader.get(b"k", &mut Vec::new()), Found::Unknown);
}

#[test]
fn readers_are_asked_for_hits_when_items_have_to_go_soon() {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    let reader = Reader::new(memory).unwrap();
    assert!(!reader.wants_hits());
    for number in 0..1000 {
        store.set(&key(number), &[&[0; 500]], 0, 0).unwrap();
    }
    assert!(store.counters().evictions > 0 && reader.wants_hits());
}
