//! `kill -9` at each step of a handover from one volume to another on the same image: no write is lost, and no write is
//! repeated over a later one.

mod front;
mod server;

use front::{Front, Guest};
use ginnel_layout::vhost_user::protocol::GET_VRING_BASE_INFLIGHT;
use ginnel_layout::virtio_blk::{RequestHeader, RequestKind};
use ginnel_shmem::SharedMemory;
use ginnel_virtqueue::{Kind, Segment};
use ginnel_volume_bench::verify::{Ledger, Since};
use kit::wait::WATCHDOG;
use server::Server;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;
use zerocopy::IntoBytes;

const BLOCK: usize = 4096;
const BLOCKS: usize = 32;
/// The number of blocks whose writes are held at the source, and how many of these are held at the destination too.
const WAIT: usize = 16;
const WAIT_LONGER: usize = 8;

/// The steps of a handover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Step {
    /// The source serves requests.
    Serving,
    /// The front end has asked the source for the queue's base (GET_VRING_BASE).
    Stopping,
    /// The source has answered.
    Stopped,
    /// The destination has the guest's memory and the in-flight region.
    HandedOver,
    /// The destination has been told everything about the queue except to start it.
    SetUp,
    /// The destination has been told to start the queue (SET_VRING_KICK, SET_VRING_ENABLE).
    Starting,
    /// The destination repeats the requests in flight: some of them have completed, and so have newer writes to the
    /// same blocks.
    Repeating,
}

use Step::{HandedOver, Repeating, Serving, SetUp, Starting, Stopped, Stopping};

const STEPS: [Step; 7] = [Serving, Stopping, Stopped, HandedOver, SetUp, Starting, Repeating];

/// Which volume is killed at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Source,
    /// Only the destination; the handover to it is tried again.
    Destination,
    /// Only the destination; the source continues as after a failed migration, and then the handover begins anew.
    DestinationForGood,
    Both,
}

use Victim::{Both, Destination, DestinationForGood, Source};

/// Returns the victims that make sense at a step.
fn victims(step: Step) -> &'static [Victim] {
    match step {
        Serving | Stopping => &[Source],
        Stopped => &[Source, Both],
        HandedOver | SetUp => &[Source, Destination, DestinationForGood, Both],
        // The queue runs at the destination, so the source cannot go on.
        Starting | Repeating => &[Source, Destination, Both],
    }
}

/// The behaviour of both volumes' disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disk {
    /// All writes succeed. Which ones are in flight at a kill is a matter of chance.
    Fast,
    /// Some writes fail and are held. They are in flight at each step, and some complete before others.
    Failing,
}

/// Writes each block again and again, and records what the image must hold.
struct Load {
    ledger: Ledger,
    /// The block of each request in flight, by the number that the driver gave it, which is also its slot of memory.
    in_flight: HashMap<u16, usize>,
    /// How often each block was written.
    turns: [usize; BLOCKS],
}

impl Load {
    /// Writes each block that has no write in flight. The data of the previous write remain in memory, so a volume that
    /// wrongly repeats that write overwrites the later one, which the test sees.
    fn write(&mut self, guest: &mut Guest) {
        for block in 0..BLOCKS {
            if self.in_flight.values().any(|n| n % BLOCKS == block) {
                continue;
            }
            let n = block + BLOCKS * (self.turns[block] % 2);
            self.turns[block] += 1;
            let mut bytes = [0; BLOCK];
            self.ledger.write(block, &mut bytes);
            let address = guest.data() + (n * BLOCK) as u64;
            guest.memory.write((address - front::GUEST) as usize, &bytes);
            let sector = self.ledger.offset(block) / 512;
            let header = RequestHeader { kind: RequestKind::OUT, reserved: 0, sector };
            let data = [Segment { address, len: BLOCK as u32, writable: false }];
            let id = guest.add(0, n, header.as_bytes(), &data, 1, false);
            assert!(self.in_flight.insert(id, n).is_none());
        }
        guest.kick(0);
    }

    /// Waits for completions until only `left` requests are in flight.
    fn wait_until_left(&mut self, guest: &mut Guest, left: usize) {
        while self.in_flight.len() > left {
            let (_, id) = guest.wait();
            let n = self.in_flight.remove(&id).expect("it was back already");
            assert_eq!(guest.answer(0, n), 0, "the answer to the write of block {}", n % BLOCKS);
            self.ledger.acknowledged(n % BLOCKS);
        }
    }
}

/// Two volumes, and a guest that moves from one to the other.
struct Handover {
    source: Server,
    destination: Server,
    disk: Disk,
    image: PathBuf,
    faults: PathBuf,
    guest: Guest,
    load: Load,
    base: u32,
    /// The connection to the source, while the guest is connected to the destination.
    left: Option<Front>,
}

impl Handover {
    fn new(disk: Disk, kind: Kind) -> Self {
        let more = if disk == Disk::Failing { "--backend volatile --on-error hold" } else { "" };
        let source = Server::start((BLOCKS * BLOCK) as u64, &format!("--path IMAGE --lock vm {more}"));
        let (image, faults) = (source.image(), source.faults());
        let destination = Server::start(0, &format!("--path {} --lock vm {more}", image.display()));
        let mut guest = Guest::connect_without_queues(&source.socket(), 1, kind, GET_VRING_BASE_INFLIGHT);
        guest.open_inflight_region();
        guest.run(0, None);
        let ledger = Ledger::new(BLOCK as u32, BLOCKS, 0);
        let load = Load { ledger, in_flight: HashMap::new(), turns: [0; BLOCKS] };
        Self { source, destination, disk, image, faults, guest, load, base: 0, left: None }
    }

    /// From now on, writes to the first `blocks` blocks fail.
    fn fail(&self, blocks: usize) {
        let line = format!("write 0 {} 28\n", blocks * BLOCK);
        std::fs::write(&self.faults, if blocks > 0 { line } else { String::new() }).unwrap();
    }

    /// Takes the handover to this step.
    fn go_to(&mut self, step: Step) {
        match step {
            Serving => {
                self.fail(WAIT);
                self.load.write(&mut self.guest);
                if self.disk == Disk::Failing {
                    self.load.wait_until_left(&mut self.guest, WAIT);
                    self.source.wait_for_held(WAIT as u64);
                }
            }
            Stopping => self.guest.begin_to_leave(0),
            Stopped => {
                self.base = self.guest.front.base();
                if self.disk == Disk::Failing {
                    assert_eq!(self.guest.poll(0), None, "what is held goes along");
                }
            }
            HandedOver => self.left = Some(self.connect_to_destination()),
            SetUp => {
                self.guest.set_up(0, Some(self.base));
                assert!(self.guest.front.is_served());
            }
            Starting => {
                self.fail(WAIT_LONGER);
                self.guest.begin(0);
            }
            Repeating if self.disk == Disk::Fast => assert!(self.guest.front.is_served()),
            Repeating => {
                for _ in 0..2 {
                    self.load.wait_until_left(&mut self.guest, WAIT_LONGER);
                    self.load.write(&mut self.guest);
                }
                self.load.wait_until_left(&mut self.guest, WAIT_LONGER);
                self.destination.wait_for_held(WAIT_LONGER as u64);
            }
        }
    }

    fn connect_to_destination(&mut self) -> Front {
        let before = self.guest.move_to(&self.destination.socket(), GET_VRING_BASE_INFLIGHT);
        assert!(self.guest.front.is_served());
        before
    }

    /// Connects to a volume and starts the queue there. Tries again until the volume has locked the image: the kernel
    /// may take a while to close the files of a killed volume.
    fn run_at(&mut self, socket: PathBuf) {
        let until = Instant::now() + WATCHDOG;
        loop {
            self.guest.move_to(&socket, GET_VRING_BASE_INFLIGHT);
            self.guest.set_up(0, Some(self.base));
            self.guest.begin(0);
            if self.guest.front.is_served() {
                return;
            }
            assert!(Instant::now() < until, "the queue does not start");
        }
    }

    /// Kills the victims, and then acts as a front end would, until the handover is at the same step again.
    fn kill(&mut self, step: Step, victim: Victim) {
        if matches!(victim, Source | Both) {
            self.source.kill();
        }
        if victim != Source {
            self.destination.kill();
            self.destination.restart();
        }
        if step <= Stopping {
            self.source.restart();
            self.run_at(self.source.socket());
            if step == Stopping {
                self.go_to(Stopping);
            }
        } else if victim == DestinationForGood {
            self.guest.front = self.left.take().unwrap();
            self.guest.start(0);
            if self.disk == Disk::Failing {
                self.source.wait_for_held(WAIT as u64);
            }
            STEPS[1..].iter().filter(|again| **again <= step).for_each(|again| self.go_to(*again));
        } else if victim != Source && step > Stopped {
            if step >= Starting {
                return self.run_at(self.destination.socket());
            }
            self.connect_to_destination();
            if step == SetUp {
                self.go_to(SetUp);
            }
        }
    }

    /// Checks that all requests in flight complete and that the image holds all writes. Then the destination becomes
    /// the next source.
    fn finish(&mut self) {
        if self.disk == Disk::Failing {
            self.destination.wait_for_held(WAIT_LONGER as u64);
            self.fail(0);
            self.destination.control(r#"{"op":"resume"}"#);
        }
        self.load.wait_until_left(&mut self.guest, 0);
        assert_eq!(self.guest.poll(0), None, "it was back already");
        let image = File::open(&self.image).unwrap();
        let mut bytes = [0; BLOCK];
        for block in 0..BLOCKS {
            image.read_exact_at(&mut bytes, self.load.ledger.offset(block)).unwrap();
            self.load.ledger.check(block, &bytes, Since::Running).unwrap();
        }
        self.left = None;
        if !self.source.is_running() {
            self.source.restart();
        }
        std::mem::swap(&mut self.source, &mut self.destination);
    }
}

fn killed_in_each_step(disk: Disk) {
    for kind in [Kind::Split, Kind::Packed] {
        let mut handover = Handover::new(disk, kind);
        for at in STEPS {
            for victim in victims(at) {
                println!("{kind:?}: {victim:?} killed while {at:?}");
                for step in STEPS {
                    handover.go_to(step);
                    if step == at {
                        handover.kill(step, *victim);
                    }
                }
                handover.finish();
            }
        }
    }
}

#[test]
fn killed_with_requests_in_flight() {
    killed_in_each_step(Disk::Fast);
}

#[test]
fn killed_with_requests_that_wait_for_an_operator() {
    killed_in_each_step(Disk::Failing);
}
