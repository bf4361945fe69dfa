//! Shared receive queues.

use super::lifetimes::{Meanwhile, with};
use super::*;
use ginnel_verbs::shared_receive_queue::SharedReceiveQueue;

/// Two queue pairs of one side that share a receive queue and have different completion queues, and their peers.
struct Stage {
    sides: [Arc<Side>; 2],
    shared: Arc<SharedReceiveQueue<Mapping>>,
    receivers: [Pair; 2],
    queues: [Arc<CompletionQueue<Mapping>>; 2],
    senders: [Pair; 2],
    sent: Arc<CompletionQueue<Mapping>>,
    keys: [Key; 2],
}

impl Stage {
    fn new() -> Self {
        let sides = sides();
        let [one, two] = &sides;
        let location = two.location(3);
        let shared = SharedReceiveQueue::new(
            two.tables.clone(),
            location,
            1,
            CAPACITY.receives,
            two.adapter(),
            two.tell(),
        )
        .unwrap();
        let queues = [(); 2].map(|()| Arc::new(CompletionQueue::new(16)));
        let receivers = [0, 1].map(|i| {
            let completes = (queues[i].clone(), queues[i].clone());
            let shared = Some(shared.clone());
            let tell = two.tell();
            let wanted =
                QueuePairOptions { kind: Kind::RC, domain: 1, capacity: CAPACITY, shared, completes, tell };
            let location = Location { rings: None, ..two.location(10 + i) };
            QueuePair::new(two.tables.clone(), location, wanted, two.adapter()).unwrap()
        });
        let sent = Arc::new(CompletionQueue::new(16));
        let senders = [0, 1].map(|i| one.queue_pair(Kind::RC, 1 + i, &sent));
        for (a, b) in receivers.iter().zip(&senders).flat_map(|(a, b)| [(a, b), (b, a)]) {
            a.modify(QpState::INIT, Change { access: Some(Access(ALL)), ..Change::default() }).unwrap();
            a.modify(QpState::RTR, Change { peer: Some(b.number()), ..Change::default() }).unwrap();
            a.modify(QpState::RTS, Change::default()).unwrap();
        }
        let keys = [one.register(0, 8192, 1), two.register(0, 8192, 1 | ALL)];
        Self { sides, shared, receivers, queues, senders, sent, keys }
    }

    fn post(&self, id: u64) {
        self.shared.post_receive(id, &[element(100 * id, 100, self.keys[1])]).unwrap();
    }

    fn send(&self, i: usize, id: u64, operation: Operation, len: u32) {
        let pages = self.sides[0].pages();
        pages.put(BASE, &vec![id as u8; len as usize]);
        let elements = [element(0, len, self.keys[0])];
        let work =
            Work { id, operation, datagram: None, elements: &elements, is_inline: false, is_signaled: true };
        self.senders[i].post(&pages, &work).unwrap();
    }

    fn poll(queue: &CompletionQueue<Mapping>, side: &Side) -> Vec<Completed> {
        let mut all = Vec::new();
        queue.poll(&side.pages(), 16, |completed| all.push(completed));
        all
    }

    fn got(&self, i: usize) -> Vec<(u64, Status, QpNumber)> {
        let all = Self::poll(&self.queues[i], &self.sides[1]);
        all.iter().map(|one| (one.id, one.status, one.queue_pair)).collect()
    }

    fn sent(&self) -> Vec<(u64, Status)> {
        Self::poll(&self.sent, &self.sides[0]).iter().map(|one| (one.id, one.status)).collect()
    }
}

#[test]
fn receives_go_to_the_first_message() {
    let stage = Stage::new();
    let [a, b] = [0, 1].map(|i| stage.receivers[i].number());
    for round in 0..5 {
        for id in 1..=4 {
            stage.post(id);
        }
        // Short messages are in the completion, long ones in the receive's buffer.
        stage.send(1, 1, SEND, 8);
        stage.send(0, 2, SEND, 90);
        stage.send(1, 3, SEND, 90);
        // Polling one completion queue also delivers the completions of the other.
        assert_eq!(stage.got(0), [(2, Status::SUCCESS, a)], "{round}");
        assert_eq!(stage.got(1), [(1, Status::SUCCESS, b), (3, Status::SUCCESS, b)], "{round}");
        let write =
            Operation::Write { address: BASE, key: stage.keys[1], immediate: Some(9), solicited: false };
        stage.send(0, 4, write, 8);
        assert_eq!(stage.got(0), [(4, Status::SUCCESS, a)], "{round}");
        for (id, len) in [(1u64, 8), (2, 90), (3, 90)] {
            let mut bytes = vec![0; len];
            stage.sides[1].pages().get(BASE + 100 * id, &mut bytes);
            assert_eq!(bytes, vec![id as u8; len]);
        }
        assert_eq!(stage.sent(), [1, 2, 3, 4].map(|id| (id, Status::SUCCESS)));
    }
}

#[test]
fn a_message_waits_for_a_receive_of_the_shared_queue() {
    let stage = Stage::new();
    stage.send(0, 1, SEND, 90);
    stage.send(1, 2, SEND, 90);
    assert!(stage.sent().is_empty());
    stage.post(1);
    assert_eq!(stage.sent(), [(1, Status::SUCCESS)]);
    stage.post(2);
    assert_eq!(stage.sent(), [(2, Status::SUCCESS)]);
    assert_eq!((stage.got(0).len(), stage.got(1).len()), (1, 1));
    for id in 0..4 {
        stage.post(id);
    }
    assert_eq!(stage.shared.post_receive(9, &[]), Err(Refused::Full));
}

#[test]
fn the_program_is_told_once_that_receives_are_running_out() {
    let stage = Stage::new();
    stage.post(1);
    stage.shared.set_limit(2);
    assert_eq!((stage.sides[1].events(), stage.shared.limit()), (vec![Event::SRQ_LIMIT_REACHED], 0));
    for id in 2..=3 {
        stage.post(id);
    }
    stage.shared.set_limit(2);
    for (id, events) in [(1, vec![]), (2, vec![Event::SRQ_LIMIT_REACHED]), (3, vec![])] {
        stage.send(0, id, SEND, 8);
        assert_eq!(stage.got(0).len(), 1);
        assert_eq!(stage.sides[1].events(), events);
    }
}

#[test]
fn an_error_of_one_queue_pair_does_not_affect_the_others() {
    let stage = Stage::new();
    let [a, b] = [0, 1].map(|i| stage.receivers[i].number());
    for id in 1..=3 {
        stage.post(id);
    }
    stage.send(0, 1, SEND, 101);
    assert_eq!(stage.sent(), [(1, Status::REM_INV_REQ_ERR)]);
    assert_eq!(stage.got(0), [(1, Status::LOC_LEN_ERR, a)]);
    assert_eq!((stage.receivers[0].state(), stage.receivers[1].state()), (QpState::ERR, QpState::RTS));
    assert_eq!(stage.sides[1].events(), [Event::QP_LAST_WQE_REACHED]);
    stage.send(1, 2, SEND, 100);
    assert_eq!(stage.got(1), [(2, Status::SUCCESS, b)]);
    // What was posted to the shared queue is there for others.
    assert!(stage.got(0).is_empty());
    assert_eq!(stage.shared.len(), 1);
}

#[test]
fn a_message_for_an_ended_queue_pair_leaves_the_receive_posted() {
    let stage = Stage::new();
    for id in 1..=2 {
        stage.post(id);
    }
    stage.send(0, 1, SEND, 90);
    stage.receivers[0].end();
    assert!(!stage.shared.is_unused());
    stage.send(1, 2, SEND, 90);
    assert_eq!(stage.got(1), [(2, Status::SUCCESS, stage.receivers[1].number())]);
    assert_eq!(stage.shared.len(), 1);
    stage.send(1, 3, SEND, 90);
    assert_eq!(stage.got(1), [(1, Status::SUCCESS, stage.receivers[1].number())]);
    stage.receivers[1].end();
    assert!(stage.shared.is_unused());
}

#[test]
fn a_shared_receive_belongs_to_its_sender_during_a_write() {
    let stage = Stage::new();
    stage.post(1);
    let meanwhile = || {
        for receiver in &stage.receivers {
            receiver.end();
        }
        assert!(stage.receivers[0].are_rings_accessed());
    };
    let program = Meanwhile(stage.sides[0].pages(), Box::new(meanwhile));
    let write = Operation::Write { address: BASE, key: stage.keys[1], immediate: Some(9), solicited: false };
    stage.senders[0].post(&program, &with(write, &[element(0, 8, stage.keys[0])])).unwrap();
    assert!(!stage.receivers[0].are_rings_accessed());
}

#[test]
fn lies_about_shared_receives_are_rejected() {
    let stage = Stage::new();
    let ring = RING + CAPACITY.receives.entries * CAPACITY.receives.stride();
    let arena = &stage.sides[1].arena;
    let at = stage.shared.number().at().unwrap();
    // A false hint can only hide receives.
    for hint in [u64::MAX, 1 << 40, 4] {
        stage.post(1);
        stage.sides[1].tables.store_relaxed_u64(at + qp::HEAD, hint);
        stage.send(0, 1, SEND, 8);
        stage.sides[1].tables.store_relaxed_u64(at + qp::HEAD, 0);
        assert_eq!(stage.sent(), [(1, Status::SUCCESS)]);
        assert_eq!(stage.got(0).len(), 1);
    }
    // A completion for a queue pair that does not use this receive queue is ignored.
    stage.post(1);
    let entry = ring + 3 * completion::ENTRY;
    arena.store_relaxed_u32(entry + completion::TARGET, 0xff_ffff);
    arena.store_release_u64(entry + completion::HEADER, Completion::new(3, Completion::RECEIVE, 0).0);
    assert!(stage.got(0).is_empty() && stage.got(1).is_empty());
    assert_eq!(stage.shared.len(), 1);
    // Receives that are given back again and again keep no thread busy without end.
    for i in 0..64 {
        let entry = ring + (i % 4) as usize * completion::ENTRY;
        arena.store_release_u64(entry + completion::HEADER, Completion::new(i, Completion::VOID, 0).0);
    }
    assert!(stage.got(0).is_empty());
    // With a false tail, the sender looks no further than the ring extends.
    stage.sides[1].tables.store_relaxed_u64(at + qp::TAIL, u64::MAX);
    stage.send(1, 2, SEND, 8);
}
