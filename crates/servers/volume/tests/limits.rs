//! Limits are exact end to end, and an idle volume uses no CPU time.
//!
//! The tests run one after the other, because they measure time.

mod server;

use ginnel_volume_bench::workload::{Limit, Outcome, Pattern, Workload, run};
use ginnel_volume_bench::{Client, Options};
use ginnel_volume_control::{Answer, LimitChange, Request, Stat};
use kit::wait::WATCHDOG;
use server::Server;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

static ALONE: Mutex<()> = Mutex::new(());

/// How long a measurement takes, after a phase that uses up the saved burst.
const MEASURED: Duration = Duration::from_secs(1);

/// Number of requests in flight on each of the two queues.
const DEPTH: u16 = 16;

fn ask(server: &Server, request: &Request) -> Answer {
    let mut control = ginnel_volume_control::Client::connect("v", &server.dir.path().join("v.ctl")).unwrap();
    control.ask(request).unwrap()
}

fn stat(server: &Server) -> Stat {
    match ask(server, &Request::Stat) {
        Answer::Stat(stat) => *stat,
        other => panic!("{other:?}"),
    }
}

fn load(client: &mut Client, block: u32) -> Outcome {
    let workload = Workload {
        pattern: Pattern { random: true, reads: 50 },
        block,
        depth: DEPTH,
        ramp: Duration::from_millis(100),
        limit: Limit::Time(MEASURED),
        sleep: true,
        ..Workload::default()
    };
    let outcome = run(client, &workload).unwrap();
    assert_eq!(outcome.failed, 0, "{:?}", outcome.first_failure);
    outcome
}

/// Measures repeatedly until the result is within two percent of the limit and no queue starves. A result may never
/// exceed the limit by more than that, except for requests that completed before the measurement began and were seen
/// only in it (`unseen`, at most the number in flight): the machine may have kept the client from looking. A lower
/// result, or a queue that starves, can be caused by the machine as well, so it only leads to another attempt.
fn holds(what: &str, limit: f64, unseen: f64, mut measure: impl FnMut() -> (f64, bool)) {
    for _ in 0..30 {
        let (measured, even) = measure();
        let error = measured / limit - 1.0;
        println!("{what}: {measured:.0} of {limit:.0}, {:+.2} %", 100.0 * error);
        let most = 1.02 * limit + unseen / MEASURED.as_secs_f64();
        assert!(measured < most, "{what}: {measured:.0} where {limit:.0} are allowed");
        if error.abs() < 0.02 && even {
            return;
        }
    }
    panic!("{what}: never within two percent, with no queue that starves");
}

fn limited(flags: &str) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let server = Server::start(32 << 20, &format!("{flags} --queues 2 --iops 4000"));
    let mut client = Client::connect(Options { queues: 2, ..server.options() }).unwrap();
    let count = |outcome: &Outcome| (outcome.reads.requests + outcome.writes.requests) as f64;
    let bytes = |outcome: &Outcome| (outcome.reads.bytes + outcome.writes.bytes) as f64;
    let mut measure = |block, amount: &dyn Fn(&Outcome) -> f64| {
        let before = stat(&server).queues;
        let outcome = load(&mut client, block);
        let after = stat(&server).queues;
        let done: Vec<_> = after.iter().zip(&before).map(|(a, b)| (a.done - b.done) as f64).collect();
        println!("queues: {done:?}");
        // A queue that comes late leaves its turn to the other one, so on a busy machine the two counts differ.
        (amount(&outcome) / outcome.time.as_secs_f64(), done[0].min(done[1]) > 0.45 * (done[0] + done[1]))
    };
    let unseen = 2.0 * f64::from(DEPTH);
    holds("requests a second", 4000.0, unseen, || measure(4096, &count));

    // Changes the limits of the running volume.
    let change = LimitChange { iops: Some(0), bandwidth: Some("32M".parse().unwrap()), burst: None };
    assert!(matches!(ask(&server, &Request::Limit(change)), Answer::Limits(limits) if limits.iops == 0));
    holds("bytes a second", f64::from(32 << 20), unseen * f64::from(16 << 10), || measure(16 << 10, &bytes));

    // Without a limit the volume must be far faster; otherwise the measurements above prove nothing.
    let change = LimitChange { bandwidth: Some("0".parse().unwrap()), ..LimitChange::default() };
    ask(&server, &Request::Limit(change));
    let free = (0..8).map(|_| measure(4096, &count).0).find(|&free| free > 5000.0);
    assert!(free.is_some(), "never more than 5000 requests a second without a limit");
}

#[test]
fn limits_hold_for_queues_of_one_thread() {
    limited("--backend ram --size 32M --threads 1");
}

#[test]
fn limits_hold_for_queues_of_two_threads() {
    limited("--backend ram --size 32M --threads 2 --wait interrupt");
}

/// CPU time of all threads of a process, from `/proc/PID/stat`, in clock ticks of 10 ms.
fn ticks(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // After the name, which is in parentheses, come the state and then numbers.
    let fields: Vec<&str> = text.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn an_idle_volume_uses_no_time() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for flags in ["--path IMAGE", "--path IMAGE --wait interrupt", "--backend ram --size 32M"] {
        let server = Server::start(32 << 20, &format!("{flags} --queues 2 --threads 2"));
        let mut client = Client::connect(Options { queues: 2, ..server.options() }).unwrap();
        client.write(0, &[1; 4096]).unwrap();
        client.flush().unwrap();
        // Work that the volume has begun may still use some time.
        let until = Instant::now() + WATCHDOG;
        let used = loop {
            let before = ticks(server.pid());
            std::thread::sleep(Duration::from_secs(1));
            let used = ticks(server.pid()) - before;
            if used == 0 {
                break used;
            }
            assert!(Instant::now() < until, "{flags}: {used} ticks in a second of nothing");
        };
        println!("{flags}: {used} ticks of 10 ms in a second");
        // The volume still answers at once.
        client.write(4096, &[2; 4096]).unwrap();
    }
}

#[test]
fn a_volume_that_polls_uses_a_whole_processor() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let server = Server::start(32 << 20, "--backend ram --size 32M --wait poll");
    let _client = server.connect();
    // Shows that the ticks of the other test do measure CPU time.
    let (before, begin) = (ticks(server.pid()), Instant::now());
    while ticks(server.pid()) - before < 5 {
        assert!(begin.elapsed() < WATCHDOG, "it does not poll");
        std::thread::sleep(Duration::from_millis(20));
    }
}
