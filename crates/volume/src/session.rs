//! One front end: its messages, and what they make of the device (vhost-user specification).
//!
//! A queue runs from when it is complete (memory, size, addresses, kick, enabled) until GET_VRING_BASE, or until the
//! front end is gone. All that was taken is given back first. If the front end has agreed that GET_VRING_BASE leaves requests
//! in flight, what has not been begun stays in the in-flight region, for whoever goes on with it.
//!
//! A message that changes what a running queue rests on, such as a new memory table, stops it in the same way, and starts it
//! again where it stood; the guest notices nothing.
//!
//! A request of the control queue waits for all that the driver has asked for in the others, also for what lies in one that is
//! stopped at the moment. So the control queue is stopped before any other, and starts again only when all others do that ran before,
//! or when the device is reset or has another driver.
//!
//! If the last queue stops by GET_VRING_BASE while written pages are logged, a VM that migrates has stopped here. So does one that
//! reboots during a migration; QEMU (9.2 and later) resets the device then, and we know better.

mod memory;
pub mod message;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ginnel_layout::vhost_user::{
    BackendRequest, ConfigHeader, InflightArea, LogArea, MAX_CONFIG, MEMORY_HEADER, MemoryRegion, Request,
    VRING_INDEX_MASK, VRING_NO_FD, VringAddress, VringState, feature as connection, protocol,
};
use ginnel_layout::virtio::{DESCRIPTOR, feature as virtio, packed, split};
use ginnel_shmem::Mapping;
use ginnel_virtqueue::{Area, DeviceQueue, DirtyLog, GuestMemory, InflightQueue, Kind, Region, Setup};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use tracing::{debug, warn};
use zerocopy::{FromBytes, IntoBytes};

use crate::device::Device;
use crate::disk::Disk;
use message::{Gone, Message, tell};

/// Regions of memory that are taken.
const MAX_REGIONS: usize = 256;

/// A buffer over the border of two regions is two pieces; a request may have that many more than the device allows.
const PIECES: u16 = 16;

/// What the specification calls an initial packed base: both wrap counters set.
const PACKED_BASE: u32 = 0x8000_8000;

/// A queue that is ready to be served.
pub struct Start {
    /// Which.
    pub index: u16,
    /// The queue.
    pub queue: DeviceQueue<Mapping>,
    /// The guest's memory.
    pub memory: Arc<GuestMemory<Mapping>>,
    /// Written by the front end when there is something; `None`: the queue must be looked at.
    pub kick: Option<Arc<OwnedFd>>,
    /// Written by us when something is done.
    pub call: Option<Arc<OwnedFd>>,
    /// Written by us when the queue is broken.
    pub error: Option<Arc<OwnedFd>>,
    /// Where written pages are marked.
    pub log: Option<DirtyLog<Mapping>>,
    /// Whether notifications are suppressed by index.
    pub event_idx: bool,
}

/// Who serves the queues.
pub trait Queues {
    /// Serves a queue from now on. An error says why that must not be.
    fn start(&mut self, start: Start) -> Result<(), String>;
    /// Serves it no more. Blocks until all that was taken is given back, and all that a predecessor had taken; if it is only
    /// suspended, until that is given back which is at a disk: the rest stays in the in-flight region. Returns the queue's base.
    fn stop(&mut self, index: u16, suspend: bool) -> Result<u32, String>;
    /// The VM has stopped to go on elsewhere; no queue is served. It may also go on here.
    fn left(&mut self);
    /// It has not: its driver has reset the device.
    fn stays(&mut self);
    /// Makes all durable that was acknowledged. Blocks for as long as the disks take.
    fn sync(&mut self) -> Result<(), String>;
    /// Another descriptor to write when something is done; the queue is served.
    fn set_call(&mut self, index: u16, call: Option<Arc<OwnedFd>>);
}

/// A front end's state.
pub struct Session {
    device: Arc<dyn Device>,
    limits: Limits,
    features: u64,
    /// Those that tell one driver from the next.
    driver: Option<u64>,
    protocol: u64,
    memory: Option<Arc<GuestMemory<Mapping>>>,
    log: Option<DirtyLog<Mapping>>,
    inflight: Option<Inflight>,
    /// The VM seems to have left.
    left: bool,
    rings: Vec<Ring>,
    /// The back end's own channel.
    channel: Option<UnixStream>,
}

/// What a front end may ask for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest queue.
    pub queue_size: u16,
    /// The most segments of data of a request.
    pub segments: u16,
    /// Whether packed queues are offered.
    pub packed: bool,
}

struct Inflight {
    memory: Mapping,
    queues: u16,
    queue_size: u16,
}

impl Inflight {
    /// Where its queues' parts end. As large as either kind needs: the driver may choose the other one at its next start.
    fn notes_at(queues: u16, queue_size: u16) -> usize {
        let part = |kind| InflightQueue::<Mapping>::len(kind, queue_size);
        part(Kind::Split).max(part(Kind::Packed)) * usize::from(queues)
    }
}

#[derive(Default)]
struct Ring {
    size: u16,
    addresses: Option<VringAddress>,
    base: Option<u32>,
    kick: Kick,
    call: Option<Arc<OwnedFd>>,
    error: Option<Arc<OwnedFd>>,
    /// As the front end has said; until then as the specification has it.
    enabled: Option<bool>,
    running: bool,
    /// It has run, and is expected to run again with what lies in it.
    returns: bool,
}

#[derive(Default)]
enum Kick {
    /// The queue does not run.
    #[default]
    None,
    By(Arc<OwnedFd>),
    /// There is none: the queue is to be polled.
    Polled,
}

/// What a message leads to.
#[derive(Debug)]
pub enum Outcome {
    /// An answer of its own.
    Reply(Vec<u8>, Option<OwnedFd>),
    /// Done.
    Done,
    /// Not done, which ends nothing.
    Failed(String),
}

impl Session {
    /// A front end that has said nothing yet.
    pub fn new(device: Arc<dyn Device>, limits: Limits) -> Self {
        let rings = (0..device.queues()).map(|_| Ring::default()).collect();
        forget_driver(&*device);
        device.disks().iter().for_each(|disk| disk.turn_cache(true));
        Self {
            device,
            limits,
            features: 0,
            driver: None,
            protocol: 0,
            memory: None,
            log: None,
            inflight: None,
            left: false,
            rings,
            channel: None,
        }
    }

    /// Feature bits that the driver has chosen.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Protocol features that the front end has chosen.
    pub fn protocol_features(&self) -> u64 {
        self.protocol
    }

    /// Queues and whether each is being served, and its size.
    pub fn rings(&self) -> impl Iterator<Item = (bool, u16)> {
        self.rings.iter().map(|ring| (ring.running, ring.size))
    }

    /// Whether the front end's memory has gone away.
    pub fn is_broken(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.is_broken())
    }

    /// All feature bits on offer.
    fn offered(&self) -> u64 {
        let packed = if self.limits.packed { virtio::RING_PACKED } else { 0 };
        self.device.features()
            | packed
            | virtio::VERSION_1
            | virtio::INDIRECT_DESC
            | virtio::EVENT_IDX
            | connection::LOG_ALL
            | connection::PROTOCOL_FEATURES
    }

    const PROTOCOL: u64 = protocol::MQ
        | protocol::LOG_SHMFD
        | protocol::REPLY_ACK
        | protocol::BACKEND_REQ
        | protocol::CONFIG
        | protocol::INFLIGHT_SHMFD
        | protocol::RESET_DEVICE
        | protocol::CONFIGURE_MEM_SLOTS
        | protocol::GET_VRING_BASE_INFLIGHT;

    /// Does what a message asks for. Blocks while queues are stopped. An error ends the connection.
    pub fn handle(&mut self, mut message: Message, queues: &mut dyn Queues) -> Result<Outcome, Gone> {
        let outcome = self.dispatch(&mut message, queues)?;
        let ack = message.need_reply && self.protocol & protocol::REPLY_ACK != 0;
        Ok(match outcome {
            Outcome::Done if ack => number(0),
            Outcome::Failed(why) => {
                warn!("message {}: {why}", message.request.0);
                if ack { number(1) } else { Outcome::Done }
            }
            other => other,
        })
    }

    fn dispatch(&mut self, message: &mut Message, queues: &mut dyn Queues) -> Result<Outcome, Gone> {
        debug!(request = message.request.0, bytes = message.body.len(), fds = message.fds.len(), "message");
        match message.request {
            Request::GET_FEATURES => return Ok(number(self.offered())),
            Request::SET_FEATURES => {
                let features: u64 = message.payload()?;
                if features & !self.offered() != 0 {
                    let extra = features & !self.offered();
                    return Err(
                        message.malformed(&format!("asks for features that were not offered: {extra:#x}"))
                    );
                }
                // The log goes on and off under a driver that goes on.
                let driver = |features| features & !connection::LOG_ALL;
                self.change_all(queues, |session| {
                    if session.driver.replace(driver(features)) != Some(driver(features)) {
                        session.device.set_features(features);
                        session.rings.iter_mut().for_each(|ring| ring.returns = false);
                    }
                    session.features = features;
                })?;
            }
            Request::SET_OWNER => {}
            Request::RESET_OWNER | Request::RESET_DEVICE => {
                self.stop_all(queues)?;
                self.rings.iter_mut().for_each(|ring| *ring = Ring::default());
                self.features = 0;
                self.driver = None;
                self.inflight = None;
                self.log = None;
                forget_driver(&*self.device);
                if std::mem::take(&mut self.left) {
                    queues.stays();
                }
            }
            Request::GET_PROTOCOL_FEATURES => return Ok(number(Self::PROTOCOL)),
            Request::SET_PROTOCOL_FEATURES => {
                let features: u64 = message.payload()?;
                if features & !Self::PROTOCOL != 0 {
                    return Err(message.malformed("asks for protocol features that were not offered"));
                }
                self.protocol = features;
            }
            Request::GET_QUEUE_NUM => return Ok(number(self.device.queues().into())),
            Request::GET_MAX_MEM_SLOTS => return Ok(number(MAX_REGIONS as u64)),
            Request::SET_MEM_TABLE => self.set_memory(message, queues)?,
            Request::ADD_MEM_REG => self.add_memory(message, queues)?,
            Request::REM_MEM_REG => self.remove_memory(message, queues)?,
            Request::SET_LOG_BASE => {
                let file = message.one_fd()?;
                let area: LogArea = message.payload()?;
                let log = memory::map_log(&area, &file).map_err(Gone::Refused)?;
                self.change_all(queues, |session| session.log = Some(log))?;
                return Ok(number(0));
            }
            // Sent by no front end that has LOG_SHMFD; its descriptor would tell of errors of the log.
            Request::SET_LOG_FD => {}
            Request::SET_VRING_NUM => {
                let (index, value) = self.vring(message)?;
                let most = self.limits.queue_size;
                let size = u16::try_from(value).ok().filter(|size| *size > 0 && *size <= most);
                let size = size.ok_or_else(|| {
                    message.malformed(&format!(
                        "asks for a queue of {value} descriptors; this volume takes 1 to {most} (queue-size)"
                    ))
                })?;
                self.change(index, queues, |ring| ring.size = size)?;
            }
            Request::SET_VRING_ADDR => {
                let addresses: VringAddress = message.payload()?;
                let index = self.index(message, addresses.index)?;
                // This too is said while the queue runs: the log of written pages goes on or off.
                self.end(index, self.inflight.is_some(), queues)?;
                self.rings[index].addresses = Some(addresses);
                self.start(index, queues)?;
            }
            Request::SET_VRING_BASE => {
                let (index, base) = self.vring(message)?;
                // A running queue knows better where it stands.
                if !self.rings[index].running {
                    self.rings[index].base = Some(base);
                }
            }
            Request::GET_VRING_BASE => {
                let (index, _) = self.vring(message)?;
                self.end(index, self.leaves(), queues)?;
                if self.features & connection::LOG_ALL != 0 && !self.rings.iter().any(|ring| ring.running) {
                    queues.left();
                    self.left = true;
                }
                let ring = &mut self.rings[index];
                ring.kick = Kick::None;
                let state = VringState { index: index as u32, value: ring.base.unwrap_or(0) };
                return Ok(Outcome::Reply(state.as_bytes().to_vec(), None));
            }
            Request::SET_VRING_KICK => {
                let (index, fd) = self.vring_fd(message)?;
                self.change(index, queues, |ring| ring.kick = fd.map_or(Kick::Polled, Kick::By))?;
            }
            Request::SET_VRING_CALL => {
                let (index, fd) = self.vring_fd(message)?;
                let ring = &mut self.rings[index];
                ring.call.clone_from(&fd);
                if ring.running {
                    queues.set_call(index as u16, fd);
                }
            }
            Request::SET_VRING_ERR => {
                let (index, fd) = self.vring_fd(message)?;
                self.change(index, queues, |ring| ring.error = fd)?;
            }
            Request::SET_VRING_ENABLE => {
                let (index, on) = self.vring(message)?;
                if on > 1 {
                    return Err(message.malformed("neither enables nor disables"));
                }
                if self.rings[index].enabled != Some(on == 1) {
                    // QEMU disables all queues before it asks the first one for its base.
                    self.end(index, self.leaves(), queues)?;
                    self.rings[index].enabled = Some(on == 1);
                    self.start(index, queues)?;
                }
            }
            Request::GET_CONFIG => return self.get_config(message),
            Request::SET_CONFIG => return self.set_config(message, queues),
            Request::SET_BACKEND_REQ_FD => {
                self.channel = Some(UnixStream::from(message.one_fd()?));
            }
            Request::GET_INFLIGHT_FD => return self.get_inflight(message),
            Request::SET_INFLIGHT_FD => {
                let area = inflight_area(message)?;
                let file = message.one_fd()?;
                let memory = memory::map_inflight(&area, &file).map_err(Gone::Refused)?;
                let inflight = Inflight { memory, queues: area.queues, queue_size: area.queue_size };
                // Nothing may be left in the old one.
                self.stop_all(queues)?;
                self.keep_notes(&inflight);
                self.inflight = Some(inflight);
                self.start_all(queues)?;
            }
            _ => return Err(message.malformed("is not known to this volume")),
        }
        Ok(Outcome::Done)
    }

    /// Tells the front end that the configuration has changed, if it has a channel for that.
    pub fn config_changed(&mut self) {
        let Some(channel) = &self.channel else { return };
        // No answer is asked for: the front end asks us for the configuration before it would give one.
        if let Err(error) = tell(channel, BackendRequest::CONFIG_CHANGE.0) {
            warn!("the front end cannot be told of the new configuration: {error}");
            self.channel = None;
        }
    }

    /// Stops all queues.
    pub fn stop_all(&mut self, queues: &mut dyn Queues) -> Result<(), Gone> {
        (0..self.rings.len()).try_for_each(|index| self.stop(index, queues))
    }

    fn stop(&mut self, index: usize, queues: &mut dyn Queues) -> Result<(), Gone> {
        self.end(index, false, queues)
    }

    fn end(&mut self, index: usize, suspend: bool, queues: &mut dyn Queues) -> Result<(), Gone> {
        if !self.rings[index].running {
            return Ok(());
        }
        if let Some(control) = self.control().filter(|control| *control != index) {
            self.end(control, false, queues)?;
        }
        let ring = &mut self.rings[index];
        // One that does not end still runs: nobody else may be given its place.
        ring.base = Some(queues.stop(index as u16, suspend).map_err(Gone::Refused)?);
        (ring.running, ring.returns) = (false, true);
        Ok(())
    }

    fn control(&self) -> Option<usize> {
        self.device.control_queue().map(usize::from)
    }

    /// Whether a queue that the front end stops may leave requests in flight. Without a region there is no place for them.
    fn leaves(&self) -> bool {
        self.protocol & protocol::GET_VRING_BASE_INFLIGHT != 0 && self.inflight.is_some()
    }

    /// Stops all queues, which are to go on at once, or with the next process: what has not been begun stays in the in-flight
    /// region, if there is one.
    pub fn pause_all(&mut self, queues: &mut dyn Queues) -> Result<(), Gone> {
        let suspend = self.inflight.is_some();
        (0..self.rings.len()).try_for_each(|index| self.end(index, suspend, queues))
    }

    fn start_all(&mut self, queues: &mut dyn Queues) -> Result<(), Gone> {
        (0..self.rings.len()).try_for_each(|index| self.start(index, queues))
    }

    /// Changes one queue, which may run.
    fn change(
        &mut self,
        index: usize,
        queues: &mut dyn Queues,
        f: impl FnOnce(&mut Ring),
    ) -> Result<(), Gone> {
        self.stop(index, queues)?;
        f(&mut self.rings[index]);
        self.start(index, queues)
    }

    /// Changes what all queues rest on.
    fn change_all(&mut self, queues: &mut dyn Queues, f: impl FnOnce(&mut Self)) -> Result<(), Gone> {
        self.pause_all(queues)?;
        f(self);
        self.start_all(queues)
    }

    /// Starts a queue if all is there, and then the control queue, if that has waited for it.
    fn start(&mut self, index: usize, queues: &mut dyn Queues) -> Result<(), Gone> {
        self.start_one(index, queues)?;
        match self.control() {
            Some(control) if control != index => self.start_one(control, queues),
            _ => Ok(()),
        }
    }

    fn start_one(&mut self, index: usize, queues: &mut dyn Queues) -> Result<(), Gone> {
        let others_return = || self.rings.iter().enumerate().any(|(n, ring)| n != index && ring.returns);
        if self.rings[index].running || (self.control() == Some(index) && others_return()) {
            return Ok(());
        }
        let ring = &self.rings[index];
        let enabled = ring.enabled.unwrap_or(self.features & connection::PROTOCOL_FEATURES == 0);
        let (Some(addresses), true, false) = (ring.addresses, enabled, ring.size == 0) else { return Ok(()) };
        let kick = match &ring.kick {
            Kick::None => return Ok(()),
            Kick::By(fd) => Some(fd.clone()),
            Kick::Polled => None,
        };
        let Some(memory) = self.memory.clone() else { return Ok(()) };
        let refused = |why: &str| Gone::Refused(format!("queue {index}: {why}"));
        let kind = self.kind();
        let event_idx = self.features & virtio::EVENT_IDX != 0;
        let setup = Setup {
            kind,
            size: ring.size,
            descriptors: self
                .area(addresses.descriptors, DESCRIPTOR * usize::from(ring.size))
                .map_err(|e| refused(&e))?,
            driver: self
                .area(addresses.available, lengths(kind, ring.size, event_idx).0)
                .map_err(|e| refused(&e))?,
            device: self
                .area(addresses.used, lengths(kind, ring.size, event_idx).1)
                .map_err(|e| refused(&e))?,
            event_idx,
            base: ring.base.unwrap_or(if kind == Kind::Packed { PACKED_BASE } else { 0 }),
            inflight: self.inflight_of(index as u16, kind, ring.size).map_err(|e| refused(&e))?,
            // With the request's header and its status. No more for a longer queue: each of its requests could have as many, in
            // tables of their own, and what was needed for a request once is kept.
            max_segments: self.limits.segments.saturating_add(2 + PIECES),
        };
        let mut queue = DeviceQueue::new(setup).map_err(|e| refused(&e.to_string()))?;
        let log = self.log.clone().filter(|_| self.features & connection::LOG_ALL != 0);
        if addresses.flags & VringAddress::LOG != 0 {
            queue.set_log(log.clone());
        }
        let start = Start {
            index: index as u16,
            queue,
            memory,
            kick,
            call: ring.call.clone(),
            error: ring.error.clone(),
            log,
            event_idx,
        };
        queues.start(start).map_err(Gone::Refused)?;
        self.left = false;
        let ring = &mut self.rings[index];
        (ring.running, ring.returns) = (true, false);
        Ok(())
    }

    fn kind(&self) -> Kind {
        if self.features & virtio::RING_PACKED != 0 { Kind::Packed } else { Kind::Split }
    }

    fn area(&self, user: u64, len: usize) -> Result<Area<Mapping>, String> {
        self.memory.as_ref().and_then(|memory| memory.at_user(user, len)).ok_or_else(|| {
            format!("{len} bytes at {user:#x} of the front end are not in the memory it has given")
        })
    }

    fn inflight_of(
        &self,
        index: u16,
        kind: Kind,
        size: u16,
    ) -> Result<Option<InflightQueue<Mapping>>, String> {
        let Some(inflight) = &self.inflight else { return Ok(None) };
        if index >= inflight.queues || size > inflight.queue_size {
            return Err("the in-flight region is for fewer or shorter queues".to_owned());
        }
        let part = InflightQueue::new(inflight.memory.clone(), 0, index, kind, inflight.queue_size);
        part.map(Some).map_err(|e| e.to_string())
    }

    fn set_memory(&mut self, message: &mut Message, queues: &mut dyn Queues) -> Result<(), Gone> {
        let fds = std::mem::take(&mut message.fds);
        let (head, tail) =
            message.body.split_at_checked(MEMORY_HEADER).ok_or_else(|| message.malformed("is too short"))?;
        let count = u32::read_from_prefix(head).map_or(0, |(count, _)| count as usize);
        let size = size_of::<MemoryRegion>();
        if count != fds.len() || tail.len() < count * size {
            return Err(message.malformed("does not have a descriptor for each region"));
        }
        let mut regions = Vec::with_capacity(count);
        for (bytes, fd) in tail.chunks_exact(size).zip(&fds) {
            let region =
                MemoryRegion::read_from_bytes(bytes).map_err(|_| message.malformed("is too short"))?;
            regions.push(memory::map_region(&region, fd).map_err(Gone::Refused)?);
        }
        self.use_memory(regions, queues)
    }

    fn add_memory(&mut self, message: &mut Message, queues: &mut dyn Queues) -> Result<(), Gone> {
        let fd = message.one_fd()?;
        let region = single_region(message)?;
        let mut regions = self.regions();
        if regions.len() >= MAX_REGIONS {
            return Err(
                message.malformed(&format!("adds one memory region too many: {MAX_REGIONS} are taken"))
            );
        }
        regions.push(memory::map_region(&region, &fd).map_err(Gone::Refused)?);
        self.use_memory(regions, queues)
    }

    fn remove_memory(&mut self, message: &mut Message, queues: &mut dyn Queues) -> Result<(), Gone> {
        use ginnel_shmem::SharedMemory;
        let wanted = single_region(message)?;
        let same = |r: &Region<Mapping>| {
            r.guest == wanted.guest && r.user == wanted.user && r.memory.len() as u64 == wanted.size
        };
        let mut regions = self.regions();
        let Some(at) = regions.iter().position(same) else {
            return Err(message.malformed("removes a memory region that is not there"));
        };
        regions.swap_remove(at);
        self.use_memory(regions, queues)
    }

    fn use_memory(&mut self, regions: Vec<Region<Mapping>>, queues: &mut dyn Queues) -> Result<(), Gone> {
        let memory = GuestMemory::new(regions).map_err(|e| Gone::Refused(e.to_string()))?;
        self.change_all(queues, |session| session.memory = Some(Arc::new(memory)))
    }

    fn regions(&self) -> Vec<Region<Mapping>> {
        self.memory.as_ref().map(|memory| memory.regions().to_vec()).unwrap_or_default()
    }

    fn get_config(&self, message: &Message) -> Result<Outcome, Gone> {
        let (header, _) = config_header(message)?;
        let (offset, size) = (header.offset as usize, header.size as usize);
        if offset.saturating_add(size) > MAX_CONFIG {
            return Err(message.malformed("asks for more configuration than there can be"));
        }
        let mut config = self.device.config();
        config.resize(MAX_CONFIG, 0);
        let reply = [header.as_bytes(), &config[offset..offset + size]].concat();
        Ok(Outcome::Reply(reply, None))
    }

    fn set_config(&mut self, message: &Message, queues: &mut dyn Queues) -> Result<Outcome, Gone> {
        let (header, bytes) = config_header(message)?;
        let cached = || self.device.disks().iter().filter(|disk| disk.is_cache_on()).count();
        let before = cached();
        let mut done = self.device.set_config(header.offset, bytes);
        if done.is_ok() && cached() < before {
            // A driver that has turned the cache off flushes no more, also not what it had written before, and what it is writing.
            self.change_all(queues, |_| {})?;
            done = queues.sync();
        }
        Ok(match done {
            Ok(()) => Outcome::Done,
            Err(why) => Outcome::Failed(why),
        })
    }

    fn get_inflight(&mut self, message: &Message) -> Result<Outcome, Gone> {
        let area = inflight_area(message)?;
        if area.queues == 0 || area.queues > self.device.queues() || area.queue_size > self.limits.queue_size
        {
            return Err(
                message.malformed("asks for an in-flight region of more or longer queues than there are")
            );
        }
        let notes = self.device.disks().len() * Disk::NOTE;
        let size = (Inflight::notes_at(area.queues, area.queue_size) + notes) as u64;
        let made = || {
            let file = memfd_create("ginnel-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&file, size)?;
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok::<_, rustix::io::Errno>(file)
        };
        let file = made()?;
        let reply = InflightArea { size, offset: 0, ..area };
        Ok(Outcome::Reply(reply.as_bytes().to_vec(), Some(file)))
    }

    /// What drivers have chosen is noted behind the queues' parts of an in-flight region of ours: front ends give the whole
    /// region to the next process. There is no such place in one that another kind of server has made.
    fn keep_notes(&self, inflight: &Inflight) {
        let first = Inflight::notes_at(inflight.queues, inflight.queue_size);
        for (number, disk) in self.device.disks().iter().enumerate() {
            disk.keep_note(inflight.memory.part(first + number * Disk::NOTE, Disk::NOTE));
        }
    }

    fn index(&self, message: &Message, index: u32) -> Result<usize, Gone> {
        match index as usize {
            index if index < self.rings.len() => Ok(index),
            _ => Err(message
                .malformed(&format!("is about queue {index}; there are {} (queues)", self.rings.len()))),
        }
    }

    fn vring(&self, message: &Message) -> Result<(usize, u32), Gone> {
        let state: VringState = message.payload()?;
        Ok((self.index(message, state.index)?, state.value))
    }

    fn vring_fd(&self, message: &mut Message) -> Result<(usize, Option<Arc<OwnedFd>>), Gone> {
        let word: u64 = message.payload()?;
        let index = self.index(message, (word & VRING_INDEX_MASK) as u32)?;
        if word & VRING_NO_FD != 0 {
            return Ok((index, None));
        }
        let fd = message.one_fd()?;
        // A front end that makes it block would stop its own volume.
        rustix::io::ioctl_fionbio(fd.as_fd(), true)
            .map_err(|e| message.malformed(&format!("has a descriptor that is no eventfd: {e}")))?;
        Ok((index, Some(Arc::new(fd))))
    }
}

/// There is no driver any more, and its choices are noted nowhere.
fn forget_driver(device: &dyn Device) {
    device.disks().iter().for_each(|disk| disk.keep_note(None));
    device.set_features(0);
}

fn number(value: u64) -> Outcome {
    Outcome::Reply(value.to_le_bytes().to_vec(), None)
}

/// Bytes of the driver area and of the device area.
fn lengths(kind: Kind, size: u16, event_idx: bool) -> (usize, usize) {
    match kind {
        Kind::Split => (split::driver_len(size, event_idx), split::device_len(size, event_idx)),
        Kind::Packed => (packed::EVENT, packed::EVENT),
    }
}

fn single_region(message: &Message) -> Result<MemoryRegion, Gone> {
    let region = message.body.get(MEMORY_HEADER..).and_then(|b| MemoryRegion::read_from_bytes(b).ok());
    region.ok_or_else(|| message.malformed("has a payload of the wrong size"))
}

fn config_header(message: &Message) -> Result<(ConfigHeader, &[u8]), Gone> {
    let (header, bytes) =
        ConfigHeader::read_from_prefix(&message.body).map_err(|_| message.malformed("is too short"))?;
    if header.size as usize != bytes.len() {
        return Err(message.malformed("has not as many bytes as it says"));
    }
    Ok((header, bytes))
}

/// Front ends send the structure with the padding that C gives it, or without.
fn inflight_area(message: &Message) -> Result<InflightArea, Gone> {
    let mut bytes = [0; size_of::<InflightArea>()];
    match message.body.len() {
        n @ (InflightArea::PACKED | 24) => bytes[..n].copy_from_slice(&message.body),
        _ => return Err(message.malformed("has a payload of the wrong size")),
    }
    Ok(InflightArea { padding: 0, ..zerocopy::transmute!(bytes) })
}

#[cfg(test)]
mod tests;
