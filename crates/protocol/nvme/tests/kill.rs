//! A device is killed at each of its stores, and another process takes over: no command is completed twice, none is lost, and the
//! commands of a queue that are executed again come in their order.
//!
//! A killed process has done all its stores up to some point and none after it. Therefore the device runs on memory that accepts no more
//! stores after the k-th, for every k until the run ends alive. The driver, its memory and the state survive. In the longer runs, the
//! later processes die as well, also while they take over.

#![cfg(not(loom))]

use ginnel_layout::nvme::{Command, Opcode, Status};
use ginnel_nvme::{QueueGroup, Ticket};
use ginnel_shmem::{Mapping, SharedMemory};
use kit::models::nvme::rig::{Driver, Mode, Rig};
use kit::mortal::Mortal;
use kit::random::Random;
use std::collections::{BTreeMap, BTreeSet};
use zerocopy::FromZeros;

/// A process that serves the queues.
struct Process {
    memory: Mortal,
    group: QueueGroup<Mortal>,
    /// Commands that it has taken, and those among them that are parked.
    held: Vec<(Ticket, u32)>,
    parked: Vec<(Ticket, u32)>,
    /// The last command that it took from each queue.
    last: BTreeMap<u16, u32>,
}

struct World {
    rig: Rig,
    memory: Mapping,
    doorbells: Mapping,
    state: Mapping,
    driver: Driver<Mapping>,
    device: Process,
    /// Commands for which the driver waits, by queue and identifier.
    waiting: BTreeMap<(usize, u16), u32>,
    sent: u32,
    done: BTreeSet<u32>,
    random: Random,
    deaths: u32,
    what: String,
}

impl World {
    fn new(rig: Rig, seed: u64, stores: u64) -> Self {
        let (memory, doorbells, state) = (rig.memory(), rig.doorbells(), rig.state_memory());
        rig.create(&memory, &doorbells, &state);
        let driver = rig.driver(&memory, &doorbells, 20);
        let device = Self::start(&rig, &memory, &doorbells, &state, stores).unwrap();
        Self {
            memory,
            doorbells,
            state,
            driver,
            device,
            waiting: BTreeMap::new(),
            sent: 0,
            done: BTreeSet::new(),
            random: Random::new(seed),
            deaths: 0,
            what: format!("{rig:?}, seed {seed}, {stores} stores"),
            rig,
        }
    }

    fn start(
        rig: &Rig,
        memory: &Mapping,
        doorbells: &Mapping,
        state: &Mapping,
        stores: u64,
    ) -> Option<Process> {
        let memory = Mortal::new(memory, stores);
        let (doorbells, state) = (memory.other(doorbells), memory.other(state));
        match rig.group(&memory, &doorbells, &state) {
            Ok(group) => {
                Some(Process { memory, group, held: Vec::new(), parked: Vec::new(), last: BTreeMap::new() })
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
        let queue = self.random.index(self.driver.submissions.len());
        let command = Command { opcode: Opcode::READ, cdw10: self.sent, ..Command::new_zeroed() };
        if let Some(cid) = self.driver.submit(queue, command) {
            assert_eq!(self.waiting.insert((queue, cid), self.sent), None, "{}", self.what);
            self.sent += 1;
        }
        if self.random.below(3) > 0 {
            self.driver.ring(queue);
        }
    }

    /// Takes all completions that the driver finds, and sometimes gives their entries back.
    fn receive(&mut self) {
        while let Some((queue, completion)) =
            self.driver.reap().unwrap_or_else(|e| panic!("{}: {e}", self.what))
        {
            let number = self.waiting.remove(&(queue, completion.cid)).unwrap();
            assert_eq!(completion.result, !number, "{}", self.what);
            assert!(self.done.insert(number), "{}: {number} twice", self.what);
        }
        if self.random.below(3) > 0 {
            self.driver.release();
        }
    }

    fn take(&mut self) {
        let Process { memory, group, held, last, .. } = &mut self.device;
        let taken = group.take().unwrap_or_else(|e| panic!("{}: {e}", self.what));
        let Some((ticket, command)) = taken else { return };
        if memory.is_dead() {
            return;
        }
        let (queue, number) = (group.queue_of(&ticket), command.cdw10);
        let wanted = self.waiting.get(&(usize::from(queue) - 1, command.cid));
        assert_eq!(wanted, Some(&number), "{}: {number} is done again", self.what);
        let last = last.insert(queue, number);
        assert!(last.is_none_or(|last| last < number), "{}: {number} behind {last:?}", self.what);
        held.push((ticket, number));
    }

    fn complete(&mut self) {
        let Process { group, held, parked, .. } = &mut self.device;
        if held.is_empty() {
            return;
        }
        let (ticket, number) = held.swap_remove(self.random.index(held.len()));
        if self.random.below(8) == 0 {
            group.park(&ticket);
            parked.push((ticket, number));
        } else {
            group.complete(ticket, Status::SUCCESS, !number);
        }
    }

    fn unpark(&mut self) {
        let Process { group, held, parked, .. } = &mut self.device;
        if let Some((ticket, number)) = parked.pop() {
            if group.unpark(&ticket).unwrap_or_else(|e| panic!("{}: {e}", self.what)) {
                held.push((ticket, number));
            } else {
                parked.push((ticket, number));
            }
        }
    }

    /// Lets another process take over. The driver sees what was completed before the new process does anything; it looks once
    /// before and once after the takeover.
    fn succeed(&mut self, mut stores: u64) {
        self.deaths += 1;
        if self.random.below(2) == 0 {
            self.receive();
        }
        self.device = loop {
            match Self::start(&self.rig, &self.memory, &self.doorbells, &self.state, stores) {
                Some(device) => break device,
                None => (self.deaths, stores) = (self.deaths + 1, stores + 1),
            }
        };
        self.receive();
    }

    fn step(&mut self) {
        match self.random.below(9) {
            0..=2 => self.send(),
            3 | 4 => self.take(),
            5 => self.complete(),
            6 => self.unpark(),
            7 => self.receive(),
            _ => {
                _ = self.device.group.publish();
                if !self.device.group.arm() {
                    self.device.group.disarm();
                }
            }
        }
    }

    /// The last process survives: all commands are done in the end, and nothing is left.
    fn finish(&mut self) {
        self.device.memory.live_on();
        for _ in 0..20 * usize::from(self.rig.slots * self.rig.submissions) {
            (0..self.driver.submissions.len()).for_each(|queue| _ = self.driver.ring(queue));
            self.take();
            self.complete();
            self.unpark();
            self.receive();
            self.driver.release();
        }
        assert!(self.waiting.is_empty(), "{}: lost {:?}", self.what, self.waiting);
        assert_eq!(self.done.len(), self.sent as usize, "{}", self.what);
        assert_eq!(self.device.group.outstanding(), 0, "{}", self.what);
        self.succeed(u64::MAX);
        let (_, submissions) = self.device.group.states();
        let left: u32 = submissions.iter().map(|queue| queue.outstanding + queue.resubmit).sum();
        assert_eq!(left, 0, "{}", self.what);
        assert!(self.device.group.publish(), "{}: an interrupt may be owed", self.what);
    }
}

fn rigs() -> impl Iterator<Item = Rig> {
    (0..64).step_by(4).map(|choice| Rig { mode: Mode::Shadow, ..Rig::choose(choice) })
}

/// Kills the device once, at every store of a run.
#[test]
fn a_device_may_die_at_each_store() {
    for (seed, rig) in (1..).zip(rigs()) {
        for stores in 0.. {
            let mut world = World::new(rig, seed, stores);
            for _ in 0..300 {
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
                assert!(stores > 100, "{}: hardly anything was done", world.what);
                break;
            }
        }
    }
}

/// Kills many devices, also while they take over.
#[test]
fn successors_may_die_as_well() {
    let mut deaths = 0;
    for (number, rig) in (0..12).flat_map(|_| rigs()).enumerate() {
        let seed = number as u64 + 1;
        let mut world = World::new(rig, seed, 20 + seed % 50);
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
    assert!(deaths > 3_000, "{deaths}");
}

/// Dies in each store of the creation of queues, in a state and with doorbells that were used before.
#[test]
fn a_queue_exists_only_when_it_is_whole() {
    let rig = Rig::pair(Mode::Shadow, 5);
    for stores in 0.. {
        let mut world = World::new(rig, 1, u64::MAX);
        for _ in 0..100 {
            world.step();
        }
        let state = ginnel_nvme::State::open(world.state.clone()).unwrap();
        state.delete_all();
        assert!(rig.group(&world.memory, &world.doorbells, &world.state).is_err());
        let memory = Mortal::new(&world.memory, stores);
        let (doorbells, new) = (memory.other(&world.doorbells), memory.other(&world.state));
        rig.create(&memory, &doorbells, &new);
        if state.submission(1).is_none() {
            continue;
        }
        // The driver has cleared its completion queue.
        world.memory.write(0, &[0; 4096]);
        let mut group = rig.group(&world.memory, &world.doorbells, &world.state).unwrap();
        assert!(group.is_empty() && group.take().unwrap().is_none(), "{stores} stores");
        let (completion, submissions) = group.states();
        assert_eq!((completion.posted, completion.tail, completion.room), (0, 0, 4));
        assert_eq!((submissions[0].head, submissions[0].resubmit), (0, 0));
        if !memory.is_dead() {
            break;
        }
    }
}
