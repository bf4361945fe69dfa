//! Objects that end or are reset while a peer is in the middle of an access.

use super::*;
use ginnel_layout::verbs::Executing;

/// The program's memory, with a function that is called in the middle of each copy.
pub struct Meanwhile<'a>(pub Pages, pub Box<dyn Fn() + 'a>);

impl ProgramMemory<Mapping> for Meanwhile<'_> {
    fn copy_in(&self, from: u64, to: &Mapping, at: usize, len: usize, is_last: bool) {
        (self.1)();
        self.0.copy_in(from, to, at, len, is_last);
    }

    fn copy_out(&self, from: &Mapping, at: usize, to: u64, len: usize) {
        (self.1)();
        self.0.copy_out(from, at, to, len);
    }

    fn get(&self, from: u64, into: &mut [u8]) {
        self.0.get(from, into);
    }

    fn put(&self, to: u64, bytes: &[u8]) {
        self.0.put(to, bytes);
    }

    fn deliver(&self, from: &Mapping, at: usize, to: u64, len: usize) {
        self.0.deliver(from, at, to, len);
    }

    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> u64 {
        self.0.compare_exchange(at, old, new)
    }

    fn fetch_add(&self, at: u64, value: u64) -> u64 {
        self.0.fetch_add(at, value)
    }

    fn is_there(&self, at: u64, len: usize, is_written: bool) -> bool {
        self.0.is_there(at, len, is_written)
    }
}

pub fn with<'a>(operation: Operation, elements: &'a [Element]) -> Work<'a> {
    Work { id: 1, operation, datagram: None, elements, is_inline: false, is_signaled: true }
}

fn connected() -> (Both, [Key; 2]) {
    let both = Both::new();
    let keys = [0, 1].map(|i| both.sides[i].register(0, 4096, 1 | ALL));
    (both, keys)
}

fn write_to(key: Key) -> Operation {
    Operation::Write { address: BASE, key, immediate: None, solicited: false }
}

fn reset(pair: &Pair) {
    pair.modify(QpState::RESET, Change::default()).unwrap();
    let change = Change { access: Some(Access(ALL)), ..Change::default() };
    pair.modify(QpState::INIT, change).unwrap();
}

#[test]
fn ending_a_queue_pair_waits_for_a_write() {
    let (both, keys) = connected();
    let meanwhile = || {
        both.pairs[1].end();
        assert!(both.pairs[1].are_rings_accessed());
        both.sides[1].remove(keys[1]);
        assert!(both.pairs[1].is_region_accessed(keys[1]));
    };
    let program = Meanwhile(both.sides[0].pages(), Box::new(meanwhile));
    both.pairs[0].post(&program, &with(write_to(keys[1]), &[element(0, 90, keys[0])])).unwrap();
    assert!(!both.pairs[1].are_rings_accessed() && !both.pairs[1].is_region_accessed(keys[1]));
}

#[test]
fn receives_are_flushed_only_when_the_peer_has_finished_with_them() {
    let (both, keys) = connected();
    both.fill(0, 0, &[7; 90]);
    both.pairs[1].post_receive(1, &[element(0, 100, keys[1])]).unwrap();
    both.pairs[1].post_receive(2, &[element(100, 100, keys[1])]).unwrap();
    let meanwhile = || {
        both.pairs[1].modify(QpState::ERR, Change::default()).unwrap();
        assert!(both.said(1).is_empty());
    };
    let program = Meanwhile(both.sides[0].pages(), Box::new(meanwhile));
    both.pairs[0].post(&program, &with(SEND, &[element(0, 90, keys[0])])).unwrap();
    assert_eq!(both.said(0), [(1, Status::SUCCESS)]);
    assert_eq!(both.said(1), [(1, Status::SUCCESS), (2, Status::WR_FLUSH_ERR)]);
    assert_eq!(both.bytes(1, 0, 90), [7; 90]);
}

/// Makes the peer stop in the middle of an access for good.
fn stop_in_a_write(both: &Both, key: Key) {
    let incarnation = 1;
    let at = both.pairs[1].number().at().unwrap() + qp::EXECUTING;
    let mark = Executing::region_and_rings(incarnation, key);
    both.sides[1].tables.store_relaxed_u64(at, mark.0);
    assert!(both.pairs[1].is_region_accessed(key) && both.pairs[1].are_rings_accessed());
}

#[test]
fn a_peer_that_dies_during_an_access_delays_no_one() {
    let (both, keys) = connected();
    stop_in_a_write(&both, keys[1]);
    both.sides[0].own.set_dead();
    assert!(!both.pairs[1].is_region_accessed(keys[1]) && !both.pairs[1].are_rings_accessed());
    both.pairs[1].post_receive(1, &[element(0, 100, keys[1])]).unwrap();
    assert_eq!(both.comes(1, 1), [(1, Status::WR_FLUSH_ERR)]);
    reset(&both.pairs[1]);
}

#[test]
fn a_reset_fails_while_a_peer_has_stopped_in_an_access() {
    let (both, keys) = connected();
    stop_in_a_write(&both, keys[1]);
    assert_eq!(both.pairs[1].modify(QpState::RESET, Change::default()), Err(Refused::Invalid));
}

#[test]
fn a_reset_ends_the_connection() {
    // The peer is connected to another queue pair since, or to the same one again.
    for peer in [QpNumber::new(1, 2), QpNumber::new(1, 1)] {
        let (both, keys) = connected();
        for id in 0..3 {
            both.pairs[1].post_receive(id, &[element(0, 100, keys[1])]).unwrap();
        }
        both.post(0, 1, SEND, &[element(0, 8, keys[0])]);
        assert_eq!((both.said(0).len(), both.said(1).len()), (1, 1));
        reset(&both.pairs[1]);
        both.pairs[1].post_receive(7, &[element(0, 100, keys[1])]).unwrap();
        both.pairs[1].modify(QpState::RTR, Change { peer, ..Change::default() }).unwrap();
        both.pairs[1].modify(QpState::RTS, Change::default()).unwrap();
        both.post(0, 5, SEND, &[element(0, 8, keys[0])]);
        both.post(0, 6, write_to(keys[1]), &[element(0, 8, keys[0])]);
        assert_eq!(both.comes(0, 2), [(5, Status::RETRY_EXC_ERR), (6, Status::WR_FLUSH_ERR)]);
        assert!(both.said(1).is_empty());
    }
}

#[test]
fn a_sender_that_is_reset_continues_at_its_old_position() {
    let (both, keys) = connected();
    for round in 0..6 {
        both.pairs[1].post_receive(round, &[element(0, 100, keys[1])]).unwrap();
        both.post(0, round, SEND, &[element(0, 8, keys[0])]);
        assert_eq!(
            (both.said(0), both.said(1)),
            (vec![(round, Status::SUCCESS)], vec![(round, Status::SUCCESS)])
        );
        reset(&both.pairs[0]);
        both.connect(0);
    }
}

#[test]
fn a_sender_to_an_earlier_queue_pair_does_not_disturb_a_later_one_with_its_number() {
    let (both, keys) = connected();
    both.post(0, 1, write_to(keys[1]), &[element(0, 8, keys[0])]);
    both.pairs[1].end();
    let (two, queue) = (&both.sides[1], &both.queues[1]);
    let later = two.queue_pair(Kind::RC, 3, queue);
    reset(&later);
    later.modify(QpState::RTR, Change { peer: QpNumber::new(1, 2), ..Change::default() }).unwrap();
    // The peer of the later queue pair is in the middle of a write.
    let at = later.number().at().unwrap();
    let state = two.tables.load_relaxed_u64(at + qp::STATE);
    let mark = Executing::region((state >> 32) as u32, keys[1]);
    two.tables.store_relaxed_u64(at + qp::EXECUTING, mark.0);
    assert!(later.is_region_accessed(keys[1]));
    both.post(0, 2, write_to(keys[1]), &[element(0, 8, keys[0])]);
    assert_eq!(both.comes(0, 2), [(1, Status::SUCCESS), (2, Status::RETRY_EXC_ERR)]);
    assert!(later.is_region_accessed(keys[1]));
    // Errors that the earlier sender reports have no effect either.
    two.tables.store_relaxed_u64(at + qp::ERROR, 1 << 32 | u64::from(Status::REM_ACCESS_ERR.0));
    later.look();
    assert_eq!(later.state(), QpState::RTR);
}

#[test]
fn the_error_state_can_be_entered_from_any_other_state() {
    let side = Side::new(1);
    let queue = Arc::new(CompletionQueue::new(4));
    let pair = side.queue_pair(Kind::RC, 1, &queue);
    pair.modify(QpState::ERR, Change::default()).unwrap();
    assert_eq!(pair.state(), QpState::ERR);
    reset(&pair);
    assert_eq!(pair.state(), QpState::INIT);
    pair.modify(QpState::ERR, Change::default()).unwrap();
    assert_eq!(pair.state(), QpState::ERR);
}

#[test]
fn waiting_requests_are_tried_even_if_there_are_always_completions() {
    let (both, keys) = connected();
    both.post(1, 50, SEND, &[element(0, 8, keys[1])]);
    both.pairs[0].post_receive(70, &[element(0, 100, keys[0])]).unwrap();
    let mut was_sent = false;
    for id in 0..1000 {
        both.pairs[1].post_receive(id, &[element(0, 100, keys[1])]).unwrap();
        both.post(0, id, SEND, &[element(0, 8, keys[0])]);
        both.queues[0].poll(&both.sides[0].pages(), 1, |_| ());
        both.queues[1]
            .poll(&both.sides[1].pages(), 1, |completed| was_sent |= completed.opcode == Opcode::SEND);
    }
    assert!(was_sent);
}

#[test]
fn a_drained_queue_pair_accepts_the_same_requests() {
    let (both, keys) = connected();
    both.pairs[0].modify(QpState::SQD, Change::default()).unwrap();
    let elements = [element(0, 100, keys[0]); 9];
    let work = with(SEND, &elements);
    assert_eq!(both.pairs[0].post(&both.sides[0].pages(), &work), Err(Refused::Invalid));
    both.pairs[1].post_receive(1, &[element(0, 100, keys[1])]).unwrap();
    both.post(0, 1, SEND, &[element(0, 8, keys[0])]);
    assert!(both.said(0).is_empty());
    both.pairs[0].modify(QpState::RTS, Change::default()).unwrap();
    assert_eq!(both.said(0), [(1, Status::SUCCESS)]);
}
