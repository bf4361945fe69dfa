//! Runs operations of a driver and a device on one queue, and compares them with simple records. With scribbles, the results are not
//! compared, but each call must return, and stay within the guest's memory.

pub mod rig;

use super::Op;
use ginnel_guest_memory::GuestMemory;
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{AddError, Chain, DeviceQueue, DirtyLog, DriverQueue, Kind, Segment, Ticket};
use rig::{GUEST, Rig, TABLE};
use std::collections::VecDeque;

struct Request {
    id: u16,
    segments: Vec<Segment>,
    ticks: Option<Ticket>,
}

struct World {
    rig: Rig,
    memory: Mapping,
    inflight: Option<Mapping>,
    guest: GuestMemory<Mapping>,
    driver: DriverQueue<Mapping>,
    device: DeviceQueue<Mapping>,
    chain: Chain,
    /// Requests that are added but not published; published; taken; given back with a number of bytes; shown to the driver.
    added: VecDeque<Request>,
    available: VecDeque<Request>,
    taken: Vec<Request>,
    given: VecDeque<(u16, u32)>,
    used: VecDeque<(u16, u32)>,
    free: usize,
    /// Number of descriptors of each id.
    counts: Vec<usize>,
    /// Whether the device sleeps and has not been woken.
    device_sleeps: bool,
    driver_sleeps: bool,
    log: Mapping,
}

/// Runs the operations. Each result must agree with the records.
pub fn run(choice: u8, ops: impl IntoIterator<Item = Op>) {
    let mut world = World::new(choice);
    for op in ops {
        world.step(op);
    }
}

/// Runs the operations and the scribbles among them. The results are not compared.
pub fn scribble(choice: u8, ops: impl IntoIterator<Item = Op>) {
    let mut world = World::new(choice);
    for op in ops {
        world.spoil(op);
    }
}

impl World {
    fn new(choice: u8) -> Self {
        let rig = Rig::choose(choice);
        let memory = rig.memory();
        let inflight = (choice & 16 != 0).then(|| rig.inflight_memory());
        let driver = rig.driver(&memory);
        let setup = rig.setup(&memory, rig.base(), inflight.as_ref());
        let mut device = DeviceQueue::new(setup).unwrap();
        assert!(device.publish(), "a predecessor may owe a call");
        let log = Mapping::anonymous(4096).unwrap();
        if choice & 32 != 0 {
            device.set_log(DirtyLog::new(log.clone(), 0, 4096));
        }
        Self {
            guest: rig.guest(&memory),
            chain: Chain::new(),
            added: VecDeque::new(),
            available: VecDeque::new(),
            taken: Vec::new(),
            given: VecDeque::new(),
            used: VecDeque::new(),
            free: rig.size.into(),
            counts: vec![0; rig.size.into()],
            device_sleeps: false,
            driver_sleeps: false,
            rig,
            memory,
            inflight,
            driver,
            device,
            log,
        }
    }

    fn segments(&self, a: u16, b: u16) -> Vec<Segment> {
        let count = usize::from(a % 5) + 1;
        let readable = usize::from(a / 5 % 6);
        let segment = |i: usize| Segment {
            address: self.rig.data(usize::from(b).wrapping_mul(i + 1) % 60_000),
            len: u32::from(b % 97) + i as u32,
            writable: i >= readable,
        };
        (0..count).map(segment).collect()
    }

    fn step(&mut self, Op { code, a, b }: Op) {
        match code % 9 {
            0 | 1 => {
                let segments = self.segments(a, b);
                let indirect = code % 9 == 1;
                let count = if indirect { 1 } else { segments.len() };
                let result = self.driver.add(&segments, indirect);
                if !indirect && count > self.rig.size.into() {
                    assert_eq!(result, Err(AddError::Count { count, limit: self.rig.size.into() }));
                } else if count > self.free {
                    assert_eq!(result, Err(AddError::Full));
                } else {
                    let id = result.unwrap();
                    assert!(id < self.rig.size && segments.len() <= TABLE.into());
                    assert_eq!(std::mem::replace(&mut self.counts[usize::from(id)], count), 0);
                    self.free -= count;
                    self.added.push_back(Request { id, segments, ticks: None });
                }
            }
            2 => {
                let new = !self.added.is_empty();
                let kick = self.driver.publish();
                assert!(!kick || new, "a kick for nothing");
                assert!(kick || !(new && self.device_sleeps), "the device sleeps on");
                self.device_sleeps &= !new;
                self.available.append(&mut self.added);
            }
            3 | 4 => {
                let ticket = self.device.pop(&self.guest, &mut self.chain).unwrap();
                let Some(mut request) = self.available.pop_front() else {
                    return assert!(ticket.is_none());
                };
                let ticket = ticket.expect("one is available");
                assert_eq!(ticket.id(), request.id);
                for writable in [false, true] {
                    let (buffers, len) = if writable {
                        (self.chain.writable(), self.chain.writable_len())
                    } else {
                        (self.chain.readable(), self.chain.readable_len())
                    };
                    let wanted: Vec<_> =
                        request.segments.iter().filter(|s| s.writable == writable && s.len > 0).collect();
                    assert_eq!(buffers.len(), wanted.len());
                    assert_eq!(len, wanted.iter().map(|s| s.len).sum::<u32>());
                    for (buffer, segment) in buffers.iter().zip(wanted) {
                        assert_eq!(
                            (self.guest.guest_address(buffer), buffer.len),
                            (segment.address, segment.len)
                        );
                    }
                }
                request.ticks = Some(ticket);
                self.taken.push(request);
            }
            5 => {
                if self.taken.is_empty() {
                    return;
                }
                let request = self.taken.swap_remove(usize::from(a) % self.taken.len());
                let room = request.segments.iter().filter(|s| s.writable).map(|s| s.len).sum::<u32>();
                let written = u32::from(b) % (room + 1);
                self.device.push(request.ticks.unwrap(), written);
                self.given.push_back((request.id, written));
            }
            6 => {
                let new = !self.given.is_empty();
                let call = self.device.publish();
                assert!(!call || new, "a call for nothing");
                assert!(call || !(new && self.driver_sleeps), "the driver sleeps on");
                self.driver_sleeps &= !new;
                self.used.append(&mut self.given);
            }
            7 => {
                let next = self.driver.poll().unwrap();
                assert_eq!(next, self.used.pop_front());
                if let Some((id, _)) = next {
                    self.free += std::mem::take(&mut self.counts[usize::from(id)]);
                }
            }
            _ => match a % 5 {
                0 => {
                    let there = self.device.arm();
                    assert_eq!(there, !self.available.is_empty());
                    self.device_sleeps = !there;
                }
                1 => {
                    let there = self.driver.arm();
                    assert_eq!(there, !self.used.is_empty());
                    self.driver_sleeps = !there;
                }
                2 => {
                    self.device.disarm();
                    self.device_sleeps = false;
                }
                3 => {
                    self.driver.disarm();
                    self.driver_sleeps = false;
                }
                _ => self.succeed(),
            },
        }
        let outstanding = self.added.len() + self.available.len() + self.taken.len();
        let returned = self.given.len() + self.used.len();
        assert_eq!(usize::from(self.driver.outstanding()), outstanding + returned);
        assert_eq!(usize::from(self.device.outstanding()), self.taken.len());
    }

    /// Replaces the device. If there is an in-flight region, the requests that the old device had taken come again, and so do
    /// those that it had not shown. Otherwise the device must have none.
    fn succeed(&mut self) {
        if self.inflight.is_none() && !(self.taken.is_empty() && self.given.is_empty()) {
            return;
        }
        if !self.given.is_empty() {
            // Their segments are not known any more.
            return;
        }
        let base = self.device.base();
        let setup = self.rig.setup(&self.memory, base, self.inflight.as_ref());
        self.device = DeviceQueue::new(setup).unwrap();
        let call = self.device.publish();
        self.driver_sleeps &= !call;
        self.device_sleeps = false;
        self.device.disarm();
        // They come in the order in which they were taken.
        let mut again: Vec<Request> = self.taken.drain(..).collect();
        let mut expected = VecDeque::new();
        assert_eq!(usize::from(self.device.state().resubmit), again.len());
        for _ in 0..again.len() {
            let ticket = self.device.pop(&self.guest, &mut self.chain).unwrap().unwrap();
            let at = again.iter().position(|request| request.id == ticket.id()).expect("it was taken");
            let mut request = again.swap_remove(at);
            let bytes = request.segments.iter().map(|s| s.len).sum::<u32>();
            assert_eq!(self.chain.readable_len() + self.chain.writable_len(), bytes);
            request.ticks = Some(ticket);
            expected.push_back(request);
        }
        self.taken = expected.into();
    }

    /// Runs one operation on a queue whose memory may contain anything.
    fn spoil(&mut self, Op { code, a, b }: Op) {
        if code & 0x80 != 0 {
            return self.write_nonsense(code, a, b);
        }
        match code % 9 {
            0 | 1 => {
                let _ = self.driver.add(&self.segments(a, b), code % 9 == 1);
            }
            2 => _ = self.driver.publish(),
            3 | 4 => {
                if let Ok(Some(ticket)) = self.device.pop(&self.guest, &mut self.chain) {
                    let mut bytes = 0;
                    for buffer in self.chain.readable().iter().chain(self.chain.writable()) {
                        bytes += self.guest.slice(buffer).len() as u32;
                    }
                    assert_eq!(bytes, self.chain.readable_len() + self.chain.writable_len());
                    let request = Request { id: ticket.id(), segments: Vec::new(), ticks: Some(ticket) };
                    self.taken.push(request);
                    assert!(self.taken.len() <= self.rig.size.into(), "more than the queue holds");
                }
            }
            5 => {
                if !self.taken.is_empty() {
                    let request = self.taken.swap_remove(usize::from(a) % self.taken.len());
                    self.device.push(request.ticks.unwrap(), b.into());
                }
            }
            6 => _ = self.device.publish(),
            7 => {
                if let Ok(Some((id, written))) = self.driver.poll() {
                    assert!(id < self.rig.size && written <= 5 * (97 + 5));
                }
            }
            _ => match a % 6 {
                0 => _ = self.device.arm(),
                1 => _ = self.driver.arm(),
                2 => self.device.disarm(),
                3 => self.driver.disarm(),
                4 => {
                    assert_eq!(self.device.state().kind, self.rig.kind);
                    assert!(self.log.load_relaxed_u64(64) == 0, "a page beyond the queue's is marked");
                }
                _ => {
                    let base =
                        if b & 1 == 0 { self.device.base() } else { u32::from(b) << 15 | u32::from(b) };
                    let setup = self.rig.setup(&self.memory, base, self.inflight.as_ref());
                    if let Ok(device) = DeviceQueue::new(setup) {
                        self.device = device;
                        self.taken.clear();
                    }
                }
            },
        }
    }

    /// Writes values that usually mean something at their place.
    fn write_nonsense(&self, code: u8, a: u16, b: u16) {
        let size = usize::from(self.rig.size);
        let word = match b % 7 {
            0 => b / 7,
            1 => self.rig.size,
            2 => self.rig.size.wrapping_sub(1),
            3 => 1 << (b / 7 % 16),
            4 => 0xffff,
            5 => b / 7 % (2 * self.rig.size + 2),
            _ => 0,
        };
        let (memory, start, len) = match code & 7 {
            0 | 1 => (&self.memory, 0, 16 * size),
            2 => (&self.memory, self.rig.driver_at(), 6 + 2 * size),
            3 => (&self.memory, self.rig.device_at(), 6 + 8 * size),
            4 => (&self.memory, self.rig.tables_at(), 16 * size * usize::from(TABLE)),
            5 | 6 => match &self.inflight {
                Some(region) => (region, 0, region.len()),
                None => return,
            },
            _ => {
                // A descriptor that points to something.
                let at = 16 * (usize::from(a) % size);
                let lens = [0, 8, 16, 128, 4096, 65536, u32::MAX, u32::from(b)];
                let address = GUEST + u64::from(a) * 2 % (self.rig.memory_len() as u64 + 64);
                let flags = u64::from(b & 7 | if b & 8 == 0 { 0x80 } else { 0x8000 });
                let (id, flags) = if self.rig.kind == Kind::Split { (flags, id(a)) } else { (id(a), flags) };
                self.memory.store_relaxed_u64(at, address);
                let rest = u64::from(lens[usize::from(b >> 4 & 7)]) | id << 32 | flags << 48;
                return self.memory.store_relaxed_u64(at + 8, rest);
            }
        };
        memory.store_relaxed_u16(start + usize::from(a) % (len / 2) * 2, word);
    }
}

fn id(a: u16) -> u64 {
    u64::from(a >> 3 & 31)
}
