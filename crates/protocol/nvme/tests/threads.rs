//! A driver and a device in two threads on a completion queue and its submission queues: mapped doorbells with both sides polling;
//! trapped and shadow doorbells with sides that sleep on real eventfds; and devices that die and leave their commands to the next
//! device. Each command carries its number, from which both sides know all bytes of its data and of the answer. If a notification is
//! lost, a sleep ends with its deadline, and the test fails.
//!
//! `scripts/sanitize` runs these tests under ThreadSanitizer, which derives an order only from acquire and release. Like
//! `crates/protocol/ring/tests/threads.rs`, and for the reasons given there, this file has its own `main`, which runs the tests whose
//! names contain one of its arguments, or all.

#[cfg(loom)]
fn main() {}

#[cfg(not(loom))]
fn main() {
    two_threads::main();
}

#[cfg(not(loom))]
mod two_threads {
    use ginnel_guest_memory::{Buffer, GuestMemory};
    use ginnel_layout::nvme::{Command, Opcode, Status};
    use ginnel_nvme::{QueueGroup, Ticket, prp};
    use ginnel_shmem::{Mapping, SharedMemory};
    use kit::models::nvme::rig::{self, Mode, Rig};
    use kit::random::Random;
    use kit::wait::{WATCHDOG, Watchdog};
    use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
    use rustix::io::Errno;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Instant;
    use zerocopy::FromZeros;

    const TESTS: [(&str, fn()); 2] = [("commands", commands), ("successors", successors)];

    pub fn main() {
        let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
        for (name, test) in TESTS {
            if wanted.is_empty() || wanted.iter().any(|w| name.contains(w.as_str())) {
                let start = Instant::now();
                test();
                println!("test {name} ... ok ({:.1} s)", start.elapsed().as_secs_f64());
            }
        }
        // This runs only if it is named in full.
        if wanted.iter().any(|w| w == "planted_race") {
            planted_race();
            println!("planted_race was not noticed");
        }
    }

    const COMMANDS: u64 = 4000;
    /// Bytes of the guest's data for each outstanding command: one half for what is written, one for the answer.
    const SLOT: usize = 1024;
    const HALF: usize = SLOT / 2;
    /// Number of commands that a device holds at a time, and completes in another order.
    const HELD: usize = 3;

    /// How both sides wait.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Wait {
        /// Both sides poll and never sleep.
        Poll,
        /// Both sides sleep at once.
        Sleep,
        /// Both sides sleep after a number of looks.
        Adaptive,
    }

    /// A way to sleep for one side: an edge-triggered epoll on an eventfd that is never read, as in a volume.
    struct EventSleeper {
        epoll: OwnedFd,
        wait: Wait,
        looks: u32,
        watchdog: Watchdog<u64>,
    }

    impl EventSleeper {
        fn new(bell: &OwnedFd, wait: Wait) -> Self {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
            epoll::add(&epoll, bell, epoll::EventData::new_u64(0), edge).unwrap();
            Self { epoll, wait, looks: 0, watchdog: Watchdog::new("commands, and the other side is no more") }
        }

        /// Called when there was nothing to do, with the number of requests so far. Returns whether it is time to arm, and then to sleep.
        fn should_arm(&mut self, requests: u64) -> bool {
            self.watchdog.look(requests);
            self.looks += 1;
            thread::yield_now();
            self.wait == Wait::Sleep || self.wait == Wait::Adaptive && self.looks.is_multiple_of(20)
        }

        fn sleep(&self) {
            let none = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
            let timeout = Timespec::try_from(WATCHDOG).unwrap();
            match epoll::wait(&self.epoll, &mut [none], Some(&timeout)) {
                Ok(n) => assert!(n > 0, "a kick or a call was lost"),
                Err(Errno::INTR) => {}
                Err(errno) => panic!("{errno}"),
            }
        }
    }

    fn bell() -> Arc<OwnedFd> {
        Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
    }

    fn ring_if(bell: &OwnedFd, needed: bool) {
        if needed {
            rustix::io::write(bell, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Returns the data of command `number`, or of its answer. They are rarely few enough to be copied word by word.
    fn bytes(number: u64, answer: bool) -> Vec<u8> {
        let seed = Random::of(2 * number + u64::from(answer));
        let len = 4 + 4 * (seed as usize % (HALF / 4));
        (0..len).map(|i| (seed >> (i % 57)) as u8 ^ i as u8).collect()
    }

    struct Driver {
        rig: Rig,
        memory: Mapping,
        queues: rig::Driver<Mapping>,
        /// Free slots of the data.
        free: Vec<usize>,
        /// The command's number and its slot, by queue and identifier.
        waiting: Vec<Vec<Option<(u64, usize)>>>,
    }

    impl Driver {
        fn new(rig: Rig, memory: &Mapping, doorbells: &Mapping) -> Self {
            let slots = rig::DATA / SLOT;
            Self {
                rig,
                memory: memory.clone(),
                queues: rig.driver(memory, doorbells, 2 * rig.size),
                free: (0..slots).rev().collect(),
                waiting: vec![vec![None; slots]; rig.submissions.into()],
            }
        }

        /// Submits command `number`. Returns false if there is no room for it now.
        fn submit(&mut self, number: u64) -> bool {
            let queue = Random::of(number) as usize % self.waiting.len();
            let Some(&slot) = self.free.last() else { return false };
            if self.queues.submissions[queue].room() == 0 {
                return false;
            }
            let (at, bytes) = (SLOT * slot, bytes(number, false));
            self.memory.write(self.rig.data_at() + at, &bytes);
            let command = Command {
                opcode: Opcode::WRITE,
                prp1: self.rig.data(at),
                prp2: self.rig.data(at + HALF),
                cdw10: number as u32,
                ..Command::new_zeroed()
            };
            let cid = self.queues.submit(queue, command).expect("there is room");
            assert_eq!(self.waiting[queue][usize::from(cid)].replace((number, slot)), None);
            self.free.pop();
            true
        }

        /// Takes and checks one completion, if there is one.
        fn reap(&mut self) -> bool {
            let Some((queue, completion)) = self.queues.reap().unwrap() else { return false };
            let (number, slot) = self.waiting[queue][usize::from(completion.cid)].take().unwrap();
            assert!(
                completion.status().is_success() && completion.result == !number as u32,
                "command {number}"
            );
            let wanted = bytes(number, true);
            let mut answer = vec![0; wanted.len()];
            self.memory.read(self.rig.data_at() + SLOT * slot + HALF, &mut answer);
            assert!(answer == wanted, "the answer to {number} is damaged");
            self.free.push(slot);
            true
        }

        fn ring_all(&mut self, kick: &OwnedFd) {
            for queue in 0..self.waiting.len() {
                ring_if(kick, self.queues.ring(queue));
            }
        }

        /// Sends all commands, and takes all completions.
        fn run(&mut self, sleeper: &mut EventSleeper, kick: &OwnedFd) {
            let (mut sent, mut done) = (0, 0);
            while done < COMMANDS {
                while sent < COMMANDS && self.submit(sent) {
                    sent += 1;
                    // Shown alone, or with some of the next.
                    if Random::of(sent).is_multiple_of(3) {
                        self.ring_all(kick);
                    }
                }
                self.ring_all(kick);
                let before = done;
                while self.reap() {
                    done += 1;
                }
                if done == before || Random::of(done).is_multiple_of(2) {
                    ring_if(kick, self.queues.release());
                }
                // The interrupt is an edge: a completion after the last look raises it.
                if done == before && sleeper.should_arm(done) {
                    sleeper.sleep();
                }
            }
        }
    }

    struct Device {
        guest: GuestMemory<Mapping>,
        group: QueueGroup<Mapping>,
        buffers: Vec<Buffer>,
        /// Commands that are taken and not completed.
        held: Vec<(Ticket, u32)>,
    }

    impl Device {
        fn new(rig: Rig, memory: &Mapping, doorbells: &Mapping, state: &Mapping) -> Self {
            let mut group = rig.group(memory, doorbells, state).unwrap();
            group.disarm();
            Self { guest: rig.guest(memory), group, buffers: Vec::new(), held: Vec::new() }
        }

        /// Takes, checks and answers one command, if there is one.
        fn take(&mut self) -> bool {
            let Some((ticket, command)) = self.group.take().unwrap() else { return false };
            let number = u64::from(command.cdw10);
            let wanted = bytes(number, false);
            let mut got = vec![0; wanted.len()];
            prp::buffers(&self.guest, command.prp1, 0, got.len() as u32, 2, &mut self.buffers).unwrap();
            assert_eq!(self.guest.read(&self.buffers, 0, &mut got), got.len());
            assert!(got == wanted, "command {number} is damaged");
            let answer = bytes(number, true);
            prp::buffers(&self.guest, command.prp2, 0, answer.len() as u32, 2, &mut self.buffers).unwrap();
            assert_eq!(self.guest.write(&self.buffers, 0, &answer), answer.len());
            self.held.push((ticket, !command.cdw10));
            true
        }

        /// Serves until the test is over, or until it has served `life` commands and dies with those that it holds. Returns whether the
        /// test is over.
        fn run(&mut self, sleeper: &mut EventSleeper, call: &OwnedFd, over: &AtomicBool, life: u64) -> bool {
            let mut taken = 0;
            // An earlier device may have died before it raised the interrupt.
            ring_if(call, self.group.publish());
            loop {
                let mut worked = false;
                while self.held.len() < HELD && self.take() {
                    worked = true;
                    taken += 1;
                    if taken > life {
                        return false;
                    }
                }
                while !self.held.is_empty() && (self.held.len() == HELD || !worked) {
                    let at = Random::of(taken + self.held.len() as u64) as usize % self.held.len();
                    let (ticket, result) = self.held.swap_remove(at);
                    self.group.complete(ticket, Status::SUCCESS, result);
                    worked = true;
                    if Random::of(taken).is_multiple_of(2) {
                        ring_if(call, self.group.publish());
                    }
                }
                ring_if(call, self.group.publish());
                if worked {
                    continue;
                }
                if over.load(Ordering::Acquire) {
                    return true;
                }
                if sleeper.should_arm(taken) {
                    if !self.group.arm() && !over.load(Ordering::Acquire) {
                        sleeper.sleep();
                    }
                    self.group.disarm();
                }
            }
        }
    }

    /// Sends all commands through the queues. With a `life`, devices die after about that many commands; each has a thread of its own.
    fn both(rig: Rig, wait: Wait, life: Option<u64>) {
        let (memory, doorbells, state) = (rig.memory(), rig.doorbells(), rig.state_memory());
        rig.create(&memory, &doorbells, &state);
        let (kick, call, over) = (bell(), bell(), Arc::new(AtomicBool::new(false)));
        let mut driver = Driver::new(rig, &memory, &doorbells);
        let device = {
            let (kick, call, over) = (kick.clone(), call.clone(), over.clone());
            move |life: u64| {
                let (mut sleeper, call, over) = (EventSleeper::new(&kick, wait), call.clone(), over.clone());
                let mut device = Device::new(rig, &memory, &doorbells, &state);
                thread::spawn(move || device.run(&mut sleeper, &call, &over, life))
            }
        };
        let process = thread::spawn(move || {
            let mut deaths = 0;
            while !device(life.map_or(u64::MAX, |life| Random::of(deaths) % (2 * life))).join().unwrap() {
                deaths += 1;
            }
            deaths
        });
        driver.run(&mut EventSleeper::new(&call, wait), &kick);
        over.store(true, Ordering::Release);
        ring_if(&kick, true);
        let deaths = process.join().unwrap();
        assert!(life.is_none_or(|life| deaths > COMMANDS / life / 4), "{deaths} deaths");
    }

    fn each(mut run: impl FnMut(Rig, Wait)) {
        for (mode, wait) in [
            (Mode::Mapped, Wait::Poll),
            (Mode::Trapped, Wait::Sleep),
            (Mode::Shadow, Wait::Sleep),
            (Mode::Shadow, Wait::Adaptive),
            (Mode::Shadow, Wait::Poll),
        ] {
            for (submissions, size, completions) in [(1, 16, 16), (1, 7, 5), (3, 5, 11)] {
                run(Rig { mode, submissions, size, completions, slots: 16 }, wait);
            }
        }
    }

    fn commands() {
        each(|rig, wait| both(rig, wait, None));
    }

    fn successors() {
        each(|rig, wait| both(rig, wait, Some(50)));
    }

    /// Shows that ThreadSanitizer sees accesses to the guest's memory: the device reads memory that it was not given. Without a
    /// sanitizer nothing happens; `scripts/sanitize` requires that this is reported.
    fn planted_race() {
        let rig = Rig::pair(Mode::Mapped, 8);
        let (memory, doorbells) = (rig.memory(), rig.doorbells());
        let mut driver = Driver::new(rig, &memory, &doorbells);
        let guest = rig.guest(&memory);
        let looks = thread::spawn(move || {
            // The buffer is all the data, so that it is not copied word by word.
            let buffer = Buffer { region: 0, at: rig.data_at(), len: 60_000 };
            let mut bytes = vec![0; 60_000];
            guest.read(&[buffer], 0, &mut bytes);
            std::hint::black_box(bytes);
        });
        assert!(driver.submit(0));
        looks.join().unwrap();
    }
}
