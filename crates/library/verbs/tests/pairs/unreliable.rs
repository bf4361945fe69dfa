//! Unreliable connections and datagrams.

use super::*;
use ginnel_layout::verbs::{GRH, MTU};
use ginnel_verbs::queue_pair::lid;
use ginnel_verbs::work::Datagram;
use kit::wait::{AtEnd, Watchdog};

const QKEY: u32 = 0x1234;

/// Returns two datagram queue pairs.
fn datagrams() -> Both {
    let both = Both::of_kind(Kind::UD);
    for pair in &both.pairs {
        let change = Change { qkey: Some(QKEY), ..Change::default() };
        pair.modify(QpState::INIT, change).unwrap();
        pair.modify(QpState::RTR, Change::default()).unwrap();
        pair.modify(QpState::RTS, Change::default()).unwrap();
    }
    both
}

impl Both {
    /// Returns the address of the other side's queue pair.
    fn to(&self, i: usize) -> Datagram {
        Datagram { number: self.pairs[i].number(), lid: lid(self.sides[i].number), qkey: QKEY }
    }

    fn send_to(&self, i: usize, id: u64, to: Datagram, elements: &[Element]) -> Result<(), Refused> {
        let operation = Operation::Send { immediate: Some(5), solicited: false };
        let work = Work { id, operation, datagram: Some(to), elements, is_inline: false, is_signaled: true };
        self.pairs[i].post(&self.sides[i].pages(), &work)
    }
}

#[test]
fn datagrams_arrive_behind_room_for_a_header() {
    let both = datagrams();
    let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 8192, 1)).collect();
    // There are more messages than the ring has entries, and elements that end within the room for the header.
    for len in [0usize, 1, 24, 32, 33, 1000, MTU, 8] {
        both.fill(0, 0, &pattern(len));
        both.fill(1, 0, &[0xee; 8192]);
        let into = [element(4, 16, keys[1]), element(100, 8000, keys[1])];
        both.pairs[1].post_receive(7, &into).unwrap();
        both.send_to(0, 8, both.to(1), &[element(0, len as u32, keys[0])]).unwrap();
        assert_eq!(both.said(0), [(8, Status::SUCCESS)], "{len}");
        let got = both.poll(1);
        assert_eq!(got.len(), 1, "{len}");
        assert_eq!((got[0].id, got[0].status, got[0].length as usize), (7, Status::SUCCESS, GRH + len));
        assert_eq!((got[0].source, got[0].lid), (both.pairs[0].number(), lid(1)));
        assert_eq!(got[0].immediate, Some(5));
        let rest = (GRH - 16) as u64;
        assert_eq!(both.bytes(1, 100 + rest, len), pattern(len));
        assert_eq!(both.bytes(1, 0, 100), [0xee; 100]);
    }
    // A queue pair can also send to itself.
    both.pairs[0].post_receive(1, &[element(0, 100, keys[0])]).unwrap();
    both.send_to(0, 2, both.to(0), &[element(200, 8, keys[0])]).unwrap();
    assert_eq!(both.said(0), [(2, Status::SUCCESS), (1, Status::SUCCESS)]);
}

#[test]
fn datagrams_that_cannot_be_delivered_are_dropped() {
    let both = datagrams();
    let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 8192, 1)).collect();
    let to = both.to(1);
    let post = |to| both.send_to(0, 1, to, &[element(0, 8, keys[0])]).unwrap();
    post(to);
    both.pairs[1].post_receive(1, &[element(0, 100, keys[1])]).unwrap();
    post(Datagram { qkey: 1, ..to });
    post(Datagram { lid: 9, ..to });
    post(Datagram { number: QpNumber::new(2, 9).unwrap(), ..to });
    post(Datagram { number: QpNumber::new(77, 9).unwrap(), ..to });
    assert!(both.said(0).iter().all(|said| *said == (1, Status::SUCCESS)));
    assert!(both.said(1).is_empty());
    post(to);
    assert_eq!(both.said(1), [(1, Status::SUCCESS)]);
    let long = [element(0, MTU as u32 + 1, keys[0])];
    assert_eq!(both.send_to(0, 1, to, &long), Err(Refused::Invalid));

    // A datagram that does not fit together with its header is an error of the receiver.
    both.pairs[1].post_receive(2, &[element(0, 47, keys[1])]).unwrap();
    post(to);
    assert_eq!(both.said(1), [(2, Status::LOC_LEN_ERR)]);
    // In the error state, the queue pair receives nothing, and flushes the posted receives.
    both.pairs[1].post_receive(3, &[element(0, 100, keys[1])]).unwrap();
    post(to);
    assert_eq!(both.said(1), [(3, Status::WR_FLUSH_ERR)]);
}

#[test]
fn nothing_is_written_into_the_memory_of_a_dead_peer() {
    let both = datagrams();
    let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 8192, 1)).collect();
    for id in 1..=4 {
        both.pairs[1].post_receive(id, &[element(100 * id, 100, keys[1])]).unwrap();
    }
    both.send_to(0, 1, both.to(1), &[element(0, 8, keys[0])]).unwrap();
    assert_eq!(both.said(1).len(), 1);
    both.sides[1].own.set_dead();
    both.send_to(0, 2, both.to(1), &[element(0, 8, keys[0])]).unwrap();
    assert!(both.said(1).is_empty());
}

#[test]
fn a_receive_claimed_by_a_dead_sender_is_used_again() {
    let both = datagrams();
    let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 8192, 1)).collect();
    for id in 1..=4 {
        both.pairs[1].post_receive(id, &[element(100 * id, 100, keys[1])]).unwrap();
    }
    // The other side has claimed the receive when it dies.
    let ring = RING + CAPACITY.receives.entries * CAPACITY.receives.stride();
    let claim = Completion::claim(0, Claimer::new(1, 7));
    both.sides[1].arena.compare_exchange_u64(ring + completion::HEADER, 0, claim.0).unwrap();
    for id in 1..=3u64 {
        both.fill(0, 0, &id.to_ne_bytes());
        both.send_to(0, id, both.to(1), &[element(0, 8, keys[0])]).unwrap();
    }
    assert!(both.said(1).is_empty(), "those behind it wait");
    assert!(both.pairs[1].is_region_accessed(keys[1]));
    both.pairs[1].look();
    assert!(both.said(1).is_empty(), "it still lives");
    both.sides[1].other_has_died.store(true, Ordering::Relaxed);
    both.pairs[1].look();
    assert!(!both.pairs[1].is_region_accessed(keys[1]));
    assert_eq!(both.said(1), [2, 3, 4].map(|id| (id, Status::SUCCESS)));
    both.send_to(0, 4, both.to(1), &[element(0, 8, keys[0])]).unwrap();
    assert_eq!(both.said(1), [(1, Status::SUCCESS)]);
}

#[test]
fn datagrams_of_many_senders_arrive_complete_and_in_order() {
    const ENOUGH: u64 = 20_000;
    let both = datagrams();
    let own = both.sides[0].register(0, 2 * CHUNK as u64, 1);
    let key = both.sides[1].register(0, 8192, 1);
    let pair = |index| {
        let queue = Arc::new(CompletionQueue::new(16));
        let pair = both.sides[0].queue_pair(Kind::UD, index, &queue);
        for state in [QpState::INIT, QpState::RTR, QpState::RTS] {
            pair.modify(state, Change { qkey: Some(QKEY), ..Change::default() }).unwrap();
        }
        pair
    };
    let senders = [pair(5), pair(6), pair(7)];
    let is_enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = AtEnd(|| is_enough.store(true, Ordering::Relaxed));
        for (n, sender) in senders.iter().enumerate() {
            let (both, is_enough) = (&both, &is_enough);
            scope.spawn(move || {
                let pages = both.sides[0].pages();
                let at = n as u64 * 64;
                for i in 0.. {
                    pages.put(BASE + at, &(i << 2 | n as u64).to_ne_bytes());
                    let elements = [element(at, 8, own)];
                    let (operation, datagram) = (SEND, Some(both.to(1)));
                    let is_inline = i % 2 == 0;
                    let work = Work {
                        id: i,
                        operation,
                        datagram,
                        elements: &elements,
                        is_inline,
                        is_signaled: false,
                    };
                    sender.post(&pages, &work).unwrap();
                    if is_enough.load(Ordering::Relaxed) {
                        break;
                    }
                    if i % 64 == 0 {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut last = [None; 3];
        for id in 0..4 {
            both.pairs[1].post_receive(id, &[element(64 * id, 64, key)]).unwrap();
        }
        let (mut count, mut watchdog) = (0, Watchdog::new("datagrams"));
        // Some datagrams are dropped, because the sender does not wait for the receiver. Those that arrive are complete, and in the
        // order of their sender.
        while count < ENOUGH || last.contains(&None) {
            watchdog.look(count);
            let got = both.poll(1);
            if got.is_empty() {
                std::thread::yield_now();
            }
            for one in got {
                assert_eq!((one.status, one.length), (Status::SUCCESS, 48));
                let word = both.word(1, 64 * one.id + 40);
                let (n, i) = (word as usize & 3, word >> 2);
                assert_eq!(one.source, senders[n].number());
                assert!(last[n].is_none_or(|last| last < i), "{n}: {i} after {last:?}");
                last[n] = Some(i);
                count += 1;
                both.pairs[1].post_receive(one.id, &[element(64 * one.id, 64, key)]).unwrap();
            }
        }
    });
    // No receive stays claimed.
    assert!(!both.pairs[1].is_region_accessed(key) && !both.pairs[1].are_rings_accessed());
}

#[test]
fn an_unreliable_connection_drops_messages_without_a_receive() {
    let both = Both::of_kind(Kind::UC);
    let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 4096, 1 | ALL)).collect();
    both.connect(0);
    both.post(0, 1, SEND, &[element(0, 8, keys[0])]);
    both.connect(1);
    both.post(0, 2, SEND, &[element(0, 8, keys[0])]);
    both.fill(0, 0, &pattern(100));
    let write = |key| Operation::Write { address: BASE + 1000, key, immediate: None, solicited: false };
    both.post(0, 3, write(Key(77)), &[element(0, 100, keys[0])]);
    both.post(0, 4, write(keys[1]), &[element(0, 100, keys[0])]);
    both.pairs[1].post_receive(5, &[element(0, 100, keys[1])]).unwrap();
    both.post(0, 5, SEND, &[element(0, 100, keys[0])]);
    assert_eq!(both.said(0), [1, 2, 3, 4, 5].map(|id| (id, Status::SUCCESS)));
    assert_eq!(both.said(1), [(5, Status::SUCCESS)]);
    assert_eq!((both.bytes(1, 1000, 100), both.bytes(1, 0, 100)), (pattern(100), pattern(100)));
    let elements = [element(0, 8, keys[0])];
    let operation = Operation::Read { address: BASE, key: keys[1] };
    let work =
        Work { id: 6, operation, datagram: None, elements: &elements, is_inline: false, is_signaled: true };
    assert_eq!(both.pairs[0].post(&both.sides[0].pages(), &work), Err(Refused::Invalid));
}
