//! Models of both sides of a queue that sleep when there is nothing to do: loom runs the real code in every order of two
//! threads, and with every old value that the stated orderings allow a load to return.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release -p ginnel-virtqueue --test loom        (or: scripts/loom)
//!
//! A lost kick or a lost call is a deadlock, which loom reports. The second half takes one ordering away from one side; then
//! the same models must fail.
#![cfg(loom)]

use ginnel_guest_memory::{Area, GuestMemory, Region};
use ginnel_layout::virtio::split;
use ginnel_shmem::{LoomMemory, Order, SharedMemory};
use ginnel_virtqueue::{Chain, DeviceQueue, DriverQueue, DriverSetup, Kind, Segment, Setup};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::sync::Arc;

const KINDS: [(Kind, bool); 4] =
    [(Kind::Split, false), (Kind::Split, true), (Kind::Packed, false), (Kind::Packed, true)];

const SIZE: u16 = 2;
const DRIVER: usize = 0x100;
const DEVICE: usize = 0x200;
const DATA: usize = 0x300;
const LEN: usize = 0x400;

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(model);
}

/// Returns the words of a queue of two, and one word of data for each request.
fn memory(kind: Kind, requests: u64) -> LoomMemory {
    let mut words: Vec<usize> = (0..usize::from(SIZE)).flat_map(|i| [16 * i, 16 * i + 8]).collect();
    words.extend((0..requests as usize).map(|i| DATA + 8 * i));
    match kind {
        Kind::Split => {
            for area in [DRIVER, DEVICE] {
                words.extend([area + split::FLAGS, area + split::INDEX]);
            }
            for i in 0..SIZE {
                let used = DEVICE + split::used(i);
                words.extend([DRIVER + split::available(i), used, used + 4]);
            }
            words.extend([DRIVER + split::used_event(SIZE), DEVICE + split::avail_event(SIZE)]);
        }
        Kind::Packed => words.extend([DRIVER, DEVICE]),
    }
    LoomMemory::new(LEN, words)
}

fn area(memory: &LoomMemory, at: usize) -> Area<LoomMemory> {
    Area { memory: memory.clone(), at, len: 0x100, guest: at as u64 }
}

fn driver(memory: &LoomMemory, kind: Kind, event_idx: bool) -> DriverQueue<LoomMemory> {
    let [descriptors, driver, device] = [0, DRIVER, DEVICE].map(|at| area(memory, at));
    let setup = DriverSetup { kind, size: SIZE, descriptors, driver, device, event_idx, tables: None };
    DriverQueue::new(setup).unwrap()
}

fn device(memory: &LoomMemory, kind: Kind, event_idx: bool) -> DeviceQueue<LoomMemory> {
    let [descriptors, driver, device] = [0, DRIVER, DEVICE].map(|at| area(memory, at));
    let base = if kind == Kind::Split { 0 } else { 0x8000_8000 };
    DeviceQueue::new(Setup {
        kind,
        size: SIZE,
        descriptors,
        driver,
        device,
        event_idx,
        base,
        inflight: None,
        max_segments: 4,
    })
    .unwrap()
}

/// A parking place, where one side sleeps. The other side has a clone, with which it wakes the first. It uses the standard
/// library's `Arc`, since loom's cannot be dropped while a deadlock is being reported.
#[derive(Clone)]
struct Parker(Arc<(Mutex<bool>, Condvar)>);

impl Parker {
    fn new() -> Self {
        Self(Arc::new((Mutex::new(false), Condvar::new())))
    }
    fn ring_if(&self, needed: bool) {
        if needed {
            *self.0.0.lock().unwrap() = true;
            self.0.1.notify_one();
        }
    }
    fn sleep(&self) {
        let mut rung = self.0.0.lock().unwrap();
        while !*rung {
            rung = self.0.1.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// `requests` requests go through the queue, `depth` at a time. Each side sleeps when there is nothing to do. Each request is
/// one word, which the device reads and writes.
fn deliver(
    (kind, event_idx): (Kind, bool),
    requests: u64,
    depth: u64,
    for_driver: LoomMemory,
    for_device: LoomMemory,
) {
    let (kicks, calls) = (Parker::new(), Parker::new());
    let (to_device, from_device) = (kicks.clone(), calls.clone());
    let mut driver = driver(&for_driver, kind, event_idx);
    let mut device = device(&for_device, kind, event_idx);
    // Both sides are awake, so they do not ask for notifications.
    device.disarm();
    driver.disarm();
    let server = thread::spawn(move || {
        let regions = vec![Region { guest: 0, user: 0, memory: for_device }];
        let (guest, mut chain) = (GuestMemory::new(regions).unwrap(), Chain::new());
        let mut served = 0;
        while served < requests {
            while let Some(ticket) = device.pop(&guest, &mut chain).unwrap() {
                let mut word = [0; 8];
                // Both directions use one buffer, so that there are fewer words.
                guest.read(chain.writable(), 0, &mut word);
                let answer = u64::from_le_bytes(word) + 1000;
                guest.write(chain.writable(), 0, &answer.to_le_bytes());
                device.push(ticket, 8);
                served += 1;
            }
            calls.ring_if(device.publish());
            if served < requests && !device.arm() {
                kicks.sleep();
            }
            device.disarm();
        }
    });
    let (mut sent, mut done) = (0, 0);
    while done < requests {
        while sent < requests && sent - done < depth {
            let at = DATA + 8 * sent as usize;
            for_driver.write(at, &sent.to_le_bytes());
            driver.add(&[Segment { address: at as u64, len: 8, writable: true }], false).unwrap();
            sent += 1;
        }
        to_device.ring_if(driver.publish());
        let before = done;
        while let Some((_, written)) = driver.poll().unwrap() {
            assert_eq!(written, 8);
            let mut word = [0; 8];
            for_driver.read(DATA + 8 * done as usize, &mut word);
            assert_eq!(u64::from_le_bytes(word), done + 1000);
            done += 1;
        }
        if done == before && !driver.arm() {
            from_device.sleep();
        }
        driver.disarm();
    }
    server.join().unwrap();
}

#[test]
fn no_kick_and_no_call_is_lost() {
    for queue in KINDS {
        explore(3, move || {
            let memory = memory(queue.0, 2);
            deliver(queue, 2, 1, memory.clone(), memory);
        });
    }
}

#[test]
fn requests_go_around_the_ring_with_both_sides_asleep() {
    for queue in KINDS {
        explore(2, move || {
            let memory = memory(queue.0, 3);
            deliver(queue, 3, 1, memory.clone(), memory);
        });
    }
}

#[test]
fn batches_are_whole() {
    for queue in KINDS {
        explore(2, move || {
            let memory = memory(queue.0, 3);
            deliver(queue, 3, 2, memory.clone(), memory);
        });
    }
}

/// Runs `model`, which must fail with a panic whose message contains one of `how`.
fn must_fail(what: &str, how: &[&str], model: impl Fn() + Sync + Send + 'static) {
    let failure = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| explore(3, model)));
    let Err(panic) = failure else { panic!("{what}: the model passes although an ordering is missing") };
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default();
    assert!(how.iter().any(|how| text.contains(how)), "{what}: expected {how:?}, failed with {text:?}");
}

/// Takes the ordering away from the driver, then from the device.
fn both_need(order: Order, how: &'static [&'static str]) {
    for queue in KINDS {
        // The first kick and the first call are always due.
        for (requests, depth) in [(2, 1), (3, 2)] {
            must_fail(&format!("{queue:?}, the driver, {depth}"), how, move || {
                let memory = memory(queue.0, requests);
                deliver(queue, requests, depth, memory.without(order), memory);
            });
            must_fail(&format!("{queue:?}, the device, {depth}"), how, move || {
                let memory = memory(queue.0, requests);
                deliver(queue, requests, depth, memory.clone(), memory.without(order));
            });
        }
    }
}

#[test]
fn without_a_fence_a_kick_or_a_call_is_lost() {
    both_need(Order::Fence, &["deadlock"]);
}

#[test]
fn without_release_what_lies_behind_is_old() {
    both_need(Order::Release, &["Causality violation", "assertion", "unwrap"]);
}

#[test]
fn without_acquire_what_lies_behind_is_old() {
    both_need(Order::Acquire, &["Causality violation", "assertion", "unwrap"]);
}
