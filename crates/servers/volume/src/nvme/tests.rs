//! A controller without a holder and without workers: the test stores what a holder stores, and drives the admin queue.

use super::controller::{Controller, Parts};
use super::{Health, Volume};
use crate::attach::{self, FromHolder};
use crate::disk::Disk;
use crate::session::Queues;
use crate::worker::{Nvme, Requests, Start};
use ginnel_guest_memory::Area;
use ginnel_layout::nvme::identify::{Cns, Namespace};
use ginnel_layout::nvme::log::Page;
use ginnel_layout::nvme::{
    Aqa, COMMAND, COMPLETION, Command, Completion, DOORBELLS, Feature, Opcode, Status, cap, cc, csts, event,
};
use ginnel_layout::nvme_state::{
    ACQ, AQA, ASQ, BUS_MASTER, CC, CSTS, DBBUF_EVENTS, DBBUF_SHADOW, DONE_GENERATION, RESET_GENERATION,
};
use ginnel_nvme::identify::Properties;
use ginnel_nvme::{Constants, DriverCompletions, DriverDoorbell, DriverSubmissions, QueueGroup, State};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros};

const QUEUES: u16 = 4;
const SLOTS: u16 = 16;
const VECTORS: u16 = QUEUES + 1;
/// Bytes of the guest's memory.
const MEMORY: u64 = 1 << 20;
/// Where things lie in the guest's memory.
const ASQ_AT: u64 = 0x1000;
const ACQ_AT: u64 = 0x2000;
const BUFFER: u64 = 0x3000;
const SHADOW: u64 = 0x4000;
const QUEUE: u64 = 0x1_0000;
const ENTRIES: u16 = 16;

/// The workers of a volume: they only remember what they serve.
#[derive(Default)]
struct Fake {
    served: Vec<(u16, QueueGroup<Mapping>)>,
    syncs: u32,
}

impl Queues for Fake {
    fn start(&mut self, start: Start) -> Result<(), String> {
        assert!(self.served.iter().all(|(index, _)| *index != start.index), "it is served already");
        let Requests::Nvme(Nvme { group, .. }) = start.requests else { return Err("a virtqueue".to_owned()) };
        self.served.push((start.index, group));
        Ok(())
    }

    fn stop(&mut self, index: u16, _: bool) -> Result<u32, String> {
        let at = self.served.iter().position(|(served, _)| *served == index).ok_or("it is not served")?;
        self.served.remove(at);
        Ok(0)
    }

    fn vm_left(&mut self) {}

    fn vm_stayed(&mut self) {}

    fn sync(&mut self) -> Result<(), String> {
        self.syncs += 1;
        Ok(())
    }

    fn set_call(&mut self, index: u16, _: Option<Arc<OwnedFd>>) {
        assert!(self.served.iter().any(|(served, _)| *served == index));
    }
}

impl Volume for Fake {
    fn health(&self) -> Health {
        Health { read: 512, reads: 1, ..Health::default() }
    }
}

/// A machine: the guest, the holder, and an engine that can be killed.
struct Machine {
    file: File,
    memory: Mapping,
    state: Mapping,
    doorbells: Mapping,
    disk: Arc<Disk>,
    mapped: bool,
    engine: Option<(Controller, Fake)>,
    submissions: DriverSubmissions<Mapping>,
    completions: DriverCompletions<Mapping>,
}

fn new_disk() -> Arc<Disk> {
    Arc::new(Disk::new(1 << 20, 512, false, "serial"))
}

fn area(memory: &Mapping, at: u64, len: usize) -> Area<Mapping> {
    Area { memory: memory.clone(), at: at as usize, len, guest: at }
}

fn admin_queues(
    memory: &Mapping,
    doorbells: &Mapping,
    stride: usize,
) -> (DriverSubmissions<Mapping>, DriverCompletions<Mapping>) {
    // The holder stores what it has trapped; here the driver does that itself.
    let doorbell =
        |number: usize| DriverDoorbell::Mapped(area(doorbells, (DOORBELLS + number * stride) as u64, 4));
    let (sq, cq) = (usize::from(ENTRIES) * COMMAND, usize::from(ENTRIES) * COMPLETION);
    memory.zero(ACQ_AT as usize, cq);
    let submissions =
        DriverSubmissions::new(0, ENTRIES, ENTRIES, area(memory, ASQ_AT, sq), doorbell(0)).unwrap();
    let completions = DriverCompletions::new(0, ENTRIES, area(memory, ACQ_AT, cq), doorbell(1)).unwrap();
    (submissions, completions)
}

impl Machine {
    /// Switches a machine on; its controller is disabled.
    fn new(mapped: bool) -> Self {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(MEMORY).unwrap();
        let memory = Mapping::of_file(&file, 0, MEMORY as usize, Protection::ReadWrite).unwrap();
        let cap =
            cap::mqes(ENTRIES.into()) | cap::CQR | cap::CSS_NVM | cap::dstrd(if mapped { 10 } else { 0 });
        let state = Mapping::anonymous(State::<Mapping>::len(QUEUES, SLOTS)).unwrap();
        let constants = Constants { queues: QUEUES, slots: SLOTS, mapped, cap, vs: 0 };
        State::create(state.clone(), &constants).unwrap();
        let stride = cap::stride(cap);
        let doorbells =
            Mapping::anonymous(DOORBELLS + 2 * usize::from(QUEUES + 1) * stride.next_multiple_of(8)).unwrap();
        let (submissions, completions) = admin_queues(&memory, &doorbells, stride);
        let mut machine = Self {
            file,
            memory,
            state,
            doorbells,
            disk: new_disk(),
            mapped,
            engine: None,
            submissions,
            completions,
        };
        machine.attach();
        machine
    }

    /// Starts an engine, with the rest of a predecessor's work in the state.
    fn attach(&mut self) {
        self.attach_with(&[attach::Range { iova: 0, len: MEMORY, offset: 0, writable: true }]);
    }

    fn attach_with(&mut self, ranges: &[attach::Range]) {
        self.disk = new_disk();
        let eventfd = || Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let parts = Parts {
            disk: self.disk.clone(),
            properties: properties(self.mapped),
            state: self.state.clone(),
            doorbells: self.doorbells.clone(),
            vectors: VECTORS,
            entries: ENTRIES,
            kicks: (0..=QUEUES).map(|_| eventfd()).collect(),
            broken: eventfd(),
        };
        self.engine = Some((Controller::new(parts).unwrap(), Fake::default()));
        for &range in ranges {
            let file = OwnedFd::from(self.file.try_clone().unwrap());
            self.tell(FromHolder::Map { range, file });
        }
        self.control();
    }

    fn kill(&mut self) {
        self.engine = None;
    }

    fn tell(&mut self, message: FromHolder) {
        let (controller, volume) = self.engine.as_mut().unwrap();
        controller.handle(message, volume).unwrap();
    }

    fn control(&mut self) {
        let (controller, volume) = self.engine.as_mut().unwrap();
        controller.follow(controller.wanted(), volume).unwrap();
    }

    fn served(&self) -> Vec<u16> {
        let mut served: Vec<_> =
            self.engine.iter().flat_map(|(_, fake)| &fake.served).map(|(i, _)| *i).collect();
        served.sort_unstable();
        served
    }

    fn load(&self, word: usize) -> u64 {
        self.state.load_relaxed_u64(word)
    }

    fn store(&self, word: usize, value: u64) {
        self.state.store_relaxed_u64(word, value);
    }

    fn csts(&self) -> u32 {
        self.load(CSTS) as u32
    }

    /// Does what a guest does to enable the controller.
    fn enable(&mut self) {
        let constants = State::open(self.state.clone()).unwrap().constants();
        (self.submissions, self.completions) =
            admin_queues(&self.memory, &self.doorbells, cap::stride(constants.cap));
        self.store(AQA, Aqa::new(ENTRIES.into(), ENTRIES.into()).0.into());
        self.store(ASQ, ASQ_AT);
        self.store(ACQ, ACQ_AT);
        self.store(BUS_MASTER, 1);
        self.store(CC, cc::enable().into());
        self.control();
    }

    fn reset(&mut self) {
        self.store(CC, 0);
        self.store(RESET_GENERATION, self.load(RESET_GENERATION) + 1);
        self.control();
    }

    fn submit(&mut self, command: Command) -> u16 {
        let cid = self.submissions.submit(command).unwrap();
        let _ = self.submissions.ring();
        cid
    }

    fn serve(&mut self) {
        let (controller, volume) = self.engine.as_mut().unwrap();
        controller.serve(volume).unwrap();
    }

    fn reap(&mut self) -> Option<Completion> {
        let completion = self.completions.reap()?;
        let _ = self.completions.ring();
        self.submissions.completed(&completion).unwrap();
        Some(completion)
    }

    /// Executes an admin command.
    fn admin(&mut self, command: Command) -> Completion {
        let cid = self.submit(command);
        self.serve();
        let completion = self.reap().expect("it is completed");
        assert_eq!((completion.cid, completion.sqid), (cid, 0));
        completion
    }

    fn status(&mut self, command: Command) -> Status {
        self.admin(command).status().code()
    }

    fn buffer(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(BUFFER as usize, &mut bytes);
        bytes
    }
}

fn properties(mapped: bool) -> Properties {
    Properties {
        vendor: [1, 2],
        serial: "serial".to_owned(),
        model: "model".to_owned(),
        firmware: "1".to_owned(),
        uuid: [7; 16],
        mdts: 7,
        doorbell_buffer: !mapped,
        write_cache: true,
        blocks: 0,
        block_exponent: 9,
        read_only: false,
        deallocate: true,
        write_zeroes: true,
        reads_zeros: false,
        granularity: 8,
        optimal: 0,
    }
}

fn command(opcode: Opcode) -> Command {
    Command { opcode, prp1: BUFFER, ..Command::new_zeroed() }
}

fn create_completion(queue: u16) -> Command {
    Command {
        prp1: QUEUE + 0x1000 * u64::from(queue),
        cdw10: u32::from(queue) | u32::from(ENTRIES - 1) << 16,
        cdw11: 3 | u32::from(queue) << 16,
        ..command(Opcode::CREATE_COMPLETION)
    }
}

fn create_submission(queue: u16, completion: u16) -> Command {
    Command {
        prp1: QUEUE + 0x8000 + 0x1000 * u64::from(queue),
        cdw10: u32::from(queue) | u32::from(ENTRIES - 1) << 16,
        cdw11: 1 | u32::from(completion) << 16,
        ..command(Opcode::CREATE_SUBMISSION)
    }
}

fn delete(opcode: Opcode, queue: u16) -> Command {
    Command { cdw10: queue.into(), ..command(opcode) }
}

fn shadow() -> Command {
    Command { prp1: SHADOW, prp2: SHADOW + 0x1000, ..command(Opcode::DOORBELL_BUFFER) }
}

fn set_feature(feature: Feature, value: u32) -> Command {
    Command { cdw10: feature.0.into(), cdw11: value, ..command(Opcode::SET_FEATURES) }
}

#[test]
fn a_driver_comes_and_goes() {
    for mapped in [false, true] {
        let mut machine = Machine::new(mapped);
        assert_eq!(machine.csts(), 0);
        machine.enable();
        assert_eq!(machine.csts(), csts::RDY);
        assert_eq!(machine.status(create_submission(1, 1)), Status::COMPLETION_QUEUE_INVALID);
        assert_eq!(machine.status(create_completion(1)), Status::SUCCESS);
        assert_eq!(machine.served(), [0; 0], "nothing comes from a completion queue alone");
        assert_eq!(machine.status(create_completion(1)), Status::INVALID_QUEUE_ID);
        assert_eq!(machine.status(create_submission(1, 1)), Status::SUCCESS);
        assert_eq!(machine.status(create_submission(2, 1)), Status::SUCCESS);
        assert_eq!(machine.status(create_completion(4)), Status::SUCCESS);
        assert_eq!(machine.status(create_submission(4, 4)), Status::SUCCESS);
        assert_eq!(machine.served(), [1, 4]);
        let in_use = delete(Opcode::DELETE_COMPLETION, 1);
        assert_eq!(machine.status(in_use), Status::INVALID_QUEUE_DELETION);
        assert_eq!(machine.status(delete(Opcode::DELETE_SUBMISSION, 1)), Status::SUCCESS);
        assert_eq!(machine.served(), [1, 4]);
        assert_eq!(machine.status(delete(Opcode::DELETE_SUBMISSION, 2)), Status::SUCCESS);
        assert_eq!(machine.served(), [4]);
        assert_eq!(machine.status(in_use), Status::SUCCESS);
        assert_eq!(machine.status(in_use), Status::INVALID_QUEUE_ID);
        machine.store(BUS_MASTER, 0);
        machine.control();
        assert_eq!((machine.served(), machine.csts()), (vec![], csts::RDY));
        machine.store(BUS_MASTER, 1);
        machine.control();
        assert_eq!(machine.served(), [4]);
        machine.store(CC, (cc::enable() | 1 << 14).into());
        machine.control();
        assert_eq!((machine.served(), machine.csts()), (vec![], csts::RDY | csts::SHST_COMPLETE));
        assert_eq!(machine.engine.as_ref().unwrap().1.syncs, 1);
        machine.reset();
        assert_eq!((machine.csts(), machine.load(DONE_GENERATION)), (0, 1));
        machine.enable();
        assert_eq!(machine.status(create_completion(1)), Status::SUCCESS);
    }
}

#[test]
fn impossible_queues_are_refused() {
    let mut machine = Machine::new(false);
    machine.enable();
    let good = create_completion(1);
    for (wrong, status) in [
        (create_completion(0), Status::INVALID_QUEUE_ID),
        (create_completion(QUEUES + 1), Status::INVALID_QUEUE_ID),
        (create_completion(u16::MAX), Status::INVALID_QUEUE_ID),
        (Command { cdw10: 1, ..good }, Status::INVALID_QUEUE_SIZE),
        (Command { cdw10: 1 | 16 << 16, ..good }, Status::INVALID_QUEUE_SIZE),
        (Command { cdw10: 1 | 0xffff << 16, ..good }, Status::INVALID_QUEUE_SIZE),
        (Command { cdw11: 2, ..good }, Status::INVALID_FIELD),
        (Command { cdw11: 3 | 5 << 16, ..good }, Status::INVALID_VECTOR),
        (Command { prp1: QUEUE + 8, ..good }, Status::PRP_OFFSET),
        (Command { prp1: MEMORY, ..good }, Status::INVALID_FIELD),
        (Command { prp1: !0xfff, ..good }, Status::INVALID_FIELD),
        (Command { flags: 1, ..good }, Status::INVALID_FIELD),
        (Command { flags: 0x40, ..good }, Status::INVALID_FIELD),
        (command(Opcode(0x80)), Status::INVALID_OPCODE),
        (command(Opcode(0xff)), Status::INVALID_OPCODE),
        (delete(Opcode::DELETE_SUBMISSION, 0), Status::INVALID_QUEUE_ID),
        (delete(Opcode::DELETE_COMPLETION, 0), Status::INVALID_QUEUE_ID),
        (delete(Opcode::DELETE_COMPLETION, 0xffff), Status::INVALID_QUEUE_ID),
        (Command { prp2: SHADOW + 8, ..shadow() }, Status::INVALID_FIELD),
        (Command { prp1: MEMORY, ..shadow() }, Status::INVALID_FIELD),
    ] {
        assert_eq!(machine.status(wrong), status, "{wrong:?}");
    }
    assert_eq!(machine.status(Command { cdw11: 1 | 0xffff << 16, ..good }), Status::SUCCESS, "no interrupts");
    assert_eq!(machine.status(set_feature(Feature::QUEUES, 0)), Status::SEQUENCE);
    machine.reset();
    machine.enable();
    assert_eq!(machine.admin(set_feature(Feature::QUEUES, 0x1_0001)).result, 0x1_0001);
    assert_eq!(machine.status(create_completion(3)), Status::INVALID_QUEUE_ID, "two were granted");
    let mut mapped = Machine::new(true);
    mapped.enable();
    assert_eq!(mapped.status(shadow()), Status::INVALID_OPCODE);
}

#[test]
fn registers_that_cannot_be_obeyed_are_a_fatal_error() {
    for (word, value) in [
        (ASQ, MEMORY),
        (ACQ, MEMORY - 16),
        (ASQ, u64::MAX),
        (AQA, 0),
        (CC, (cc::enable() | 1 << 4).into()),
        (CC, (cc::enable() | 1 << 7).into()),
    ] {
        let mut machine = Machine::new(false);
        machine.enable();
        machine.reset();
        machine.store(word, value);
        if word != CC {
            machine.store(CC, cc::enable().into());
        }
        machine.control();
        assert_eq!(machine.csts(), csts::CFS, "{word}: {value:#x}");
        machine.control();
        machine.kill();
        machine.attach();
        assert_eq!(machine.csts(), csts::CFS);
        machine.reset();
        assert_eq!(machine.csts(), 0);
        machine.enable();
        assert_eq!(machine.csts(), csts::RDY);
    }
}

#[test]
fn memory_that_is_not_shared_is_noticed_at_once() {
    let mut machine = Machine::new(false);
    machine.enable();
    // The driver's command stays in memory that nobody else sees.
    machine.doorbells.store_relaxed_u32(DOORBELLS, 1);
    machine.serve();
    assert_eq!(machine.csts(), csts::RDY | csts::CFS);
    assert!(machine.completions.reap().is_none());
}

#[test]
fn a_doorbell_beyond_the_queue_is_a_fatal_error() {
    let mut machine = Machine::new(false);
    machine.enable();
    assert_eq!(machine.status(create_completion(1)), Status::SUCCESS);
    assert_eq!(machine.status(create_submission(1, 1)), Status::SUCCESS);
    machine.doorbells.store_relaxed_u32(DOORBELLS, ENTRIES.into());
    machine.serve();
    assert_eq!((machine.csts(), machine.served()), (csts::RDY | csts::CFS, vec![]));
}

#[test]
fn the_guests_memory_may_change_under_queues() {
    let mut machine = Machine::new(false);
    machine.enable();
    assert_eq!(machine.status(create_completion(1)), Status::SUCCESS);
    assert_eq!(machine.status(create_submission(1, 1)), Status::SUCCESS);
    let range = attach::Range { iova: MEMORY, len: 0x1000, offset: 0, writable: true };
    let file = OwnedFd::from(machine.file.try_clone().unwrap());
    machine.tell(FromHolder::Map { range, file });
    assert_eq!(machine.served(), [1]);
    machine.tell(FromHolder::Unmap { id: 0, iova: MEMORY, len: 0x1000 });
    assert_eq!((machine.served(), machine.csts()), (vec![1], csts::RDY));
    // The queues lie there. QEMU replaces a range by another one in two steps.
    machine.tell(FromHolder::Unmap { id: 3, iova: 0, len: MEMORY });
    assert_eq!((machine.served(), machine.csts()), (vec![], csts::RDY));
    let file = || OwnedFd::from(machine.file.try_clone().unwrap());
    let (first, second) = (file(), file());
    let low = attach::Range { iova: 0, len: QUEUE, offset: 0, writable: true };
    machine.tell(FromHolder::Map { range: low, file: first });
    assert_eq!((machine.served(), machine.csts()), (vec![], csts::RDY));
    let high = attach::Range { iova: QUEUE, len: MEMORY - QUEUE, offset: QUEUE, writable: true };
    machine.tell(FromHolder::Map { range: high, file: second });
    assert_eq!(machine.served(), [1]);
    assert_eq!(machine.status(create_completion(2)), Status::SUCCESS);
    // An engine that attaches in between waits too, and so does one whose driver has just rung.
    machine.tell(FromHolder::Unmap { id: 3, iova: 0, len: QUEUE });
    machine.serve();
    machine.kill();
    machine.attach_with(&[high]);
    machine.serve();
    assert_eq!((machine.served(), machine.csts()), (vec![], csts::RDY));
    let file = OwnedFd::from(machine.file.try_clone().unwrap());
    machine.tell(FromHolder::Map { range: low, file });
    assert_eq!((machine.served(), machine.csts()), (vec![1], csts::RDY));
}

#[test]
fn a_driver_is_told_of_a_new_size() {
    let mut machine = Machine::new(false);
    machine.enable();
    let resize = |machine: &mut Machine, bytes| {
        machine.disk.set_bytes(bytes);
        let (controller, volume) = machine.engine.as_mut().unwrap();
        controller.resized(volume).unwrap();
    };
    for _ in 0..4 {
        machine.submit(command(Opcode::ASYNC_EVENT));
    }
    machine.serve();
    assert!(machine.reap().is_none());
    assert_eq!(machine.status(command(Opcode::ASYNC_EVENT)), Status::ASYNC_EVENT_LIMIT);
    resize(&mut machine, 2 << 20);
    assert!(machine.reap().is_none(), "it has not asked for this kind");
    let wanted = set_feature(Feature::ASYNC_EVENTS, event::NAMESPACE_NOTICES);
    assert_eq!(machine.status(wanted), Status::SUCCESS);
    // The requests outlive the process.
    machine.kill();
    machine.attach();
    assert!(machine.reap().is_none());
    resize(&mut machine, 3 << 20);
    assert_eq!(
        machine.reap().map(|c| (c.status(), c.result)),
        Some((Status::SUCCESS, event::NAMESPACE_CHANGED))
    );
    resize(&mut machine, 4 << 20);
    assert!(machine.reap().is_none(), "it has not looked yet");
    let page = |retain: u32| Command {
        cdw10: u32::from(Page::CHANGED_NAMESPACES.0) | retain << 15 | 1023 << 16,
        ..command(Opcode::GET_LOG_PAGE)
    };
    for (retain, changed) in [(1, 1), (0, 1), (0, 0)] {
        assert_eq!(machine.status(page(retain)), Status::SUCCESS);
        assert_eq!(machine.buffer(4), [changed, 0, 0, 0]);
    }
    resize(&mut machine, 5 << 20);
    assert!(machine.reap().is_some());
    let identify = Command { nsid: 1, cdw10: Cns::NAMESPACE.0.into(), ..command(Opcode::IDENTIFY) };
    assert_eq!(machine.status(identify), Status::SUCCESS);
    let namespace = Namespace::read_from_bytes(&machine.buffer(4096)).unwrap();
    assert_eq!({ namespace.nsze }, (5 << 20) / 512);
}

#[test]
fn a_driver_that_turns_the_cache_off_has_durable_writes() {
    let mut machine = Machine::new(false);
    machine.enable();
    let cache = |on| set_feature(Feature::WRITE_CACHE, on);
    assert_eq!(machine.status(cache(1)), Status::SUCCESS);
    assert_eq!(machine.engine.as_ref().unwrap().1.syncs, 0);
    assert_eq!(machine.status(cache(0)), Status::SUCCESS);
    assert_eq!((machine.engine.as_ref().unwrap().1.syncs, machine.disk.write_back()), (1, false));
    machine.kill();
    machine.attach();
    assert!(!machine.disk.write_back(), "the driver does not know of the new process");
    machine.reset();
    assert!(machine.disk.write_back(), "the next driver may be another one");
}

#[derive(Clone, Debug)]
enum Step {
    Admin(Command),
    Reset,
    BusMaster(bool),
    Shutdown,
}

fn step() -> impl Strategy<Value = Step> {
    let queue = 1..=QUEUES + 1;
    prop_oneof![
        4 => queue.clone().prop_map(|queue| Step::Admin(create_completion(queue))),
        6 => (queue.clone(), queue.clone()).prop_map(|(sq, cq)| Step::Admin(create_submission(sq, cq))),
        2 => queue.clone().prop_map(|queue| Step::Admin(delete(Opcode::DELETE_SUBMISSION, queue))),
        2 => queue.prop_map(|queue| Step::Admin(delete(Opcode::DELETE_COMPLETION, queue))),
        1 => Just(Step::Admin(shadow())),
        1 => (0..2_u32).prop_map(|on| Step::Admin(set_feature(Feature::WRITE_CACHE, on))),
        1 => (0..0xc_u8, any::<u32>()).prop_map(|(feature, value)| {
            Step::Admin(set_feature(Feature(feature), value))
        }),
        1 => Just(Step::Admin(command(Opcode::IDENTIFY))),
        1 => Just(Step::Reset),
        1 => any::<bool>().prop_map(Step::BusMaster),
        1 => Just(Step::Shutdown),
    ]
}

/// What a machine consists of beside its engine.
fn snapshot(machine: &Machine) -> [Vec<u8>; 3] {
    [&machine.state, &machine.doorbells, &machine.memory].map(|mapping| {
        let mut bytes = vec![0; mapping.len()];
        mapping.read(0, &mut bytes);
        bytes
    })
}

/// Two machines do the same; in one of them, the engine is killed after each step, and also in the middle of each
/// command: it was executed, and its completion was not written. Nobody can tell the difference.
fn check_kills(steps: &[Step]) {
    let mut machines = [Machine::new(false), Machine::new(false)];
    machines.iter_mut().for_each(Machine::enable);
    for step in steps {
        let [calm, killed] = &mut machines;
        match step {
            Step::Admin(_) if calm.load(BUS_MASTER) == 0 || calm.csts() != csts::RDY => {}
            Step::Admin(command) => {
                let completion = calm.admin(*command);
                let cid = killed.submit(*command);
                let before = snapshot(killed);
                killed.serve();
                killed.kill();
                // The stores of a completion are undone: the slot, the completion's position, the completion.
                restore_completion(killed, &before);
                killed.attach();
                let again = killed.reap().expect("it is completed");
                assert_eq!((again, again.cid), (completion, cid), "{command:?}");
            }
            Step::Reset => {
                for machine in &mut machines {
                    machine.reset();
                    machine.enable();
                }
            }
            Step::BusMaster(on) => {
                for machine in &mut machines {
                    machine.store(BUS_MASTER, (*on).into());
                    machine.control();
                }
            }
            Step::Shutdown => {
                for machine in &mut machines {
                    machine.store(CC, (cc::enable() | 1 << 14).into());
                    machine.control();
                }
            }
        }
        let [calm, killed] = &mut machines;
        killed.kill();
        killed.attach();
        assert_eq!(calm.served(), killed.served(), "after {step:?}");
        assert_eq!(calm.csts(), killed.csts());
        assert_eq!(calm.disk.write_back(), killed.disk.write_back());
        let [a, b] = [&*calm, &*killed]
            .map(|machine| [DBBUF_EVENTS, DBBUF_SHADOW, DONE_GENERATION].map(|word| machine.load(word)));
        assert_eq!(a, b);
    }
}

/// Undoes the completion of the last admin command: what was in flight before it is in flight again.
fn restore_completion(machine: &Machine, [state, _, memory]: &[Vec<u8>; 3]) {
    use ginnel_layout::nvme_state::{SLOT, completion, slot, slots};
    machine.state.write(completion(0), &state[completion(0)..completion(0) + 64]);
    machine.memory.write(ACQ_AT as usize, &memory[ACQ_AT as usize..][..usize::from(ENTRIES) * COMPLETION]);
    let first = slots(0, QUEUES, SLOTS);
    let newest = (0..usize::from(SLOTS))
        .map(|number| first + SLOT * number + slot::TAKEN)
        .max_by_key(|at| machine.state.load_relaxed_u64(*at))
        .unwrap();
    machine.state.store_relaxed_u64(newest, machine.state.load_relaxed_u64(newest) | 1);
    machine.state.store_relaxed_u64(newest - slot::TAKEN + slot::COMPLETING, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_kill_in_the_middle_of_a_command_is_not_noticed(steps in prop::collection::vec(step(), 1..24)) {
        check_kills(&steps);
    }
}
