//! A device is killed at each of its stores, and another process takes over: no acknowledged request is done again, none is
//! lost, and the requests that are done again come in their order (vhost-user specification, "Inflight I/O tracking").
//!
//! A killed process has done all its stores up to some point and none after it. Therefore the device runs on a memory that
//! accepts no more stores after the k-th, for every k until the run ends alive. The driver and its memory survive. In the
//! longer runs, the later processes die as well, also while they take over.

#![cfg(not(loom))]

use ginnel_guest_memory::GuestMemory;
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{Chain, DeviceQueue, DriverQueue, InflightQueue, Kind, Segment, Ticket};
use kit::models::virtqueue::rig::Rig;
use kit::mortal::Mortal;
use kit::random::Random;
use std::collections::{BTreeMap, BTreeSet};

/// A process that serves the queue.
struct Process {
    memory: Mortal,
    guest: GuestMemory<Mortal>,
    queue: DeviceQueue<Mortal>,
    held: Vec<Ticket>,
    /// The last request that it took.
    last: Option<u64>,
}

struct World {
    rig: Rig,
    memory: Mapping,
    inflight: Mapping,
    driver: DriverQueue<Mapping>,
    device: Process,
    /// Requests for which the driver waits, by id: their number, and their slot of the data.
    waiting: BTreeMap<u16, (u64, usize)>,
    slots: Vec<usize>,
    sent: u64,
    done: BTreeSet<u64>,
    random: Random,
    deaths: u32,
    what: String,
}

impl World {
    fn new(kind: Kind, size: u16, seed: u64, stores: u64) -> Self {
        let rig = Rig::new(kind, size, seed.is_multiple_of(2));
        let (memory, inflight) = (rig.memory(), rig.inflight_memory());
        let driver = rig.driver(&memory);
        let device = Self::start(&rig, &memory, &inflight, stores).unwrap();
        Self {
            rig,
            memory,
            inflight,
            driver,
            device,
            waiting: BTreeMap::new(),
            slots: (0..size.into()).collect(),
            sent: 0,
            done: BTreeSet::new(),
            random: Random::new(seed),
            deaths: 0,
            what: format!("{kind:?}, size {size}, seed {seed}, {stores} stores"),
        }
    }

    fn start(rig: &Rig, memory: &Mapping, inflight: &Mapping, stores: u64) -> Option<Process> {
        let memory = Mortal::new(memory, stores);
        let inflight = memory.other(inflight);
        let queue = DeviceQueue::new(rig.setup(&memory, rig.base(), Some(&inflight)));
        match queue {
            Ok(queue) => {
                let guest = rig.guest(&memory);
                Some(Process { memory, guest, queue, held: Vec::new(), last: None })
            }
            // The device was already dead, so its stores had no effect, and its loads do not match them.
            Err(_) if memory.is_dead() => None,
            Err(error) => panic!("{rig:?}: {error}"),
        }
    }

    fn dead(&self) -> bool {
        self.device.memory.is_dead()
    }

    fn send(&mut self) {
        let Some(slot) = self.slots.pop() else { return };
        let at = 256 * slot;
        let segments = 1 + self.random.below(3) as usize;
        let segment = |i: usize| Segment {
            address: self.rig.data(at + 64 * i),
            len: 8,
            writable: i > 0 && i + 1 == segments,
        };
        let list: Vec<_> = (0..segments).map(segment).collect();
        let indirect = self.random.below(3) == 0;
        match self.driver.add(&list, indirect) {
            Ok(id) => {
                self.memory.write(self.rig.data_at() + at, &self.sent.to_le_bytes());
                assert!(self.waiting.insert(id, (self.sent, slot)).is_none(), "{}", self.what);
                self.sent += 1;
            }
            Err(_) => self.slots.push(slot),
        }
        if self.random.below(3) > 0 {
            let _ = self.driver.publish();
        }
    }

    /// Takes back what the driver finds used.
    fn receive(&mut self) {
        while let Some((id, _)) = self.driver.poll().unwrap_or_else(|e| panic!("{}: {e}", self.what)) {
            let (number, slot) = self.waiting.remove(&id).unwrap();
            assert!(self.done.insert(number), "{}: {number} twice", self.what);
            self.slots.push(slot);
        }
    }

    fn take(&mut self) {
        let mut chain = Chain::new();
        let Process { memory, queue, guest, held, last } = &mut self.device;
        let ticket = queue.pop(guest, &mut chain).unwrap_or_else(|e| panic!("{}: {e}", self.what));
        let Some(ticket) = ticket else { return };
        if memory.is_dead() {
            return;
        }
        let mut number = [0; 8];
        guest.read(chain.readable(), 0, &mut number);
        let number = u64::from_le_bytes(number);
        let (wanted, _) = self.waiting.get(&ticket.id()).unwrap_or(&(u64::MAX, 0));
        assert!(*wanted == number && !self.done.contains(&number), "{}: {number} is done again", self.what);
        assert!(last.is_none_or(|last| last < number), "{}: {number} behind {last:?}", self.what);
        *last = Some(number);
        held.push(ticket);
    }

    fn give(&mut self) {
        if !self.device.held.is_empty() {
            let ticket = self.random.below(self.device.held.len() as u64);
            let ticket = self.device.held.swap_remove(ticket as usize);
            self.device.queue.push(ticket, 0);
        }
    }

    /// Lets another process take over. The driver sees what was acknowledged before the new process does anything; it looks
    /// once before and once after the takeover.
    fn succeed(&mut self, mut stores: u64) {
        self.deaths += 1;
        if self.random.below(2) == 0 {
            self.receive();
        }
        self.device = loop {
            match Self::start(&self.rig, &self.memory, &self.inflight, stores) {
                Some(device) => break device,
                None => (self.deaths, stores) = (self.deaths + 1, stores + 1),
            }
        };
        self.receive();
    }

    fn step(&mut self) {
        match self.random.below(8) {
            0..=2 => self.send(),
            3 | 4 => self.take(),
            5 => self.give(),
            6 => {
                let _ = self.device.queue.publish();
            }
            _ if self.random.below(2) == 0 => self.receive(),
            _ => {
                if !self.device.queue.arm() {
                    self.device.queue.disarm();
                }
            }
        }
    }

    /// The last process survives: all requests are done in the end, and nothing is left.
    fn finish(&mut self) {
        self.device.memory.live_on();
        let _ = self.driver.publish();
        for _ in 0..4 * usize::from(self.rig.size) {
            self.take();
            self.give();
            let _ = self.device.queue.publish();
            self.receive();
        }
        assert!(self.waiting.is_empty(), "{}: lost {:?}", self.what, self.waiting);
        assert_eq!(self.done.len() as u64, self.sent, "{}", self.what);
        assert_eq!(self.device.queue.outstanding(), 0, "{}", self.what);
        self.succeed(u64::MAX);
        let state = self.device.queue.state();
        assert_eq!((state.resubmit, state.outstanding), (0, 0), "{}", self.what);
        assert!(self.device.queue.publish(), "{}: a call may be owed", self.what);
    }
}

/// Kills the device once, at every store of a run.
#[test]
fn a_device_may_die_at_each_store() {
    for kind in [Kind::Split, Kind::Packed] {
        for seed in 1..=12 {
            let size = [4, 8][seed as usize / 2 % 2];
            for stores in 0.. {
                let mut world = World::new(kind, size, seed, stores);
                for _ in 0..400 {
                    if world.deaths == 0 && world.dead() {
                        world.succeed(u64::MAX);
                    }
                    world.step();
                }
                let deaths = world.deaths;
                if world.dead() {
                    world.succeed(u64::MAX);
                }
                world.finish();
                if deaths == 0 {
                    assert!(stores > 150, "{}: hardly anything was done", world.what);
                    break;
                }
            }
        }
    }
}

/// Kills many devices, also while they take over.
#[test]
fn successors_may_die_as_well() {
    let mut deaths = 0;
    for kind in [Kind::Split, Kind::Packed] {
        for seed in 1..=400 {
            let size = [2, 4, 8, 16][seed as usize / 2 % 4];
            let mut world = World::new(kind, size, seed, 20 + seed % 50);
            for _ in 0..1000 {
                while world.dead() {
                    let stores = world.random.below(60);
                    world.succeed(stores);
                }
                world.step();
            }
            deaths += world.deaths;
            world.succeed(u64::MAX);
            world.finish();
        }
    }
    assert!(deaths > 10_000, "{deaths}");
}

/// Uses the region of a queue that is shorter than the maximum, and that of one of several queues.
#[test]
fn a_region_has_a_part_for_each_queue() {
    for kind in [Kind::Split, Kind::Packed] {
        let rig = Rig::new(kind, 8, true);
        let len = InflightQueue::<Mapping>::len(kind, 128);
        let region = Mapping::anonymous((3 * len).next_multiple_of(4096)).unwrap();
        let part = |queue| InflightQueue::new(region.clone(), 0, queue, kind, 128);
        let memory = rig.memory();
        let mut driver = rig.driver(&memory);
        driver.add(&[Segment { address: rig.data(0), len: 8, writable: false }], false).unwrap();
        let _ = driver.publish();
        for (taken, queue) in [(0, 2), (1, 2), (0, 1)] {
            let mut setup = rig.setup(&memory, rig.base(), None);
            setup.inflight = Some(part(queue).unwrap());
            let mut device = DeviceQueue::new(setup).unwrap();
            assert_eq!(device.state().resubmit, taken, "{kind:?}, part {queue}");
            let ticket = device.pop(&rig.guest(&memory), &mut Chain::new()).unwrap();
            assert!(ticket.is_some());
        }
        let beyond = (region.len() / len) as u16;
        assert!(part(beyond).is_err());
    }
}
