//! Measures the cost of a queue: a block read of 4 KiB, in cache, and between two cores. Beside it the same for a split virtqueue.
//!
//!     cargo run --release -p ginnel-nvme --example nvme_speed
//!
//! *device*: look, take, find the buffers, complete, publish; *driver*: submit, ring, reap, ring. *turn* is one of each in one thread.
//! *round trip*: driver and device on one core each, one command at a time, both polling; beside it the floor, which is the time for a
//! cache line there and back. The split virtqueue is the one of `crates/protocol/virtqueue/examples/speed.rs`: three descriptors, and
//! an in-flight record.

use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::nvme::{Command, Opcode, Status};
use ginnel_nvme::{QueueGroup, prp};
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{Chain, DeviceQueue, DriverQueue, Kind, Segment};
use kit::models::nvme::rig::{Driver, Mode, Rig};
use kit::models::virtqueue::rig::Rig as VirtRig;
use std::hint::{black_box, spin_loop};
use std::time::{Duration, Instant};
use zerocopy::FromZeros;

/// Requests of a run, and runs of a row. Other programs may use the machine too: the minimum is what the code costs, and the median says
/// how reliable it is.
const ROUNDS: u64 = 20_000;
const RUNS: usize = 31;

/// A driver and a device. All methods are static calls.
trait Pair: Sized {
    type Device: Send + 'static;
    fn split(self) -> (Self, Option<Self::Device>);
    /// Submits `count` requests and shows them to the device.
    fn submit(&mut self, count: usize);
    /// Takes a completion back, if there is one.
    fn reap(&mut self) -> bool;
    /// Says that all completions of a batch were taken back.
    fn release(&mut self) {}
    /// Serves the requests that are there. Returns how many there were.
    fn serve(device: &mut Self::Device) -> u64;
}

struct Nvme {
    rig: Rig,
    driver: Driver<Mapping>,
    device: Option<NvmeDevice>,
}

struct NvmeDevice {
    guest: GuestMemory<Mapping>,
    group: QueueGroup<Mapping>,
    buffers: Vec<Buffer>,
}

impl Nvme {
    fn new(mode: Mode) -> Self {
        let rig = Rig::pair(mode, 256);
        let (memory, doorbells, state) = (rig.memory(), rig.doorbells(), rig.state_memory());
        rig.create(&memory, &doorbells, &state);
        let driver = rig.driver(&memory, &doorbells, 255);
        let mut group = rig.group(&memory, &doorbells, &state).expect("a group");
        group.disarm();
        let device = NvmeDevice { guest: rig.guest(&memory), group, buffers: Vec::new() };
        Self { rig, driver, device: Some(device) }
    }
}

impl Pair for Nvme {
    type Device = NvmeDevice;

    fn split(mut self) -> (Self, Option<NvmeDevice>) {
        let device = self.device.take();
        (self, device)
    }

    #[inline]
    fn submit(&mut self, count: usize) {
        for _ in 0..count {
            let command = Command {
                opcode: Opcode::READ,
                prp1: self.rig.data(4096),
                cdw12: 7,
                ..Command::new_zeroed()
            };
            self.driver.submit(0, command).expect("room");
        }
        black_box(self.driver.ring(0));
    }

    #[inline]
    fn reap(&mut self) -> bool {
        matches!(self.driver.reap(), Ok(Some(_)))
    }

    #[inline]
    fn release(&mut self) {
        black_box(self.driver.release());
    }

    #[inline]
    fn serve(device: &mut NvmeDevice) -> u64 {
        let NvmeDevice { guest, group, buffers } = device;
        let mut count = 0;
        while let Ok(Some((ticket, command))) = group.take() {
            let len = 512 * command.blocks();
            let status = match prp::buffers(guest, command.prp1, command.prp2, len, 129, buffers) {
                Ok(()) => Status::SUCCESS,
                Err(status) => status,
            };
            black_box(&*buffers);
            group.complete(ticket, status, 0);
            count += 1;
        }
        if count > 0 {
            black_box(group.publish());
        }
        count
    }
}

struct Virtio {
    rig: VirtRig,
    driver: DriverQueue<Mapping>,
    device: Option<VirtioDevice>,
}

struct VirtioDevice {
    guest: GuestMemory<Mapping>,
    queue: DeviceQueue<Mapping>,
    chain: Chain,
}

impl Virtio {
    fn new() -> Self {
        let rig = VirtRig::new(Kind::Split, 256, true);
        let (memory, region) = (rig.memory(), rig.inflight_memory());
        let mut driver = rig.driver(&memory);
        driver.disarm();
        let mut queue = DeviceQueue::new(rig.setup(&memory, rig.base(), Some(&region))).expect("a queue");
        queue.disarm();
        let device = VirtioDevice { guest: rig.guest(&memory), queue, chain: Chain::new() };
        Self { rig, driver, device: Some(device) }
    }
}

impl Pair for Virtio {
    type Device = VirtioDevice;

    fn split(mut self) -> (Self, Option<VirtioDevice>) {
        let device = self.device.take();
        (self, device)
    }

    #[inline]
    fn submit(&mut self, count: usize) {
        for n in 0..count {
            let header = self.rig.data(32 * n);
            let segments = [
                Segment { address: header, len: 16, writable: false },
                Segment { address: self.rig.data(4096), len: 4096, writable: true },
                Segment { address: header + 16, len: 1, writable: true },
            ];
            self.driver.add(&segments, false).expect("room");
        }
        black_box(self.driver.publish());
    }

    #[inline]
    fn reap(&mut self) -> bool {
        matches!(self.driver.poll(), Ok(Some(_)))
    }

    #[inline]
    fn serve(device: &mut VirtioDevice) -> u64 {
        let VirtioDevice { guest, queue, chain } = device;
        let mut count = 0;
        while let Ok(Some(ticket)) = queue.pop(guest, chain) {
            let mut header = [0; 16];
            guest.slice(&chain.readable()[0]).read(0, &mut header);
            black_box(header);
            if let Some(status) = chain.writable().last() {
                guest.slice(status).write(0, &[0]);
            }
            queue.push(ticket, 4097);
            count += 1;
        }
        if count > 0 {
            black_box(queue.publish());
        }
        count
    }
}

/// Returns the nanoseconds per request for the device alone, and for both sides.
fn in_cache<P: Pair>(pair: P, batch: usize) -> [f64; 2] {
    let (mut driver, device) = pair.split();
    let mut device = device.expect("a device");
    // The cost of reading the clock twice.
    let clock = (0..1000).map(|_| Instant::now().elapsed()).min().unwrap_or_default();
    let rounds = ROUNDS / batch as u64;
    let mut alone = Duration::ZERO;
    let mut run = |timed: bool| {
        let begin = Instant::now();
        for _ in 0..rounds {
            driver.submit(batch);
            let start = timed.then(Instant::now);
            assert_eq!(P::serve(&mut device), batch as u64);
            if let Some(start) = start {
                alone += start.elapsed();
            }
            for _ in 0..batch {
                assert!(driver.reap());
            }
            driver.release();
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

/// Returns the nanoseconds for a request to a device on another core and back, with `depth` requests at a time.
fn between_cores<P: Pair>(pair: P, depth: usize) -> f64 {
    let (mut driver, device) = pair.split();
    let mut device = device.expect("a device");
    let rounds = ROUNDS / depth as u64;
    let server = std::thread::spawn(move || {
        pin(1);
        let mut served = 0;
        while served < rounds * depth as u64 {
            served += P::serve(&mut device);
        }
    });
    pin(0);
    let begin = Instant::now();
    for _ in 0..rounds {
        driver.submit(depth);
        for _ in 0..depth {
            while !driver.reap() {
                spin_loop();
            }
        }
        driver.release();
    }
    let time = begin.elapsed();
    server.join().expect("the device lives");
    time.as_nanos() as f64 / (rounds * depth as u64) as f64
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
    for batch in [1, 32] {
        let row = |name: &str, [device, both]: [(f64, f64); 2]| {
            let name = format!("{name} batch {batch}");
            println!("{name:<34} {:>8.1} {:>7.1} {:>14.1} {:>7.1}", device.0, device.1, both.0, both.1);
        };
        row("NVMe mapped", runs(|| in_cache(Nvme::new(Mode::Mapped), batch)));
        row("NVMe shadow", runs(|| in_cache(Nvme::new(Mode::Shadow), batch)));
        row("virtqueue split", runs(|| in_cache(Virtio::new(), batch)));
    }
    println!("between two cores, ns a request, least and median");
    let [(least, median)] = runs(|| [floor()]);
    println!("{:<34} {least:>8.0} {median:>7.0}", "cache line there and back");
    for depth in [1, 32] {
        let row = |name: &str, [(least, median)]: [(f64, f64); 1]| {
            let name = format!("{name} QD {depth}");
            println!("{name:<34} {least:>8.0} {median:>7.0}");
        };
        row("NVMe mapped", runs(|| [between_cores(Nvme::new(Mode::Mapped), depth)]));
        row("NVMe shadow", runs(|| [between_cores(Nvme::new(Mode::Shadow), depth)]));
        row("virtqueue split", runs(|| [between_cores(Virtio::new(), depth)]));
    }
}
