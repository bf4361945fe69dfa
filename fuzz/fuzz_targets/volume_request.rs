//! Requests of a hostile guest to a blk device and to a SCSI target, from the ring to a disk in memory and back.
//!
//! The input determines the device, how much room there is to write to, and the bytes to read. No operation may touch anything
//! outside of a disk or change a protected disk, and only the memory that the guest gave for writing may be written.
#![no_main]

use ginnel_guest_memory::{Area, GuestMemory, Region};
use ginnel_layout::virtio_scsi::FIRST_COMMAND_QUEUE;
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{Chain, DeviceQueue, DriverQueue, DriverSetup, Kind, Segment, Setup};
use ginnel_volume::backend::{Backend, Op, Stores};
use ginnel_volume::device::blk::Blk;
use ginnel_volume::device::scsi::Scsi;
use ginnel_volume::device::{Begin, Device, Request};
use ginnel_volume::disk::Disk;
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;

const GUEST: u64 = 0x10_0000;
const LEN: usize = 0x8000;
/// Where the bytes begin that the device reads, and the room that it writes to.
const READ: usize = 0x1000;
const WRITE: usize = 0x4000;
const DISK: u64 = 64 << 10;

fuzz_target!(|input: &[u8]| {
    let [choice, room_low, room_high, cut, data @ ..] = input else { return };
    let data = &data[..data.len().min(WRITE - READ)];
    let room = usize::from(u16::from_le_bytes([*room_low, *room_high])).min(LEN - WRITE);
    let queue = u16::from(choice >> 2 & 3);

    let memory = Mapping::anonymous(LEN).unwrap();
    memory.write(READ, data);
    let segments = segments(data.len(), room, usize::from(*cut));
    if segments.is_empty() {
        return;
    }
    let guest = GuestMemory::new(vec![Region { guest: GUEST, user: 0, memory: memory.clone() }]).unwrap();
    let (mut driver, mut device) = queue_of(&memory);
    let Ok(_) = driver.add(&segments, false) else { return };
    let _ = driver.publish();
    let mut chain = Chain::new();
    let Some(ticket) = device.pop(&guest, &mut chain).unwrap() else { unreachable!("it was published") };

    let disks = [false, true].map(|protected| Arc::new(Disk::new(DISK, 512, protected, "serial")));
    let backend = Backend::Ram(Mapping::anonymous(DISK as usize).unwrap());
    let mut stores = Stores::new(&[backend.clone(), backend], 0, None).unwrap();
    let target: Box<dyn Device> = match choice & 3 {
        0 | 1 => Box::new(Scsi::new(disks.clone().map(|disk| (disk, true)), 1, 64)),
        2 => Box::new(Blk::new(disks[0].clone(), 1, 64, true)),
        _ => Box::new(Blk::new(disks[1].clone(), 1, 64, true)),
    };
    let queue = if choice & 3 < 2 { queue.min(FIRST_COMMAND_QUEUE) } else { 0 };

    let before = all(&memory);
    let mut request = Request::default();
    let written = match target.begin(queue, &guest, &chain, &mut request) {
        Begin::Done(written) => written,
        Begin::Barrier => target.finish(&guest, &request, Ok(())),
        Begin::Do { disk, op } => {
            // A blk device has only the first disk.
            let which = if choice & 3 == 3 { 1 } else { usize::from(disk) };
            check(op, &disks[which], &request);
            let result = stores.start(0, disk, op, &request.data, &guest);
            target.finish(&guest, &request, result.expect("memory is done at once"))
        }
    };
    assert!(written as usize <= room, "{written} bytes written to {room}");
    let after = all(&memory);
    assert!(before[..WRITE] == after[..WRITE] && before[WRITE + room..] == after[WRITE + room..]);
    device.push(ticket, written);
    let _ = device.publish();
    assert!(driver.poll().unwrap().is_some());
});

/// Checks that an operation lies inside its disk, and does not change a protected disk.
fn check(op: Op, disk: &Disk, request: &Request) {
    let data: u64 = request.data.iter().map(|buffer| u64::from(buffer.len)).sum();
    let (at, len, writes) = match op {
        Op::Read { at } => (at, data, false),
        Op::Write { at, .. } => (at, data, true),
        Op::Discard { at, len } | Op::WriteZeroes { at, len, .. } => (at, len, true),
        Op::Flush => (0, 0, false),
    };
    assert!(disk.holds(at, len), "{op:?} of {len} bytes");
    assert!(!(writes && disk.read_only), "{op:?}");
    assert!(matches!(op, Op::Read { .. } | Op::Write { .. }) == (data > 0) || data == 0);
    assert_eq!(request.bytes, data);
}

/// Returns the segments of all that is read and all that may be written, each cut in two.
fn segments(read: usize, room: usize, cut: usize) -> Vec<Segment> {
    let halves = |start: usize, len: usize, writable| {
        let first = cut.min(len);
        [(start, first), (start + first, len - first)].map(|(at, len)| Segment {
            address: GUEST + at as u64,
            len: len as u32,
            writable,
        })
    };
    let mut all = [halves(READ, read, false), halves(WRITE, room, true)].concat();
    all.retain(|segment| segment.len > 0);
    all
}

fn queue_of(memory: &Mapping) -> (DriverQueue<Mapping>, DeviceQueue<Mapping>) {
    let area = |at, len| Area { memory: memory.clone(), at, len, guest: GUEST + at as u64 };
    let areas = || (area(0, 256), area(256, 64), area(512, 256));
    let (kind, size, event_idx) = (Kind::Split, 16, false);
    let (descriptors, driver, device) = areas();
    let setup = DriverSetup { kind, size, descriptors, driver, device, event_idx, tables: None };
    let (descriptors, area, device) = areas();
    let theirs = Setup {
        kind,
        size,
        descriptors,
        driver: area,
        device,
        event_idx,
        base: 0,
        inflight: None,
        max_segments: 64,
    };
    (DriverQueue::new(setup).unwrap(), DeviceQueue::new(theirs).unwrap())
}

/// Returns the memory without the ring.
fn all(memory: &Mapping) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    memory.read(READ, &mut bytes[READ..]);
    bytes
}
