//! A front end for tests that sends any message, valid or not.
#![allow(dead_code)] // Each test program uses only a part of this module.

use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use ginnel_guest_memory::{Area, GuestMemory, Region};
use ginnel_layout::vhost_user::{
    Header, InflightArea, MemoryRegion, Request, VringAddress, VringState, feature, protocol,
};
use ginnel_layout::virtio::feature as virtio;
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use ginnel_virtqueue::{
    DeviceQueue, DriverQueue, DriverSetup, IndirectTables, InflightQueue, Kind, Segment, Setup,
};
use kit::wait::WATCHDOG;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of memory, and its address for the guest and for the front end.
pub const MEMORY: u64 = 64 << 10;
pub const GUEST: u64 = 0x1_0000;
pub const USER: u64 = 0x7000_0000;
/// Number of descriptors in a queue.
pub const SIZE: u32 = 16;

/// The connection of a front end that sends any message, valid or not.
pub struct Front(pub UnixStream);

impl Front {
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        stream.set_write_timeout(Some(WATCHDOG)).unwrap();
        Self(stream)
    }

    /// Writes these bytes to the socket. Ignores errors: the volume may have closed the connection.
    pub fn raw(&self, bytes: &[u8]) {
        let _ = (&self.0).write_all(bytes);
    }

    pub fn say(&self, request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) {
        let header = Header { request: request.0, flags: Header::VERSION, size: body.len() as u32 };
        self.send(&[header.as_bytes(), body].concat(), fds);
    }

    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let _ = fdpass::send(self.0.as_fd(), bytes, fds, SendFlags::empty());
    }

    /// Waits until the volume has handled all messages so far. Returns whether the volume still serves the connection;
    /// false means that it has closed it.
    pub fn is_served(&self) -> bool {
        self.say(Request::GET_FEATURES, &[], &[]);
        let mut answer = [0; 20];
        match (&self.0).read_exact(&mut answer) {
            Ok(()) => true,
            Err(error) => {
                assert!(error.kind() != std::io::ErrorKind::WouldBlock, "the volume hangs");
                false
            }
        }
    }

    /// Sets up a whole device with one running queue in this memory.
    pub fn set_up(&self, memory: &OwnedFd, kick: BorrowedFd<'_>, call: BorrowedFd<'_>, packed: bool) {
        self.agree(packed);
        self.share(memory, MEMORY);
        let (descriptors, available, used) = (USER, USER + 0x400, USER + 0x800);
        self.queue(descriptors, available, used);
        self.say(Request::SET_VRING_CALL, 0u64.as_bytes(), &[call]);
        self.say(Request::SET_VRING_KICK, 0u64.as_bytes(), &[kick]);
        self.enable();
    }

    pub fn agree(&self, packed: bool) {
        self.agree_on(packed, 0);
    }

    /// Like [`Front::agree`], with more protocol features.
    pub fn agree_on(&self, packed: bool, more: u64) {
        let agreed = protocol::CONFIG | protocol::INFLIGHT_SHMFD | protocol::MQ | more;
        self.say(Request::SET_PROTOCOL_FEATURES, agreed.as_bytes(), &[]);
        self.agree_on_features(packed, 0);
    }

    /// Acknowledges the feature bits that all tests use, and these in addition.
    pub fn agree_on_features(&self, packed: bool, more: u64) {
        let packed = if packed { virtio::RING_PACKED } else { 0 };
        let features = virtio::VERSION_1 | virtio::INDIRECT_DESC | feature::PROTOCOL_FEATURES | packed | more;
        self.say(Request::SET_FEATURES, features.as_bytes(), &[]);
    }

    pub fn share(&self, memory: impl AsFd, size: u64) {
        let region = MemoryRegion { guest: GUEST, size, user: USER, offset: 0 };
        let table = [&[1, 0, 0, 0, 0, 0, 0, 0], region.as_bytes()].concat();
        self.say(Request::SET_MEM_TABLE, &table, &[memory.as_fd()]);
    }

    pub fn queue(&self, descriptors: u64, available: u64, used: u64) {
        let state = VringState { index: 0, value: SIZE };
        self.say(Request::SET_VRING_NUM, state.as_bytes(), &[]);
        let address = VringAddress { index: 0, flags: 0, descriptors, used, available, log: 0 };
        self.say(Request::SET_VRING_ADDR, address.as_bytes(), &[]);
    }

    /// Asks for a new in-flight region (GET_INFLIGHT_FD). Returns its description and its memory.
    pub fn new_inflight_region(&self, area: InflightArea) -> (InflightArea, OwnedFd) {
        self.say(Request::GET_INFLIGHT_FD, area.as_bytes(), &[]);
        let mut answer = [0; size_of::<Header>() + size_of::<InflightArea>()];
        let mut got = fdpass::receive(self.0.as_fd(), &mut answer, 1, RecvFlags::WAITALL).unwrap();
        assert_eq!((got.len, got.fds.len()), (answer.len(), 1));
        let area = InflightArea::read_from_bytes(&answer[size_of::<Header>()..]).unwrap();
        (area, got.fds.remove(0))
    }

    pub fn enable(&self) {
        self.enable_queue(0, true);
    }

    pub fn enable_queue(&self, index: u32, on: bool) {
        self.say(Request::SET_VRING_ENABLE, VringState { index, value: on.into() }.as_bytes(), &[]);
    }

    pub fn stop(&self) {
        self.stop_queue(0);
    }

    /// Stops a queue and returns its base. Panics if the volume closes the connection.
    pub fn stop_queue(&self, index: u32) -> u32 {
        self.ask_to_stop(index);
        self.base()
    }

    /// Sends GET_VRING_BASE, and does not wait for the answer.
    pub fn ask_to_stop(&self, index: u32) {
        self.say(Request::GET_VRING_BASE, VringState { index, value: 0 }.as_bytes(), &[]);
    }

    /// Waits for the answer to [`Front::ask_to_stop`].
    pub fn base(&self) -> u32 {
        let mut answer = [0; 20];
        let _ = (&self.0).read_exact(&mut answer);
        u32::from_le_bytes([answer[16], answer[17], answer[18], answer[19]])
    }
}

pub fn memory() -> OwnedFd {
    let file = memfd_create("hostile", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, MEMORY).unwrap();
    file
}

pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

/// Number of descriptors of a queue of [`Guest`], and of an indirect table.
const QUEUE_SIZE: u16 = 256;
const TABLE: u16 = 128;
/// Bytes of a guest's memory for each queue: its rings, its tables, and then 256 KiB that the driver uses for requests.
const QUEUE: usize = 1 << 20;
const OWN: usize = QUEUE - (256 << 10);

/// Returns a function that makes areas, by offset and length, in the memory of this queue.
fn area(memory: &Mapping, queue: usize) -> impl Fn(usize, usize) -> Area<Mapping> {
    let at = QUEUE * queue;
    move |from, len| Area { memory: memory.clone(), at: at + from, len, guest: GUEST + (at + from) as u64 }
}
/// The driver writes this value to where the device will write its status.
const NO_ANSWER: u8 = 0xff;
/// Size of the data area that all queues share, in bytes.
pub const DATA: usize = (4 << 20) + 4096;

/// A guest behind such a front end. Its rings are valid, but its driver can make any request.
pub struct Guest {
    pub front: Front,
    pub memory: Mapping,
    pub queues: Vec<DriverQueue<Mapping>>,
    file: OwnedFd,
    kind: Kind,
    kicks: Vec<OwnedFd>,
    /// The in-flight region, if the front end has asked for one.
    inflight: Option<(InflightArea, OwnedFd)>,
}

impl Guest {
    /// Connects, and starts this number of split queues.
    pub fn connect(socket: &Path, queues: usize) -> Self {
        Self::connect_with(socket, queues, Kind::Split)
    }

    /// Connects, and starts this number of queues of this kind.
    pub fn connect_with(socket: &Path, queues: usize, kind: Kind) -> Self {
        let mut guest = Self::connect_without_queues(socket, queues, kind, 0);
        (0..queues).for_each(|queue| guest.run(queue, None));
        guest
    }

    /// Connects with this number of queues, none of which runs yet, and with these protocol features in addition to the
    /// usual ones.
    pub fn connect_without_queues(socket: &Path, queues: usize, kind: Kind, protocol: u64) -> Self {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        let len = queues * QUEUE + DATA;
        ftruncate(&file, len as u64).unwrap();
        let memory = Mapping::of_file(&file, 0, len, Protection::ReadWrite).unwrap();
        let mut drivers = Vec::new();
        for index in 0..queues {
            let area = area(&memory, index);
            let tables = IndirectTables::new(area(0x10000, OWN - 0x10000), QUEUE_SIZE, TABLE);
            let (size, event_idx) = (QUEUE_SIZE, false);
            let (descriptors, driver, device) = (area(0, 0x1000), area(0x1000, 0x1000), area(0x2000, 0x1000));
            let setup = DriverSetup { kind, size, descriptors, driver, device, event_idx, tables };
            drivers.push(DriverQueue::new(setup).unwrap());
        }
        let kicks = (0..queues).map(|_| event()).collect();
        let front = Front::connect(socket);
        let guest = Self { front, memory, queues: drivers, file, kind, kicks, inflight: None };
        guest.agree(protocol);
        guest
    }

    fn agree(&self, protocol: u64) {
        self.front.agree_on(self.kind == Kind::Packed, protocol);
        self.front.share(&self.file, self.memory.len() as u64);
    }

    /// Moves to another volume. No queue runs there yet; the front end hands the in-flight region over. Returns the
    /// connection to the previous volume.
    pub fn move_to(&mut self, socket: &Path, protocol: u64) -> Front {
        let before = std::mem::replace(&mut self.front, Front::connect(socket));
        self.agree(protocol);
        self.share_inflight_region();
        before
    }

    /// Begins a migration of the VM as QEMU does: written pages are logged, the queue is disabled, and the front end
    /// asks for its base.
    pub fn begin_to_leave(&self, queue: usize) {
        self.front.agree_on_features(self.kind == Kind::Packed, feature::LOG_ALL);
        self.front.enable_queue(queue as u32, false);
        self.front.ask_to_stop(queue as u32);
    }

    /// Asks for an in-flight region, and shares it with the volume.
    pub fn open_inflight_region(&mut self) {
        let queues = self.queues.len() as u16;
        let area = InflightArea { size: 0, offset: 0, queues, queue_size: QUEUE_SIZE, padding: 0 };
        self.inflight = Some(self.front.new_inflight_region(area));
        self.share_inflight_region();
    }

    fn share_inflight_region(&self) {
        if let Some((area, file)) = &self.inflight {
            self.front.say(Request::SET_INFLIGHT_FD, area.as_bytes(), &[file.as_fd()]);
        }
    }

    /// Returns the device's side of a queue and the guest's memory. The test then plays the part of a volume, while no
    /// real one runs the queue.
    pub fn device(&self, queue: usize) -> (DeviceQueue<Mapping>, GuestMemory<Mapping>) {
        let area = area(&self.memory, queue);
        let inflight = self.inflight.as_ref().map(|(what, file)| {
            let region = Mapping::of_file(file, 0, what.size as usize, Protection::ReadWrite).unwrap();
            InflightQueue::new(region, 0, queue as u16, self.kind, QUEUE_SIZE).unwrap()
        });
        let device = DeviceQueue::new(Setup {
            kind: self.kind,
            size: QUEUE_SIZE,
            descriptors: area(0, 0x1000),
            driver: area(0x1000, 0x1000),
            device: area(0x2000, 0x1000),
            event_idx: false,
            base: if self.kind == Kind::Packed { 0x8000_8000 } else { 0 },
            inflight,
            max_segments: 128,
        });
        let regions = vec![Region { guest: GUEST, user: USER, memory: self.memory.clone() }];
        (device.unwrap(), GuestMemory::new(regions).unwrap())
    }

    /// Starts a queue, at its beginning or at this base.
    pub fn run(&mut self, queue: usize, base: Option<u32>) {
        self.set_up(queue, base);
        self.begin(queue);
        assert!(self.front.is_served());
    }

    /// Sends everything that a queue needs, except for the messages that start it.
    pub fn set_up(&self, queue: usize, base: Option<u32>) {
        let (front, number, user) = (&self.front, queue as u32, USER + (QUEUE * queue) as u64);
        let state = |value| VringState { index: number, value };
        front.say(Request::SET_VRING_NUM, state(QUEUE_SIZE.into()).as_bytes(), &[]);
        if let Some(base) = base {
            front.say(Request::SET_VRING_BASE, state(base).as_bytes(), &[]);
        }
        let (descriptors, available, used) = (user, user + 0x1000, user + 0x2000);
        let address = VringAddress { index: number, flags: 0, descriptors, used, available, log: 0 };
        front.say(Request::SET_VRING_ADDR, address.as_bytes(), &[]);
        front.say(Request::SET_VRING_CALL, u64::from(number).as_bytes(), &[event().as_fd()]);
    }

    /// Starts a queue that has been set up.
    pub fn begin(&self, queue: usize) {
        self.change(queue);
        self.front.enable_queue(queue as u32, true);
    }

    /// Returns the guest physical address of the data area that all queues share.
    pub fn data(&self) -> u64 {
        GUEST + (QUEUE * self.queues.len()) as u64
    }

    /// Adds a request that consists of `head`, which the device reads, `data`, and `room` bytes that the device writes;
    /// these come before or after the data. `n` is the slot in the queue's own memory that holds the request.
    pub fn add(
        &mut self,
        queue: usize,
        n: usize,
        head: &[u8],
        data: &[Segment],
        room: u32,
        room_first: bool,
    ) -> u16 {
        let at = QUEUE * queue + OWN + 512 * n;
        self.memory.write(at, head);
        // A value that is not a status, so that the test sees whether the device has written one.
        self.memory.write(at + 256, &[NO_ANSWER]);
        let address = GUEST + at as u64;
        let head = Segment { address, len: head.len() as u32, writable: false };
        let room = Segment { address: address + 256, len: room, writable: true };
        let segments = match room_first {
            true => [&[head, room], data].concat(),
            false => [&[head], data, &[room]].concat(),
        };
        self.queues[queue].add(&segments, true).unwrap()
    }

    /// Stops a queue and returns its base.
    pub fn stop(&mut self, queue: usize) -> u32 {
        self.front.stop_queue(queue as u32)
    }

    /// Starts a stopped queue where it was stopped.
    pub fn start(&mut self, queue: usize) {
        self.begin(queue);
        assert!(self.front.is_served());
    }

    /// Changes the eventfds of a running queue. Does not wait until the volume has done so.
    pub fn change(&self, queue: usize) {
        self.front.say(Request::SET_VRING_KICK, (queue as u64).as_bytes(), &[self.kicks[queue].as_fd()]);
    }

    /// Returns the first byte of the device's answer to request `n` of a queue.
    pub fn answer(&self, queue: usize, n: usize) -> u8 {
        let mut byte = [0];
        self.memory.read(QUEUE * queue + OWN + 512 * n + 256, &mut byte);
        byte[0]
    }

    /// Publishes the added requests, and notifies the device if it wants that.
    pub fn kick(&mut self, queue: usize) {
        if self.queues[queue].publish() {
            rustix::io::write(&self.kicks[queue], &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Returns a completed request of this queue, if there is one.
    pub fn poll(&mut self, queue: usize) -> Option<u16> {
        self.queues[queue].poll().unwrap().map(|(id, _)| id)
    }

    /// Waits for the next completed request of any queue.
    pub fn wait(&mut self) -> (usize, u16) {
        let until = Instant::now() + WATCHDOG;
        loop {
            for index in 0..self.queues.len() {
                if let Some(id) = self.poll(index) {
                    return (index, id);
                }
            }
            assert!(Instant::now() < until, "nothing comes back");
            std::thread::yield_now();
        }
    }
}
