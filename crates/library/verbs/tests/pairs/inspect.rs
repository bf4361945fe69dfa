//! What the tables report about the work and the waits of queue pairs.

use super::*;
use ginnel_verbs::inspect;

impl Side {
    /// Returns what is reported of the side's only queue pair: the number of executed requests, their bytes, and the waiting requests
    /// with the reason.
    fn shown(&self) -> (u64, u64, Option<(u32, &'static str)>) {
        self.tables.store_relaxed_u64(verbs::MAGIC, verbs::READY);
        self.tables.store_relaxed_u32(verbs::ENDPOINT, self.number);
        let pairs = inspect::read(&self.tables, None).unwrap().queue_pairs;
        assert_eq!(pairs.len(), 1);
        (
            pairs[0].executed,
            pairs[0].bytes,
            pairs[0].waits.as_ref().map(|waits| (waits.requests, waits.reason)),
        )
    }
}

#[test]
fn requests_are_counted_and_waits_have_a_reason() {
    let both = Both::unconnected();
    let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 4096, 1 | ALL)).collect();
    let shown = || both.sides[0].shown();
    let send = |id| both.post(0, id, SEND, &[element(0, 100, keys[0])]);
    let receive = || both.pairs[1].post_receive(7, &[element(0, 100, keys[1])]).unwrap();
    assert_eq!(shown(), (0, 0, None));

    both.connect(0);
    send(1);
    assert_eq!(shown(), (0, 0, Some((1, "peer"))));
    both.connect(1);
    assert_eq!(both.said(0), []);
    assert_eq!(shown(), (0, 0, Some((1, "receive"))));
    send(2);
    assert_eq!(shown(), (0, 0, Some((2, "receive"))));
    receive();
    assert_eq!(both.said(0), [(1, Status::SUCCESS)]);
    assert_eq!(shown(), (1, 100, Some((1, "receive"))));

    both.pairs[0].modify(QpState::SQD, Change::default()).unwrap();
    assert_eq!(shown(), (1, 100, Some((1, "stopped"))));
    send(3);
    assert_eq!(shown(), (1, 100, Some((2, "stopped"))));
    both.pairs[0].modify(QpState::RTS, Change::default()).unwrap();
    receive();
    receive();
    assert_eq!(both.said(0), [(2, Status::SUCCESS), (3, Status::SUCCESS)]);
    assert_eq!(shown(), (3, 300, None));

    let read = Operation::Read { address: BASE, key: keys[1] };
    both.post(0, 4, read, &[element(0, 50, keys[0])]);
    let add = Operation::FetchAndAdd { address: BASE, key: keys[1], add: 1 };
    both.post(0, 5, add, &[element(0, 8, keys[0])]);
    assert_eq!(shown(), (5, 358, None));
    assert_eq!(both.said(0).len(), 2);

    // Flushed requests neither wait nor count as executed.
    send(6);
    assert_eq!(shown(), (5, 358, Some((1, "receive"))));
    both.pairs[0].modify(QpState::ERR, Change::default()).unwrap();
    assert_eq!(shown(), (5, 358, None));
    assert_eq!(both.sides[1].shown(), (0, 0, None));
}

#[test]
fn waits_for_errands_and_full_completion_queues_are_shown() {
    let queues = [Arc::new(CompletionQueue::new(1)), Arc::new(CompletionQueue::new(16))];
    let both = Both::completing(Kind::RC, queues);
    assert!(both.pairs[1].offer_errands(ginnel_verbs::shadow::MOST));
    (0..2).for_each(|i| both.connect(i));
    let own = both.sides[0].register(0, 4096, 1);
    let region = Region { address: OUTSIDE, length: 100, access: Access(1 | ALL), domain: 1 };
    let shadow = both.sides[1].regions.lock().unwrap().add_shadow(region).unwrap();
    let write = Operation::Write { address: OUTSIDE, key: shadow, immediate: None, solicited: false };
    both.post(0, 1, write, &[element(0, 10, own)]);
    assert_eq!(both.sides[0].shown(), (0, 0, Some((1, "errand"))));
    assert_eq!(both.said(1), []);
    both.pairs[0].progress(&both.sides[0].pages());
    assert_eq!(both.sides[0].shown(), (1, 10, None));

    both.post(0, 2, write, &[element(0, 10, own)]);
    assert_eq!(both.sides[0].shown(), (1, 10, Some((1, "completions"))));
    let tables = inspect::read(&both.sides[1].tables, None);
    assert_eq!(tables, None);
    both.sides[1].shown();
    let tables = inspect::read(&both.sides[1].tables, None).unwrap();
    assert_eq!((tables.shadow_regions, tables.shadow_bytes, tables.regions), (1, 100, 0));
}
