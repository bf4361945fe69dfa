//! The client: a disk, as a front end sees it.

use crate::device::{Device, Encoding};
use crate::disk::Disk;
use crate::echo::Echo;
use crate::error::Error;
use crate::events::Events;
use crate::front::Front;
use crate::memory::{DriverMemory, GUEST, MemoryRange, Plan};
use crate::options::{Options, Ring};
use crate::queue::{Buffers, Queue, stride};
use crate::request::{Operation, Request};
use crate::scsi;
use crate::session::{InflightRegion, Session, Vring};
use crate::slots::HEAD;
use crate::virtio::{Eventfds, Parts, Shape, VirtioTransport};
use ginnel_guest_memory::Area;
use ginnel_layout::vhost_user::{VringAddress, protocol};
use ginnel_layout::virtio::{DESCRIPTOR, feature as virtio, packed, split};
use ginnel_layout::virtio_blk::ID_LEN;
use ginnel_layout::virtio_scsi::{EVENT_QUEUE, Event};
use ginnel_shmem::{Mapping, SharedMemory as _};
use ginnel_virtqueue::{DriverQueue, DriverSetup, IndirectTables, Kind};
use rustix::event::{EventfdFlags, eventfd};
use std::time::{Duration, Instant};

/// The largest queue that QEMU's library for vhost-user servers supports, in descriptors.
const LARGEST: u16 = 1024;

/// The parts of one queue in the shared memory.
#[derive(Clone, Copy)]
struct QueueAddresses {
    descriptors: MemoryRange,
    driver: MemoryRange,
    device: MemoryRange,
    tables: MemoryRange,
    heads: MemoryRange,
    buffers: MemoryRange,
}

/// A connection to a server, and the memory and the queues that outlive it.
///
/// The client belongs to one thread; each of its queues can be used by a thread of its own ([`Client::queues`]).
pub struct Client {
    options: Options,
    ring_size: u16,
    memory: DriverMemory,
    addresses: Vec<QueueAddresses>,
    /// The queues of the device before the request queues. Only the event queue gets a buffer.
    others: Vec<(QueueAddresses, Eventfds)>,
    events: Option<Events>,
    log: Option<DriverMemory>,
    session: Session,
    disk: Disk,
    queues: Vec<Queue>,
    inflight_region: Option<InflightRegion>,
}

/// What happened at [`Client::reconnect`] to the requests that were in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// The new server has its predecessor's in-flight region, and continues the requests.
    ByServer,
    /// The server has no in-flight region, so the client has submitted the requests again.
    Resubmitted,
}

impl Client {
    /// Connects, and starts the queues. Makes one attempt. Blocks for each message for at most the `patience` of the
    /// options.
    pub fn connect(options: Options) -> Result<Self, Error> {
        let ring_size = ring_size(&options)?;
        let mut plan = Plan::default();
        let addresses: Vec<_> =
            (0..options.queues).map(|_| plan_queue(&mut plan, &options, ring_size)).collect();
        let others = (0..options.device.first_queue())
            .map(|_| Ok((plan_queue(&mut plan, &options, ring_size), new_eventfds()?)))
            .collect::<Result<_, Error>>()?;
        let memory = DriverMemory::new("ginnel-volume-bench", plan.len())?;
        let session = Session::open(&options)?;
        let (queues, log) = (Vec::new(), None);
        let mut client = Self {
            options,
            ring_size,
            memory,
            addresses,
            others,
            events: None,
            log,
            session,
            disk: Disk::default(),
            queues,
            inflight_region: None,
        };
        client.count_queues()?;
        for index in 0..usize::from(client.options.queues) {
            let queue = client.new_queue(index)?;
            client.queues.push(queue);
        }
        if !client.options.echo {
            client.start(&vec![client.fresh_base(); client.queues.len()])?;
        }
        client.look()?;
        Ok(client)
    }

    /// Connects as [`Client::connect`] does, and retries for at most `limit` while there is no server.
    pub fn connect_within(options: Options, limit: Duration) -> Result<Self, Error> {
        let deadline = Instant::now() + limit;
        loop {
            match Self::connect(options.clone()) {
                Err(Error::Connect { .. } | Error::Gone) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                result => return result,
            }
        }
    }

    /// Returns the disk's properties.
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Returns the negotiated virtio feature bits.
    pub fn features(&self) -> u64 {
        self.session.features
    }

    /// Returns whether the server records the requests in flight, so that its successor can continue them.
    pub fn has_inflight_region(&self) -> bool {
        self.inflight_region.is_some()
    }

    /// Returns the request queues. Each may be used by a thread of its own.
    pub fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    /// Returns one request queue. Panics if `index` is out of range.
    pub fn queue(&mut self, index: usize) -> &mut Queue {
        &mut self.queues[index]
    }

    /// Connects again after the server has gone. Makes one attempt. Afterwards all requests that were in flight are in
    /// flight again.
    pub fn reconnect(&mut self) -> Result<Recovery, Error> {
        let session = Session::open(&self.options)?;
        if session.features != self.session.features {
            return Err(Error::Unsupported(format!(
                "the server's features were {:#x} and are now {:#x}",
                self.session.features, session.features
            )));
        }
        self.session = session;
        self.count_queues()?;
        for queue in &mut self.queues {
            queue.transport.socket = self.session.socket();
        }
        if self.inflight_region.is_some() && self.session.has(protocol::INFLIGHT_SHMFD) {
            let bases: Vec<_> = (0..self.queues.len()).map(|index| self.used_base(index)).collect();
            self.start(&bases)?;
            self.look_again()?;
            return Ok(Recovery::ByServer);
        }
        self.inflight_region = None;
        let bases = vec![self.fresh_base(); self.queues.len()];
        for index in 0..self.queues.len() {
            let ring = self.new_ring(&self.addresses[index])?;
            self.queues[index].transport.restart(ring);
            self.queues[index].put_again()?;
        }
        self.start(&bases)?;
        for queue in &mut self.queues {
            queue.publish()?;
        }
        self.look_again()?;
        Ok(Recovery::Resubmitted)
    }

    /// Connects again as [`Client::reconnect`] does, and retries for at most `limit` while there is no server.
    pub fn reconnect_within(&mut self, limit: Duration) -> Result<Recovery, Error> {
        let deadline = Instant::now() + limit;
        loop {
            match self.reconnect() {
                Err(Error::Connect { .. } | Error::Gone) if Instant::now() < deadline => {
                    // There is no notification when a server starts.
                    std::thread::sleep(Duration::from_millis(5));
                }
                result => return result,
            }
        }
    }

    /// Ends the session as a VM does: the server completes the requests in flight, and stops. Returns the base at which
    /// each queue stopped.
    pub fn close(mut self) -> Result<Vec<u32>, Error> {
        (0..self.queues.len()).map(|index| self.session.stop(self.vring_index(index))).collect()
    }

    /// Stops all queues and starts them again where they stopped, as a VM that is paused does.
    pub fn pause(&mut self) -> Result<(), Error> {
        let bases: Result<Vec<_>, _> =
            (0..self.queues.len()).map(|index| self.session.stop(self.vring_index(index))).collect();
        self.start(&bases?)
    }

    /// Returns whether the server has reported a change of the disk since the last call. If so, reads the disk's
    /// properties again; otherwise does not block.
    pub fn has_changed(&mut self) -> Result<bool, Error> {
        let changed = self.session.config_changed()?;
        if changed {
            self.look()?;
        }
        Ok(changed)
    }

    /// Gives the server a buffer for an event of its SCSI target (virtio 1.2, section 5.6.6.3). Call it again after the
    /// event in the previous buffer was taken, and after [`Client::reconnect`].
    pub fn offer_event_buffer(&mut self) -> Result<(), Error> {
        let kick = self.events()?.offer()?;
        if kick { self.others[EVENT_QUEUE as usize].1.kick() } else { Ok(()) }
    }

    /// Takes the event that the server has put into the buffer, if there is one. Does not block.
    pub fn take_event(&mut self) -> Result<Option<Event>, Error> {
        self.events()?.take()
    }

    fn events(&mut self) -> Result<&mut Events, Error> {
        self.events.as_mut().ok_or_else(|| Error::Invalid("only a SCSI target has events".into()))
    }

    /// Turns the disk's write cache on or off (`VIRTIO_BLK_F_CONFIG_WCE`).
    pub fn set_write_cache(&mut self, on: bool) -> Result<(), Error> {
        self.session.set_write_cache(on)?;
        self.look()
    }

    /// Reads from the disk. Blocks. No other request may be in flight in the first queue, and `bytes` must not be
    /// longer than a buffer.
    pub fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.do_one(Request::read(offset, bytes.len() as u32), bytes)
    }

    /// Writes to the disk, as [`Client::read`] reads from it.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.do_one(Request::write(offset, bytes.len() as u32), &mut bytes.to_vec())
    }

    /// Flushes the disk's cache, under the same conditions.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.do_one(Request::flush(), &mut [])
    }

    /// Discards a range, under the same conditions.
    pub fn discard(&mut self, offset: u64, len: u32) -> Result<(), Error> {
        self.do_one(Request { operation: Operation::Discard, offset, len }, &mut [])
    }

    /// Writes zeros to a range, under the same conditions.
    pub fn write_zeroes(&mut self, offset: u64, len: u32, unmap: bool) -> Result<(), Error> {
        self.do_one(Request { operation: Operation::WriteZeroes { unmap }, offset, len }, &mut [])
    }

    /// Returns the disk's serial number, under the same conditions.
    pub fn id(&mut self) -> Result<String, Error> {
        // A SCSI page has a header of four bytes, of which the last is the length.
        let (len, start) = if self.options.device == Device::Blk { (ID_LEN, 0) } else { (64, 4) };
        let mut bytes = vec![0; len];
        self.do_one(Request { operation: Operation::GetId, offset: 0, len: len as u32 }, &mut bytes)?;
        let bytes = &bytes[start..];
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        Ok(String::from_utf8_lossy(&bytes[..end]).trim_end().to_owned())
    }

    fn do_one(&mut self, request: Request, bytes: &mut [u8]) -> Result<(), Error> {
        Front::execute(self, request, bytes)
    }

    /// Makes the server mark the pages that it writes from now on, as for a VM that migrates.
    pub fn start_log(&mut self) -> Result<(), Error> {
        let pages = (GUEST + self.memory.len()) / 4096;
        let log = DriverMemory::new("ginnel-volume-log", (pages as usize / 8).next_multiple_of(4096))?;
        let rings: Vec<_> = self.addresses().collect();
        self.session.log_to(&log, &rings)?;
        self.log = Some(log);
        Ok(())
    }

    /// Makes the server stop marking pages.
    pub fn stop_log(&mut self) -> Result<(), Error> {
        self.log = None;
        let rings: Vec<_> = self.addresses().collect();
        self.session.set_log(false, &rings)
    }

    /// Takes the marks. Returns the offsets in the shared memory of the pages that the server has written since the
    /// last call.
    pub fn take_dirty(&mut self) -> Vec<usize> {
        let Some(log) = &self.log else { return Vec::new() };
        let first = (GUEST / 4096) as usize;
        let words = (first / 64)..(log.mapping.len() / 8);
        let mut pages = Vec::new();
        for word in words {
            let bits = log.mapping.swap_u64(8 * word, 0);
            let set = (0..64).filter(|bit| bits >> bit & 1 != 0);
            pages.extend(set.map(|bit| (64 * word + bit - first) * 4096));
        }
        pages
    }

    /// Returns the ranges of pages in the shared memory that contain a slot's buffer, the slot's answer, and the
    /// queue's used ring. Tests use them to check the marks.
    pub fn pages_of(&self, queue: usize, slot: usize) -> [std::ops::Range<usize>; 3] {
        let QueueAddresses { heads, buffers, device, .. } = self.addresses[queue];
        let head = heads.at + HEAD * slot;
        let buffer = buffers.at + stride(self.options.buffer) * slot;
        [buffer..buffer + self.options.buffer as usize, head..head + HEAD, device.at..device.at + device.len]
            .map(|range| range.start / 4096 * 4096..range.end.next_multiple_of(4096))
    }

    /// Reads the disk's properties.
    fn look(&mut self) -> Result<(), Error> {
        self.disk = match self.options.device {
            Device::Blk => Disk::of_blk(&self.session.config()?, self.session.features),
            Device::Scsi { .. } => self.look_at_unit()?,
        };
        Ok(())
    }

    /// Reads the disk's properties after a reconnect. Requests may be in flight, so a SCSI unit is not asked.
    fn look_again(&mut self) -> Result<(), Error> {
        if self.options.device == Device::Blk { self.look() } else { Ok(()) }
    }

    fn look_at_unit(&mut self) -> Result<Disk, Error> {
        let queues = self.most_queues();
        // The unit reports each unit attention condition once to a new initiator.
        for _ in 0..8 {
            if self.do_one(scsi::test_unit_ready(), &mut []).is_ok() {
                break;
            }
        }
        let (mut capacity, mut mode) = ([0; 32], [0; 64]);
        self.do_one(scsi::read_capacity(), &mut capacity)?;
        // Not all units have that page.
        let _ = self.do_one(scsi::mode_sense(), &mut mode);
        let disk = scsi::disk(&capacity, &mode, queues);
        if let Encoding::Scsi(unit) = self.options.device.encoding() {
            let unit = scsi::Unit { block: disk.block.max(1), ..unit };
            self.queues.iter_mut().for_each(|queue| queue.transport.set_encoding(Encoding::Scsi(unit)));
        }
        Ok(disk)
    }

    /// Returns the number of request queues that the server has.
    fn most_queues(&self) -> u16 {
        let others = u64::from(self.options.device.first_queue());
        u16::try_from(self.session.queues.saturating_sub(others)).unwrap_or(u16::MAX)
    }

    fn count_queues(&mut self) -> Result<(), Error> {
        let most = self.most_queues();
        if self.options.queues > most {
            let wanted = self.options.queues;
            return Err(Error::Unsupported(format!("the disk has {most} queues and not {wanted}")));
        }
        Ok(())
    }

    fn start(&mut self, bases: &[u32]) -> Result<(), Error> {
        if let Some((addresses, _)) = self.others.get(usize::from(EVENT_QUEUE)) {
            let buffer = addresses.heads;
            self.events =
                Some(Events::new(self.new_ring(addresses)?, self.memory.part(buffer)?, buffer.guest()));
        }
        let fresh = self.fresh_base();
        let vring = |address: VringAddress, base| Vring { size: self.ring_size, base, address };
        let others = self
            .others
            .iter()
            .enumerate()
            .map(|(index, (addresses, _))| vring(address(index, addresses), fresh));
        let vrings: Vec<_> =
            others.chain(self.addresses().zip(bases).map(|(address, base)| vring(address, *base))).collect();
        for queue in &mut self.queues {
            // A server looks at a queue when it is kicked. QEMU creates its notifiers with a kick, too.
            queue.transport.eventfds.kick()?;
        }
        let others = self.others.iter().map(|(_, eventfds)| eventfds);
        let eventfds: Vec<_> =
            others.chain(self.queues.iter().map(|queue| &queue.transport.eventfds)).collect();
        self.session.start(&self.memory, &vrings, &eventfds, &mut self.inflight_region)
    }

    /// Returns the number of a request queue among all queues of the device.
    fn vring_index(&self, queue: usize) -> u32 {
        u32::from(self.options.device.first_queue()) + queue as u32
    }

    /// Returns the addresses of the request queues.
    fn addresses(&self) -> impl Iterator<Item = VringAddress> {
        let first = usize::from(self.options.device.first_queue());
        self.addresses.iter().enumerate().map(move |(index, addresses)| address(first + index, addresses))
    }

    /// Returns the base of a new ring. In a packed ring, both wrap counters are set.
    fn fresh_base(&self) -> u32 {
        match self.options.ring {
            Ring::Split => 0,
            Ring::Packed => 0x8000_8000,
        }
    }

    /// Returns an empty ring.
    fn new_ring(&self, addresses: &QueueAddresses) -> Result<DriverQueue<Mapping>, Error> {
        let area = |range: MemoryRange| Area {
            memory: self.memory.mapping.clone(),
            at: range.at,
            len: range.len,
            guest: range.guest(),
        };
        let has = |feature| self.session.features & feature != 0;
        let tables = has(virtio::INDIRECT_DESC).then(|| {
            IndirectTables::new(area(addresses.tables), self.ring_size, pieces(&self.options) as u16)
        });
        let setup = DriverSetup {
            kind: match self.options.ring {
                Ring::Split => Kind::Split,
                Ring::Packed => Kind::Packed,
            },
            size: self.ring_size,
            descriptors: area(addresses.descriptors),
            driver: area(addresses.driver),
            device: area(addresses.device),
            event_idx: has(virtio::EVENT_IDX),
            tables: tables.flatten(),
        };
        DriverQueue::new(setup).map_err(|error| Error::Invalid(error.to_string()))
    }

    /// Returns the base from which the server's successor continues. Like QEMU, this uses the used index that the
    /// server has published.
    fn used_base(&self, index: usize) -> u32 {
        match self.options.ring {
            Ring::Split => {
                let at = self.addresses[index].device.at + split::INDEX;
                self.memory.mapping.load_relaxed_u16(at).into()
            }
            // A packed ring has no visible index; the in-flight region has it.
            Ring::Packed => self.queues[index].transport.base(),
        }
    }

    fn new_queue(&self, index: usize) -> Result<Queue, Error> {
        let QueueAddresses { heads, buffers, driver, device, .. } = self.addresses[index];
        let echo = self.options.echo.then(|| Echo {
            size: self.ring_size,
            memory: self.memory.mapping.clone(),
            available: driver.at,
            used: device.at,
            next: 0,
        });
        let parts = Parts {
            ring: self.new_ring(&self.addresses[index])?,
            heads: self.memory.part(heads)?,
            heads_guest: heads.guest(),
            buffers_guest: buffers.guest(),
            echo,
        };
        let options = &self.options;
        let shape = Shape {
            encoding: options.device.encoding(),
            buffer: options.buffer,
            stride: stride(options.buffer),
            segment: options.segment,
            indirect: self.session.features & virtio::INDIRECT_DESC != 0,
        };
        let (eventfds, socket) = (new_eventfds()?, self.session.socket());
        let transport = VirtioTransport::new(index, shape, parts, eventfds, socket, self.ring_size);
        let buffers = Buffers { memory: self.memory.part(buffers)?, len: options.buffer };
        Ok(Queue::new(index, options.depth, buffers, transport))
    }
}

impl Front for Client {
    type Transport = VirtioTransport;

    fn disk(&self) -> &Disk {
        &self.disk
    }

    fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    fn resume(&mut self, limit: Duration) -> Result<(), Error> {
        self.reconnect_within(limit).map(drop)
    }

    fn has_inflight_record(&self) -> bool {
        self.has_inflight_region()
    }

    fn serial(&mut self) -> Result<String, Error> {
        self.id()
    }
}

fn new_eventfds() -> Result<Eventfds, Error> {
    let bell =
        || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::io("making an eventfd"));
    Ok(Eventfds { kick: bell()?, call: bell()?, error: bell()? })
}

fn address(index: usize, addresses: &QueueAddresses) -> VringAddress {
    VringAddress {
        index: index as u32,
        flags: 0,
        descriptors: addresses.descriptors.user(),
        used: addresses.device.user(),
        available: addresses.driver.user(),
        log: addresses.device.guest(),
    }
}

/// Checks the options. Returns the number of descriptors of a queue.
fn ring_size(options: &Options) -> Result<u16, Error> {
    let invalid = |what: String| Err(Error::Invalid(what));
    let Options { queues, depth, buffer, segment, .. } = *options;
    if options.echo && (options.ring == Ring::Packed || options.device != Device::Blk) {
        return invalid("the echo is a virtio-blk device with split rings".into());
    }
    if !(1..=256).contains(&queues) {
        return invalid(format!("{queues} queues; 1 to 256 are possible"));
    }
    if !(1..=256).contains(&depth) {
        return invalid(format!("{depth} requests on their way; 1 to 256 are possible"));
    }
    if !(512..=64 << 20).contains(&buffer) || segment < 512 || !segment.min(buffer).is_multiple_of(512) {
        return invalid(format!(
            "buffers of {buffer} bytes in pieces of {segment}; 512 bytes to 64 MiB in multiples of 512 are possible"
        ));
    }
    let pieces = u64::from(pieces(options));
    // Without indirect tables, the ring holds all descriptors. The server decides whether there are tables.
    let needed = pieces * u64::from(depth);
    let size = match options.ring_size {
        Some(size) => size,
        None => needed.next_power_of_two().clamp(128, LARGEST.into()) as u16,
    };
    if !size.is_power_of_two() || size > LARGEST || u64::from(size) < pieces {
        return invalid(format!(
            "queues of {size} descriptors; a power of two is possible, at most {LARGEST} and at least the {pieces} that one request needs"
        ));
    }
    Ok(size)
}

/// Returns the number of descriptors of the longest request.
fn pieces(options: &Options) -> u32 {
    options.buffer.div_ceil(options.segment) + 2
}

fn plan_queue(plan: &mut Plan, options: &Options, size: u16) -> QueueAddresses {
    let (driver, device) = match options.ring {
        Ring::Split => (split::driver_len(size, true), split::device_len(size, true)),
        Ring::Packed => (packed::EVENT, packed::EVENT),
    };
    let pieces = pieces(options) as usize;
    let depth = usize::from(options.depth);
    QueueAddresses {
        descriptors: plan.pages(DESCRIPTOR * usize::from(size)),
        driver: plan.pages(driver),
        device: plan.pages(device),
        tables: plan.pages(DESCRIPTOR * pieces * usize::from(size)),
        heads: plan.pages(HEAD * depth),
        buffers: plan.pages(stride(options.buffer) * depth),
    }
}
