//! Completion queues that notify the program.

use super::*;
use kit::wait::{AtEnd, Watchdog};

/// Two connected queue pairs whose completion queues count their notifications.
struct Stage {
    both: Both,
    told: [Arc<AtomicU64>; 2],
    keys: [Key; 2],
}

impl Stage {
    fn new() -> Self {
        let told: [Arc<AtomicU64>; 2] = Default::default();
        let queues = [0, 1].map(|i| {
            let told = told[i].clone();
            let tell = move || {
                told.fetch_add(1, Ordering::Relaxed);
            };
            Arc::new(CompletionQueue::with_events(16, Box::new(tell)))
        });
        let both = Both::completing(Kind::RC, queues);
        both.connect(0);
        both.connect(1);
        let keys = [0, 1].map(|i| both.sides[i].register(0, 4096, 1 | ALL));
        Self { both, told, keys }
    }

    /// Returns how often the second side's doorbell was rung, and its program was notified, since the last call.
    fn since(&self) -> (u64, u64) {
        let rings = self.both.sides[1].rings.swap(0, Ordering::Relaxed);
        self.both.queues[1].attend(&self.both.sides[1].pages());
        (rings, self.told[1].swap(0, Ordering::Relaxed))
    }

    fn send(&self, solicited: bool) {
        self.both.pairs[1].post_receive(1, &[element(0, 100, self.keys[1])]).unwrap();
        let operation = Operation::Send { immediate: None, solicited };
        self.both.post(0, 1, operation, &[element(0, 8, self.keys[0])]);
    }
}

#[test]
fn a_receiver_is_woken_once_for_each_request_to_be_notified() {
    let stage = Stage::new();
    stage.send(true);
    assert_eq!(stage.since(), (0, 0), "it has not asked");
    assert_eq!(stage.both.said(1).len(), 1);
    for _ in 0..3 {
        stage.both.queues[1].arm(false);
        assert_eq!(stage.since(), (0, 0));
        stage.send(false);
        stage.send(false);
        assert_eq!(stage.since(), (1, 1));
        assert_eq!(stage.since(), (0, 0));
        assert_eq!(stage.both.said(1).len(), 2);
    }
    stage.both.queues[1].arm(true);
    stage.send(false);
    assert_eq!(stage.since(), (0, 0));
    stage.send(true);
    assert_eq!(stage.since(), (1, 1));
    assert_eq!(stage.both.said(1).len(), 2);
    // The request for any completion takes precedence.
    stage.both.queues[1].arm(false);
    stage.both.queues[1].arm(true);
    stage.send(false);
    assert_eq!(stage.since(), (1, 1));
    assert_eq!(stage.both.said(1).len(), 1);
}

#[test]
fn a_sender_is_notified_of_its_own_completions_at_once() {
    let stage = Stage::new();
    stage.both.queues[0].arm(false);
    stage.send(false);
    assert_eq!(stage.told[0].swap(0, Ordering::Relaxed), 1);
    stage.both.queues[0].arm(true);
    stage.send(false);
    assert_eq!(stage.told[0].load(Ordering::Relaxed), 0);
    // An error wakes a program that waits for any kind of completion.
    let write = Operation::Write { address: BASE, key: Key(77), immediate: None, solicited: false };
    stage.both.queues[1].arm(true);
    stage.both.pairs[1].post_receive(1, &[]).unwrap();
    stage.both.said(1);
    stage.both.post(0, 2, write, &[element(0, 8, stage.keys[0])]);
    assert_eq!(stage.told[0].load(Ordering::Relaxed), 1);
    assert_eq!(stage.since(), (1, 1));
    assert_eq!(stage.both.said(1), [(1, Status::WR_FLUSH_ERR)]);
}

#[test]
fn the_notifier_tries_waiting_requests() {
    let stage = Stage::new();
    stage.both.queues[0].arm(false);
    stage.both.post(0, 1, SEND, &[element(0, 8, stage.keys[0])]);
    assert_eq!(stage.both.sides[0].waits.load(Ordering::Relaxed), 1);
    let attend = || stage.both.queues[0].attend(&stage.both.sides[0].pages());
    assert!(attend());
    assert_eq!(stage.told[0].load(Ordering::Relaxed), 0);
    stage.both.pairs[1].post_receive(1, &[element(0, 100, stage.keys[1])]).unwrap();
    assert!(!attend());
    assert_eq!(stage.told[0].load(Ordering::Relaxed), 1);
    assert_eq!(stage.both.said(0), [(1, Status::SUCCESS)]);
}

#[test]
fn a_program_that_polls_before_the_notifier_is_woken_for_the_next_completion() {
    let stage = Stage::new();
    stage.both.queues[1].arm(false);
    stage.send(false);
    assert_eq!(stage.both.said(1).len(), 1);
    // The notifier looks only now.
    assert_eq!(stage.since(), (1, 0));
    stage.send(false);
    assert_eq!(stage.since(), (1, 1));
}

#[test]
fn a_queue_pair_created_after_arming_wakes_the_program() {
    let told = Arc::<AtomicU64>::default();
    let tell = told.clone();
    let queue = CompletionQueue::with_events(
        16,
        Box::new(move || {
            tell.fetch_add(1, Ordering::Relaxed);
        }),
    );
    queue.arm(false);
    let both = Both::completing(Kind::RC, [Arc::new(CompletionQueue::new(16)), Arc::new(queue)]);
    both.connect(0);
    both.connect(1);
    let keys = [0, 1].map(|i| both.sides[i].register(0, 4096, 1));
    both.pairs[1].post_receive(1, &[element(0, 100, keys[1])]).unwrap();
    both.post(0, 1, SEND, &[element(0, 8, keys[0])]);
    assert_eq!(both.sides[1].rings.load(Ordering::Relaxed), 1);
    both.queues[1].attend(&both.sides[1].pages());
    assert_eq!(told.load(Ordering::Relaxed), 1);
}

#[test]
fn a_receive_posted_in_the_error_state_causes_a_notification() {
    let stage = Stage::new();
    stage.both.pairs[1].modify(QpState::ERR, Change::default()).unwrap();
    stage.both.queues[1].arm(false);
    stage.told[1].store(0, Ordering::Relaxed);
    stage.both.queues[1].arm(false);
    stage.both.pairs[1].post_receive(9, &[element(0, 100, stage.keys[1])]).unwrap();
    assert_eq!(stage.told[1].load(Ordering::Relaxed), 1);
}

/// A receiver that sleeps after each message, and is woken only by the doorbell. If one ring were lost, it would sleep for ever.
#[test]
fn no_wake_is_lost() {
    let stage = Stage::new();
    let [one, two] = &stage.both.sides;
    const MESSAGES: u64 = 20_000;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = AtEnd(|| is_over.store(true, Ordering::Relaxed));
        scope.spawn(|| {
            let pages = one.pages();
            for id in 0..MESSAGES {
                let elements = [element(0, 8, stage.keys[0])];
                let work = Work {
                    id,
                    operation: SEND,
                    datagram: None,
                    elements: &elements,
                    is_inline: true,
                    is_signaled: false,
                };
                while stage.both.pairs[0].post(&pages, &work) == Err(Refused::Full)
                    && !is_over.load(Ordering::Relaxed)
                {
                    stage.both.pairs[0].progress(&pages);
                    std::thread::yield_now();
                }
            }
            while stage.both.pairs[0].is_waiting() && !is_over.load(Ordering::Relaxed) {
                stage.both.pairs[0].progress(&pages);
                std::thread::yield_now();
            }
        });
        let (mut got, mut posted) = (0, 0);
        let mut watchdog = Watchdog::new("messages, and nobody rings");
        while got < MESSAGES {
            while posted < MESSAGES && posted - got < 4 {
                stage.both.pairs[1].post_receive(1, &[element(0, 100, stage.keys[1])]).unwrap();
                posted += 1;
            }
            let rung = two.rings.load(Ordering::SeqCst);
            stage.both.queues[1].arm(false);
            let found = stage.both.poll(1).len() as u64;
            got += found;
            while found == 0 && two.rings.load(Ordering::SeqCst) == rung {
                watchdog.look(got);
                std::thread::yield_now();
            }
        }
    });
}
