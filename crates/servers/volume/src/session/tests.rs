//! Tests of the state machine, without a socket and without workers.

use super::*;
use crate::device::blk::Blk;
use crate::device::scsi::Scsi;
use crate::disk::Disk;
use ginnel_layout::virtio_blk::feature as blk;
use ginnel_shmem::SharedMemory;
use std::fs::File;

const QUEUES: u16 = 2;
const USER: u64 = 0x7f00_0000_0000;
const GUEST: u64 = 0x10_0000;
const LEN: u64 = 1 << 20;

/// Queues that no worker serves.
#[derive(Default)]
struct FakeQueues {
    running: Vec<Start>,
    stops: usize,
    suspends: usize,
    calls: usize,
    /// Simulates a disk that does not answer.
    stuck: bool,
    lefts: usize,
    stays: usize,
    syncs: usize,
    refuses: bool,
    /// The queues that were started (true) and stopped (false), in order.
    order: Vec<(bool, u16)>,
}

impl Queues for FakeQueues {
    fn start(&mut self, start: Start) -> Result<(), String> {
        if self.refuses {
            return Err("it is another's".to_owned());
        }
        assert!(self.running.iter().all(|other| other.index != start.index), "started twice");
        self.order.push((true, start.index));
        self.running.push(start);
        Ok(())
    }
    fn stop(&mut self, index: u16, suspend: bool) -> Result<u32, String> {
        self.suspends += usize::from(suspend);
        let at = self.running.iter().position(|start| start.index == index).expect("it runs");
        self.stops += 1;
        self.order.push((false, index));
        if self.stuck {
            return Err("the disk does not answer".to_owned());
        }
        let Requests::Virtqueue(queue) = self.running.swap_remove(at).requests else {
            panic!("a session has virtqueues")
        };
        Ok(queue.ring.base())
    }
    fn vm_left(&mut self) {
        assert!(self.running.is_empty());
        self.lefts += 1;
    }
    fn vm_stayed(&mut self) {
        self.stays += 1;
    }
    fn sync(&mut self) -> Result<(), String> {
        self.syncs += 1;
        if self.stuck { Err("the disk has failed".to_owned()) } else { Ok(()) }
    }
    fn set_call(&mut self, _: u16, _: Option<Arc<OwnedFd>>) {
        self.calls += 1;
    }
}

struct Rig {
    session: Session,
    queues: FakeQueues,
    memory: File,
    disk: Arc<Disk>,
}

impl Rig {
    fn new() -> Self {
        let disk = Arc::new(Disk::new(1 << 20, 512, false, "serial"));
        Self::of(Arc::new(Blk::new(disk.clone(), QUEUES, 126, true)), disk)
    }

    fn of(device: Arc<dyn Device>, disk: Arc<Disk>) -> Self {
        let limits = Limits { queue_size: 256, segments: 126, packed: true };
        let memory = tempfile::tempfile_in("/dev/shm").unwrap();
        memory.set_len(LEN).unwrap();
        Self { session: Session::new(device, limits), queues: FakeQueues::default(), memory, disk }
    }

    /// Returns a session with features and memory, in which queue 0 needs only its kick eventfd to start.
    fn prepared() -> Self {
        Self::new().prepare(QUEUES)
    }

    /// Returns a session of a SCSI target with the control queue, the event queue and two command queues.
    fn target() -> Self {
        let disk = Arc::new(Disk::new(1 << 20, 512, false, "serial"));
        Self::of(Arc::new(Scsi::new([(disk.clone(), true)], 2, 126)), disk).prepare(4)
    }

    fn prepare(mut self, queues: u16) -> Self {
        let rig = &mut self;
        rig.negotiate(virtio::VERSION_1 | connection::PROTOCOL_FEATURES);
        rig.table(&[(GUEST, LEN, USER, 0)]).unwrap();
        for index in 0..u32::from(queues) {
            rig.state(Request::SET_VRING_NUM, index, 128).unwrap();
            rig.state(Request::SET_VRING_BASE, index, 0).unwrap();
            rig.addresses(index, USER + 0x10000 * u64::from(index)).unwrap();
            rig.state(Request::SET_VRING_ENABLE, index, 1).unwrap();
        }
        self
    }

    fn negotiate(&mut self, features: u64) {
        let all = Session::PROTOCOL;
        self.say(Request::SET_PROTOCOL_FEATURES, &all.to_le_bytes(), vec![]).unwrap();
        self.say(Request::SET_FEATURES, &features.to_le_bytes(), vec![]).unwrap();
    }

    fn say(&mut self, request: Request, body: &[u8], fds: Vec<OwnedFd>) -> Result<Outcome, Gone> {
        let message = Message { request, need_reply: true, body: body.to_vec(), fds };
        self.session.handle(message, &mut self.queues)
    }

    fn state(&mut self, request: Request, index: u32, value: u32) -> Result<Outcome, Gone> {
        self.say(request, VringState { index, value }.as_bytes(), vec![])
    }

    fn addresses(&mut self, index: u32, at: u64) -> Result<Outcome, Gone> {
        let (descriptors, available, used) = (at, at + 0x4000, at + 0x8000);
        let address = VringAddress { index, flags: 0, descriptors, used, available, log: 0 };
        self.say(Request::SET_VRING_ADDR, address.as_bytes(), vec![])
    }

    fn table(&mut self, regions: &[(u64, u64, u64, u64)]) -> Result<Outcome, Gone> {
        let mut body = (regions.len() as u64).to_le_bytes().to_vec();
        let mut fds = Vec::new();
        for &(guest, size, user, offset) in regions {
            body.extend(MemoryRegion { guest, size, user, offset }.as_bytes());
            fds.push(self.memory.try_clone().unwrap().into());
        }
        self.say(Request::SET_MEM_TABLE, &body, fds)
    }

    fn kick(&mut self, index: u64) -> Result<Outcome, Gone> {
        self.say(Request::SET_VRING_KICK, &index.to_le_bytes(), vec![bell()])
    }

    fn turn_cache(&mut self, on: bool) {
        let write = [ConfigHeader { offset: 32, size: 1, flags: 0 }.as_bytes(), &[u8::from(on)]].concat();
        assert_eq!(value(self.say(Request::SET_CONFIG, &write, vec![])), 0);
        assert_eq!(self.disk.write_back(), on);
    }

    fn new_inflight(&mut self) -> (Vec<u8>, OwnedFd) {
        let area = InflightArea { size: 0, offset: 0, queues: QUEUES, queue_size: 128, padding: 0 };
        match self.say(Request::GET_INFLIGHT_FD, area.as_bytes(), vec![]).unwrap() {
            Outcome::Reply(body, Some(file)) => (body, file),
            other => panic!("{other:?}"),
        }
    }

    fn runs(&self) -> Vec<u16> {
        let mut all: Vec<_> = self.queues.running.iter().map(|start| start.index).collect();
        all.sort_unstable();
        all
    }
}

fn bell() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap()
}

fn value(outcome: Result<Outcome, Gone>) -> u64 {
    match outcome.unwrap() {
        Outcome::Reply(body, _) => u64::from_le_bytes(body[..8].try_into().unwrap()),
        other => panic!("{other:?}"),
    }
}

fn refused(outcome: Result<Outcome, Gone>) -> String {
    match outcome {
        Err(Gone::Refused(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_queue_runs_when_it_is_complete_and_until_its_base_is_asked_for() {
    let mut rig = Rig::prepared();
    assert!(rig.runs().is_empty());
    rig.kick(1).unwrap();
    assert_eq!(rig.runs(), [1]);
    rig.kick(0).unwrap();
    assert_eq!(rig.runs(), [0, 1]);
    rig.state(Request::SET_VRING_ENABLE, 1, 0).unwrap();
    assert_eq!(rig.runs(), [0]);
    rig.state(Request::SET_VRING_ENABLE, 1, 1).unwrap();
    assert_eq!(rig.runs(), [0, 1]);
    assert_eq!(value(rig.state(Request::GET_VRING_BASE, 0, 0)), 0);
    // A stopped queue that is enabled again does not run: it has no kick eventfd.
    rig.state(Request::SET_VRING_ENABLE, 0, 0).unwrap();
    rig.state(Request::SET_VRING_ENABLE, 0, 1).unwrap();
    assert_eq!(rig.runs(), [1]);
    rig.say(Request::RESET_DEVICE, &[], vec![]).unwrap();
    assert!(rig.runs().is_empty());
}

#[test]
fn a_running_queue_takes_changes_and_goes_on_where_it_stood() {
    let mut rig = Rig::prepared();
    rig.state(Request::SET_VRING_BASE, 0, 77).unwrap();
    rig.kick(0).unwrap();
    let stops = rig.queues.stops;
    rig.table(&[(GUEST, LEN, USER, 0)]).unwrap();
    assert_eq!((rig.runs(), rig.queues.stops), (vec![0], stops + 1));
    // The session ignores the base, because it knows the queue's position itself.
    rig.state(Request::SET_VRING_BASE, 0, 5).unwrap();
    rig.say(Request::SET_VRING_CALL, &0u64.to_le_bytes(), vec![bell()]).unwrap();
    assert_eq!(rig.queues.calls, 1);
    assert_eq!(value(rig.state(Request::GET_VRING_BASE, 0, 0)), 77 << 32);
}

/// A request to abort arrives in the control queue. The volume must see it only after all commands that were submitted
/// before it.
#[test]
fn the_control_queue_runs_only_with_all_that_ran_before() {
    const CONTROL: u16 = 0;
    let plain = virtio::VERSION_1 | connection::PROTOCOL_FEATURES;
    let mut rig = Rig::target();
    // At first it is not known which queues the driver will use, so each one starts at once.
    (0..4).for_each(|index| drop(rig.kick(index).unwrap()));
    assert_eq!(rig.runs(), [0, 1, 2, 3]);
    // Changes of one queue, and changes that affect all queues.
    for change in [
        |rig: &mut Rig| rig.kick(3),
        |rig: &mut Rig| rig.addresses(3, USER + 0x30000),
        |rig: &mut Rig| rig.table(&[(GUEST, LEN, USER, 0)]),
    ] {
        rig.queues.order.clear();
        change(&mut rig).unwrap();
        let order = &rig.queues.order;
        assert_eq!(
            (order.first(), order.last()),
            (Some(&(false, CONTROL)), Some(&(true, CONTROL))),
            "{order:?}"
        );
        assert!(order.contains(&(false, 3)) && order.contains(&(true, 3)), "{order:?}");
        assert_eq!(rig.runs(), [0, 1, 2, 3]);
    }
    // The VM is stopped and resumed.
    (0..4).for_each(|index| drop(rig.state(Request::GET_VRING_BASE, index, 0).unwrap()));
    rig.kick(0).unwrap();
    rig.kick(2).unwrap();
    rig.kick(1).unwrap();
    assert_eq!(rig.runs(), [1, 2]);
    rig.kick(3).unwrap();
    assert_eq!(rig.runs(), [0, 1, 2, 3]);
    // A queue that is disabled keeps the control queue from running until it is enabled again, or until a new driver,
    // which may use fewer queues, takes over.
    rig.state(Request::SET_VRING_ENABLE, 3, 0).unwrap();
    assert_eq!(rig.runs(), [1, 2]);
    rig.state(Request::SET_VRING_ENABLE, 3, 1).unwrap();
    assert_eq!(rig.runs(), [0, 1, 2, 3]);
    rig.state(Request::GET_VRING_BASE, 3, 0).unwrap();
    rig.negotiate(plain);
    assert_eq!(rig.runs(), [1, 2]);
    rig.negotiate(plain | virtio::EVENT_IDX);
    assert_eq!(rig.runs(), [0, 1, 2]);
}

#[test]
fn without_protocol_features_queues_are_enabled_from_the_beginning() {
    let mut rig = Rig::new();
    rig.say(Request::SET_FEATURES, &virtio::VERSION_1.to_le_bytes(), vec![]).unwrap();
    rig.table(&[(GUEST, LEN, USER, 0)]).unwrap();
    rig.state(Request::SET_VRING_NUM, 0, 128).unwrap();
    rig.addresses(0, USER).unwrap();
    rig.say(Request::SET_VRING_KICK, &VRING_NO_FD.to_le_bytes(), vec![]).unwrap();
    assert_eq!(rig.runs(), [0]);
    assert!(rig.queues.running[0].kicks.is_empty(), "to be polled");
}

#[test]
fn a_vm_has_left_when_all_queues_have_stopped_under_the_log() {
    let mut rig = Rig::prepared();
    let plain = virtio::VERSION_1 | connection::PROTOCOL_FEATURES;
    let stop = |rig: &mut Rig, index| rig.state(Request::GET_VRING_BASE, index, 0).unwrap();
    let start = |rig: &mut Rig| (0..2).for_each(|index| drop(rig.kick(index).unwrap()));
    // Pausing the VM or resetting the device does not count as leaving.
    start(&mut rig);
    (0..2).for_each(|index| drop(stop(&mut rig, index)));
    assert_eq!(rig.queues.lefts, 0);
    // Queues that stop and start because of a change do not count.
    start(&mut rig);
    rig.negotiate(plain | connection::LOG_ALL);
    rig.table(&[(GUEST, LEN, USER, 0)]).unwrap();
    assert_eq!((rig.runs(), rig.queues.lefts), (vec![0, 1], 0));
    stop(&mut rig, 0);
    assert_eq!(rig.queues.lefts, 0);
    stop(&mut rig, 1);
    assert_eq!(rig.queues.lefts, 1);
    // The VM continues here after all, unless another process has locked the image.
    rig.kick(1).unwrap();
    assert_eq!(rig.runs(), [1]);
    rig.queues.refuses = true;
    assert_eq!(refused(rig.kick(0)), "it is another's");
}

#[test]
fn a_vm_that_reboots_while_it_migrates_has_not_left() {
    let mut rig = Rig::prepared();
    let logged = virtio::VERSION_1 | connection::PROTOCOL_FEATURES | connection::LOG_ALL;
    let reset = |rig: &mut Rig| drop(rig.say(Request::RESET_DEVICE, &[], vec![]).unwrap());
    rig.negotiate(logged);
    rig.kick(0).unwrap();
    rig.state(Request::GET_VRING_BASE, 0, 0).unwrap();
    assert_eq!((rig.queues.lefts, rig.queues.stays), (1, 0));
    reset(&mut rig);
    assert_eq!(rig.queues.stays, 1);
    reset(&mut rig);
    assert_eq!(rig.queues.stays, 1, "once is enough");
    // If a migration is cancelled, the queue runs here again, which the session knows already.
    let mut rig = Rig::prepared();
    rig.negotiate(logged);
    rig.kick(0).unwrap();
    rig.state(Request::GET_VRING_BASE, 0, 0).unwrap();
    rig.kick(0).unwrap();
    reset(&mut rig);
    assert_eq!((rig.queues.lefts, rig.queues.stays), (1, 0));
}

#[test]
fn a_cache_that_is_turned_off_is_emptied() {
    let mut rig = Rig::new();
    rig.negotiate(LINUX);
    rig.turn_cache(true);
    assert_eq!(rig.queues.syncs, 0, "it was on");
    rig.turn_cache(false);
    assert_eq!(rig.queues.syncs, 1);
    rig.turn_cache(false);
    rig.turn_cache(true);
    assert_eq!(rig.queues.syncs, 1, "there was nothing in it");
    rig.queues.stuck = true;
    let write = [ConfigHeader { offset: 32, size: 1, flags: 0 }.as_bytes(), &[0]].concat();
    assert_eq!(value(rig.say(Request::SET_CONFIG, &write, vec![])), 1, "the driver is told");
    assert!(!rig.disk.is_cache_on(), "no write waits in it from now on");
}

#[test]
fn memory_comes_and_goes_piece_by_piece() {
    let mut rig = Rig::prepared();
    rig.kick(0).unwrap();
    let region = MemoryRegion { guest: GUEST + LEN, size: 0x1000, user: USER + LEN, offset: 0 };
    let body = [&[0; 8], region.as_bytes()].concat();
    let fd = || vec![OwnedFd::from(File::options().read(true).write(true).open("/dev/zero").unwrap())];
    assert!(refused(rig.say(Request::ADD_MEM_REG, &body, fd())).contains("share=on"));
    let mut rig = Rig::prepared();
    rig.kick(0).unwrap();
    let file = rig.memory.try_clone().unwrap().into();
    rig.say(Request::ADD_MEM_REG, &body, vec![file]).unwrap();
    assert_eq!(rig.queues.running[0].memory.regions().len(), 2);
    rig.say(Request::REM_MEM_REG, &body, vec![]).unwrap();
    assert_eq!(rig.queues.running[0].memory.regions().len(), 1);
    assert!(refused(rig.say(Request::REM_MEM_REG, &body, vec![])).contains("not there"));
}

#[test]
fn memory_that_is_taken_away_is_noticed() {
    let mut rig = Rig::prepared();
    rig.kick(0).unwrap();
    rig.memory.set_len(0).unwrap();
    assert!(!rig.session.is_broken());
    rig.queues.running[0].memory.regions()[0].memory.load_relaxed_u32(0);
    assert!(rig.session.is_broken());
}

#[test]
fn the_configuration_is_read_and_partly_written() {
    let mut rig = Rig::new();
    let ask = |offset, size: u32| {
        [ConfigHeader { offset, size, flags: 0 }.as_bytes(), &vec![0; size as usize]].concat()
    };
    match rig.say(Request::GET_CONFIG, &ask(0, 64), vec![]).unwrap() {
        Outcome::Reply(body, None) => {
            assert_eq!(body.len(), 12 + 64);
            assert_eq!(u64::from_le_bytes(body[12..20].try_into().unwrap()), (1 << 20) / 512);
        }
        other => panic!("{other:?}"),
    }
    refused(rig.say(Request::GET_CONFIG, &ask(200, 100), vec![]));
    rig.negotiate(virtio::VERSION_1 | blk::FLUSH | blk::CONFIG_WCE);
    let write = |offset, byte| [ConfigHeader { offset, size: 1, flags: 1 }.as_bytes(), &[byte]].concat();
    assert_eq!(value(rig.say(Request::SET_CONFIG, &write(32, 0), vec![])), 0);
    assert_eq!(
        value(rig.say(Request::SET_CONFIG, &write(0, 9), vec![])),
        1,
        "not done, and that ends nothing"
    );
}

#[test]
fn an_inflight_region_is_made_and_taken_back() {
    let mut rig = Rig::prepared();
    let area = InflightArea { size: 0, offset: 0, queues: QUEUES, queue_size: 128, padding: 0 };
    let (body, file) = rig.new_inflight();
    rig.say(Request::SET_INFLIGHT_FD, &body, vec![file.try_clone().unwrap()]).unwrap();
    rig.kick(0).unwrap();
    assert_eq!(rig.runs(), [0]);
    // A region that is too small for its declared number and size of queues.
    let small = InflightArea { size: 64, ..area };
    let outcome = rig.say(Request::SET_INFLIGHT_FD, &small.as_bytes()[..20], vec![file]);
    assert!(refused(outcome).contains("in-flight"));
    let area = InflightArea { queues: QUEUES + 1, ..area };
    refused(rig.say(Request::GET_INFLIGHT_FD, area.as_bytes(), vec![]));
}

#[test]
fn a_queue_is_only_suspended_where_there_is_a_place_for_what_is_left() {
    let mut rig = Rig::prepared();
    let stop = |rig: &mut Rig| {
        rig.kick(0).unwrap();
        rig.state(Request::GET_VRING_BASE, 0, 0).unwrap();
        std::mem::take(&mut rig.queues.suspends)
    };
    assert_eq!(stop(&mut rig), 0, "no region");
    let (body, file) = rig.new_inflight();
    rig.say(Request::SET_INFLIGHT_FD, &body, vec![file]).unwrap();
    assert_eq!(stop(&mut rig), 1);
    // A queue that a change stops and starts again at once, with the same region.
    rig.kick(0).unwrap();
    rig.table(&[(GUEST, LEN, USER, 0)]).unwrap();
    assert_eq!(std::mem::take(&mut rig.queues.suspends), 1);
    // With another region, nothing would be known about the requests that are left.
    let (body, file) = rig.new_inflight();
    rig.say(Request::SET_INFLIGHT_FD, &body, vec![file]).unwrap();
    rig.session.stop_all(&mut rig.queues).unwrap();
    assert_eq!(rig.queues.suspends, 0);
    // QEMU disables a queue before it stops it.
    let disable = |rig: &mut Rig| {
        rig.kick(0).unwrap();
        rig.state(Request::SET_VRING_ENABLE, 0, 0).unwrap();
        rig.state(Request::SET_VRING_ENABLE, 0, 1).unwrap();
        std::mem::take(&mut rig.queues.suspends)
    };
    assert_eq!(disable(&mut rig), 1);
    let without = Session::PROTOCOL & !protocol::GET_VRING_BASE_INFLIGHT;
    rig.say(Request::SET_PROTOCOL_FEATURES, &without.to_le_bytes(), vec![]).unwrap();
    assert_eq!(stop(&mut rig), 0, "not agreed on");
    assert_eq!(disable(&mut rig), 0, "not agreed on");
}

const LINUX: u64 = virtio::VERSION_1 | connection::PROTOCOL_FEATURES | blk::FLUSH | blk::CONFIG_WCE;

#[test]
fn a_driver_has_its_cache_whoever_was_there_before() {
    let mut rig = Rig::new();
    assert!(!rig.disk.write_back(), "nobody has said that he flushes");
    let firmware = virtio::VERSION_1 | blk::BLK_SIZE;
    rig.negotiate(firmware);
    assert!(!rig.disk.write_back(), "it cannot flush");
    // Front ends read the configuration once, and show the same copy to every driver.
    assert!(rig.disk.is_cache_on());
    rig.negotiate(LINUX);
    assert!(rig.disk.write_back());
    rig.turn_cache(false);
    rig.negotiate(LINUX | connection::LOG_ALL);
    rig.negotiate(firmware);
    rig.negotiate(LINUX);
    assert!(!rig.disk.write_back(), "the next driver reads that it is off, and does not flush");
    rig.turn_cache(true);
    // The next front end reads it again.
    rig.turn_cache(false);
    Session::new(rig.session.device.clone(), rig.session.limits);
    assert!(rig.disk.is_cache_on());
}

#[test]
fn a_cache_of_a_scsi_disk_is_on_for_each_driver_and_stays_off_while_pages_are_logged() {
    use crate::device::scsi::Scsi;
    let disk = Arc::new(Disk::new(1 << 20, 512, false, "serial"));
    let device = Arc::new(Scsi::new([(disk.clone(), true)], QUEUES, 126));
    let mut rig = Rig::new();
    rig.session = Session::new(device, rig.session.limits);
    let driver = virtio::VERSION_1 | connection::PROTOCOL_FEATURES;
    rig.negotiate(driver);
    disk.turn_cache(false);
    rig.negotiate(driver);
    rig.negotiate(driver | connection::LOG_ALL);
    assert!(!disk.write_back());
    rig.say(Request::RESET_DEVICE, &[], vec![]).unwrap();
    assert!(disk.write_back());
}

#[test]
fn a_cache_that_was_turned_off_stays_off_over_a_restart_of_the_volume() {
    let mut first = Rig::new();
    first.negotiate(LINUX);
    let (body, file) = first.new_inflight();
    let file = || vec![file.try_clone().unwrap()];
    first.say(Request::SET_INFLIGHT_FD, &body, file()).unwrap();
    first.turn_cache(false);
    // QEMU does this when it connects to the next process of the volume.
    let mut second = Rig::new();
    second.negotiate(LINUX);
    second.say(Request::SET_INFLIGHT_FD, &body, file()).unwrap();
    second.negotiate(LINUX);
    assert!(!second.disk.write_back());
    // A region from a different server, which has no field for the state of the cache.
    let mut third = Rig::new();
    third.negotiate(LINUX);
    let mut area = InflightArea::read_from_bytes(&body).unwrap();
    area.size -= Disk::NOTE as u64;
    third.say(Request::SET_INFLIGHT_FD, area.as_bytes(), file()).unwrap();
    assert!(third.disk.write_back());
    third.turn_cache(false);
}

#[test]
fn a_queue_that_does_not_end_still_runs() {
    let mut rig = Rig::prepared();
    rig.kick(0).unwrap();
    rig.queues.stuck = true;
    // QEMU asks for the base when it pauses a guest. The session ends then.
    assert!(refused(rig.state(Request::GET_VRING_BASE, 0, 0)).contains("does not answer"));
    assert!(rig.session.stop_all(&mut rig.queues).is_err(), "it is taken to be free");
    rig.queues.stuck = false;
    rig.session.stop_all(&mut rig.queues).unwrap();
    assert_eq!((rig.runs().len(), rig.queues.stops), (0, 3));
}

#[test]
fn an_invalid_message_ends_the_session_with_an_error() {
    type Lie = fn(&mut Rig) -> Result<Outcome, Gone>;
    let lies: [(&str, Lie); 16] = [
        ("not one that this volume knows", |rig| rig.say(Request(99), &[], vec![])),
        ("wrong size", |rig| rig.say(Request::SET_FEATURES, &[0; 4], vec![])),
        ("not offered", |rig| rig.say(Request::SET_FEATURES, &u64::MAX.to_le_bytes(), vec![])),
        ("not offered", |rig| rig.say(Request::SET_PROTOCOL_FEATURES, &u64::MAX.to_le_bytes(), vec![])),
        ("queue 2", |rig| rig.state(Request::SET_VRING_NUM, 2, 128)),
        ("queue 255", |rig| rig.kick(255)),
        ("0 descriptors", |rig| rig.state(Request::SET_VRING_NUM, 0, 0)),
        ("queue-size", |rig| rig.state(Request::SET_VRING_NUM, 0, 512)),
        ("neither", |rig| rig.state(Request::SET_VRING_ENABLE, 0, 2)),
        ("descriptors, not one", |rig| rig.say(Request::SET_VRING_KICK, &[0; 8], vec![])),
        ("for each region", |rig| rig.say(Request::SET_MEM_TABLE, &1u64.to_le_bytes(), vec![])),
        ("not inside its file", |rig| rig.table(&[(GUEST, 2 * LEN, USER, 0)])),
        ("overlap", |rig| rig.table(&[(GUEST, LEN, USER, 0), (GUEST + 4096, 4096, USER + LEN, 0)])),
        ("not in the memory", |rig| {
            rig.addresses(0, USER + LEN - 16)?;
            rig.kick(0)
        }),
        ("powers of two", |rig| {
            rig.state(Request::SET_VRING_NUM, 0, 100)?;
            rig.kick(0)
        }),
        ("not inside its file", |rig| {
            let log = LogArea { size: LEN, offset: LEN };
            let file = rig.memory.try_clone().unwrap().into();
            rig.say(Request::SET_LOG_BASE, log.as_bytes(), vec![file])
        }),
    ];
    for (n, (part, lie)) in lies.into_iter().enumerate() {
        let mut rig = Rig::prepared();
        let why = refused(lie(&mut rig));
        assert!(why.contains(part), "lie {n}: {why}");
        rig.session.stop_all(&mut rig.queues).unwrap();
        assert!(rig.runs().is_empty());
    }
}
