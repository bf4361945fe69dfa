//! Measures the cost of a queue: a block read of three descriptors (header, data, status), in cache, and between two cores.
//!
//!     cargo run --release -p ginnel-virtqueue --example speed
//!
//! *device*: look, take, read the header, write the status, give back, publish; *driver*: add, publish, poll. *turn* is one
//! of each in one thread. *round trip*: driver and device on one core each, one request at a time, both polling; beside it
//! the floor, which is the time for a cache line there and back.

use ginnel_guest_memory::GuestMemory;
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{Chain, DeviceQueue, DriverQueue, Kind, Segment};
use kit::models::virtqueue::rig::Rig;
use std::hint::{black_box, spin_loop};
use std::time::{Duration, Instant};

/// Requests of a run, and runs of a row. Other programs may use the machine too: the minimum is what the code costs, and the
/// median says how reliable it is.
const ROUNDS: u64 = 20_000;
const RUNS: usize = 31;

struct Queue {
    rig: Rig,
    memory: Mapping,
    guest: GuestMemory<Mapping>,
    driver: DriverQueue<Mapping>,
    device: DeviceQueue<Mapping>,
}

fn queue(kind: Kind, inflight: bool) -> Queue {
    let rig = Rig::new(kind, 256, true);
    let memory = rig.memory();
    let region = inflight.then(|| rig.inflight_memory());
    let driver = rig.driver(&memory);
    let mut device = DeviceQueue::new(rig.setup(&memory, rig.base(), region.as_ref())).expect("a queue");
    device.disarm();
    Queue { guest: rig.guest(&memory), rig, memory, driver, device }
}

fn request(rig: &Rig, n: usize) -> [Segment; 3] {
    let header = rig.data(32 * n);
    [
        Segment { address: header, len: 16, writable: false },
        Segment { address: rig.data(4096), len: 4096, writable: true },
        Segment { address: header + 16, len: 1, writable: true },
    ]
}

/// Serves the requests that are there. Returns how many there were.
#[inline]
fn serve(device: &mut DeviceQueue<Mapping>, guest: &GuestMemory<Mapping>, chain: &mut Chain) -> u64 {
    let mut count = 0;
    while let Ok(Some(ticket)) = device.pop(guest, chain) {
        let mut header = [0; 16];
        guest.slice(&chain.readable()[0]).read(0, &mut header);
        black_box(header);
        if let Some(status) = chain.writable().last() {
            guest.slice(status).write(0, &[0]);
        }
        device.push(ticket, 4097);
        count += 1;
    }
    if count > 0 {
        black_box(device.publish());
    }
    count
}

/// Returns the nanoseconds per request for the device alone, and for both sides.
fn in_cache(kind: Kind, inflight: bool, batch: usize, indirect: bool) -> [f64; 2] {
    let Queue { rig, guest, mut driver, mut device, .. } = queue(kind, inflight);
    let mut chain = Chain::new();
    // The cost of reading the clock twice.
    let clock = (0..1000).map(|_| Instant::now().elapsed()).min().unwrap_or_default();
    let rounds = ROUNDS / batch as u64;
    let mut alone = Duration::ZERO;
    let mut run = |timed: bool| {
        let begin = Instant::now();
        for _ in 0..rounds {
            for n in 0..batch {
                driver.add(&request(&rig, n), indirect).expect("room");
            }
            black_box(driver.publish());
            let start = timed.then(Instant::now);
            assert_eq!(serve(&mut device, &guest, &mut chain), batch as u64);
            if let Some(start) = start {
                alone += start.elapsed();
            }
            for _ in 0..batch {
                assert!(matches!(driver.poll(), Ok(Some(_))));
            }
        }
        begin.elapsed()
    };
    run(true);
    let both = run(false);
    let ns = |time: Duration| time.as_nanos() as f64 / (rounds * batch as u64) as f64;
    [ns(alone.saturating_sub(rounds as u32 * clock)), ns(both)]
}

fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    // If this fails, the numbers are worse, and nothing else happens.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Returns the nanoseconds for a request to a device on another core and back.
fn between_cores(kind: Kind, inflight: bool) -> f64 {
    let Queue { rig, memory, guest, mut driver, mut device } = queue(kind, inflight);
    driver.disarm();
    let rounds = ROUNDS;
    let server = std::thread::spawn(move || {
        pin(1);
        let (mut chain, mut served) = (Chain::new(), 0);
        while served < rounds {
            served += serve(&mut device, &guest, &mut chain);
        }
    });
    pin(0);
    let begin = Instant::now();
    for n in 0..rounds {
        memory.store_relaxed_u64(rig.data_at() + 8, n);
        driver.add(&request(&rig, 0), false).expect("room");
        black_box(driver.publish());
        while !matches!(driver.poll(), Ok(Some(_))) {
            spin_loop();
        }
    }
    let time = begin.elapsed();
    server.join().expect("the device lives");
    time.as_nanos() as f64 / rounds as f64
}

/// Returns the nanoseconds for a cache line to another core and back.
fn floor() -> f64 {
    let memory = Mapping::anonymous(4096).expect("memory");
    let theirs = memory.clone();
    let echo = std::thread::spawn(move || {
        pin(1);
        for n in 1..=ROUNDS {
            while theirs.load_acquire_u64(0) != n {}
            theirs.store_release_u64(64, n);
        }
    });
    pin(0);
    let begin = Instant::now();
    for n in 1..=ROUNDS {
        memory.store_release_u64(0, n);
        while memory.load_acquire_u64(64) != n {}
    }
    let time = begin.elapsed();
    echo.join().expect("the echo lives");
    time.as_nanos() as f64 / ROUNDS as f64
}

/// Returns the minimum and the median of each figure.
fn runs<const N: usize>(mut run: impl FnMut() -> [f64; N]) -> [(f64, f64); N] {
    let runs: Vec<_> = (0..RUNS).map(|_| run()).collect();
    std::array::from_fn(|i| {
        let mut figures: Vec<f64> = runs.iter().map(|run| run[i]).collect();
        figures.sort_by(f64::total_cmp);
        (figures[0], figures[RUNS / 2])
    })
}

fn main() {
    println!("in cache, ns a request        device: least  median    turn: least  median");
    for kind in [Kind::Split, Kind::Packed] {
        for (inflight, batch, indirect) in
            [(false, 1, false), (false, 32, false), (false, 32, true), (true, 1, false), (true, 32, false)]
        {
            let [device, both] = runs(|| in_cache(kind, inflight, batch, indirect));
            let name = format!(
                "{kind:?} batch {batch}{}{}",
                if indirect { " indirect" } else { "" },
                if inflight { " in-flight" } else { "" }
            );
            println!("{name:<34} {:>8.1} {:>7.1} {:>14.1} {:>7.1}", device.0, device.1, both.0, both.1);
        }
    }
    println!("between two cores, ns a round trip (QD 1), least and median");
    let [(least, median)] = runs(|| [floor()]);
    println!("{:<34} {least:>8.0} {median:>7.0}", "cache line");
    for kind in [Kind::Split, Kind::Packed] {
        for inflight in [false, true] {
            let [(least, median)] = runs(|| [between_cores(kind, inflight)]);
            let name = format!("{kind:?}{}", if inflight { " in-flight" } else { "" });
            println!("{name:<34} {least:>8.0} {median:>7.0}");
        }
    }
}
