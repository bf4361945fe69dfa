//! One front end: its messages, and their effect on the device (vhost-user specification).
//!
//! A queue runs from the moment at which it is complete (memory, size, addresses, kick, enabled) until GET_VRING_BASE,
//! or until the front end disconnects. Before the queue stops, all requests that were taken are given back. If the
//! front end has negotiated that GET_VRING_BASE leaves requests in flight, requests that have not been begun stay in
//! the in-flight region for the process that continues with it.
//!
//! A message that changes something that a running queue uses, such as a new memory table, stops the queue in the same
//! way and starts it again where it stood. The guest does not notice this.
//!
//! A request of the control queue waits for all requests that the driver made earlier in the other queues, also for
//! those in a queue that is stopped at the moment. So the control queue stops before any other queue. It starts again
//! only when all other queues that ran before have started, or when the device is reset or has another driver.
//!
//! If GET_VRING_BASE stops the last queue while dirty pages are logged, the session concludes that the VM has stopped
//! here because it migrates. A VM that reboots during a migration looks the same; QEMU (9.2 and later) then resets the
//! device, and the session learns that the VM stays.

mod memory;
pub mod message;

use crate::device::Device;
use crate::disk::Disk;
use crate::worker::{Requests, Start, Virtqueue};
use ginnel_guest_memory::{Area, GuestMemory, Region};
use ginnel_layout::vhost_user::{
    BackendRequest, ConfigHeader, InflightArea, LogArea, MAX_CONFIG, MEMORY_HEADER, MemoryRegion, Request,
    VRING_INDEX_MASK, VRING_NO_FD, VringAddress, VringState, feature as connection, protocol,
};
use ginnel_layout::virtio::{DESCRIPTOR, feature as virtio, packed, split};
use ginnel_shmem::Mapping;
use ginnel_virtqueue::{DeviceQueue, DirtyLog, InflightQueue, Kind, Setup};
pub(crate) use memory::map_region;
use message::{Gone, Message, tell};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use tracing::{debug, warn};
use zerocopy::{FromBytes, IntoBytes};

/// Number of memory regions that a front end may have.
const MAX_REGIONS: usize = 256;

/// A buffer across the border of two regions becomes two pieces; a request may have this many pieces more than the
/// device allows segments.
const PIECES: u16 = 16;

/// The base that the specification gives a new packed queue: both wrap counters are set.
const PACKED_BASE: u32 = 0x8000_8000;

/// The session's interface to the workers that serve the queues.
pub trait Queues {
    /// Starts serving a queue. An error says why the queue must not be served.
    fn start(&mut self, start: Start) -> Result<(), String>;
    /// Stops serving a queue, and returns its base. Blocks until all requests that were taken, here or by a
    /// predecessor, are given back. With `suspend` it waits only for the requests that are at a disk; the rest stays in
    /// the in-flight region.
    fn stop(&mut self, index: u16, suspend: bool) -> Result<u32, String>;
    /// Called when no queue is served any more and the VM has probably migrated away. It may also continue here.
    fn vm_left(&mut self);
    /// Called when the VM has not migrated after all: its driver has reset the device.
    fn vm_stayed(&mut self);
    /// Makes all acknowledged writes durable. Blocks for as long as the disks take.
    fn sync(&mut self) -> Result<(), String>;
    /// Sets another call descriptor for a queue that is being served.
    fn set_call(&mut self, index: u16, call: Option<Arc<OwnedFd>>);
}

/// The state of one front end's connection.
pub struct Session {
    device: Arc<dyn Device>,
    limits: Limits,
    features: u64,
    /// The features by which one driver is distinguished from the next.
    driver: Option<u64>,
    protocol: u64,
    memory: Option<Arc<GuestMemory<Mapping>>>,
    log: Option<DirtyLog<Mapping>>,
    inflight: Option<Inflight>,
    /// Whether the VM seems to have migrated away.
    vm_left: bool,
    rings: Vec<Ring>,
    /// The channel for the back end's own requests (`SET_BACKEND_REQ_FD`).
    channel: Option<UnixStream>,
}

/// What a front end may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest queue, in descriptors.
    pub queue_size: u16,
    /// The largest number of data segments in a request.
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
    /// Returns the offset at which the queues' parts end and the disks' notes begin. Each part is as large as the
    /// larger kind of queue needs, since the driver may choose the other kind at its next start.
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
    /// What the front end has set; until then the specification's default applies.
    enabled: Option<bool>,
    running: bool,
    /// Whether it has run, and is expected to run again with the requests that lie in it.
    will_restart: bool,
}

#[derive(Default)]
enum Kick {
    /// No descriptor was set, so the queue does not run.
    #[default]
    None,
    By(Arc<OwnedFd>),
    /// The front end has set no descriptor: the queue must be polled.
    Polled,
}

/// The result of a message.
#[derive(Debug)]
pub enum Outcome {
    /// The message has an answer of its own.
    Reply(Vec<u8>, Option<OwnedFd>),
    /// The message was executed.
    Done,
    /// The message was not executed; the connection continues.
    Failed(String),
}

impl Session {
    /// Returns the state of a front end that has not sent anything yet.
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
            vm_left: false,
            rings,
            channel: None,
        }
    }

    /// Returns the feature bits that the driver has chosen.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns the protocol features that the front end has chosen.
    pub fn protocol_features(&self) -> u64 {
        self.protocol
    }

    /// Returns, for each queue, whether it is being served, and its size in descriptors.
    pub fn rings(&self) -> impl Iterator<Item = (bool, u16)> {
        self.rings.iter().map(|ring| (ring.running, ring.size))
    }

    /// Returns whether the front end's memory has disappeared because its file was truncated.
    pub fn is_broken(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.is_broken())
    }

    /// Returns all feature bits that are offered.
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

    /// Executes a message. Blocks while queues are stopped. An error ends the connection.
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
                // Logging starts and stops while the same driver continues.
                let driver = |features| features & !connection::LOG_ALL;
                self.change_all(queues, |session| {
                    if session.driver.replace(driver(features)) != Some(driver(features)) {
                        session.device.set_features(features);
                        session.rings.iter_mut().for_each(|ring| ring.will_restart = false);
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
                if std::mem::take(&mut self.vm_left) {
                    queues.vm_stayed();
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
            // No front end that has LOG_SHMFD sends this; the descriptor would report errors of the log.
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
                // Front ends send this also while the queue runs, to start or stop the logging of written pages.
                self.stop_or_suspend(index, self.inflight.is_some(), queues)?;
                self.rings[index].addresses = Some(addresses);
                self.start(index, queues)?;
            }
            Request::SET_VRING_BASE => {
                let (index, base) = self.vring(message)?;
                // The position of a running queue is more recent than the front end's.
                if !self.rings[index].running {
                    self.rings[index].base = Some(base);
                }
            }
            Request::GET_VRING_BASE => {
                let (index, _) = self.vring(message)?;
                self.stop_or_suspend(index, self.may_leave_in_flight(), queues)?;
                if self.features & connection::LOG_ALL != 0 && !self.rings.iter().any(|ring| ring.running) {
                    queues.vm_left();
                    self.vm_left = true;
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
                    // QEMU disables all queues before it asks for the base of the first one.
                    self.stop_or_suspend(index, self.may_leave_in_flight(), queues)?;
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
                // No request may be left in the old region.
                self.stop_all(queues)?;
                self.keep_notes(&inflight);
                self.inflight = Some(inflight);
                self.start_all(queues)?;
            }
            _ => return Err(message.malformed("is not one that this volume knows")),
        }
        Ok(Outcome::Done)
    }

    /// Tells the front end that the configuration has changed, if it has a channel for that.
    pub fn config_changed(&mut self) {
        let Some(channel) = &self.channel else { return };
        // The request asks for no answer: the front end sends a request for the configuration before it would answer.
        if let Err(error) = tell(channel, BackendRequest::CONFIG_CHANGE.0) {
            warn!("the front end cannot be told of the new configuration: {error}");
            self.channel = None;
        }
    }

    /// Stops all queues, and finishes the requests that were taken.
    pub fn stop_all(&mut self, queues: &mut dyn Queues) -> Result<(), Gone> {
        (0..self.rings.len()).try_for_each(|index| self.stop(index, queues))
    }

    fn stop(&mut self, index: usize, queues: &mut dyn Queues) -> Result<(), Gone> {
        self.stop_or_suspend(index, false, queues)
    }

    fn stop_or_suspend(&mut self, index: usize, suspend: bool, queues: &mut dyn Queues) -> Result<(), Gone> {
        if !self.rings[index].running {
            return Ok(());
        }
        if let Some(control) = self.control().filter(|control| *control != index) {
            self.stop_or_suspend(control, false, queues)?;
        }
        let ring = &mut self.rings[index];
        // A queue that does not stop still runs, so its position must not be used by anyone else.
        ring.base = Some(queues.stop(index as u16, suspend).map_err(Gone::Refused)?);
        (ring.running, ring.will_restart) = (false, true);
        Ok(())
    }

    fn control(&self) -> Option<usize> {
        self.device.control_queue().map(usize::from)
    }

    /// Returns whether a queue that the front end stops may leave requests in flight. This needs an in-flight region.
    fn may_leave_in_flight(&self) -> bool {
        self.protocol & protocol::GET_VRING_BASE_INFLIGHT != 0 && self.inflight.is_some()
    }

    /// Stops all queues that will continue soon, here or in the next process. Requests that have not been begun stay in
    /// the in-flight region, if there is one.
    pub fn pause_all(&mut self, queues: &mut dyn Queues) -> Result<(), Gone> {
        let suspend = self.inflight.is_some();
        (0..self.rings.len()).try_for_each(|index| self.stop_or_suspend(index, suspend, queues))
    }

    fn start_all(&mut self, queues: &mut dyn Queues) -> Result<(), Gone> {
        (0..self.rings.len()).try_for_each(|index| self.start(index, queues))
    }

    /// Changes one queue. If it runs, it stops before the change and starts again afterwards.
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

    /// Changes something that all queues depend on. They stop before the change and start again afterwards.
    fn change_all(&mut self, queues: &mut dyn Queues, f: impl FnOnce(&mut Self)) -> Result<(), Gone> {
        self.pause_all(queues)?;
        f(self);
        self.start_all(queues)
    }

    /// Starts a queue if it is complete, and then the control queue, if that has waited for this one.
    fn start(&mut self, index: usize, queues: &mut dyn Queues) -> Result<(), Gone> {
        self.start_one(index, queues)?;
        match self.control() {
            Some(control) if control != index => self.start_one(control, queues),
            _ => Ok(()),
        }
    }

    fn start_one(&mut self, index: usize, queues: &mut dyn Queues) -> Result<(), Gone> {
        let others_will_restart =
            || self.rings.iter().enumerate().any(|(n, ring)| n != index && ring.will_restart);
        if self.rings[index].running || (self.control() == Some(index) && others_will_restart()) {
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
            // Includes the request's header and its status. A longer queue does not get more: each of its requests
            // could have as many segments, in indirect tables, and memory that one request needed is kept.
            max_segments: self.limits.segments.saturating_add(2 + PIECES),
        };
        let mut queue = DeviceQueue::new(setup).map_err(|e| refused(&e.to_string()))?;
        let log = self.log.clone().filter(|_| self.features & connection::LOG_ALL != 0);
        if addresses.flags & VringAddress::LOG != 0 {
            queue.set_log(log.clone());
        }
        let start = Start {
            index: index as u16,
            memory,
            kicks: kick.into_iter().collect(),
            call: ring.call.clone(),
            error: ring.error.clone(),
            requests: Requests::Virtqueue(Virtqueue { ring: queue, log, event_idx }),
        };
        queues.start(start).map_err(Gone::Refused)?;
        self.vm_left = false;
        let ring = &mut self.rings[index];
        (ring.running, ring.will_restart) = (true, false);
        Ok(())
    }

    fn kind(&self) -> Kind {
        if self.features & virtio::RING_PACKED != 0 { Kind::Packed } else { Kind::Split }
    }

    fn area(&self, user: u64, len: usize) -> Result<Area<Mapping>, String> {
        self.memory.as_ref().and_then(|memory| memory.at_user(user, len)).ok_or_else(|| {
            format!("{len} bytes at {user:#x} in the front end's addresses are not in the memory that it has shared")
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
            // A driver that has turned the cache off sends no more flushes, so the writes that it has made or is making
            // are made durable here.
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

    /// Gives the disks the places behind the queues' parts of the in-flight region, in which they note what drivers
    /// have chosen. Front ends hand the whole region to the next process. A region that another kind of server has made
    /// has no such place.
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
        // If the descriptor blocked, a front end could stop its own volume.
        rustix::io::ioctl_fionbio(fd.as_fd(), true)
            .map_err(|e| message.malformed(&format!("has a descriptor that is not an eventfd: {e}")))?;
        Ok((index, Some(Arc::new(fd))))
    }
}

/// Forgets the driver. Its choices are no longer noted anywhere.
fn forget_driver(device: &dyn Device) {
    device.disks().iter().for_each(|disk| disk.keep_note(None));
    device.set_features(0);
}

fn number(value: u64) -> Outcome {
    Outcome::Reply(value.to_le_bytes().to_vec(), None)
}

/// Returns the lengths in bytes of the driver area and of the device area.
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
        return Err(message.malformed("does not have as many bytes as it says"));
    }
    Ok((header, bytes))
}

/// Reads the payload with or without the padding that C adds: front ends send both.
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
