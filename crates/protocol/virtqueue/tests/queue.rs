//! The device gets what a driver makes available, the driver gets it back, and each side is notified when it should be.

#![cfg(not(loom))]

use ginnel_guest_memory::GuestMemory;
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{AddError, Chain, DeviceQueue, DriverQueue, Kind, Segment};
use kit::models::virtqueue::rig::{self, Rig};

const KINDS: [Kind; 2] = [Kind::Split, Kind::Packed];

struct Pair {
    rig: Rig,
    guest: GuestMemory<Mapping>,
    driver: DriverQueue<Mapping>,
    device: DeviceQueue<Mapping>,
    chain: Chain,
}

impl Pair {
    fn new(kind: Kind, size: u16, event_idx: bool) -> Self {
        let rig = Rig::new(kind, size, event_idx);
        let memory = rig.memory();
        Self {
            rig,
            guest: rig.guest(&memory),
            driver: rig.driver(&memory),
            device: rig.device(&memory),
            chain: Chain::new(),
        }
    }

    fn segment(&self, at: usize, len: u32, writable: bool) -> Segment {
        Segment { address: self.rig.data(at), len, writable }
    }

    /// Returns a block request: header, data, status.
    fn request(&self, n: usize) -> [Segment; 3] {
        let at = 512 * n;
        [self.segment(at, 16, false), self.segment(at + 16, 256, true), self.segment(at + 272, 1, true)]
    }

    /// The device answers all requests that are there, with the id as the last byte written. Returns how many there were.
    fn serve(&mut self) -> usize {
        let mut count = 0;
        while let Some(ticket) = self.device.pop(&self.guest, &mut self.chain).unwrap() {
            assert_eq!((self.chain.readable_len(), self.chain.writable_len()), (16, 257));
            let mut header = [0; 16];
            assert_eq!(self.guest.read(self.chain.readable(), 0, &mut header), 16);
            assert_eq!(self.guest.write(self.chain.writable(), 256, &header[..1]), 1);
            self.device.push(ticket, 257);
            count += 1;
        }
        count
    }
}

#[test]
fn requests_go_around_the_ring() {
    for kind in KINDS {
        for size in [4, 8, 256] {
            for indirect in [false, true] {
                let mut p = Pair::new(kind, size, true);
                for n in 0..1000usize {
                    let request = p.request(n % 100);
                    p.guest.write(&[p.guest_buffer(&request[0])], 0, &[n as u8]);
                    let id = p.driver.add(&request, indirect).unwrap();
                    assert!(p.driver.outstanding() == 1 && p.serve() == 0, "not published yet");
                    let _ = p.driver.publish();
                    assert_eq!(p.serve(), 1);
                    assert_eq!(p.driver.poll(), Ok(None), "not published yet");
                    let _ = p.device.publish();
                    assert_eq!(p.driver.poll(), Ok(Some((id, 257))));
                    assert_eq!(p.driver.poll(), Ok(None));
                    let mut status = [0];
                    p.guest.read(&[p.guest_buffer(&request[2])], 0, &mut status);
                    assert_eq!(status[0], n as u8);
                }
                assert_eq!((p.driver.outstanding(), p.device.outstanding()), (0, 0));
            }
        }
    }
}

impl Pair {
    fn guest_buffer(&self, segment: &Segment) -> ginnel_guest_memory::Buffer {
        ginnel_guest_memory::Buffer {
            region: 0,
            at: (segment.address - rig::GUEST) as usize,
            len: segment.len,
        }
    }
}

#[test]
fn a_full_queue_says_so_and_empties() {
    for kind in KINDS {
        let mut p = Pair::new(kind, 8, false);
        for _ in 0..10 {
            let mut ids = Vec::new();
            ids.push(p.driver.add(&p.request(0), false).unwrap());
            ids.push(p.driver.add(&p.request(1), false).unwrap());
            assert_eq!(p.driver.add(&p.request(2), false), Err(AddError::Full));
            ids.push(p.driver.add(&p.request(2), true).unwrap());
            ids.push(p.driver.add(&p.request(3), true).unwrap());
            assert_eq!(p.driver.add(&p.request(4), true), Err(AddError::Full));
            assert_eq!(
                p.driver.add(&[p.segment(0, 1, false); 9], false),
                Err(AddError::Count { count: 9, limit: 8 })
            );
            assert_eq!(p.driver.add(&[], true), Err(AddError::Count { count: 0, limit: rig::TABLE.into() }));
            let _ = p.driver.publish();
            assert_eq!(p.serve(), 4);
            let _ = p.device.publish();
            let mut done = Vec::new();
            while let Some((id, _)) = p.driver.poll().unwrap() {
                done.push(id);
            }
            assert_eq!(done, ids);
        }
    }
}

#[test]
fn requests_come_back_in_any_order() {
    for kind in KINDS {
        let mut p = Pair::new(kind, 16, true);
        for round in 0..50 {
            let ids: Vec<u16> =
                (0..5).map(|n| p.driver.add(&p.request(n), (n + round) % 3 == 0).unwrap()).collect();
            let _ = p.driver.publish();
            let mut tickets = Vec::new();
            while let Some(ticket) = p.device.pop(&p.guest, &mut p.chain).unwrap() {
                tickets.push(ticket);
            }
            assert_eq!(tickets.iter().map(|t| t.id()).collect::<Vec<_>>(), ids);
            let mut order = ids.clone();
            order.rotate_left(round % 5);
            order.swap(1, 3);
            for id in &order {
                let at = tickets.iter().position(|t| t.id() == *id).unwrap();
                p.device.push(tickets.swap_remove(at), u32::from(*id));
            }
            let _ = p.device.publish();
            for id in order {
                assert_eq!(p.driver.poll(), Ok(Some((id, id.into()))));
            }
        }
    }
}

#[test]
fn only_a_sleeping_side_is_notified() {
    for kind in KINDS {
        for event_idx in [false, true] {
            let mut p = Pair::new(kind, 8, event_idx);
            p.device.disarm();
            p.driver.disarm();
            // With event index, the notification that was asked for at the beginning is still to come.
            for n in 0..40 {
                let id = p.driver.add(&p.request(0), false).unwrap();
                let kick = p.driver.publish();
                assert_eq!(p.serve(), 1);
                let call = p.device.publish();
                assert_eq!(p.driver.poll(), Ok(Some((id, 257))));
                if n > 0 {
                    assert!(!kick && !call, "{kind:?} {event_idx} {n}");
                }
            }
            for n in 0..40 {
                assert!(!p.device.arm(), "nothing there");
                let id = p.driver.add(&p.request(0), n % 2 == 0).unwrap();
                assert!(p.driver.publish(), "{kind:?} {event_idx} {n}: the device sleeps");
                assert!(!p.driver.publish(), "nothing new");
                assert!(p.device.arm(), "it does not sleep now");
                p.device.disarm();
                assert_eq!(p.serve(), 1);
                assert!(!p.driver.arm());
                assert!(p.device.publish(), "{kind:?} {event_idx} {n}: the driver sleeps");
                assert!(!p.device.publish(), "nothing new");
                assert!(p.driver.arm(), "it does not sleep now");
                p.driver.disarm();
                assert_eq!(p.driver.poll(), Ok(Some((id, 257))));
            }
        }
    }
}

#[test]
fn a_successor_goes_on_where_its_predecessor_stood() {
    for kind in KINDS {
        let mut p = Pair::new(kind, 8, true);
        let memory = p.guest.regions()[0].memory.clone();
        for n in 0..30 {
            let id = p.driver.add(&p.request(0), n % 3 == 0).unwrap();
            let _ = p.driver.publish();
            p.device = DeviceQueue::new(p.rig.setup(&memory, p.device.base(), None)).unwrap();
            assert!(p.device.publish() && !p.device.publish(), "a call may be owed, one");
            assert_eq!(p.serve(), 1);
            let _ = p.device.publish();
            assert_eq!(p.driver.poll(), Ok(Some((id, 257))));
        }
    }
}

/// For a packed queue, front ends that do not know wrap counters also use the base 0.
#[test]
fn a_base_of_zero_is_the_beginning_of_a_ring_that_was_never_used() {
    const SIZE: u16 = 4;
    let ask = |p: &mut Pair| {
        let id = p.driver.add(&p.request(0), true).unwrap();
        let _ = p.driver.publish();
        id
    };
    for asks_before in [false, true] {
        let mut p = Pair::new(Kind::Packed, SIZE, false);
        let memory = p.guest.regions()[0].memory.clone();
        let mut asked = asks_before.then(|| ask(&mut p));
        p.device = DeviceQueue::new(p.rig.setup(&memory, 0, None)).unwrap();
        assert_eq!(p.device.base(), 0x8000_8000);
        let mut at_zero = 0;
        for _ in 0..6 * SIZE {
            let id = asked.take().unwrap_or_else(|| ask(&mut p));
            assert_eq!(p.serve(), 1);
            let _ = p.device.publish();
            assert_eq!(p.driver.poll(), Ok(Some((id, 257))));
            // Every other lap begins with both wrap counters 0. There a base of 0 has its normal meaning.
            if p.device.base() == 0 {
                at_zero += 1;
                asked = asks_before.then(|| ask(&mut p));
                p.device = DeviceQueue::new(p.rig.setup(&memory, 0, None)).unwrap();
                assert_eq!(p.device.base(), 0);
            }
        }
        assert_eq!(at_zero, 3);
    }
}

/// The device does not write to the first descriptor in a lap that begins in the middle of a chain.
#[test]
fn a_base_of_zero_after_a_chain_went_past_the_end_is_not_the_beginning() {
    const SIZE: u16 = 4;
    let mut p = Pair::new(Kind::Packed, SIZE, false);
    let memory = p.guest.regions()[0].memory.clone();
    // Chains of three descriptors in a ring of four: after every third lap, one begins at the beginning of the ring.
    let mut at_zero = 0;
    for n in 0..12 * usize::from(SIZE) {
        let id = p.driver.add(&p.request(n % 100), false).unwrap();
        let _ = p.driver.publish();
        assert_eq!(p.serve(), 1);
        let _ = p.device.publish();
        assert_eq!(p.driver.poll(), Ok(Some((id, 257))));
        let base = p.device.base();
        at_zero += usize::from(base == 0);
        p.device = DeviceQueue::new(p.rig.setup(&memory, base, None)).unwrap();
        assert_eq!(p.device.base(), base);
    }
    assert_eq!(at_zero, 6);
}

#[test]
fn the_number_of_visible_requests_is_right_before_they_are_taken() {
    for kind in KINDS {
        let mut p = Pair::new(kind, 16, true);
        // The rounds go around the ring more than once.
        for round in 0..20 {
            assert!(p.device.is_empty() && p.device.visible() == 0);
            let before = p.device.taken();
            for n in 0..3 {
                let request = p.request(n);
                p.driver.add(&request, false).unwrap();
                assert_eq!(p.device.visible(), 0, "not shown yet");
            }
            let _ = p.driver.publish();
            let all = before + p.device.visible();
            // The driver shows more requests behind these.
            let request = p.request(3);
            p.driver.add(&request, false).unwrap();
            let _ = p.driver.publish();
            for n in 0..4 {
                assert!(!p.device.is_empty());
                assert_eq!(p.device.taken() < all, n < 3, "{kind:?}, round {round}, {n}");
                let ticket = p.device.pop(&p.guest, &mut p.chain).unwrap().unwrap();
                p.device.push(ticket, 0);
            }
            let _ = p.device.publish();
            while p.driver.poll().unwrap().is_some() {}
        }
    }
}

/// Virtio 1.2, section 2.8: a driver with a whole ring outstanding has no place for more, whatever the flags say.
#[test]
fn there_is_never_more_than_the_ring_has_room_for() {
    for kind in KINDS {
        let mut p = Pair::new(kind, 16, false);
        for n in 0..16 {
            let request = [p.segment(512 * n, 16, false)];
            p.driver.add(&request, false).unwrap();
        }
        let _ = p.driver.publish();
        assert_eq!(p.device.visible(), 16);
        let memory = p.guest.regions()[0].memory.clone();
        if kind == Kind::Split {
            // A driver that lies.
            memory.store_relaxed_u16(p.rig.driver_at() + 2, 0xffff);
            assert_eq!(p.device.visible(), 16);
            memory.store_relaxed_u16(p.rig.driver_at() + 2, 16);
        }
        for _ in 0..16 {
            let _ = p.device.pop(&p.guest, &mut p.chain).unwrap().unwrap();
        }
        assert_eq!((p.device.taken(), p.device.visible()), (16, 0));
    }
}
