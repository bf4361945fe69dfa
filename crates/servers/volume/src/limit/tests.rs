use super::*;
use ginnel_config::{Bytes, Period};
use proptest::prelude::*;
use std::thread;

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;

fn limiter(iops: u64, bandwidth: u64, burst_ms: u64) -> Arc<Limiter> {
    let burst = Period(Duration::from_millis(burst_ms));
    Arc::new(Limiter::new(Limits { iops, bandwidth: Bytes(bandwidth), burst }))
}

/// What a queue was allowed to send.
#[derive(Clone, Copy, Debug, Default)]
struct Passed {
    requests: u64,
    bytes: u64,
}

/// Simulates queues that always have requests of these lengths, from time `from` to `to`. Each queue looks again `late`
/// after the time that the limiter has named.
fn run(limiter: &Arc<Limiter>, lengths: &[u64], from: u64, to: u64, late: u64) -> Vec<Passed> {
    let mut queues: Vec<_> = lengths.iter().map(|_| QueueLimit::new(limiter.clone())).collect();
    let mut passed = vec![Passed::default(); lengths.len()];
    let mut next = vec![from; lengths.len()];
    loop {
        let (i, now) = next.iter().copied().enumerate().min_by_key(|&(_, at)| at).unwrap();
        if now >= to {
            return passed;
        }
        match queues[i].pass(now, lengths[i]) {
            // Each request takes a microsecond, so that a queue without limits comes to an end too.
            Ok(()) => {
                passed[i].requests += 1;
                passed[i].bytes += lengths[i];
                next[i] = now + 1000;
            }
            Err(NotBefore(at)) => {
                assert!(at > now);
                next[i] = at + late;
            }
        }
    }
}

fn within(value: u64, target: u64, percent: f64) -> bool {
    (value as f64 - target as f64).abs() <= target as f64 * percent / 100.0
}

#[test]
fn requests_a_second() {
    for queues in [1, 2, 4, 16] {
        for iops in [100, 5_000, 200_000] {
            let passed = run(&limiter(iops, 0, 10), &vec![4096; queues], 5 * S, 6 * S, 100_000);
            let sum = passed.iter().map(|p| p.requests).sum();
            assert!(within(sum, iops, 2.0), "{queues} queues, {iops} IOPS: {sum}");
        }
    }
}

#[test]
fn bytes_a_second() {
    for queues in [1, 2, 4] {
        for length in [512, 4096, 1 << 20] {
            let rate = 200 << 20;
            let passed = run(&limiter(0, rate, 10), &vec![length; queues], S, 2 * S, 50_000);
            let sum = passed.iter().map(|p| p.bytes).sum();
            assert!(within(sum, rate, 2.0), "{queues} queues of {length}: {sum}");
        }
    }
}

#[test]
fn the_tighter_limit_holds() {
    let passed = run(&limiter(1000, 100 << 20, 10), &[4096, 4096], 0, S, 0);
    assert!(within(passed.iter().map(|p| p.requests).sum(), 1000, 2.0), "{passed:?}");
    let passed = run(&limiter(1000, 100 << 20, 10), &[1 << 20, 1 << 20], 0, S, 0);
    assert!(within(passed.iter().map(|p| p.bytes).sum(), 100 << 20, 2.0), "{passed:?}");
}

#[test]
fn queues_get_the_same() {
    let passed = run(&limiter(10_000, 0, 10), &[4096; 4], 0, S, 0);
    for queue in &passed {
        assert!(within(queue.requests, 2500, 2.0), "{passed:?}");
    }
    // The queues share bytes equally, even if the requests of one are 256 times as long.
    let passed = run(&limiter(0, 100 << 20, 10), &[1 << 20, 4096], 0, 4 * S, 0);
    assert!(within(passed[0].bytes, 200 << 20, 3.0), "{passed:?}");
    assert!(within(passed[1].bytes, 200 << 20, 3.0), "{passed:?}");
}

#[test]
fn idle_time_saves_a_burst_and_no_more() {
    let limiter = limiter(1000, 0, 100);
    let mut queue = QueueLimit::new(limiter.clone());
    // After an idle hour, a burst of 100 requests passes at once, and the one that is due.
    let now = 3600 * S;
    let at_once = (0..1000).take_while(|_| queue.pass(now, 4096).is_ok()).count();
    assert_eq!(at_once, 101);
}

#[test]
fn debts_are_shared_by_all_queues() {
    let limiter = limiter(1000, 1 << 20, 0);
    // Each queue appears, lets requests through at once without waiting, and disappears.
    for _ in 0..10 {
        let mut queue = QueueLimit::new(limiter.clone());
        assert!(queue.pass(0, 1 << 20).is_err());
        queue.owe(0, 1, 1 << 20);
    }
    let mut queue = QueueLimit::new(limiter.clone());
    let Err(NotBefore(then)) = queue.pass(0, 512) else { panic!("ten seconds' worth is not paid") };
    assert!(within(then, 10 * S, 1.0), "{then}");
    assert_eq!(queue.pass(then, 512), Ok(()));
    // Without a limit there is no debt.
    limiter.set(Limits::default());
    queue.owe(then, u64::MAX, u64::MAX);
    limiter.set(Limits { iops: 1000, bandwidth: Bytes(1 << 20), burst: Period::default() });
    assert_eq!(queue.pass(then, 512), Ok(()));
}

#[test]
fn a_reserved_request_is_not_charged_twice() {
    let limiter = limiter(1000, 0, 0);
    let mut queue = QueueLimit::new(limiter.clone());
    assert_eq!(queue.pass(0, 0), Ok(()));
    // This request has reserved its time, and is then let through early.
    assert_eq!(queue.pass(0, 0), Err(NotBefore(MS)));
    queue.owe(0, 1, 0);
    assert_eq!(queue.pass(0, 0), Err(NotBefore(2 * MS)));
}

#[test]
fn limits_change_while_queues_wait() {
    let limiter = limiter(1, 0, 0);
    let mut queue = QueueLimit::new(limiter.clone());
    assert_eq!(queue.pass(0, 4096), Ok(()));
    assert_eq!(queue.pass(0, 4096), Err(NotBefore(S)));
    limiter.set(Limits { iops: 1000, bandwidth: Bytes(0), burst: Period::default() });
    assert_eq!(queue.pass(MS, 4096), Ok(()));
    assert_eq!(queue.pass(MS, 4096), Err(NotBefore(2 * MS)));
    // From a high limit to a low one: nothing of the old limit is carried over.
    limiter.set(Limits { iops: 1_000_000, bandwidth: Bytes(0), burst: Period::default() });
    assert_eq!(queue.pass(2 * MS, 4096), Ok(()));
    limiter.set(Limits { iops: 2, bandwidth: Bytes(0), burst: Period::default() });
    assert_eq!(queue.pass(3 * MS, 4096), Ok(()));
    assert_eq!(queue.pass(3 * MS, 4096), Err(NotBefore(S / 2 + 3 * MS)));
    limiter.set(Limits::default());
    assert_eq!(queue.pass(3 * MS, u64::MAX), Ok(()));
}

#[test]
fn threads_lose_and_win_nothing() {
    for threads in 1..=4 {
        let limiter = limiter(1_000_000, 0, 10);
        let passed: u64 = thread::scope(|scope| {
            let worker = || {
                let mut queue = QueueLimit::new(limiter.clone());
                // One virtual second for each thread, at full speed. Each thread has its own clock.
                let (mut now, mut passed) = (S, 0);
                while now < 2 * S {
                    match queue.pass(now, 4096) {
                        Ok(()) => passed += 1,
                        Err(NotBefore(at)) => now = at,
                    }
                }
                passed
            };
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
            workers.into_iter().map(|w| w.join().unwrap()).sum()
        });
        assert!(within(passed, 1_000_000, 2.0), "{threads} threads: {passed}");
    }
}

proptest! {
    /// The bound that the module documents holds for any limits, request lengths and lateness.
    #[test]
    fn never_more_than_promised(
        iops in prop_oneof![Just(0u64), 1u64..1_000_000],
        bandwidth in prop_oneof![Just(0u64), 512u64..(1 << 32)],
        burst_ms in 0u64..100,
        lengths in prop::collection::vec(0u64..(1 << 21), 1..5),
        late in 0u64..2_000_000,
    ) {
        let span = 100 * MS;
        let passed = run(&limiter(iops, bandwidth, burst_ms), &lengths, S, S + span, late);
        let queues = lengths.len() as u64;
        let bound = |rate: u64, least: u64| rate * (100 + burst_ms) / 1000 + 1 + (queues + 1) * (rate / QUANTA).max(least);
        let requests: u64 = passed.iter().map(|p| p.requests).sum();
        let bytes: u64 = passed.iter().map(|p| p.bytes).sum();
        prop_assert!(iops == 0 || requests <= bound(iops, 1), "{} requests", requests);
        prop_assert!(bandwidth == 0 || bytes <= bound(bandwidth, LEAST_BYTES), "{} bytes", bytes);
    }

    /// No numbers cause an overflow or a panic.
    #[test]
    fn no_number_is_too_large(iops: u64, bandwidth: u64, burst: u64, now: u64, bytes: u64) {
        let burst = Period(Duration::from_nanos(burst));
        // A request must not be millions of quanta, each of which passes at once because of an endless burst.
        let bytes = bytes % (1 << 32);
        let bandwidth = if bandwidth == 0 { 0 } else { bandwidth.max(bytes / 100) };
        let limiter = Arc::new(Limiter::new(Limits { iops, bandwidth: Bytes(bandwidth), burst }));
        let mut queue = QueueLimit::new(limiter);
        let _ = queue.pass(now, bytes);
        queue.owe(now, iops, bytes);
        let _ = queue.pass(now, bytes);
    }
}
