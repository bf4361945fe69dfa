//! Models of both sides of a submission queue and a completion queue that sleep when there is nothing to do: loom runs the real code in
//! every order of two threads, and with every old value that the stated orderings allow a load to return.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release -p ginnel-nvme --test loom        (or: scripts/loom)
//!
//! A lost notification is a deadlock, which loom reports. The second half takes one ordering away from one side; then the same models must
//! fail.
#![cfg(loom)]

use ginnel_guest_memory::Area;
use ginnel_layout::nvme::{Command, Status};
use ginnel_layout::nvme_state as layout;
use ginnel_nvme::{
    CompletionRecord, Constants, Doorbell, DriverCompletions, DriverDoorbell, DriverSubmissions, QueueGroup,
    QueueSetup, State, SubmissionRecord,
};
use ginnel_shmem::{LoomMemory, Order, SharedMemory};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::sync::Arc;
use zerocopy::FromZeros;

/// Entries of the submission queue. The completion queue has two, so that it has room for one completion.
const SIZE: u16 = 3;
const COMPLETIONS: u16 = 2;
const SUBMISSIONS_AT: usize = 0x100;
/// The tail, its event index, the head, and its event index.
const WORDS: [usize; 4] = [0x400, 0x440, 0x480, 0x4c0];
const DATA: usize = 0x500;
const LEN: usize = 0x600;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Each write to a doorbell notifies.
    Trapped,
    /// Shadow doorbells.
    Shadow,
}

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(model);
}

/// Returns the words of the queues, and one word of data for each command.
fn memory(commands: u64) -> LoomMemory {
    let entries =
        (0..usize::from(SIZE)).flat_map(|i| (0..8).map(move |word| SUBMISSIONS_AT + 64 * i + 8 * word));
    let completions = (0..2 * usize::from(COMPLETIONS)).map(|word| 8 * word);
    let data = (0..commands as usize).map(|i| DATA + 8 * i);
    LoomMemory::new(LEN, completions.chain(entries).chain(WORDS).chain(data))
}

/// Returns a state in which the queues exist. It is the device's alone.
fn state() -> State<LoomMemory> {
    let (queues, slots) = (1, 4);
    let mut words: Vec<usize> = (0..7).map(|word| 8 * word).collect();
    for record in [layout::completion(1), layout::submission(1, queues)] {
        words.extend((0..4).map(|word| record + 8 * word));
    }
    words.extend((0..8 * usize::from(slots)).map(|word| layout::slots(1, queues, slots) + 8 * word));
    let memory = LoomMemory::new(State::<LoomMemory>::len(queues, slots), words);
    State::create(memory, &Constants { queues, slots, mapped: false, cap: 0, vs: 0 }).unwrap()
}

fn area(memory: &LoomMemory, at: usize, len: usize) -> Area<LoomMemory> {
    Area { memory: memory.clone(), at, len, guest: at as u64 }
}

fn group(memory: &LoomMemory, mode: Mode) -> QueueGroup<LoomMemory> {
    let state = state();
    let doorbell = |value: usize, event: usize| {
        let doorbell = Doorbell::new(memory.clone(), value).unwrap();
        match mode {
            Mode::Trapped => doorbell,
            Mode::Shadow => {
                doorbell.with_shadow_of_predecessor(&area(memory, value, 4), &area(memory, event, 4)).unwrap()
            }
        }
    };
    let (tail, head) = (doorbell(WORDS[0], WORDS[1]), doorbell(WORDS[2], WORDS[3]));
    let record = CompletionRecord { created: 1, base: 0, size: COMPLETIONS, vector: 0, interrupts: true };
    state.create_completion(1, &record, &head).unwrap();
    let record = SubmissionRecord { created: 1, base: 0, size: SIZE, completion: 1 };
    state.create_submission(1, &record, &tail).unwrap();
    let completion =
        QueueSetup { id: 1, ring: area(memory, 0, 16 * usize::from(COMPLETIONS)), doorbell: head };
    let ring = area(memory, SUBMISSIONS_AT, 64 * usize::from(SIZE));
    QueueGroup::new(&state, completion, vec![QueueSetup { id: 1, ring, doorbell: tail }]).unwrap()
}

/// A parking place, where one side sleeps. The other side has a clone, with which it wakes the first. It uses the standard library's
/// `Arc`, since loom's cannot be dropped while a deadlock is being reported.
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

/// The driver's side, with a trapped register, which is a word of its memory.
struct Driver {
    memory: LoomMemory,
    submissions: DriverSubmissions<LoomMemory>,
    completions: DriverCompletions<LoomMemory>,
    kicks: Parker,
}

impl Driver {
    fn new(memory: LoomMemory, mode: Mode, kicks: Parker) -> Self {
        let doorbell = |value: usize, event: usize| match mode {
            Mode::Trapped => DriverDoorbell::Trapped,
            Mode::Shadow => {
                DriverDoorbell::Shadow { value: area(&memory, value, 4), event: area(&memory, event, 4) }
            }
        };
        let ring = area(&memory, SUBMISSIONS_AT, 64 * usize::from(SIZE));
        let submissions = DriverSubmissions::new(1, SIZE, 4, ring, doorbell(WORDS[0], WORDS[1])).unwrap();
        let ring = area(&memory, 0, 16 * usize::from(COMPLETIONS));
        let completions = DriverCompletions::new(1, COMPLETIONS, ring, doorbell(WORDS[2], WORDS[3])).unwrap();
        Self { memory, submissions, completions, kicks }
    }

    fn ring(&mut self) {
        let value = self.submissions.ring();
        self.write(WORDS[0], value);
    }

    fn release(&mut self) {
        let value = self.completions.ring();
        self.write(WORDS[2], value);
    }

    fn write(&self, register: usize, value: Option<u32>) {
        if let Some(value) = value {
            self.memory.store_release_u32(register, value);
            self.kicks.ring_if(true);
        }
    }
}

/// `commands` commands go through the queue, `depth` at a time. Each side sleeps when there is nothing to do. Each command is for one word,
/// which the device reads and writes.
fn deliver(mode: Mode, commands: u64, depth: u64, for_driver: LoomMemory, for_device: LoomMemory) {
    let (kicks, calls) = (Parker::new(), Parker::new());
    let mut driver = Driver::new(for_driver.clone(), mode, kicks.clone());
    let mut group = group(&for_device, mode);
    // It is awake, so it does not ask for notifications.
    group.disarm();
    let from_device = calls.clone();
    let server = thread::spawn(move || {
        let mut served = 0;
        while served < commands {
            while let Some((ticket, command)) = group.take().unwrap() {
                let at = command.prp1 as usize;
                let mut word = [0; 8];
                // Both directions use one word, so that there are fewer.
                for_device.read(at, &mut word);
                let answer = u64::from_le_bytes(word) + 1000;
                for_device.write(at, &answer.to_le_bytes());
                group.complete(ticket, Status::SUCCESS, 0);
                served += 1;
            }
            calls.ring_if(group.publish());
            if served < commands && !group.arm() {
                kicks.sleep();
            }
            group.disarm();
        }
    });
    let (mut sent, mut done) = (0, 0);
    while done < commands {
        while sent < commands && sent - done < depth {
            let at = DATA + 8 * sent as usize;
            for_driver.write(at, &sent.to_le_bytes());
            let command = Command { prp1: at as u64, ..Command::new_zeroed() };
            driver.submissions.submit(command).unwrap();
            sent += 1;
        }
        driver.ring();
        let before = done;
        while let Some(completion) = driver.completions.reap() {
            driver.submissions.completed(&completion).unwrap();
            let mut word = [0; 8];
            for_driver.read(DATA + 8 * done as usize, &mut word);
            assert_eq!(u64::from_le_bytes(word), done + 1000);
            done += 1;
        }
        driver.release();
        if done == before {
            from_device.sleep();
        }
    }
    server.join().unwrap();
}

const MODES: [Mode; 2] = [Mode::Trapped, Mode::Shadow];

#[test]
fn no_notification_is_lost() {
    for mode in MODES {
        explore(3, move || {
            let memory = memory(2);
            deliver(mode, 2, 1, memory.clone(), memory);
        });
    }
}

#[test]
fn commands_go_around_the_queue_with_both_sides_asleep() {
    for mode in MODES {
        explore(2, move || {
            let memory = memory(4);
            deliver(mode, 4, 1, memory.clone(), memory);
        });
    }
}

/// There is room for one completion, so the device waits for the driver to take it back.
#[test]
fn a_device_that_waits_for_room_is_woken() {
    for mode in MODES {
        explore(2, move || {
            let memory = memory(3);
            deliver(mode, 3, 2, memory.clone(), memory);
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

/// Takes the ordering away from the driver, then from the device. The cases are modes with depths: with two commands at a time, one waits
/// for room.
fn both_need(cases: &[(Mode, u64)], order: Order, how: &'static [&'static str]) {
    for &(mode, depth) in cases {
        let commands = depth + 1;
        must_fail(&format!("{mode:?}, the driver, {depth}"), how, move || {
            let memory = memory(commands);
            deliver(mode, commands, depth, memory.without(order), memory);
        });
        must_fail(&format!("{mode:?}, the device, {depth}"), how, move || {
            let memory = memory(commands);
            deliver(mode, commands, depth, memory.clone(), memory.without(order));
        });
    }
}

#[test]
fn without_a_fence_a_notification_is_lost() {
    both_need(&[(Mode::Shadow, 1), (Mode::Shadow, 2)], Order::Fence, &["deadlock"]);
}

/// The shadows are left out with two commands, where loom needs minutes to find the old value.
const ORDERED: [(Mode, u64); 3] = [(Mode::Trapped, 1), (Mode::Trapped, 2), (Mode::Shadow, 1)];

#[test]
fn without_release_what_lies_behind_is_old() {
    both_need(&ORDERED, Order::Release, &["Causality violation", "assertion", "unwrap"]);
}

#[test]
fn without_acquire_what_lies_behind_is_old() {
    both_need(&ORDERED, Order::Acquire, &["Causality violation", "assertion", "unwrap"]);
}
