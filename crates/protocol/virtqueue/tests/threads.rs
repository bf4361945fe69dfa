//! A driver and a device in two threads on one queue, which sleep on real eventfds whenever there is nothing to do: split and
//! packed, with flags and with event index, indirect or not, and with devices that die and leave their requests to the next
//! device. Each request carries its number and a checksum, and so does its answer. If a kick or call is lost, a sleep ends
//! with its deadline, and the test fails.
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
    use ginnel_guest_memory::GuestMemory;
    use ginnel_shmem::{Mapping, SharedMemory};
    use ginnel_virtqueue::{AddError, Chain, DeviceQueue, DirtyLog, DriverQueue, Kind, Segment, Ticket};
    use kit::models::virtqueue::rig::{GUEST, Rig};
    use kit::random::Random;
    use kit::wait::{WATCHDOG, Watchdog};
    use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
    use rustix::io::Errno;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Instant;

    const TESTS: [(&str, fn()); 2] = [("requests", requests), ("successors", successors)];

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

    const REQUESTS: u64 = 3000;
    /// Bytes of the guest's data for each outstanding request: one half for the request, one for its answer.
    const SLOT: usize = 1024;
    const HALF: usize = SLOT / 2;
    const HEADER: usize = 16;
    /// Number of requests that a device holds at a time, and gives back in another order.
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
            Self { epoll, wait, looks: 0, watchdog: Watchdog::new("requests, and the other side is no more") }
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

    /// Returns the bytes of request `number` after its header, or of its answer. They are rarely few enough to be copied word
    /// by word.
    fn bytes(number: u64, answer: bool) -> Vec<u8> {
        let seed = Random::of(2 * number + u64::from(answer));
        let len = 1 + seed as usize % (HALF - HEADER);
        (0..len).map(|i| (seed >> (i % 57)) as u8 ^ i as u8).collect()
    }

    /// Returns the header: number and length of the rest.
    fn header(number: u64) -> [u8; HEADER] {
        let len = bytes(number, false).len() as u64;
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&number.to_le_bytes());
        header[8..].copy_from_slice(&len.to_le_bytes());
        header
    }

    struct Driver {
        rig: Rig,
        memory: Mapping,
        queue: DriverQueue<Mapping>,
        /// Free slots of the data.
        free: Vec<usize>,
        /// The request's number and its slot, indexed by id.
        waiting: Vec<Option<(u64, usize)>>,
    }

    impl Driver {
        fn new(rig: Rig, memory: &Mapping) -> Self {
            let slots = usize::from(rig.size);
            Self {
                rig,
                memory: memory.clone(),
                queue: rig.driver(memory),
                free: (0..slots).rev().collect(),
                waiting: vec![None; slots],
            }
        }

        /// Makes request `number`. Returns false if there is no room for it now.
        fn add(&mut self, number: u64) -> bool {
            let Some(&slot) = self.free.last() else { return false };
            let (at, bytes) = (SLOT * slot, bytes(number, false));
            self.memory.write(self.rig.data_at() + at, &header(number));
            self.memory.write(self.rig.data_at() + at + HEADER, &bytes);
            let segment = |from: usize, len: usize, writable| Segment {
                address: self.rig.data(at + from),
                len: len as u32,
                writable,
            };
            let first = 1 + HALF / 3;
            let segments = [
                segment(0, HEADER, false),
                segment(HEADER, bytes.len(), false),
                segment(HALF, first, true),
                segment(HALF + first, HALF - first, true),
            ];
            match self.queue.add(&segments, Random::of(number).is_multiple_of(3)) {
                Ok(id) => {
                    assert_eq!(self.waiting[usize::from(id)].replace((number, slot)), None);
                    self.free.pop();
                    true
                }
                Err(AddError::Full) => false,
                Err(error) => panic!("{error}"),
            }
        }

        /// Takes and checks one answer, if there is one.
        fn poll(&mut self) -> bool {
            let Some((id, written)) = self.queue.poll().unwrap() else { return false };
            let (number, slot) = self.waiting[usize::from(id)].take().unwrap();
            let wanted = bytes(number, true);
            assert_eq!(written as usize, wanted.len(), "request {number}");
            let mut answer = vec![0; wanted.len()];
            self.memory.read(self.rig.data_at() + SLOT * slot + HALF, &mut answer);
            assert!(answer == wanted, "the answer to {number} is damaged");
            self.free.push(slot);
            true
        }

        /// Sends all requests, and takes all answers.
        fn run(&mut self, sleeper: &mut EventSleeper, kick: &OwnedFd) {
            let (mut sent, mut done) = (0, 0);
            while done < REQUESTS {
                while sent < REQUESTS && self.add(sent) {
                    sent += 1;
                    // Published alone, or with some of the next.
                    if Random::of(sent).is_multiple_of(3) {
                        ring_if(kick, self.queue.publish());
                    }
                }
                ring_if(kick, self.queue.publish());
                let before = done;
                while self.poll() {
                    done += 1;
                }
                if done == before && sleeper.should_arm(done) {
                    if !self.queue.arm() {
                        sleeper.sleep();
                    }
                    self.queue.disarm();
                }
            }
            assert_eq!(self.queue.outstanding(), 0);
        }
    }

    struct Device {
        guest: GuestMemory<Mapping>,
        queue: DeviceQueue<Mapping>,
        chain: Chain,
        /// Requests that are taken and not given back, with the bytes written to each.
        held: Vec<(Ticket, u32)>,
    }

    impl Device {
        fn new(rig: Rig, memory: &Mapping, inflight: Option<&Mapping>) -> Self {
            let mut queue = DeviceQueue::new(rig.setup(memory, rig.base(), inflight)).unwrap();
            queue.disarm();
            Self { guest: rig.guest(memory), queue, chain: Chain::new(), held: Vec::new() }
        }

        /// Takes, checks and answers one request, if there is one.
        fn take(&mut self) -> bool {
            let Some(ticket) = self.queue.pop(&self.guest, &mut self.chain).unwrap() else { return false };
            let mut head = [0; HEADER];
            assert_eq!(self.guest.read(self.chain.readable(), 0, &mut head), HEADER);
            let number = u64::from_le_bytes(head[..8].try_into().unwrap());
            assert_eq!(head, header(number));
            let wanted = bytes(number, false);
            let mut got = vec![0; HALF];
            let len = self.guest.read(self.chain.readable(), HEADER as u64, &mut got);
            assert!(got[..len] == wanted, "request {number} is damaged");
            let answer = bytes(number, true);
            assert_eq!(self.guest.write(self.chain.writable(), 0, &answer), answer.len());
            self.held.push((ticket, answer.len() as u32));
            true
        }

        fn give_back(&mut self, at: usize) {
            let (ticket, written) = self.held.swap_remove(at);
            self.queue.push(ticket, written);
        }

        /// Serves until the test is over, or until it has served `life` requests and dies with those that it holds. Returns
        /// whether the test is over.
        fn run(&mut self, sleeper: &mut EventSleeper, call: &OwnedFd, over: &AtomicBool, life: u64) -> bool {
            let mut taken = 0;
            // An earlier device may have died between its publish and its call.
            ring_if(call, self.queue.publish());
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
                    self.give_back(at);
                    worked = true;
                    if Random::of(taken).is_multiple_of(2) {
                        ring_if(call, self.queue.publish());
                    }
                }
                ring_if(call, self.queue.publish());
                if worked {
                    continue;
                }
                if over.load(Ordering::Acquire) {
                    return true;
                }
                if sleeper.should_arm(taken) {
                    if !self.queue.arm() && !over.load(Ordering::Acquire) {
                        sleeper.sleep();
                    }
                    self.queue.disarm();
                }
            }
        }
    }

    /// Sends all requests through one queue. With a `life`, devices die after about that many requests; each has a thread of
    /// its own.
    fn both(rig: Rig, wait: Wait, life: Option<u64>) {
        let memory = rig.memory();
        let inflight = life.map(|_| rig.inflight_memory());
        let log = Mapping::anonymous(4096).unwrap();
        let (kick, call, over) = (bell(), bell(), Arc::new(AtomicBool::new(false)));
        let mut driver = Driver::new(rig, &memory);
        driver.queue.disarm();
        let device = {
            let (kick, call, over, log) = (kick.clone(), call.clone(), over.clone(), log.clone());
            move |life: u64| {
                let (mut sleeper, call, over) = (EventSleeper::new(&kick, wait), call.clone(), over.clone());
                let mut device = Device::new(rig, &memory, inflight.as_ref());
                device.queue.set_log(DirtyLog::new(log.clone(), 0, 4096));
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
        assert!(life.is_none_or(|life| deaths > REQUESTS / life / 4), "{deaths} deaths");
        assert!(log.load_acquire_u64(GUEST as usize / 4096 / 8) != 0, "no page is marked");
    }

    fn each(mut run: impl FnMut(Rig, Wait)) {
        for kind in [Kind::Split, Kind::Packed] {
            for event_idx in [false, true] {
                for (size, wait) in [(16, Wait::Poll), (8, Wait::Sleep), (16, Wait::Adaptive)] {
                    run(Rig::new(kind, size, event_idx), wait);
                }
            }
        }
    }

    fn requests() {
        each(|rig, wait| both(rig, wait, None));
    }

    fn successors() {
        each(|rig, wait| both(rig, wait, Some(50)));
    }

    /// Shows that ThreadSanitizer sees accesses to the guest's memory: the device reads memory that it was not given. Without
    /// a sanitizer nothing happens; `scripts/sanitize` requires that this is reported.
    fn planted_race() {
        let rig = Rig::new(Kind::Split, 8, true);
        let memory = rig.memory();
        let mut driver = Driver::new(rig, &memory);
        let device = Device::new(rig, &memory, None);
        let looks = thread::spawn(move || {
            // The buffer is all the data, so that it is not copied word by word.
            let buffer = ginnel_guest_memory::Buffer { region: 0, at: rig.data_at(), len: 60_000 };
            let mut bytes = vec![0; 60_000];
            device.guest.read(&[buffer], 0, &mut bytes);
            std::hint::black_box(bytes);
        });
        assert!(driver.add(0) && driver.queue.publish());
        looks.join().unwrap();
    }
}
