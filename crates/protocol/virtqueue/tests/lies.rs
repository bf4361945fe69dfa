//! One test for each malformed value that a driver can write, and for each that a device can write for our driver, named by
//! the rule that the value breaks. The test expects the exact error, and that nothing was written but the answer.

#![cfg(not(loom))]

use Kind::{Packed, Split};
use ginnel_guest_memory::{GuestMemory, MemoryError, Region};
use ginnel_layout::inflight as layout;
use ginnel_layout::virtio::{Descriptor, DescriptorFlags, PackedDescriptor, split};
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{Chain, Corrupt, DeviceQueue, InflightQueue, Kind, Segment, SetupError};
use kit::models::virtqueue::rig::{GUEST, Rig, SEGMENTS};

const NEXT: u16 = DescriptorFlags::NEXT.0;
const WRITE: u16 = DescriptorFlags::WRITE.0;
const INDIRECT: u16 = DescriptorFlags::INDIRECT.0;
const AVAIL: u16 = DescriptorFlags::AVAIL.0;

/// A driver that writes arbitrary values.
struct Liar {
    rig: Rig,
    memory: Mapping,
}

impl Liar {
    fn new(kind: Kind) -> Self {
        let rig = Rig::new(kind, 8, true);
        Self { rig, memory: rig.memory() }
    }

    /// Writes a descriptor at a guest address, in a table or in the ring.
    fn put(&self, at: usize, address: u64, len: u32, flags: u16, next_or_id: u16) {
        let flags = DescriptorFlags(flags);
        let rest = match self.rig.kind {
            Split => Descriptor { address, len, flags, next: next_or_id }.rest(),
            Packed => PackedDescriptor { address, len, id: next_or_id, flags }.rest(),
        };
        self.memory.store_relaxed_u64(at, address);
        self.memory.store_relaxed_u64(at + 8, rest);
    }

    /// Writes descriptor `i` of the ring, for the first lap.
    fn descriptor(&self, i: u16, address: u64, len: u32, flags: u16, next: u16) {
        let available = if self.rig.kind == Packed { AVAIL } else { 0 };
        self.put(16 * usize::from(i), address, len, flags | available, next);
    }

    /// Writes entry `i` of the indirect table at the beginning of the data.
    fn entry(&self, i: u16, address: u64, len: u32, flags: u16, next: u16) {
        self.put(self.rig.data_at() + 16 * usize::from(i), address, len, flags, next);
    }

    /// Split: makes this head available.
    fn head(&self, head: u16) {
        let at = self.rig.driver_at();
        let index = self.memory.load_relaxed_u16(at + split::INDEX);
        self.memory.store_relaxed_u16(at + split::available(index % self.rig.size), head);
        self.memory.store_relaxed_u16(at + split::INDEX, index.wrapping_add(1));
    }

    fn pop(&self, guest: &GuestMemory<Mapping>) -> Result<Option<u16>, Corrupt> {
        let mut before = vec![0; self.memory.len()];
        let mut after = before.clone();
        self.memory.read(0, &mut before);
        let mut device = self.rig.device(&self.memory);
        let mut chain = Chain::new();
        let mut result = Ok(None);
        for _ in 0..=self.rig.size {
            result = device.pop(guest, &mut chain).map(|ticket| ticket.map(|ticket| ticket.id()));
            let Ok(Some(_)) = result else { break };
            result = Ok(None);
            for buffer in chain.readable().iter().chain(chain.writable()) {
                assert_eq!(guest.slice(buffer).len(), buffer.len as usize);
            }
        }
        if result.is_err() {
            let again = device.pop(guest, &mut chain).map(|ticket| ticket.map(|ticket| ticket.id()));
            assert_eq!(again, result, "an error that ends a queue stays");
        }
        self.memory.read(0, &mut after);
        assert!(before == after, "popping writes nothing");
        result
    }

    fn refused(&self, error: Corrupt) {
        assert_eq!(self.pop(&self.rig.guest(&self.memory)), Err(error));
    }
}

/// Runs `lie` for both formats. Descriptor 0 is made available if the format needs that. The lie returns the expected error.
fn both(lie: impl Fn(&Liar) -> Corrupt) {
    for kind in [Split, Packed] {
        let liar = Liar::new(kind);
        let wanted = lie(&liar);
        if kind == Split {
            liar.head(0);
        }
        liar.refused(wanted);
    }
}

fn split_only(lie: impl Fn(&Liar) -> Corrupt) {
    let liar = Liar::new(Split);
    let wanted = lie(&liar);
    liar.refused(wanted);
}

#[test]
fn the_available_index_is_at_most_the_size_ahead() {
    for index in [9, 0x8000, 0xffff] {
        split_only(|l| {
            l.memory.store_relaxed_u16(l.rig.driver_at() + split::INDEX, index);
            Corrupt::AvailableIndex { index, ahead: index, outstanding: 0, size: 8 }
        });
    }
}

#[test]
fn outstanding_chains_are_counted() {
    split_only(|l| {
        l.descriptor(0, GUEST, 8, 0, 0);
        for _ in 0..8 {
            l.head(0);
        }
        let mut device = l.rig.device(&l.memory);
        let guest = l.rig.guest(&l.memory);
        let tickets: Vec<_> =
            (0..8).map(|_| device.pop(&guest, &mut Chain::new()).unwrap().unwrap()).collect();
        assert_eq!(device.pop(&guest, &mut Chain::new()), Ok(None));
        l.head(0);
        let wanted = Corrupt::AvailableIndex { index: 9, ahead: 1, outstanding: 8, size: 8 };
        assert_eq!(device.pop(&guest, &mut Chain::new()), Err(wanted));
        // If a driver makes one head available eight times, it gets the head back as often; this harms only the driver.
        for ticket in tickets {
            device.push(ticket, 0);
        }
        let _ = device.publish();
        assert_eq!(l.memory.load_relaxed_u16(l.rig.device_at() + split::INDEX), 8);
        assert!(device.pop(&guest, &mut Chain::new()).unwrap().is_some(), "in order again");
        Corrupt::AvailableIndex { index: 9, ahead: 9, outstanding: 0, size: 8 }
    });
}

#[test]
fn a_packed_driver_makes_no_more_available_than_there_is() {
    let l = Liar::new(Packed);
    for i in 0..8 {
        l.descriptor(i, GUEST, 8, 0, 7);
    }
    let mut device = l.rig.device(&l.memory);
    let guest = l.rig.guest(&l.memory);
    let tickets: Vec<_> = (0..8).map(|_| device.pop(&guest, &mut Chain::new()).unwrap().unwrap()).collect();
    assert_eq!(device.pop(&guest, &mut Chain::new()), Ok(None));
    l.put(0, GUEST, 8, DescriptorFlags::USED.0, 0);
    assert_eq!(device.pop(&guest, &mut Chain::new()), Err(Corrupt::ChainLength { limit: 0 }));
    for ticket in tickets {
        device.push(ticket, 0);
    }
    assert!(device.publish(), "fresh event suppression says: always");
}

#[test]
fn a_head_is_a_descriptor() {
    for head in [8, 0xffff] {
        split_only(|l| {
            l.head(head);
            Corrupt::Descriptor { index: head.into(), size: 8 }
        });
    }
}

#[test]
fn a_link_is_a_descriptor() {
    split_only(|l| {
        l.descriptor(0, GUEST, 8, NEXT, 8);
        l.head(0);
        Corrupt::Descriptor { index: 8, size: 8 }
    });
}

#[test]
fn a_chain_has_no_loop() {
    both(|l| {
        for i in 0..8 {
            l.descriptor(i, GUEST, 8, NEXT, (i + 1) % 8);
        }
        Corrupt::ChainLength { limit: 8 }
    });
    split_only(|l| {
        l.descriptor(3, GUEST, 8, NEXT, 3);
        l.head(3);
        Corrupt::ChainLength { limit: 8 }
    });
    // Empty buffers take no room, but their number is limited nevertheless.
    split_only(|l| {
        l.descriptor(3, GUEST, 0, NEXT, 3);
        l.head(3);
        Corrupt::ChainLength { limit: 8 }
    });
}

#[test]
fn a_buffer_lies_in_the_guest() {
    let end = GUEST + Rig::new(Split, 8, true).memory_len() as u64;
    for (address, len) in [
        (0, 1),
        (GUEST - 1, 1),
        (GUEST - 1, 2),
        (end, 1),
        (end - 1, 2),
        (u64::MAX, 1),
        (GUEST, u32::MAX),
        (u64::MAX - 15, 32),
    ] {
        for flags in [0, WRITE] {
            both(|l| {
                l.descriptor(0, address, len, flags, 0);
                Corrupt::Outside { address, len }
            });
            both(|l| {
                l.descriptor(0, l.rig.data(0), 16, INDIRECT, 0);
                l.entry(0, address, len, flags, 0);
                Corrupt::Outside { address, len }
            });
        }
    }
}

#[test]
fn readable_buffers_come_before_writable_ones() {
    both(|l| {
        l.descriptor(0, GUEST, 8, WRITE | NEXT, 1);
        l.descriptor(1, GUEST, 8, 0, 0);
        Corrupt::Order
    });
    both(|l| {
        l.descriptor(0, l.rig.data(0), 32, INDIRECT, 0);
        l.entry(0, GUEST, 8, WRITE | NEXT, 1);
        l.entry(1, GUEST, 8, 0, 0);
        Corrupt::Order
    });
}

#[test]
fn a_request_has_less_than_4_gib() {
    for kind in [Split, Packed] {
        let l = Liar::new(kind);
        let large = 0x1_0000_0000;
        let regions = vec![
            Region { guest: GUEST, user: 0, memory: l.memory.clone() },
            Region { guest: large, user: large, memory: Mapping::anonymous(1 << 30).unwrap() },
        ];
        let guest = GuestMemory::new(regions).unwrap();
        for i in 0..4 {
            l.descriptor(i, large, 1 << 30, if i < 2 { NEXT } else { NEXT | WRITE }, i + 1);
        }
        l.descriptor(3, large, 1 << 30, WRITE, 0);
        if kind == Split {
            l.head(0);
        }
        assert_eq!(l.pop(&guest), Err(Corrupt::TooLong));
        l.descriptor(3, large, (1 << 30) - 1, WRITE, 0);
        assert_eq!(l.pop(&guest), Ok(None), "one byte less is taken");
    }
}

#[test]
fn an_indirect_table_has_whole_descriptors() {
    for len in [0, 1, 15, 17, 31, u32::MAX] {
        both(|l| {
            l.descriptor(0, GUEST, len, INDIRECT, 0);
            Corrupt::IndirectLength(len)
        });
    }
}

#[test]
fn an_indirect_table_lies_in_the_guest() {
    both(|l| {
        l.descriptor(0, 16, 16, INDIRECT, 0);
        Corrupt::Outside { address: 16, len: 16 }
    });
    both(|l| {
        l.descriptor(0, u64::MAX - 15, 32, INDIRECT, 0);
        Corrupt::Outside { address: u64::MAX - 15, len: 16 }
    });
    // The second descriptor is beyond the end of the address space.
    both(|l| {
        let end = GUEST + l.rig.memory_len() as u64;
        l.put(l.rig.memory_len() - 16, GUEST, 8, NEXT, 1);
        l.descriptor(0, end - 16, 32, INDIRECT, 0);
        Corrupt::Outside { address: end, len: 16 }
    });
}

#[test]
fn an_indirect_table_holds_no_indirect_descriptor() {
    both(|l| {
        l.descriptor(0, l.rig.data(0), 16, INDIRECT, 0);
        l.entry(0, l.rig.data(0), 16, INDIRECT, 0);
        Corrupt::IndirectPlace
    });
}

#[test]
fn an_indirect_descriptor_ends_its_chain() {
    both(|l| {
        l.descriptor(0, l.rig.data(0), 16, INDIRECT | NEXT, 1);
        l.entry(0, GUEST, 8, 0, 0);
        l.descriptor(1, GUEST, 8, 0, 0);
        Corrupt::IndirectPlace
    });
}

#[test]
fn only_a_split_chain_may_end_with_an_indirect_descriptor() {
    let l = Liar::new(Packed);
    l.descriptor(0, GUEST, 8, NEXT, 0);
    l.descriptor(1, l.rig.data(0), 16, INDIRECT, 0);
    l.entry(0, GUEST, 8, 0, 0);
    l.refused(Corrupt::IndirectPlace);
    let l = Liar::new(Split);
    l.descriptor(0, GUEST, 8, NEXT, 1);
    l.descriptor(1, l.rig.data(0), 16, INDIRECT, 0);
    l.entry(0, GUEST, 8, 0, 0);
    l.head(0);
    assert_eq!(l.pop(&l.rig.guest(&l.memory)), Ok(None), "2.7.5.3.2");
}

#[test]
fn a_link_of_an_indirect_table_stays_in_it() {
    split_only(|l| {
        l.descriptor(0, l.rig.data(0), 32, INDIRECT, 0);
        l.entry(0, GUEST, 8, NEXT, 2);
        l.head(0);
        Corrupt::Descriptor { index: 2, size: 2 }
    });
}

#[test]
fn an_indirect_table_has_no_loop() {
    for len in [8, 0] {
        split_only(|l| {
            l.descriptor(0, l.rig.data(0), 32, INDIRECT, 0);
            l.entry(0, GUEST, len, NEXT, 1);
            l.entry(1, GUEST, len, NEXT, 0);
            l.head(0);
            Corrupt::ChainLength { limit: 2 }
        });
    }
    // A long table does not allow a long walk.
    split_only(|l| {
        l.descriptor(0, l.rig.data(0), 16 * 4096, INDIRECT, 0);
        l.entry(0, GUEST, 0, NEXT, 0);
        l.head(0);
        Corrupt::ChainLength { limit: SEGMENTS.into() }
    });
}

#[test]
fn a_request_has_no_more_segments_than_the_device_takes() {
    both(|l| {
        let count = SEGMENTS + 1;
        l.descriptor(0, l.rig.data(0), 16 * u32::from(count), INDIRECT, 0);
        for i in 0..count {
            l.entry(i, GUEST, 8, if i + 1 < count { NEXT } else { 0 }, i + 1);
        }
        Corrupt::Segments { limit: SEGMENTS }
    });
    // A buffer over many regions has as many segments.
    for kind in [Split, Packed] {
        let l = Liar::new(kind);
        let small = |i: u64| Region {
            guest: 0x1_0000_0000 + 8 * i,
            user: 0x1_0000_0000 + 8 * i,
            memory: Mapping::anonymous(8).unwrap(),
        };
        let mut regions: Vec<_> = (0..u64::from(SEGMENTS) + 1).map(small).collect();
        regions.push(Region { guest: GUEST, user: 0, memory: l.memory.clone() });
        let guest = GuestMemory::new(regions).unwrap();
        let len = 8 * u32::from(SEGMENTS);
        l.descriptor(0, 0x1_0000_0000, len + 1, 0, 0);
        if kind == Split {
            l.head(0);
        }
        assert_eq!(l.pop(&guest), Err(Corrupt::Segments { limit: SEGMENTS }));
        l.descriptor(0, 0x1_0000_0000, len, 0, 0);
        assert_eq!(l.pop(&guest), Ok(None), "as many as it takes");
    }
}

#[test]
fn reserved_bits_do_no_harm() {
    for kind in [Split, Packed] {
        let l = Liar::new(kind);
        let ours = NEXT | WRITE | INDIRECT | AVAIL | DescriptorFlags::USED.0;
        l.descriptor(0, GUEST, 8, !ours, 0xffff);
        if kind == Split {
            l.head(0);
        }
        assert_eq!(l.pop(&l.rig.guest(&l.memory)), Ok(None));
    }
}

// Values that a device can write for our driver.

/// Returns a driver with one outstanding request of 100 writable bytes, and its memory.
fn waiting(kind: Kind) -> (Rig, Mapping, ginnel_virtqueue::DriverQueue<Mapping>) {
    let rig = Rig::new(kind, 8, true);
    let memory = rig.memory();
    let mut driver = rig.driver(&memory);
    let segments = [
        Segment { address: rig.data(0), len: 16, writable: false },
        Segment { address: rig.data(64), len: 100, writable: true },
    ];
    assert_eq!(driver.add(&segments, false), Ok(0));
    let _ = driver.publish();
    (rig, memory, driver)
}

/// Writes a used element as a device would, with any id and length.
fn used(rig: &Rig, memory: &Mapping, slot: u16, id: u32, len: u32) {
    match rig.kind {
        Split => {
            let at = rig.device_at() + split::used(slot);
            memory.store_relaxed_u32(at, id);
            memory.store_relaxed_u32(at + 4, len);
            memory.store_release_u16(rig.device_at() + split::INDEX, slot + 1);
        }
        Packed => {
            let descriptor =
                PackedDescriptor { address: 0, len, id: id as u16, flags: DescriptorFlags::used(true) };
            memory.store_release_u64(16 * usize::from(slot) + 8, descriptor.rest());
        }
    }
}

#[test]
fn the_used_index_is_not_ahead_of_what_is_outstanding() {
    for index in [2, 9, 0xffff] {
        let (rig, memory, mut driver) = waiting(Split);
        memory.store_relaxed_u16(rig.device_at() + split::INDEX, index);
        let wanted = Corrupt::UsedIndex { index, ahead: index, outstanding: 1 };
        assert_eq!((driver.poll(), driver.poll()), (Err(wanted), Err(wanted)));
    }
}

#[test]
fn a_used_element_names_what_is_outstanding() {
    for kind in [Split, Packed] {
        for id in [1, 7, 8, 0xffff] {
            let (rig, memory, mut driver) = waiting(kind);
            used(&rig, &memory, 0, id, 0);
            assert_eq!(driver.poll(), Err(Corrupt::UsedId(id)));
            assert_eq!(driver.outstanding(), 1);
        }
    }
    let (rig, memory, mut driver) = waiting(Split);
    used(&rig, &memory, 0, 0x1_0000, 0);
    assert_eq!(driver.poll(), Err(Corrupt::UsedId(0x1_0000)), "all 32 bits count");
}

#[test]
fn nothing_is_used_twice() {
    for kind in [Split, Packed] {
        let (rig, memory, mut driver) = waiting(kind);
        driver.add(&[Segment { address: rig.data(0), len: 16, writable: false }], false).unwrap();
        used(&rig, &memory, 0, 0, 100);
        assert_eq!(driver.poll(), Ok(Some((0, 100))));
        used(&rig, &memory, if kind == Split { 1 } else { 2 }, 0, 100);
        assert_eq!(driver.poll(), Err(Corrupt::UsedId(0)));
    }
}

#[test]
fn no_more_is_written_than_there_was_room_for() {
    for kind in [Split, Packed] {
        for written in [101, 116, u32::MAX] {
            let (rig, memory, mut driver) = waiting(kind);
            used(&rig, &memory, 0, 0, written);
            assert_eq!(driver.poll(), Err(Corrupt::UsedLength { written, room: 100 }));
        }
    }
}

#[test]
fn a_link_in_shared_memory_is_never_read_back() {
    let (rig, memory, mut driver) = waiting(Split);
    for at in (0..16 * 8).step_by(8) {
        memory.store_relaxed_u64(at, u64::MAX);
    }
    used(&rig, &memory, 0, 0, 1);
    assert_eq!(driver.poll(), Ok(Some((0, 1))));
    let one = [Segment { address: rig.data(0), len: 1, writable: false }];
    let mut ids: Vec<u16> = (0..8).map(|_| driver.add(&one, false).unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..8).collect::<Vec<_>>());
}

// Impossible parameters.

fn setup_fails(kind: Kind, change: impl FnOnce(&mut ginnel_virtqueue::Setup<Mapping>)) -> SetupError {
    let rig = Rig::new(kind, 8, true);
    let mut setup = rig.setup(&rig.memory(), rig.base(), None);
    change(&mut setup);
    DeviceQueue::new(setup).err().expect("it is refused")
}

#[test]
fn a_queue_has_a_possible_size() {
    for size in [0, 3, 12, 32769, 65535] {
        assert_eq!(setup_fails(Split, |s| s.size = size), SetupError::Size(size));
    }
    for size in [0, 32769] {
        assert_eq!(setup_fails(Packed, |s| s.size = size), SetupError::Size(size));
    }
}

#[test]
fn areas_are_aligned_and_long_enough() {
    for kind in [Split, Packed] {
        let area = |change: fn(&mut ginnel_virtqueue::Setup<Mapping>)| match setup_fails(kind, change) {
            SetupError::Area { area, .. } => area,
            other => panic!("{other}"),
        };
        assert_eq!(area(|s| s.descriptors.at += 8), "descriptor");
        assert_eq!(area(|s| s.descriptors.len -= 1), "descriptor");
        assert_eq!(area(|s| s.driver.at += 1), "driver");
        assert_eq!(area(|s| s.device.at += 2), "device");
        assert_eq!(area(|s| s.driver.len = 3), "driver");
        assert_eq!(area(|s| s.device.len = 3), "device");
        assert_eq!(area(|s| s.device.at = usize::MAX - 3), "device");
        assert_eq!(area(|s| s.descriptors.at = s.descriptors.memory.len()), "descriptor");
    }
    // The event index needs two more bytes.
    let rig = Rig::new(Split, 8, true);
    let mut setup = rig.setup(&rig.memory(), 0, None);
    (setup.driver.len, setup.device.len, setup.event_idx) = (4 + 16, 4 + 64, false);
    assert!(DeviceQueue::new(setup).is_ok());
    assert!(matches!(setup_fails(Split, |s| s.driver.len = 4 + 16), SetupError::Area { needed: 22, .. }));
}

#[test]
fn a_queue_begins_within_itself() {
    for base in [0x1_0000, u32::MAX] {
        assert_eq!(setup_fails(Split, |s| s.base = base), SetupError::Base { base, size: 8 });
    }
    // An index beyond the ring; available behind used, or more than a lap ahead.
    for base in [8, 0x8_0000, 0x8000_0001, 0x8000_8008, 0x8001_8000, 0x0001_8002] {
        assert_eq!(setup_fails(Packed, |s| s.base = base), SetupError::Base { base, size: 8 }, "{base:#x}");
    }
}

#[test]
fn regions_overlap_in_neither_address() {
    let region = |guest, user| Region { guest, user, memory: Mapping::anonymous(4096).unwrap() };
    let overlap = |a, b| GuestMemory::new(vec![a, b]).err();
    assert_eq!(overlap(region(0, 0), region(4095, 9999)), Some(MemoryError::Overlap(4095)));
    assert_eq!(overlap(region(0, 0), region(9999, 4095)), Some(MemoryError::Overlap(4095)));
}

// In-flight regions that no correct device has left.

/// Returns the result of a queue of 8 with a region for `entries` that is in use and has these changes.
fn region(kind: Kind, entries: u16, change: impl FnOnce(&Mapping)) -> Result<u16, SetupError> {
    let rig = Rig::new(kind, 8, true);
    let memory = rig.memory();
    let region = Mapping::anonymous(16384).unwrap();
    let queue = || InflightQueue::new(region.clone(), 0, 0, kind, entries).unwrap();
    let start = || {
        let mut setup = rig.setup(&memory, rig.base(), None);
        setup.inflight = Some(queue());
        DeviceQueue::new(setup)
    };
    drop(start()?);
    change(&region);
    Ok(start()?.state().resubmit)
}

#[test]
fn an_inflight_region_is_one_for_this_queue() {
    for kind in [Split, Packed] {
        assert_eq!(region(kind, 8, |_| {}), Ok(0));
        assert_eq!(region(kind, 128, |_| {}), Ok(0));
        for (at, value) in [(layout::VERSION_AT, 2), (layout::VERSION_AT, 0xffff), (layout::DESC_NUM, 7)] {
            let result = region(kind, 8, |r| r.store_relaxed_u16(at, value));
            assert!(matches!(result, Err(SetupError::Inflight(_))), "{at}: {value}");
        }
        assert!(region(kind, 4, |_| {}).is_err(), "shorter than the queue");
        let other = if kind == Split { Packed } else { Split };
        let rig = Rig::new(kind, 8, true);
        let mut setup = rig.setup(&rig.memory(), rig.base(), None);
        setup.inflight = Some(InflightQueue::new(Mapping::anonymous(4096).unwrap(), 0, 0, other, 8).unwrap());
        assert!(matches!(DeviceQueue::new(setup).err(), Some(SetupError::Inflight(_))));
        let short = InflightQueue::new(Mapping::anonymous(64).unwrap(), 0, 0, kind, 8);
        assert!(matches!(short.err(), Some(SetupError::Inflight(_))));
        let crooked = InflightQueue::new(Mapping::anonymous(4096).unwrap(), 4, 0, kind, 8);
        assert!(matches!(crooked.err(), Some(SetupError::Inflight(_))));
    }
}

#[test]
fn a_split_region_stays_in_its_queue() {
    let entry = |i: usize| layout::split::HEADER + layout::split::ENTRY * i;
    let refused = |change: fn(&Mapping)| assert!(region(Split, 128, change).is_err());
    refused(|r| r.store_relaxed_u16(layout::split::USED_IDX, 1));
    refused(|r| {
        r.store_relaxed_u16(layout::split::USED_IDX, 0xffff);
        r.store_relaxed_u16(layout::split::LAST_BATCH_HEAD, 8);
    });
    refused(|r| r.store_relaxed_u16(layout::split::HEADER + layout::split::ENTRY * 8, 1));
    // A batch that wraps around, and padding that is not zero.
    let around = region(Split, 8, |r| {
        r.store_relaxed_u16(layout::split::USED_IDX, 0xfff8);
        r.store_relaxed_u16(entry(0), 1);
    });
    assert_eq!(around, Ok(0));
    assert_eq!(region(Split, 8, |r| r.store_relaxed_u16(entry(3), 0xff00)), Ok(0));
    assert_eq!(region(Split, 8, |r| (0..8).for_each(|i| r.store_relaxed_u16(entry(i), 0xff01))), Ok(8));
}

#[test]
fn a_packed_region_stays_in_its_queue() {
    use layout::packed::{ENTRY, ENTRY_LAST, ENTRY_NEXT, ENTRY_NUM, FREE_HEAD, HEADER, OLD_FREE_HEAD, USED};
    fn entry(i: usize) -> usize {
        HEADER + ENTRY * i
    }
    /// Makes entry 0 in flight, and not free.
    fn one(r: &Mapping, num: u16, last: u16) {
        r.store_relaxed_u16(OLD_FREE_HEAD, 1);
        r.store_relaxed_u16(FREE_HEAD, 1);
        r.store_relaxed_u16(entry(0), 1);
        r.store_relaxed_u16(entry(0) + ENTRY_NUM, num);
        r.store_relaxed_u16(entry(0) + ENTRY_LAST, last);
    }
    assert_eq!(region(Packed, 8, |r| one(r, 1, 0)), Ok(1));
    let refused = |why: &str, change: fn(&Mapping)| {
        let error = region(Packed, 128, change).expect_err(why);
        assert!(error.to_string().contains(why), "{error}");
    };
    refused("outside this ring", |r| r.store_relaxed_u64(USED, 8));
    refused("outside this ring", |r| r.store_relaxed_u64(USED, 8 << 16));
    refused("loop", |r| r.store_relaxed_u16(entry(5) + ENTRY_NEXT, 2));
    refused("neither free", |r| r.store_relaxed_u16(entry(5) + ENTRY_NEXT, 7));
    refused("without a descriptor", |r| one(r, 0, 0));
    refused("its last entry", |r| one(r, 1, 1));
    refused("its last entry", |r| one(r, 2, 0));
    refused("share an entry", |r| one(r, 2, 1));
    refused("share an entry", |r| {
        one(r, 2, 200);
        r.store_relaxed_u16(entry(0) + ENTRY_NEXT, 200);
    });
    refused("more is in flight", |r| {
        for i in 0..9 {
            r.store_relaxed_u16(entry(i), 1);
            r.store_relaxed_u16(entry(i) + ENTRY_NUM, 1);
            r.store_relaxed_u16(entry(i) + ENTRY_LAST, i as u16);
        }
        r.store_relaxed_u16(OLD_FREE_HEAD, 9);
    });
}
