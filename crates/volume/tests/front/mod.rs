//! A front end that says what it likes, for tests.
#![allow(dead_code)] // Each test program uses its part.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use ginnel_fdpass::{self as fdpass, SendFlags};
use ginnel_layout::vhost_user::{Header, MemoryRegion, Request, VringAddress, VringState, feature, protocol};
use ginnel_layout::virtio::feature as virtio;
use ginnel_shmem::{Mapping, Memory, Protection};
use ginnel_virtqueue::{Area, DriverQueue, DriverSetup, IndirectTables, Kind, Segment};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zerocopy::IntoBytes;

use crate::server::PROMPT;

/// Bytes of memory, and its address for the guest and for the front end.
pub const MEMORY: u64 = 64 << 10;
pub const GUEST: u64 = 0x1_0000;
pub const USER: u64 = 0x7000_0000;
/// Descriptors of a queue.
pub const SIZE: u32 = 16;

/// A front end that says what it likes.
pub struct Front(pub UnixStream);

impl Front {
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PROMPT)).unwrap();
        stream.set_write_timeout(Some(PROMPT)).unwrap();
        Self(stream)
    }

    /// What is not taken, because the volume has hung up, is lost.
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

    /// Waits until the volume has done all that it was told, or has hung up, which it tells.
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

    /// A whole device with one queue that runs, in this memory.
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
        let agreed = protocol::CONFIG | protocol::INFLIGHT_SHMFD | protocol::MQ;
        self.say(Request::SET_PROTOCOL_FEATURES, agreed.as_bytes(), &[]);
        let packed = if packed { virtio::RING_PACKED } else { 0 };
        let features = virtio::VERSION_1 | virtio::INDIRECT_DESC | feature::PROTOCOL_FEATURES | packed;
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

    pub fn enable(&self) {
        self.say(Request::SET_VRING_ENABLE, VringState { index: 0, value: 1 }.as_bytes(), &[]);
    }

    pub fn stop(&self) {
        self.stop_queue(0);
    }

    /// Stops a queue; its base, if the volume does not hang up.
    pub fn stop_queue(&self, index: u32) -> u32 {
        self.say(Request::GET_VRING_BASE, VringState { index, value: 0 }.as_bytes(), &[]);
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

/// Descriptors of a queue of [`Guest`], and of an indirect table.
const QUEUE_SIZE: u16 = 256;
const TABLE: u16 = 128;
/// Bytes of a guest's memory for each queue: its rings, its tables, and then 256 KiB for the driver's own use.
const QUEUE: usize = 1 << 20;
const OWN: usize = QUEUE - (256 << 10);
/// Bytes of data that all queues have in common.
pub const DATA: usize = (4 << 20) + 4096;

/// A guest behind such a front end, whose driver asks for what it likes in rings that are in order.
pub struct Guest {
    pub front: Front,
    pub memory: Mapping,
    pub queues: Vec<DriverQueue<Mapping>>,
    kicks: Vec<OwnedFd>,
}

impl Guest {
    /// With so many queues that run, split ones.
    pub fn connect(socket: &Path, queues: usize) -> Self {
        Self::connect_with(socket, queues, Kind::Split)
    }

    /// With so many queues of this kind that run.
    pub fn connect_with(socket: &Path, queues: usize, kind: Kind) -> Self {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        let len = queues * QUEUE + DATA;
        ftruncate(&file, len as u64).unwrap();
        let memory = Mapping::of_file(&file, 0, len, Protection::ReadWrite).unwrap();
        let front = Front::connect(socket);
        front.agree(kind == Kind::Packed);
        front.share(&file, len as u64);
        let (mut drivers, mut kicks) = (Vec::new(), Vec::new());
        for index in 0..queues {
            let at = QUEUE * index;
            let area = |from, len| Area {
                memory: memory.clone(),
                at: at + from,
                len,
                guest: GUEST + (at + from) as u64,
            };
            let (descriptors, driver, device) = (area(0, 0x1000), area(0x1000, 0x1000), area(0x2000, 0x1000));
            let tables = IndirectTables::new(area(0x10000, OWN - 0x10000), QUEUE_SIZE, TABLE);
            let (size, event_idx) = (QUEUE_SIZE, false);
            let setup = DriverSetup { kind, size, descriptors, driver, device, event_idx, tables };
            drivers.push(DriverQueue::new(setup).unwrap());
            let (number, user) = (index as u32, USER + at as u64);
            let state = |value| VringState { index: number, value };
            front.say(Request::SET_VRING_NUM, state(size.into()).as_bytes(), &[]);
            let (descriptors, available, used) = (user, user + 0x1000, user + 0x2000);
            let address = VringAddress { index: number, flags: 0, descriptors, used, available, log: 0 };
            front.say(Request::SET_VRING_ADDR, address.as_bytes(), &[]);
            let (kick, call) = (event(), event());
            front.say(Request::SET_VRING_CALL, u64::from(number).as_bytes(), &[call.as_fd()]);
            front.say(Request::SET_VRING_KICK, u64::from(number).as_bytes(), &[kick.as_fd()]);
            front.say(Request::SET_VRING_ENABLE, state(1).as_bytes(), &[]);
            kicks.push(kick);
        }
        assert!(front.is_served());
        Self { front, memory, queues: drivers, kicks }
    }

    /// Where the data of all queues begin, as the guest knows it.
    pub fn data(&self) -> u64 {
        GUEST + (QUEUE * self.queues.len()) as u64
    }

    /// Makes a request of `head`, which the device reads, `data`, and `room` bytes that it writes, with the room in front of the
    /// data or behind it. Its memory is number `n` of the queue's own.
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
        let address = GUEST + at as u64;
        let head = Segment { address, len: head.len() as u32, writable: false };
        let room = Segment { address: address + 256, len: room, writable: true };
        let segments = match room_first {
            true => [&[head, room], data].concat(),
            false => [&[head], data, &[room]].concat(),
        };
        self.queues[queue].add(&segments, true).unwrap()
    }

    /// Stops a queue; its base.
    pub fn stop(&mut self, queue: usize) -> u32 {
        self.front.stop_queue(queue as u32)
    }

    /// Starts a queue that was stopped, where it stood.
    pub fn start(&mut self, queue: usize) {
        self.front.say(Request::SET_VRING_KICK, (queue as u64).as_bytes(), &[self.kicks[queue].as_fd()]);
        assert!(self.front.is_served());
    }

    /// Shows the device what was added.
    pub fn kick(&mut self, queue: usize) {
        if self.queues[queue].publish() {
            rustix::io::write(&self.kicks[queue], &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// A request of this queue that has come back, if there is one.
    pub fn poll(&mut self, queue: usize) -> Option<u16> {
        self.queues[queue].poll().unwrap().map(|(id, _)| id)
    }

    /// The next request that comes back, of any queue.
    pub fn wait(&mut self) -> (usize, u16) {
        let until = Instant::now() + PROMPT;
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
