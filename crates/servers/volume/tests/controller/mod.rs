//! A controller without a VM: a worker with one completion queue and its submission queues, and a driver that shares their
//! memory. The test is the holder: it owns the state, and stores and announces doorbells that are trapped.

use ginnel_guest_memory::{Area, GuestMemory, Region};
use ginnel_layout::nvme::{
    self, Command, Completion, Opcode, PAGE, Status, completion_doorbell, submission_doorbell,
};
use ginnel_nvme::identify::NSID;
use ginnel_nvme::{
    CompletionRecord, Constants, Doorbell, DriverCompletions, DriverDoorbell, DriverSubmissions, QueueGroup,
    QueueSetup, State, SubmissionRecord, prp,
};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use ginnel_volume::backend::{Backend, Stores};
use ginnel_volume::device::nvme::Namespace;
use ginnel_volume::disk::Disk;
use ginnel_volume::limit::Limiter;
use ginnel_volume::stats::Counters;
use ginnel_volume::worker::{Events, Handle, Nvme, Order, Peers, Plan, Requests, Start, Target};
use ginnel_volume_control::config::Wait;
use kit::wait::{WATCHDOG, spin_for};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::FromZeros;

/// Guest address of the memory.
const GUEST: u64 = 0x10_0000;
const PAGES: u64 = 512;
/// Pages of the queues. The data begin at [`DATA`].
const SHADOWS: u64 = 0;
const EVENTS: u64 = 1;
const COMPLETIONS: u64 = 2;
const SUBMISSIONS: u64 = 8;
const PER_SUBMISSION: u64 = 8;
const LISTS: u64 = 48;
/// The first page that tests may use for data.
pub const DATA: u64 = 64;

/// The number of the completion queue. Those of the submission queues begin with it too.
pub const QUEUE: u16 = 1;
const STRIDE: usize = 4;
const MAX_TRANSFER: u32 = 512 << 10;

/// How the controller learns of doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbells {
    /// It looks at them.
    Mapped,
    /// It is kicked at each write.
    Trapped,
    /// It is kicked if it has asked for that.
    Shadow,
}

/// How a controller is made.
#[derive(Clone)]
pub struct Options {
    pub doorbells: Doorbells,
    pub wait: Wait,
    pub disk: Arc<Disk>,
    pub backend: Backend,
    /// Number of submission queues.
    pub submissions: u16,
    /// Entries of each of them.
    pub size: u16,
    /// Entries of the completion queue.
    pub completions: u16,
}

impl Options {
    /// Returns options for a disk in memory.
    pub fn ram(bytes: u64, doorbells: Doorbells, wait: Wait) -> Self {
        let backend = Backend::Ram(Mapping::anonymous(bytes as usize).unwrap());
        let disk = Arc::new(Disk::new(bytes, 512, false, "serial"));
        Self { doorbells, wait, disk, backend, submissions: 1, size: 64, completions: 64 }
    }
}

pub struct Controller {
    pub options: Options,
    pub memory: Mapping,
    /// The file of the memory.
    pub file: File,
    pub guest: Arc<GuestMemory<Mapping>>,
    pub limiter: Arc<Limiter>,
    pub counters: Arc<Counters>,
    pub error: Arc<OwnedFd>,
    state: State<Mapping>,
    bells: Mapping,
    call: Arc<OwnedFd>,
    kicks: Vec<Arc<OwnedFd>>,
    submissions: Vec<DriverSubmissions<Mapping>>,
    completions: DriverCompletions<Mapping>,
    worker: Option<Handle>,
    pub events: Events,
}

impl Controller {
    /// Starts a worker and its queues.
    pub fn start(options: Options) -> Self {
        let mut controller = Self::create(options);
        controller.start_worker();
        controller.start_queues();
        controller
    }

    /// Creates the queues. Nobody serves them yet.
    pub fn create(options: Options) -> Self {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(PAGES * PAGE).unwrap();
        let memory = Mapping::of_file(&file, 0, (PAGES * PAGE) as usize, Protection::ReadWrite).unwrap();
        let region = Region { guest: GUEST, user: 0, memory: memory.clone() };
        let guest = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let (queues, slots) = (options.submissions.max(QUEUE), 1024);
        let mapped = options.doorbells == Doorbells::Mapped;
        let constants = Constants { queues, slots, mapped, cap: 0, vs: nvme::VS_1_4 };
        let state = Mapping::anonymous(State::<Mapping>::len(queues, slots).next_multiple_of(4096)).unwrap();
        let state = State::create(state, &constants).unwrap();
        let bells = Mapping::anonymous(2 * PAGE as usize).unwrap();
        let fd = || Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap());
        let driver_bell = |at: usize| match options.doorbells {
            Doorbells::Trapped => DriverDoorbell::Trapped,
            Doorbells::Mapped => {
                DriverDoorbell::Mapped(Area { memory: bells.clone(), at, len: 4, guest: at as u64 })
            }
            Doorbells::Shadow => DriverDoorbell::Shadow {
                value: shadow(&guest, SHADOWS, at),
                event: shadow(&guest, EVENTS, at),
            },
        };
        let record = CompletionRecord {
            created: 1,
            base: page(COMPLETIONS),
            size: options.completions,
            vector: 1,
            interrupts: true,
        };
        let at = completion_doorbell(QUEUE, STRIDE);
        state.create_completion(QUEUE, &record, &Doorbell::new(bells.clone(), at).unwrap()).unwrap();
        let ring = guest.at_guest(record.base, 16 * usize::from(record.size)).unwrap();
        let completions = DriverCompletions::new(QUEUE, record.size, ring, driver_bell(at)).unwrap();
        let submissions = (0..options.submissions)
            .map(|n| {
                let id = QUEUE + n;
                let base = page(SUBMISSIONS + PER_SUBMISSION * u64::from(n));
                let record = SubmissionRecord { created: 2, base, size: options.size, completion: QUEUE };
                let at = submission_doorbell(id, STRIDE);
                state.create_submission(id, &record, &Doorbell::new(bells.clone(), at).unwrap()).unwrap();
                let ring = guest.at_guest(base, 64 * usize::from(options.size)).unwrap();
                DriverSubmissions::new(id, options.size, options.size, ring, driver_bell(at)).unwrap()
            })
            .collect();
        Self {
            limiter: Arc::default(),
            counters: Arc::new(Counters::new(usize::from(queues) + 1, 1)),
            error: fd(),
            call: fd(),
            kicks: (0..options.submissions).map(|_| fd()).collect(),
            events: Events::new().unwrap(),
            worker: None,
            options,
            memory,
            file,
            guest,
            state,
            bells,
            submissions,
            completions,
        }
    }

    pub fn start_worker(&mut self) {
        let stores = Stores::new(std::slice::from_ref(&self.options.backend), 0, None).unwrap();
        let peers = Peers::default();
        let namespace = Namespace::new(self.options.disk.clone(), MAX_TRANSFER, true);
        let plan = Plan {
            number: 0,
            target: Target::Nvme(Arc::new(namespace)),
            stores,
            wait: self.options.wait,
            budget: Duration::from_micros(20),
            pin_memory: false,
            counters: self.counters.clone(),
            limiter: self.limiter.clone(),
            peers: peers.clone(),
            epoch: Instant::now(),
        };
        let worker = Handle::start(plan, None, &self.events).unwrap();
        peers.introduce(std::slice::from_ref(&worker));
        self.worker = Some(worker);
    }

    pub fn worker(&self) -> &Handle {
        self.worker.as_ref().expect("it was started")
    }

    /// Returns the queues as their controller sees them, with what a predecessor has left.
    pub fn group(&self) -> QueueGroup<Mapping> {
        let setup = |id, base, len, at| QueueSetup {
            id,
            ring: self.guest.at_guest(base, len).unwrap(),
            doorbell: self.doorbell(at),
        };
        let completion = self.state.completion(QUEUE).unwrap();
        let at = completion_doorbell(QUEUE, STRIDE);
        let completion = setup(QUEUE, completion.base, 16 * usize::from(completion.size), at);
        let submissions = self.submissions.iter().map(|queue| {
            let record = self.state.submission(queue.id()).unwrap();
            let at = submission_doorbell(queue.id(), STRIDE);
            setup(queue.id(), record.base, 64 * usize::from(record.size), at)
        });
        QueueGroup::new(&self.state, completion, submissions.collect()).unwrap()
    }

    fn doorbell(&self, at: usize) -> Doorbell<Mapping> {
        let bell = Doorbell::new(self.bells.clone(), at).unwrap();
        if self.options.doorbells != Doorbells::Shadow {
            return bell;
        }
        let (value, event) = (shadow(&self.guest, SHADOWS, at), shadow(&self.guest, EVENTS, at));
        bell.with_shadow_of_predecessor(&value, &event).unwrap()
    }

    pub fn start_queues(&mut self) {
        let mapped = self.options.doorbells == Doorbells::Mapped;
        let shadow = self.options.doorbells == Doorbells::Shadow;
        let start = Start {
            index: QUEUE,
            memory: self.guest.clone(),
            kicks: if mapped { Vec::new() } else { self.kicks.clone() },
            call: Some(self.call.clone()),
            error: Some(self.error.clone()),
            requests: Requests::Nvme(Nvme { group: self.group(), shadow }),
        };
        self.worker().send(Order::Start(Box::new(start)));
    }

    pub fn stop_queues(&self, suspend: bool) {
        self.worker().stop(QUEUE, suspend).unwrap();
    }

    /// Submits a command to a submission queue, and shows it to the controller. Returns its identifier.
    pub fn submit(&mut self, queue: usize, command: Command) -> u16 {
        let cid = self.submissions[queue].submit(command).expect("there is room");
        self.ring(queue);
        cid
    }

    /// Writes a command that the controller does not see before [`ring`](Self::ring).
    pub fn add(&mut self, queue: usize, command: Command) -> Option<u16> {
        self.submissions[queue].submit(command)
    }

    pub fn ring(&mut self, queue: usize) {
        if let Some(tail) = self.submissions[queue].ring() {
            let id = self.submissions[queue].id();
            self.write_doorbell(submission_doorbell(id, STRIDE), tail, queue);
        }
    }

    /// Does what the holder does for a trapped write.
    pub fn write_doorbell(&self, at: usize, value: u32, kick: usize) {
        self.bells.store_release_u32(at, value);
        write(&self.kicks[kick]);
    }

    /// Writes a tail that the driver's side would never write.
    pub fn write_tail(&self, queue: usize, tail: u32) {
        let at = submission_doorbell(self.submissions[queue].id(), STRIDE);
        if self.options.doorbells == Doorbells::Shadow {
            shadow(&self.guest, SHADOWS, at).store_release_u32(0, tail);
        }
        self.write_doorbell(at, tail, queue);
    }

    /// Takes all completions that are there. The controller gets their entries back after [`free`](Self::free).
    pub fn look(&mut self) -> Vec<Completion> {
        let mut found = Vec::new();
        while let Some(completion) = self.completions.reap() {
            let queue = self.submissions.iter_mut().find(|queue| queue.id() == completion.sqid).unwrap();
            queue.completed(&completion).unwrap();
            found.push(completion);
        }
        found
    }

    pub fn free(&mut self) {
        if let Some(head) = self.completions.ring() {
            self.write_doorbell(completion_doorbell(QUEUE, STRIDE), head, 0);
        }
    }

    pub fn reap(&mut self) -> Vec<Completion> {
        let found = self.look();
        self.free();
        found
    }

    /// Waits for so many completions, and looks for them all the time.
    pub fn poll(&mut self, count: usize) -> Vec<Completion> {
        let mut all = Vec::new();
        spin_for("completions", || {
            all.extend(self.reap());
            (all.len() >= count).then_some(())
        });
        assert_eq!(all.len(), count);
        all
    }

    /// Waits for so many completions, and looks for them only after interrupts.
    pub fn sleep(&mut self, count: usize) -> Vec<Completion> {
        let mut all = Vec::new();
        while all.len() < count {
            assert!(becomes_readable(&self.call), "no interrupt, with {} of {count} completions", all.len());
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
            all.extend(self.reap());
        }
        assert_eq!(all.len(), count);
        all
    }

    /// Submits a command to the first queue, and waits for its status.
    pub fn run(&mut self, command: Command) -> Status {
        self.submit(0, command);
        self.poll(1)[0].status()
    }

    /// Describes pages of data in a command, from one page on and in descending order.
    pub fn with_pages(&self, command: Command, first: u64, count: u64) -> Command {
        let pages: Vec<_> = (first..first + count).rev().map(page).collect();
        let (prp1, prp2) = prp::describe(&self.guest, &pages, &[page(LISTS), page(LISTS + 1)], 500).unwrap();
        Command { prp1, prp2, ..command }
    }

    /// Offset in the memory of a page's data.
    pub fn at(number: u64) -> usize {
        (number * PAGE) as usize
    }
}

fn page(number: u64) -> u64 {
    GUEST + number * PAGE
}

/// Returns the word of a shadow page that belongs to the doorbell at an offset of BAR 0.
fn shadow(guest: &GuestMemory<Mapping>, which: u64, at: usize) -> Area<Mapping> {
    guest.at_guest(page(which) + (at - nvme::DOORBELLS) as u64, 4).unwrap()
}

fn write(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
}

/// Returns whether an eventfd becomes readable before the watchdog.
pub fn becomes_readable(fd: &OwnedFd) -> bool {
    let limit = Timespec { tv_sec: WATCHDOG.as_secs() as i64, tv_nsec: 0 };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

pub fn command(opcode: Opcode) -> Command {
    Command { opcode, nsid: NSID, prp1: page(DATA), ..Command::new_zeroed() }
}

/// Returns a command for `count` blocks.
pub fn blocks(opcode: Opcode, slba: u64, count: u32) -> Command {
    Command { cdw10: slba as u32, cdw11: (slba >> 32) as u32, cdw12: count - 1, ..command(opcode) }
}
