//! Shadow regions, whose memory peers cannot reach.

use super::lifetimes::with;
use super::*;
use ginnel_layout::verbs::Errand;
use ginnel_verbs::shared_receive_queue::SharedReceiveQueue;
use ginnel_verbs::work::Datagram;

impl Side {
    /// Registers a part of the memory outside the arena that begins at an offset.
    fn register_shadow(&self, at: u64, length: u64, access: u32) -> Key {
        let region = Region { address: OUTSIDE + at, length, access: Access(access), domain: 1 };
        self.regions.lock().unwrap().add_shadow(region).unwrap()
    }

    /// Returns whether all memory that was allocated has been freed, except this many bytes.
    fn has_all_but(&self, len: usize) -> bool {
        let mut spare = self.spare.lock().unwrap().clone();
        spare.take((SPARE.len() - len) as u64, 64).is_some()
    }
}

/// The length of a bounce area.
const BOUNCE: usize = ginnel_verbs::shadow::MOST;
const ALL_OUTSIDE: u64 = OUTSIDE_BYTES as u64;

fn outside(at: u64, length: u32, key: Key) -> Element {
    Element { address: OUTSIDE + at, length, key: key.0 }
}

/// Returns two connected queue pairs. Each side has registered all of its memory outside the arena.
fn stage(kind: Kind) -> (Both, [Key; 2]) {
    let both = Both::of_kind(kind);
    let keys = [0, 1].map(|i| {
        assert!(both.pairs[i].offer_errands(BOUNCE));
        both.sides[i].register_shadow(0, ALL_OUTSIDE, 1 | ALL)
    });
    for i in 0..2 {
        match kind {
            Kind::UD => {
                both.pairs[i].modify(QpState::RTR, Change::default()).unwrap();
                both.pairs[i].modify(QpState::RTS, Change::default()).unwrap();
            }
            _ => both.connect(i),
        }
    }
    (both, keys)
}

impl Both {
    fn fill_outside(&self, i: usize, at: u64, bytes: &[u8]) {
        self.sides[i].pages().put(OUTSIDE + at, bytes);
    }

    fn bytes_outside(&self, i: usize, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.sides[i].pages().get(OUTSIDE + at, &mut bytes);
        bytes
    }

    /// Polls both sides until the first one has this many completions.
    fn until(&self, count: usize) -> Vec<(u64, Status)> {
        let mut all = Vec::new();
        for _ in 0..1000 {
            all.extend(self.said(0));
            if all.len() >= count {
                return all;
            }
            assert!(self.said(1).is_empty());
        }
        panic!("only {all:?}");
    }
}

fn write(at: u64, key: Key) -> Operation {
    Operation::Write { address: OUTSIDE + at, key, immediate: None, solicited: false }
}

fn write_with_immediate(at: u64, key: Key) -> Operation {
    Operation::Write { address: OUTSIDE + at, key, immediate: Some(5), solicited: false }
}

fn read(at: u64, key: Key) -> Operation {
    Operation::Read { address: OUTSIDE + at, key }
}

#[test]
fn the_owner_writes_and_reads_on_behalf_of_its_peer() {
    let (both, keys) = stage(Kind::RC);
    for len in [1, 7, 8, 4096, BOUNCE - 1, BOUNCE, BOUNCE + 1, 3 * BOUNCE + 100] {
        let bytes: Vec<_> = pattern(len).iter().map(|byte| byte ^ len as u8).collect();
        both.fill_outside(0, 10, &bytes);
        both.fill_outside(1, 0, &vec![0; len + 100]);
        // Elements whose ends do not coincide with those of the pieces.
        let third = len as u32 / 3;
        let elements = [
            outside(10, third, keys[0]),
            outside(10 + u64::from(third), 0, keys[0]),
            outside(10 + u64::from(third), len as u32 - third, keys[0]),
        ];
        both.post(0, 1, write(50, keys[1]), &elements);
        assert_eq!(both.until(1), [(1, Status::SUCCESS)]);
        let around = both.bytes_outside(1, 0, len + 100);
        assert!(around[50..50 + len] == bytes, "{len} bytes");
        assert!(around[..50].iter().chain(&around[50 + len..]).all(|byte| *byte == 0), "{len} bytes");

        both.fill_outside(0, 0, &vec![0; len + 100]);
        both.post(0, 2, read(50, keys[1]), &elements);
        assert_eq!(both.until(1), [(2, Status::SUCCESS)]);
        let around = both.bytes_outside(0, 0, len + 100);
        assert!(around[10..10 + len] == bytes, "{len} bytes");
        assert!(around[..10].iter().chain(&around[10 + len..]).all(|byte| *byte == 0), "{len} bytes");
    }
}

/// A request on UC that has failed is over, and no one is told. The next request must not get its answer.
#[test]
fn the_answer_to_a_failed_request_is_not_taken_for_that_of_another() {
    let (both, keys) = stage(Kind::UC);
    let allow = |access| {
        let change = Change { access: Some(Access(access)), ..Change::default() };
        both.pairs[1].modify(QpState::RTS, change).unwrap();
    };
    both.fill_outside(0, 0, &vec![1; BOUNCE]);
    both.fill_outside(1, 0, &vec![0; BOUNCE]);
    both.post(0, 1, write(0, keys[1]), &[outside(0, BOUNCE as u32, keys[0])]);
    assert!(both.said(0).is_empty(), "the owner has not been asked to look");
    allow(0);
    assert_eq!(both.said(0), [(1, Status::SUCCESS)]);
    // The owner answers only now.
    assert!(both.said(1).is_empty());
    allow(1 | ALL);
    both.fill_outside(0, 0, &[2; 8]);
    both.post(0, 2, write(100, keys[1]), &[outside(0, 8, keys[0])]);
    assert_eq!(both.until(1), [(2, Status::SUCCESS)]);
    assert_eq!(both.bytes_outside(1, 100, 8), [2; 8]);
}

#[test]
fn the_owner_executes_atomic_operations_on_behalf_of_its_peer() {
    let (both, keys) = stage(Kind::RC);
    both.fill_outside(1, 64, &41u64.to_ne_bytes());
    let (address, key) = (OUTSIDE + 64, keys[1]);
    for (operation, before, after) in [
        (Operation::FetchAndAdd { address, key, add: 2 }, 41, 43),
        (Operation::CompareAndSwap { address, key, compare: 43, swap: 7 }, 43, 7),
        (Operation::CompareAndSwap { address, key, compare: 43, swap: 9 }, 7, 7),
    ] {
        both.post(0, 1, operation, &[outside(8, 8, keys[0])]);
        assert_eq!(both.until(1), [(1, Status::SUCCESS)]);
        assert_eq!(both.bytes_outside(0, 8, 8), u64::to_ne_bytes(before));
        assert_eq!(both.bytes_outside(1, 64, 8), u64::to_ne_bytes(after));
    }
}

#[test]
fn requests_are_executed_in_order() {
    let (both, keys) = stage(Kind::RC);
    let there = both.sides[1].register(0, 4096, 1 | ALL);
    both.pairs[1].post_receive(9, &[element(100, 100, there)]).unwrap();
    both.fill_outside(0, 0, &[1; 200]);
    let one = [outside(0, 90, keys[0])];
    both.post(0, 1, write(0, keys[1]), &one);
    let direct = Operation::Write { address: BASE, key: there, immediate: None, solicited: false };
    both.post(0, 2, direct, &one);
    both.post(0, 3, SEND, &one);
    both.post(0, 4, write(0, keys[1]), &one);
    assert_eq!((both.said(0).len(), both.sides[1].rings.load(Ordering::Relaxed)), (0, 1));
    assert_eq!(both.bytes(1, 0, 200), [0; 200]);
    assert_eq!(both.bytes_outside(1, 0, 90), [0; 90]);
    // The owner's notifier, while its program sleeps.
    both.queues[1].attend(&both.sides[1].pages());
    assert_eq!(both.bytes_outside(1, 0, 90), [1; 90]);
    assert_eq!(both.bytes(1, 0, 90), [0; 90]);
    // An errand whose completion the owner does not know of is not counted as done, and nothing is done twice.
    both.fill_outside(1, 0, &[2; 90]);
    both.queues[1].attend(&both.sides[1].pages());
    let ok = |id| (id, Status::SUCCESS);
    assert_eq!(both.said(0), [ok(1), ok(2), ok(3)]);
    assert_eq!((both.bytes(1, 0, 90), both.bytes_outside(1, 0, 90)), (vec![1; 90], vec![2; 90]));
    assert_eq!((both.said(1), both.bytes(1, 100, 90)), (vec![ok(9)], vec![1; 90]));
    assert!(both.sides[0].asked.load(Ordering::Relaxed) > 0);
    assert_eq!(both.until(1), [ok(4)]);
}

#[test]
fn data_arrives_before_its_immediate_data() {
    for kind in [Kind::RC, Kind::UC] {
        let (both, keys) = stage(kind);
        both.fill_outside(0, 0, &[3; 90]);
        let one = [outside(0, 90, keys[0])];
        both.pairs[1].post_receive(9, &[]).unwrap();
        both.post(0, 1, write_with_immediate(0, keys[1]), &one);
        assert!(both.said(0).is_empty() && both.bytes_outside(1, 0, 90) == [0; 90]);
        assert!(both.poll(1).is_empty() && both.bytes_outside(1, 0, 90) == [3; 90]);
        assert_eq!(both.said(0), [(1, Status::SUCCESS)]);
        let got = both.poll(1);
        assert_eq!((got.len(), got[0].id, got[0].immediate), (1, 9, Some(5)));
    }
}

#[test]
fn immediate_data_waits_for_a_receive_and_the_bytes_are_written_once() {
    let (both, keys) = stage(Kind::RC);
    let one = [outside(0, 90, keys[0])];
    for round in 1..4 {
        both.fill_outside(0, 0, &[round; 90]);
        both.post(0, 1, write_with_immediate(0, keys[1]), &one);
        for _ in 0..3 {
            assert!(both.said(0).is_empty() && both.poll(1).is_empty());
        }
        assert_eq!(both.bytes_outside(1, 0, 90), [round; 90]);
        both.fill_outside(1, 0, &[99; 90]);
        both.pairs[1].post_receive(9, &[]).unwrap();
        assert_eq!(both.said(0), [(1, Status::SUCCESS)]);
        assert_eq!((both.said(1), both.bytes_outside(1, 0, 90)), (vec![(9, Status::SUCCESS)], vec![99; 90]));
    }
}

#[test]
fn messages_reach_receives_outside_the_arena() {
    for kind in [Kind::RC, Kind::UC] {
        let (both, keys) = stage(kind);
        let here = both.sides[0].register(0, 8192, 1);
        let there = both.sides[1].register(0, 4096, 1);
        for len in [0usize, 1, 32, 33, 200, 1000] {
            both.fill(0, 0, &pattern(len));
            both.fill_outside(1, 0, &[0; 4000]);
            // Some buffers are in the arena, some are not.
            let elements = [outside(0, 100, keys[1]), element(0, 50, there), outside(1000, 2000, keys[1])];
            both.pairs[1].post_receive(7, &elements).unwrap();
            both.post(0, 1, SEND, &[element(0, len as u32, here)]);
            assert_eq!(both.said(0), [(1, Status::SUCCESS)]);
            let got = both.poll(1);
            assert_eq!((got.len(), got[0].status, got[0].length), (1, Status::SUCCESS, len as u32));
            let mut bytes = both.bytes_outside(1, 0, 100);
            bytes.extend(both.bytes(1, 0, 50));
            bytes.extend(both.bytes_outside(1, 1000, 2000));
            assert!(bytes[..len] == pattern(len), "{len} bytes");
        }
        assert!(both.sides[1].has_all_but(BOUNCE));
        // A message that is too long writes nothing, and neither does one for an invalid buffer.
        both.fill_outside(1, 0, &[0; 200]);
        both.pairs[1].post_receive(8, &[outside(0, 99, keys[1])]).unwrap();
        both.post(0, 2, SEND, &[element(0, 100, here)]);
        assert_eq!(both.said(1), [(8, Status::LOC_LEN_ERR)]);
        assert!(both.bytes_outside(1, 0, 200) == [0; 200] && both.sides[1].has_all_but(BOUNCE));
    }
}

#[test]
fn datagrams_reach_receives_outside_the_arena_behind_their_header() {
    let (both, keys) = stage(Kind::UD);
    let here = both.sides[0].register(0, 8192, 1);
    let change = Change { qkey: Some(5), ..Change::default() };
    both.pairs[1].modify(QpState::RTS, change).unwrap();
    let datagram = Some(Datagram { number: both.pairs[1].number(), lid: 3, qkey: 5 });
    for len in [8, 100] {
        both.fill(0, 0, &pattern(len));
        both.fill_outside(1, 0, &[9; 300]);
        let elements = [outside(0, 50, keys[1]), outside(100, 200, keys[1])];
        both.pairs[1].post_receive(7, &elements).unwrap();
        let elements = [element(0, len as u32, here)];
        let work = Work { datagram, ..with(SEND, &elements) };
        both.pairs[0].post(&both.sides[0].pages(), &work).unwrap();
        let got = both.poll(1);
        assert_eq!((got.len(), got[0].status, got[0].length), (1, Status::SUCCESS, 40 + len as u32));
        let mut bytes = both.bytes_outside(1, 0, 50);
        bytes.extend(both.bytes_outside(1, 100, 200));
        assert!(bytes[..40] == [9; 40] && bytes[40..40 + len] == pattern(len), "{len} bytes");
        assert!(both.sides[1].has_all_but(0));
    }
}

#[test]
fn a_shared_receive_queue_has_receives_outside_the_arena() {
    let (both, _) = stage(Kind::RC);
    let [one, two] = &both.sides;
    let (location, receives) = (two.location(5), CAPACITY.receives);
    let shared =
        SharedReceiveQueue::new(two.tables.clone(), location, 1, receives, two.adapter(), two.tell());
    let shared = shared.unwrap();
    let completes = (both.queues[1].clone(), both.queues[1].clone());
    let tell = two.tell();
    let wanted = QueuePairOptions {
        kind: Kind::RC,
        domain: 1,
        capacity: CAPACITY,
        shared: Some(shared.clone()),
        completes,
        tell,
    };
    let location = Location { rings: None, ..two.location(6) };
    let receiver = QueuePair::new(two.tables.clone(), location, wanted, two.adapter()).unwrap();
    let sender = one.queue_pair(Kind::RC, 7, &both.queues[0]);
    assert!(receiver.offer_errands(BOUNCE));
    for (a, b) in [(&receiver, &sender), (&sender, &receiver)] {
        a.modify(QpState::INIT, Change { access: Some(Access(ALL)), ..Change::default() }).unwrap();
        a.modify(QpState::RTR, Change { peer: Some(b.number()), ..Change::default() }).unwrap();
        a.modify(QpState::RTS, Change::default()).unwrap();
    }
    let key = two.register_shadow(0, 4096, 1 | ALL);
    let here = one.register(0, 4096, 1);
    both.fill(0, 0, &[4; 100]);
    let elements = [element(0, 100, here)];
    shared.post_receive(3, &[outside(0, 100, key)]).unwrap();
    sender.post(&one.pages(), &with(SEND, &elements)).unwrap();
    assert_eq!((both.said(0).len(), both.said(1)), (1, vec![(3, Status::SUCCESS)]));
    assert_eq!(both.bytes_outside(1, 0, 100), [4; 100]);
    // A write with immediate data claims no receive before its data has been written.
    shared.post_receive(4, &[outside(0, 100, key)]).unwrap();
    sender.post(&one.pages(), &with(write_with_immediate(200, key), &elements)).unwrap();
    let header = shared.location().rings.as_ref().unwrap().completions.1.1 + completion::ENTRY;
    assert!(Completion(two.arena.load_relaxed_u64(header)).claimer().is_none());
    assert!(both.said(0).is_empty() && both.said(1).is_empty());
    assert_eq!((both.said(0).len(), both.said(1)), (1, vec![(4, Status::SUCCESS)]));
    assert_eq!(both.bytes_outside(1, 200, 100), [4; 100]);
    assert!(two.has_all_but(2 * BOUNCE));
}

#[test]
fn memory_for_messages_is_freed() {
    let (both, keys) = stage(Kind::RC);
    let elements = [outside(0, 1000, keys[1])];
    both.pairs[1].post_receive(1, &elements).unwrap();
    both.pairs[1].post_receive(2, &elements).unwrap();
    assert!(!both.sides[1].has_all_but(BOUNCE));
    both.pairs[1].modify(QpState::ERR, Change::default()).unwrap();
    assert_eq!(both.said(1), [(1, Status::WR_FLUSH_ERR), (2, Status::WR_FLUSH_ERR)]);
    assert!(both.sides[1].has_all_but(BOUNCE));
    both.pairs[1].post_receive(3, &elements).unwrap();
    both.pairs[1].modify(QpState::RESET, Change::default()).unwrap();
    assert!(both.sides[1].has_all_but(BOUNCE));
    // If there is no room, posting a receive fails.
    both.pairs[1].modify(QpState::INIT, Change::default()).unwrap();
    let all = both.sides[1].take(SPARE.len() - BOUNCE).unwrap();
    assert_eq!(both.pairs[1].post_receive(4, &elements), Err(Refused::Full));
    both.sides[1].give(all);
    both.pairs[1].post_receive(4, &elements).unwrap();
}

#[test]
fn the_owner_allows_only_what_its_private_records_allow() {
    let wrong = |operation: &dyn Fn(&Both, Key) -> Operation, change: &dyn Fn(&Both, Key), status| {
        let (both, keys) = stage(Kind::RC);
        change(&both, keys[1]);
        both.fill_outside(0, 0, &[7; 100]);
        both.post(0, 1, operation(&both, keys[1]), &[outside(0, 8, keys[0])]);
        assert_eq!(both.until(1), [(1, status)]);
        assert!(both.bytes_outside(1, 0, OUTSIDE_BYTES).iter().all(|byte| *byte == 0));
        both.pairs[1].look();
        assert_eq!(both.pairs[1].state(), QpState::ERR);
    };
    let nothing = |_: &Both, _| ();
    let access = Status::REM_ACCESS_ERR;
    // Ranges beyond the end, before the beginning, and around the end of the address space.
    for at in [ALL_OUTSIDE - 7, u64::MAX, u64::MAX - OUTSIDE - 3] {
        let address = OUTSIDE.wrapping_add(at);
        let write = move |_: &Both, key| Operation::Write { address, key, immediate: None, solicited: false };
        wrong(&write, &nothing, access);
    }
    // Invalid keys: of nothing, of an earlier region, of a region in another domain, and the key that no region has.
    wrong(&|_, key| write(0, Key(key.0 + 1)), &nothing, access);
    wrong(&|_, key| write(0, Key(key.0 + 256)), &nothing, access);
    wrong(&|_, key| write(0, Key(key.0 & u32::MAX >> 1)), &nothing, access);
    wrong(&|_, _| write(0, Key::PLACE), &nothing, access);
    wrong(&|_, key| write(0, key), &|both, key| both.sides[1].remove(key), access);
    let elsewhere = |both: &Both, _| {
        let region = Region { address: OUTSIDE, length: 99, access: Access(1 | ALL), domain: 2 };
        both.sides[1].regions.lock().unwrap().add_shadow(region).unwrap()
    };
    wrong(&|both, key| write(0, elsewhere(both, key)), &nothing, access);
    // The rights of the region, and those of the queue pair.
    for (has, operation) in [
        (Access::REMOTE_READ | Access::REMOTE_ATOMIC, write as fn(u64, Key) -> Operation),
        (Access::REMOTE_WRITE | Access::REMOTE_ATOMIC, read),
        (Access::REMOTE_WRITE | Access::REMOTE_READ, |at, key| {
            let address = OUTSIDE + at;
            Operation::FetchAndAdd { address, key, add: 1 }
        }),
    ] {
        let of_region = |both: &Both, _| both.sides[1].register_shadow(0, 100, 1 | has);
        wrong(&|both, key| operation(0, of_region(both, key)), &nothing, access);
        let of_pair = |both: &Both, _| {
            let change = Change { access: Some(Access(has)), ..Change::default() };
            both.pairs[1].modify(QpState::RTS, change).unwrap();
        };
        wrong(&|_, key| operation(0, key), &of_pair, access);
    }
    let odd = |_: &Both, key| Operation::FetchAndAdd { address: OUTSIDE + 4, key, add: 1 };
    wrong(&odd, &nothing, Status::REM_INV_REQ_ERR);
    // The program has unmapped the memory, although it is registered.
    let unmap = |both: &Both, _| both.sides[1].is_unmapped.store(true, Ordering::Relaxed);
    wrong(&|_, key| write(0, key), &unmap, Status::REM_OP_ERR);
}

#[test]
fn deregistered_buffers_receive_nothing() {
    let (both, keys) = stage(Kind::RC);
    let here = both.sides[0].register(0, 4096, 1);
    let bad: [&dyn Fn() -> Key; 3] =
        [&|| both.sides[1].register_shadow(0, 50, 1), &|| both.sides[1].register_shadow(0, 100, 0), &|| {
            Key(keys[1].0 + 512)
        }];
    both.fill(0, 0, &[7; 100]);
    for key in bad.map(|key| key()) {
        both.pairs[1].post_receive(1, &[outside(0, 100, key)]).unwrap();
        both.post(0, 1, SEND, &[element(0, 100, here)]);
        both.said(0);
        assert_eq!(both.said(1), [(1, Status::LOC_PROT_ERR)]);
        assert_eq!(both.bytes_outside(1, 0, 100), [0; 100]);
        for i in 0..2 {
            both.pairs[i].modify(QpState::RESET, Change::default()).unwrap();
            let change = Change { access: Some(Access(ALL)), ..Change::default() };
            both.pairs[i].modify(QpState::INIT, change).unwrap();
        }
        both.connect(0);
        both.connect(1);
    }
    assert!(both.sides[1].has_all_but(BOUNCE));
}

#[test]
fn a_region_is_not_removed_while_its_owner_accesses_it() {
    struct Watched<'a>(Pages, &'a Side);
    impl Watched<'_> {
        fn look(&self) {
            assert!(self.1.regions.try_lock().is_err(), "it can be removed");
        }
    }
    impl ProgramMemory<Mapping> for Watched<'_> {
        fn copy_in(&self, from: u64, to: &Mapping, at: usize, len: usize, is_last: bool) {
            self.look();
            self.0.copy_in(from, to, at, len, is_last);
        }
        fn copy_out(&self, from: &Mapping, at: usize, to: u64, len: usize) {
            self.look();
            self.0.copy_out(from, at, to, len);
        }
        fn get(&self, _: u64, _: &mut [u8]) {}
        fn put(&self, _: u64, _: &[u8]) {}
        fn deliver(&self, from: &Mapping, at: usize, to: u64, len: usize) {
            self.look();
            self.0.deliver(from, at, to, len);
        }
        fn compare_exchange(&self, at: u64, old: u64, new: u64) -> u64 {
            self.look();
            self.0.compare_exchange(at, old, new)
        }
        fn fetch_add(&self, at: u64, value: u64) -> u64 {
            self.look();
            self.0.fetch_add(at, value)
        }
        fn is_there(&self, _: u64, _: usize, _: bool) -> bool {
            self.look();
            true
        }
    }
    let (both, keys) = stage(Kind::RC);
    let watched = Watched(both.sides[1].pages(), &both.sides[1]);
    let (address, key) = (OUTSIDE, keys[1]);
    for operation in [
        write(0, key),
        read(0, key),
        Operation::FetchAndAdd { address, key, add: 1 },
        Operation::CompareAndSwap { address, key, compare: 1, swap: 2 },
        SEND,
    ] {
        let len = if operation == SEND { 100 } else { 8 };
        if operation == SEND {
            both.pairs[1].post_receive(2, &[outside(0, 100, key)]).unwrap();
        }
        both.post(0, 1, operation, &[outside(0, len, keys[0])]);
        let got = both.queues[1].poll(&watched, 16, |_| ());
        assert_eq!((both.said(0).len(), got), (1, usize::from(operation == SEND)));
    }
}

#[test]
fn the_death_of_an_owner_fails_its_errands() {
    let (both, keys) = stage(Kind::RC);
    let one = [outside(0, 8, keys[0])];
    both.post(0, 1, write(0, keys[1]), &one);
    both.post(0, 2, write(0, keys[1]), &one);
    assert!(both.said(0).is_empty());
    both.sides[1].own.set_dead();
    assert_eq!(both.comes(0, 2), [(1, Status::RETRY_EXC_ERR), (2, Status::WR_FLUSH_ERR)]);
}

#[test]
fn after_a_peers_death_the_owner_executes_no_new_errand() {
    let (both, keys) = stage(Kind::RC);
    both.fill_outside(0, 0, &[7; 100]);
    both.post(0, 1, write(0, keys[1]), &[outside(0, 100, keys[0])]);
    both.sides[0].own.set_dead();
    both.pairs[1].post_receive(5, &[outside(0, 8, keys[1])]).unwrap();
    assert_eq!(both.comes(1, 1), [(5, Status::WR_FLUSH_ERR)]);
    // The errand was requested while the peer was alive, and no other one is executed now.
    both.fill_outside(1, 0, &[8; 100]);
    assert!(both.said(1).is_empty() && both.bytes_outside(1, 0, 100) == [8; 100]);
}

fn begin_anew(both: &Both, i: usize) {
    both.pairs[i].modify(QpState::RESET, Change::default()).unwrap();
    let change = Change { access: Some(Access(ALL)), ..Change::default() };
    both.pairs[i].modify(QpState::INIT, change).unwrap();
}

#[test]
fn an_owner_that_is_reset_does_not_execute_earlier_errands() {
    let (both, keys) = stage(Kind::RC);
    both.fill_outside(0, 0, &[7; 100]);
    both.post(0, 1, write(0, keys[1]), &[outside(0, 100, keys[0])]);
    begin_anew(&both, 1);
    both.connect(1);
    assert!(both.said(1).is_empty() && both.bytes_outside(1, 0, 100) == [0; 100]);
    assert_eq!(both.comes(0, 1), [(1, Status::RETRY_EXC_ERR)]);
    begin_anew(&both, 0);
    both.connect(0);
    both.post(0, 2, write(50, keys[1]), &[outside(0, 100, keys[0])]);
    assert!(both.said(0).is_empty());
    assert_eq!(both.until(1), [(2, Status::SUCCESS)]);
    assert_eq!(both.bytes_outside(1, 0, 150), [[0; 50], [7; 50], [7; 50]].concat());
}

#[test]
fn a_peer_that_is_reset_waits_for_its_earlier_errand() {
    let (both, keys) = stage(Kind::RC);
    both.fill_outside(0, 0, &[7; 100]);
    both.post(0, 1, write(0, keys[1]), &[outside(0, 100, keys[0])]);
    begin_anew(&both, 0);
    both.connect(0);
    both.fill_outside(0, 0, &[8; 100]);
    both.post(0, 2, write(200, keys[1]), &[outside(0, 100, keys[0])]);
    assert!(both.said(0).is_empty());
    assert!(both.said(1).is_empty());
    assert_eq!(
        (both.bytes_outside(1, 0, 100), both.bytes_outside(1, 200, 100)),
        (vec![7; 100], vec![0; 100])
    );
    assert_eq!(both.until(1), [(2, Status::SUCCESS)]);
    assert_eq!(
        (both.bytes_outside(1, 0, 100), both.bytes_outside(1, 200, 100)),
        (vec![7; 100], vec![8; 100])
    );
}

#[test]
fn a_failed_queue_pair_executes_no_errands() {
    let (both, keys) = stage(Kind::RC);
    both.fill_outside(0, 0, &[7; 100]);
    both.post(0, 1, write(0, keys[1]), &[outside(0, 100, keys[0])]);
    both.pairs[1].modify(QpState::ERR, Change::default()).unwrap();
    assert!(both.said(1).is_empty() && both.bytes_outside(1, 0, 100) == [0; 100]);
    assert_eq!(both.comes(0, 1), [(1, Status::RETRY_EXC_ERR)]);
}

#[test]
fn the_owners_bounce_area_is_checked() {
    for (word, value) in [
        (qp::ROOM, 0),
        (qp::ROOM, 8),
        (qp::ROOM, 1 << 31),
        (qp::BOUNCE, u64::MAX),
        (qp::BOUNCE, (ARENA - 8) as u64),
        (qp::BOUNCE, Place::new(1, 0).0),
    ] {
        let (both, keys) = stage(Kind::RC);
        let at = both.pairs[1].number().at().unwrap() + word;
        match word {
            qp::ROOM => both.sides[1].tables.store_relaxed_u32(at, value as u32),
            _ => both.sides[1].tables.store_relaxed_u64(at, value),
        }
        both.post(0, 1, write(0, keys[1]), &[outside(0, 8, keys[0])]);
        assert_eq!(both.said(0), [(1, Status::REM_ACCESS_ERR)]);
    }
}

#[test]
fn the_peers_errands_are_checked() {
    let (both, keys) = stage(Kind::RC);
    let (tables, at) = (&both.sides[1].tables, both.pairs[1].number().at().unwrap());
    let incarnation = tables.load_relaxed_u64(at + qp::STATE) >> 32;
    let mut number = 0;
    let mut ask = |kind: u32, address: u64, key: Key, length: u32, rest: u32| {
        number += 1;
        tables.store_relaxed_u64(at + qp::ASKED_ADDRESS, address);
        tables.store_relaxed_u64(at + qp::ASKED_KEY, u64::from(kind) << 32 | u64::from(key.0));
        tables.store_relaxed_u64(at + qp::ASKED_LENGTH, u64::from(rest) << 32 | u64::from(length));
        tables.store_relaxed_u64(at + qp::ASKED, incarnation << 32 | number);
        assert!(both.said(1).is_empty());
        let answer = tables.load_relaxed_u64(at + qp::ANSWER);
        assert_eq!(answer >> 32, number);
        Status(answer as u32)
    };
    let (write, room) = (Errand::WRITE.0, BOUNCE as u32);
    assert_eq!(ask(write, OUTSIDE, keys[1], room, room), Status::SUCCESS);
    let invalid = Status::REM_INV_REQ_ERR;
    assert_eq!(ask(write, OUTSIDE, keys[1], room + 1, room + 1), invalid);
    assert_eq!(ask(write, OUTSIDE, keys[1], 9, 8), invalid);
    assert_eq!(ask(write, OUTSIDE, keys[1], 0, 8), invalid);
    assert_eq!(ask(Errand::FETCH_AND_ADD.0, OUTSIDE, keys[1], 4, 4), invalid);
    assert_eq!(ask(Errand::FETCH_AND_ADD.0, OUTSIDE + 1, keys[1], 8, 8), invalid);
    for kind in [0, 5, u32::MAX] {
        assert_eq!(ask(kind, OUTSIDE, keys[1], 8, 8), invalid);
    }
    assert_eq!(ask(write, OUTSIDE, keys[1], 8, u32::MAX), Status::REM_ACCESS_ERR);
    assert_eq!(ask(write, u64::MAX - 3, keys[1], 8, 8), Status::REM_ACCESS_ERR);
    // The owner must not access regions in the arena on behalf of others.
    let direct = both.sides[1].register(0, 4096, 1 | ALL);
    assert_eq!(ask(write, BASE, direct, 8, 8), Status::REM_ACCESS_ERR);
}
