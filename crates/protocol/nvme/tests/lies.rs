//! What a driver, a device or another process of the controller can write although it must not: one case each, with the exact error.
#![cfg(not(loom))]

use ginnel_guest_memory::Area;
use ginnel_layout::nvme::{COMPLETION_WORD, Command, Completion, Opcode, Status};
use ginnel_layout::nvme_state as layout;
use ginnel_nvme::{
    Broken, CompletionRecord, Constants, Corrupt, Doorbell, QueueGroup, QueueSetup, SetupError, State,
    SubmissionRecord,
};
use ginnel_shmem::{Mapping, SharedMemory};
use kit::models::nvme::rig::{COMPLETION, Driver, MOST, Mode, Rig};
use zerocopy::FromZeros;

struct World {
    rig: Rig,
    memory: Mapping,
    doorbells: Mapping,
    state: Mapping,
    driver: Driver<Mapping>,
    group: QueueGroup<Mapping>,
}

impl World {
    fn new(rig: Rig) -> Self {
        let (memory, doorbells, state) = (rig.memory(), rig.doorbells(), rig.state_memory());
        rig.create(&memory, &doorbells, &state);
        let driver = rig.driver(&memory, &doorbells, 64);
        let group = rig.group(&memory, &doorbells, &state).unwrap();
        Self { rig, memory, doorbells, state, driver, group }
    }

    /// Returns the group of the next process.
    fn successor(&self) -> Result<QueueGroup<Mapping>, SetupError> {
        self.rig.group(&self.memory, &self.doorbells, &self.state)
    }

    fn submit(&mut self, cdw10: u32) {
        let command = Command { opcode: Opcode::READ, cdw10, ..Command::new_zeroed() };
        self.driver.submit(0, command).expect("room");
        self.driver.ring(0);
    }

    /// Stores a value in a doorbell, and in its shadow.
    fn store(&self, submission: Option<u16>, value: u32) {
        let at = self.rig.doorbell_at(submission);
        self.doorbells.store_relaxed_u32(at, value);
        self.memory.store_relaxed_u32(self.rig.shadow_at() + at - 4096, value);
    }

    fn slot(&self, slot: u16, word: usize) -> usize {
        layout::slots(1, MOST, self.rig.slots) + layout::SLOT * usize::from(slot) + word
    }
}

fn worlds() -> impl Iterator<Item = World> {
    [Mode::Mapped, Mode::Trapped, Mode::Shadow].into_iter().map(|mode| World::new(Rig::pair(mode, 5)))
}

#[test]
fn a_tail_is_an_entry() {
    for value in [5, 6, 0xffff, 0x1_0000, u32::MAX] {
        for mut world in worlds() {
            world.store(Some(0), value);
            assert!(!world.group.is_empty() && world.group.visible() == 1, "so that somebody looks");
            assert_eq!(world.group.take().err(), Some(Broken::Tail { queue: 1, tail: value, size: 5 }));
        }
    }
}

#[test]
fn a_head_is_an_entry_with_a_completion() {
    for (posted, head) in [(0, 1), (2, 3), (2, 4), (4, 5), (4, 0x1_0000), (4, u32::MAX)] {
        for mut world in worlds() {
            for number in 0..4 {
                world.submit(number);
                if number < posted {
                    let (ticket, _) = world.group.take().unwrap().unwrap();
                    world.group.complete(ticket, Status::SUCCESS, 0);
                }
            }
            world.store(None, head);
            // It looks when there is no room left.
            let broken = loop {
                match world.group.take() {
                    Ok(Some(_)) => {}
                    // All are taken. It looks only if there are more.
                    Ok(None) => world.store(Some(0), 3),
                    Err(broken) => break broken,
                }
            };
            let posted = posted as u16;
            assert_eq!(broken, Broken::Head { queue: COMPLETION, head, size: 5, posted, from: 0 });
        }
    }
    for world in worlds() {
        world.store(None, 5);
        let broken = Broken::Head { queue: COMPLETION, head: 5, size: 5, posted: 0, from: 0 };
        assert_eq!(world.successor().err(), Some(SetupError::Broken(broken)));
    }
}

#[test]
fn a_driver_that_takes_nothing_back_gets_no_more() {
    for mut world in worlds() {
        let mut tickets = Vec::new();
        for _ in 0..3 {
            world.store(Some(0), 0);
            while let Some((ticket, _)) = world.group.take().unwrap() {
                tickets.push(ticket);
            }
            // Once more around the queue.
            world.store(Some(0), 4);
            while let Some((ticket, _)) = world.group.take().unwrap() {
                tickets.push(ticket);
            }
        }
        assert_eq!(tickets.len(), 4, "as many as have room in the completion queue");
        world.store(Some(0), 2);
        for ticket in tickets.drain(..) {
            world.group.complete(ticket, Status::SUCCESS, 0);
        }
        assert!(
            world.group.take().unwrap().is_none() && world.group.is_empty() && world.group.visible() == 0
        );
        // A device that sleeps now is woken when the driver takes something back.
        assert!(!world.group.arm());
        for _ in 0..2 {
            assert!(world.driver.completions.reap().is_some());
        }
        let kick = world.driver.release();
        assert_eq!(kick, world.rig.mode != Mode::Mapped);
        assert!(!world.group.is_empty() && world.group.take().unwrap().is_some());
    }
}

#[test]
fn parked_commands_take_slots_and_not_room() {
    for mut world in worlds() {
        let mut parked = Vec::new();
        for number in 0..100 {
            if world.driver.submissions[0].room() == 0 {
                // It says that the device has taken all of them.
                world.store(Some(0), number % 5);
            } else {
                world.submit(number);
            }
            while let Some((ticket, _)) = world.group.take().unwrap() {
                world.group.park(&ticket);
                parked.push(ticket);
            }
        }
        assert_eq!(parked.len(), usize::from(world.rig.slots));
        assert!(world.group.is_empty(), "no slot is free");
        let ticket = parked.pop().unwrap();
        assert!(world.group.unpark(&ticket).unwrap());
        world.group.complete(ticket, Status::ABORT_REQUESTED, 0);
        assert!(!world.group.is_empty());
    }
}

#[test]
fn a_completion_belongs_to_a_command() {
    let post = |world: &World, sqhd, sqid, cid| {
        let word = Completion::word(sqhd, sqid, cid, Status::SUCCESS, true);
        world.memory.store_relaxed_u64(COMPLETION_WORD, word);
    };
    for (sqhd, sqid, cid, wanted) in [
        (1, 0, 0, Corrupt::Queue(0)),
        (1, 2, 0, Corrupt::Queue(2)),
        (1, 0xffff, 0, Corrupt::Queue(0xffff)),
        (2, 1, 0, Corrupt::Head { queue: 1, head: 2, from: 0, tail: 1 }),
        (5, 1, 0, Corrupt::Head { queue: 1, head: 5, from: 0, tail: 1 }),
        (1, 1, 1, Corrupt::Command { queue: 1, cid: 1 }),
        (1, 1, 64, Corrupt::Command { queue: 1, cid: 64 }),
        (1, 1, 0xffff, Corrupt::Command { queue: 1, cid: 0xffff }),
    ] {
        let mut world = World::new(Rig::pair(Mode::Mapped, 5));
        world.submit(0);
        post(&world, sqhd, sqid, cid);
        assert_eq!(world.driver.reap(), Err(wanted));
    }
    let mut world = World::new(Rig::pair(Mode::Mapped, 5));
    world.submit(0);
    post(&world, 1, 1, 0);
    assert!(world.driver.reap().unwrap().is_some());
}

#[test]
fn a_state_belongs_to_this_version() {
    let state = |queues, slots| {
        let memory = Mapping::anonymous(State::<Mapping>::len(4, 16)).unwrap();
        State::create(memory, &Constants { queues, slots, mapped: false, cap: 1, vs: 2 })
    };
    for (queues, slots) in [(0, 16), (65, 16), (4, 0), (4, 1), (4, 3), (4, 32), (16, 16)] {
        assert!(matches!(state(queues, slots), Err(SetupError::State(_))), "{queues} queues, {slots} slots");
    }
    let memory = Mapping::anonymous(State::<Mapping>::len(4, 16)).unwrap();
    assert!(State::open(memory.clone()).is_err(), "only zeros");
    let constants = Constants { queues: 4, slots: 16, mapped: true, cap: 1, vs: 2 };
    State::create(memory.clone(), &constants).unwrap();
    assert_eq!(State::open(memory.clone()).unwrap().constants(), constants);
    for (word, values) in [
        (layout::MAGIC_AT, [0, layout::MAGIC + 1]),
        (layout::VERSION_AT, [0, 2]),
        (layout::QUEUES, [16, u64::MAX]),
        (layout::SLOTS, [32, 1 << 32]),
    ] {
        let right = memory.load_relaxed_u64(word);
        for value in values {
            memory.store_relaxed_u64(word, value);
            assert!(matches!(State::open(memory.clone()), Err(SetupError::State(_))), "{value} at {word}");
        }
        memory.store_relaxed_u64(word, right);
    }
    assert!(State::open(memory.part(0, memory.len() - 4096).unwrap()).is_err());
    assert!(State::open(memory.part(0, 64).unwrap()).is_err());
}

#[test]
fn a_queue_has_a_possible_number_size_and_place() {
    let world = World::new(Rig::pair(Mode::Trapped, 5));
    let state = State::open(world.state.clone()).unwrap();
    let doorbell = Doorbell::new(world.doorbells.clone(), 4096).unwrap();
    let completion = |size| CompletionRecord { created: 1, base: 0, size, vector: 3, interrupts: true };
    let submission = |size| SubmissionRecord { created: 1, base: 0, size, completion: 2 };
    for size in [0, 1, 9, 0xffff] {
        let wanted = Err(SetupError::Size { queue: 2, size: size.into(), most: 8 });
        assert_eq!(state.create_completion(2, &completion(size), &doorbell), wanted);
        assert_eq!(state.create_submission(2, &submission(size), &doorbell), wanted);
    }
    assert_eq!(
        state.create_submission(0, &submission(4096), &doorbell),
        Ok(()),
        "an admin queue may be longer"
    );
    let wanted = Err(SetupError::Size { queue: 0, size: 4097, most: 4096 });
    assert_eq!(state.create_completion(0, &completion(4097), &doorbell), wanted);
    assert!(matches!(
        state.create_completion(MOST + 1, &completion(2), &doorbell),
        Err(SetupError::Queue { queue: 5, .. })
    ));
    assert!(state.create_submission(MOST + 1, &submission(2), &doorbell).is_err());
    assert!(
        state.completion(MOST + 1).is_none()
            && state.submission(0xffff).is_none()
            && state.submission(2).is_none()
    );
    state.delete_completion(0xffff);
    state.create_completion(2, &completion(8), &doorbell).unwrap();
    state.create_submission(2, &submission(8), &doorbell).unwrap();
    assert_eq!((state.completion(2), state.submission(2)), (Some(completion(8)), Some(submission(8))));

    let setup = |id, at, len| QueueSetup {
        id,
        ring: Area { memory: world.memory.clone(), at, len, guest: 7 },
        doorbell: doorbell.clone(),
    };
    let group = |completion, submission| QueueGroup::new(&state, completion, vec![submission]).err();
    let area = |area, address, len, needed| Some(SetupError::Area { area, address, len, align: 8, needed });
    assert_eq!(group(setup(2, 0, 128), setup(2, 4096, 512)), None);
    assert_eq!(group(setup(2, 4, 128), setup(2, 4096, 512)), area("completion queue", 7, 128, 128));
    assert_eq!(group(setup(2, 0, 127), setup(2, 4096, 512)), area("completion queue", 7, 127, 128));
    assert_eq!(group(setup(2, 0, 128), setup(2, 4100, 512)), area("submission queue", 7, 512, 512));
    assert_eq!(group(setup(2, 0, 128), setup(2, 4096, 511)), area("submission queue", 7, 511, 512));
    let end = world.memory.len();
    assert_eq!(group(setup(2, 0, 128), setup(2, end - 504, 512)), area("submission queue", 7, 512, 512));
    assert_eq!(group(setup(2, usize::MAX - 7, 128), setup(2, 0, 512)), area("completion queue", 7, 128, 128));
    assert!(matches!(group(setup(3, 0, 128), setup(2, 0, 512)), Some(SetupError::Queue { queue: 3, .. })));
    assert!(matches!(group(setup(2, 0, 128), setup(3, 0, 512)), Some(SetupError::Queue { queue: 3, .. })));
    assert!(matches!(group(setup(2, 0, 128), setup(1, 0, 512)), Some(SetupError::Queue { queue: 1, .. })));
    for at in [2, world.doorbells.len(), world.doorbells.len() - 2, usize::MAX - 3] {
        assert!(
            matches!(Doorbell::new(world.doorbells.clone(), at), Err(SetupError::Area { align: 4, .. })),
            "{at}"
        );
    }
    let word = |at, len| Area { memory: world.memory.clone(), at, len, guest: 0 };
    assert!(doorbell.with_shadow(&word(2, 4), &word(4, 4)).is_err());
    assert!(doorbell.with_shadow(&word(0, 4), &word(4, 3)).is_err());
    assert!(doorbell.with_shadow(&word(0, 4), &word(end, 4)).is_err());
}

#[test]
fn a_shadow_begins_with_the_value_of_the_doorbell() {
    let world = World::new(Rig::pair(Mode::Trapped, 5));
    let state = State::open(world.state.clone()).unwrap();
    world.doorbells.store_relaxed_u32(4096, 3);
    let doorbell = Doorbell::new(world.doorbells.clone(), 4096).unwrap();
    let word = |at| Area { memory: world.memory.clone(), at, len: 4, guest: 0 };
    let shadow = doorbell.with_shadow(&word(512), &word(516)).unwrap();
    assert_eq!(world.memory.load_relaxed_u32(512), 3);
    // A queue that is created begins with zeros, whatever lies there.
    world.memory.store_relaxed_u32(516, 99);
    let record = CompletionRecord { created: 1, base: 0, size: 4, vector: 0, interrupts: false };
    state.create_completion(3, &record, &shadow).unwrap();
    assert_eq!((world.memory.load_relaxed_u32(512), world.memory.load_relaxed_u32(516)), (0, 0));
}

#[test]
fn completions_are_at_possible_positions() {
    for position in [0, 3, 1 << 40, u64::MAX - 1] {
        let mut world = World::new(Rig::pair(Mode::Mapped, 5));
        world.submit(0);
        let (ticket, _) = world.group.take().unwrap().unwrap();
        world.group.complete(ticket, Status::SUCCESS, 0);
        world.submit(1);
        let (ticket, _) = world.group.take().unwrap().unwrap();
        world.group.complete(ticket, Status::SUCCESS, 0);
        world.submit(2);
        let (_ticket, _) = world.group.take().unwrap().unwrap();
        // Two completions were posted, so that the position can be 1 or 2.
        let completing = world.slot(0, layout::slot::COMPLETING);
        world.state.store_relaxed_u64(completing, position + 1);
        assert!(matches!(world.successor(), Err(SetupError::State(_))), "{position}");
        world.state.store_relaxed_u64(completing, 2);
        let (_, submissions) = world.successor().unwrap().states();
        assert_eq!(submissions[0].resubmit, 0, "it was posted");
    }
}

/// Whatever the guest has written to the place of a completion, the command is in flight or done.
#[test]
fn a_guest_cannot_confuse_a_successor() {
    for (sqid, cid, phase, resubmit) in [(1, 0, true, 0), (1, 0, false, 1), (1, 1, true, 1), (2, 0, true, 1)]
    {
        let mut world = World::new(Rig::pair(Mode::Mapped, 5));
        world.submit(0);
        let (_ticket, _) = world.group.take().unwrap().unwrap();
        world.state.store_relaxed_u64(world.slot(0, layout::slot::COMPLETING), 1);
        let word = Completion::word(1, sqid, cid, Status::SUCCESS, phase);
        world.memory.store_relaxed_u64(COMPLETION_WORD, word);
        for _ in 0..2 {
            let (completion, submissions) = world.successor().unwrap().states();
            assert_eq!(submissions[0].resubmit, resubmit);
            assert_eq!(completion.posted, u64::from(1 - resubmit));
        }
    }
}
