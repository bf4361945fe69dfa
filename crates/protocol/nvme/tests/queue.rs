//! What a device and a driver do for each other: turns among queues, and notifications that are left out.
#![cfg(not(loom))]

use ginnel_layout::nvme::{Command, Opcode, Status};
use kit::models::nvme::rig::{Mode, Rig};
use zerocopy::FromZeros;

fn flush() -> Command {
    Command { opcode: Opcode::FLUSH, ..Command::new_zeroed() }
}

/// A driver that always fills its first queue cannot keep the device from the others.
#[test]
fn queues_take_turns() {
    let rig = Rig { mode: Mode::Mapped, submissions: 3, size: 4, completions: 16, slots: 16 };
    let (memory, doorbells, state) = (rig.memory(), rig.doorbells(), rig.state_memory());
    rig.create(&memory, &doorbells, &state);
    let mut driver = rig.driver(&memory, &doorbells, 16);
    let mut group = rig.group(&memory, &doorbells, &state).unwrap();
    let mut taken = [0; 4];
    for round in 0..200 {
        let queues = if round == 0 { 0..3 } else { 0..1 };
        for queue in queues {
            while driver.submit(queue, flush()).is_some() {}
            driver.ring(queue);
        }
        let (ticket, _) = group.take().unwrap().expect("there are commands");
        taken[usize::from(group.queue_of(&ticket))] += 1;
        group.complete(ticket, Status::SUCCESS, 0);
        while driver.reap().unwrap().is_some() {}
        driver.release();
        if round == 12 {
            assert_eq!((taken[2], taken[3]), (3, 3), "all that were there at the beginning");
        }
    }
}

/// The event indexes of a device that polls stay out of the way, however often the driver goes around its queues.
#[test]
fn a_device_that_polls_is_not_notified() {
    for (size, batch) in [(2, 1), (3, 1), (5, 2), (64, 1), (64, 31), (1000, 7)] {
        let rig = Rig::pair(Mode::Shadow, size);
        let (memory, doorbells, state) = (rig.memory(), rig.doorbells(), rig.state_memory());
        rig.create(&memory, &doorbells, &state);
        let mut driver = rig.driver(&memory, &doorbells, size);
        let mut group = rig.group(&memory, &doorbells, &state).unwrap();
        for armed in [false, true] {
            if armed {
                assert!(!group.arm());
            } else {
                group.disarm();
            }
            let mut notified = 0;
            for _ in 0..5 * size {
                for _ in 0..batch {
                    driver.submit(0, flush()).expect("room");
                }
                notified += usize::from(driver.ring(0));
                for _ in 0..batch {
                    let (ticket, _) = group.take().unwrap().expect("a command");
                    group.complete(ticket, Status::SUCCESS, 0);
                    assert!(driver.reap().unwrap().is_some());
                }
                notified += usize::from(driver.release());
            }
            assert_eq!(notified > 0, armed, "{size} entries, {batch} at a time: {notified} notifications");
        }
    }
}

/// A completion queue without interrupts never raises one.
#[test]
fn interrupts_are_raised_if_they_are_enabled() {
    for interrupts in [false, true] {
        let rig = Rig::pair(Mode::Mapped, 4);
        let (memory, doorbells, state) = (rig.memory(), rig.doorbells(), rig.state_memory());
        rig.create(&memory, &doorbells, &state);
        let word = ginnel_layout::nvme_state::completion(1) + ginnel_layout::nvme_state::completion::CONFIG;
        let config = ginnel_shmem::SharedMemory::load_relaxed_u64(&state, word) & !(1 << 32);
        ginnel_shmem::SharedMemory::store_relaxed_u64(&state, word, config | u64::from(interrupts) << 32);
        let mut driver = rig.driver(&memory, &doorbells, 4);
        let mut group = rig.group(&memory, &doorbells, &state).unwrap();
        assert_eq!(group.publish(), interrupts, "a predecessor may owe one");
        assert!(!group.publish(), "nothing new");
        driver.submit(0, flush()).unwrap();
        driver.ring(0);
        let (ticket, _) = group.take().unwrap().unwrap();
        assert!(!group.publish());
        group.complete(ticket, Status::SUCCESS, 0);
        assert_eq!(group.publish(), interrupts);
        assert!(!group.publish());
    }
}
