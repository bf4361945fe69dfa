//! A queue in a small guest of its own: the position of its areas, and both sides.

use ginnel_guest_memory::{Area, GuestMemory, Region};
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{DeviceQueue, DriverQueue, DriverSetup, IndirectTables, InflightQueue, Kind, Setup};

/// Start of the guest's memory, in guest addresses.
pub const GUEST: u64 = 0x10_0000;
/// Start of the guest's memory, in addresses of the front end.
pub const USER: u64 = 0x7f00_0000_0000;
/// Number of descriptors of an indirect table.
pub const TABLE: u16 = 8;
/// Maximum number of segments of a request.
pub const SEGMENTS: u16 = 64;

/// The position of a queue in its guest's memory.
#[derive(Clone, Copy, Debug)]
pub struct Rig {
    /// Split or packed.
    pub kind: Kind,
    /// Number of descriptors.
    pub size: u16,
    /// Whether the sides say at which index they want to be notified.
    pub event_idx: bool,
}

impl Rig {
    /// Returns a queue of this kind and size.
    pub fn new(kind: Kind, size: u16, event_idx: bool) -> Self {
        Self { kind, size, event_idx }
    }

    /// Returns the queue that a byte selects.
    pub fn choose(choice: u8) -> Self {
        let kind = if choice & 1 == 0 { Kind::Split } else { Kind::Packed };
        let sizes = if kind == Kind::Split { [1, 2, 4, 16] } else { [1, 3, 5, 16] };
        Self::new(kind, sizes[usize::from(choice >> 2 & 3)], choice & 2 != 0)
    }

    /// Returns the offset of the driver's area in the guest's memory.
    pub fn driver_at(&self) -> usize {
        (16 * usize::from(self.size)).next_multiple_of(64)
    }

    /// Returns the offset of the device's area.
    pub fn device_at(&self) -> usize {
        (self.driver_at() + 6 + 2 * usize::from(self.size)).next_multiple_of(64)
    }

    /// Returns the offset of the indirect tables.
    pub fn tables_at(&self) -> usize {
        (self.device_at() + 6 + 8 * usize::from(self.size)).next_multiple_of(64)
    }

    /// Returns the offset of the data.
    pub fn data_at(&self) -> usize {
        self.tables_at() + 16 * usize::from(self.size) * usize::from(TABLE)
    }

    /// Returns the length of the guest's memory, which ends with 64 KiB of data.
    pub fn memory_len(&self) -> usize {
        (self.data_at() + (64 << 10)).next_multiple_of(4096)
    }

    /// Returns the guest address of byte `at` of the data.
    pub fn data(&self, at: usize) -> u64 {
        GUEST + (self.data_at() + at) as u64
    }

    /// Makes the guest's memory.
    pub fn memory(&self) -> Mapping {
        Mapping::anonymous(self.memory_len()).unwrap()
    }

    /// Makes the region in which the device notes what is in flight.
    pub fn inflight_memory(&self) -> Mapping {
        Mapping::anonymous(InflightQueue::<Mapping>::len(self.kind, self.size)).unwrap()
    }

    /// Returns an area of the guest's memory.
    pub fn area<M: SharedMemory>(&self, memory: &M, at: usize, len: usize) -> Area<M> {
        Area { memory: memory.clone(), at, len, guest: GUEST + at as u64 }
    }

    /// Returns the guest's memory as a device sees it.
    pub fn guest<M: SharedMemory>(&self, memory: &M) -> GuestMemory<M> {
        GuestMemory::new(vec![Region { guest: GUEST, user: USER, memory: memory.clone() }]).unwrap()
    }

    /// Returns the base that a front end uses for a new queue.
    pub fn base(&self) -> u32 {
        if self.kind == Kind::Split { 0 } else { 0x8000_8000 }
    }

    /// Returns what a device needs to know of the queue.
    pub fn setup<M: SharedMemory>(&self, memory: &M, base: u32, inflight: Option<&M>) -> Setup<M> {
        let Self { kind, size, event_idx } = *self;
        Setup {
            kind,
            size,
            event_idx,
            descriptors: self.area(memory, 0, 16 * usize::from(size)),
            driver: self.area(memory, self.driver_at(), 6 + 2 * usize::from(size)),
            device: self.area(memory, self.device_at(), 6 + 8 * usize::from(size)),
            base,
            inflight: inflight.map(|region| InflightQueue::new(region.clone(), 0, 0, kind, size).unwrap()),
            max_segments: SEGMENTS,
        }
    }

    /// Returns a device that begins.
    pub fn device<M: SharedMemory>(&self, memory: &M) -> DeviceQueue<M> {
        DeviceQueue::new(self.setup(memory, self.base(), None)).unwrap()
    }

    /// Returns a driver that begins.
    pub fn driver<M: SharedMemory>(&self, memory: &M) -> DriverQueue<M> {
        let Setup { kind, size, event_idx, descriptors, driver, device, .. } = self.setup(memory, 0, None);
        let tables = self.area(memory, self.tables_at(), self.data_at() - self.tables_at());
        let tables = IndirectTables::new(tables, size, TABLE);
        DriverQueue::new(DriverSetup { kind, size, descriptors, driver, device, event_idx, tables }).unwrap()
    }
}
