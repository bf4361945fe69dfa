//! A vhost-user session: features, memory and queues, in QEMU's order of messages.

use crate::connection::{Connection, receive, wait};
use crate::device::Device;
use crate::error::Error;
use crate::memory::{DriverMemory, GUEST, USER};
use crate::options::{Options, Ring};
use crate::virtio::Eventfds;
use ginnel_fdpass::{self as fdpass, SendFlags};
use ginnel_layout::vhost_user::{
    BackendRequest, ConfigHeader, Header, InflightArea, LogArea, MEMORY_HEADER, MemoryRegion, Request,
    VringAddress, VringState, feature, protocol,
};
use ginnel_layout::virtio::feature as virtio;
use ginnel_layout::virtio_blk::{Config, feature as blk};
use ginnel_layout::virtio_scsi::feature as scsi;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// The features of the device and of its queues that the client uses.
const WANTED: u64 = virtio::VERSION_1
    | blk::SIZE_MAX
    | blk::SEG_MAX
    | blk::RO
    | blk::BLK_SIZE
    | blk::FLUSH
    | blk::CONFIG_WCE
    | blk::MQ
    | blk::DISCARD
    | blk::WRITE_ZEROES;
/// The feature bits whose meaning depends on the kind of device.
const DEVICE_BITS: u64 = (1 << 24) - 1;
const WANTED_PROTOCOL: u64 = protocol::MQ
    | protocol::LOG_SHMFD
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD;

/// An established session.
pub(crate) struct Session {
    connection: Connection,
    /// Virtio features that the server offers.
    offered: u64,
    /// Negotiated virtio features.
    pub features: u64,
    /// Negotiated protocol features.
    pub protocol: u64,
    /// Number of queues that the server has; 1 if it does not report it.
    pub queues: u64,
    /// The channel on which the server sends requests.
    backend: Option<OwnedFd>,
}

/// A queue's size, base and addresses.
pub(crate) struct Vring {
    pub size: u16,
    pub base: u32,
    pub address: VringAddress,
}

/// The region in which the server records the requests in flight. The client hands it to the server's successor.
pub(crate) struct InflightRegion {
    what: InflightArea,
    file: OwnedFd,
}

impl Session {
    /// Connects and negotiates features.
    pub fn open(options: &Options) -> Result<Self, Error> {
        let mut connection = Connection::connect(&options.socket, options.patience)?;
        let offered: u64 = connection.ask_for(Request::GET_FEATURES, &[])?;
        let (mut agreed, mut queues, mut backend) = (0, 1, None);
        if offered & feature::PROTOCOL_FEATURES != 0 {
            let can: u64 = connection.ask_for(Request::GET_PROTOCOL_FEATURES, &[])?;
            agreed = can & WANTED_PROTOCOL;
            if !options.inflight {
                agreed &= !protocol::INFLIGHT_SHMFD;
            }
            connection.tell(Request::SET_PROTOCOL_FEATURES, agreed.as_bytes(), &[])?;
            connection.acknowledge = agreed & protocol::REPLY_ACK != 0;
            if agreed & protocol::MQ != 0 {
                queues = connection.ask_for(Request::GET_QUEUE_NUM, &[])?;
            }
            if agreed & protocol::BACKEND_REQ != 0 {
                let (ours, theirs) =
                    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                        .map_err(Error::io("making the backend channel"))?;
                connection.tell(Request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()])?;
                backend = Some(ours);
            }
        }
        connection.tell(Request::SET_OWNER, &[], &[])?;
        let features = choose(options, offered)?;
        connection.tell(
            Request::SET_FEATURES,
            (features | offered & feature::PROTOCOL_FEATURES).as_bytes(),
            &[],
        )?;
        Ok(Self { connection, offered, features, protocol: agreed, queues, backend })
    }

    /// Returns whether a protocol feature was negotiated.
    pub fn has(&self, feature: u64) -> bool {
        self.protocol & feature != 0
    }

    /// Returns the connection's socket.
    pub fn socket(&self) -> Arc<OwnedFd> {
        self.connection.socket()
    }

    /// Reads the disk's configuration space.
    pub fn config(&mut self) -> Result<Config, Error> {
        if !self.has(protocol::CONFIG) {
            return Err(Error::Unsupported("the server does not show its configuration space".into()));
        }
        const LEN: usize = size_of::<Config>();
        let header = ConfigHeader { offset: 0, size: LEN as u32, flags: 0 };
        let request = [header.as_bytes(), &[0; LEN]].concat();
        let answer = self.connection.ask(Request::GET_CONFIG, &request, &[])?;
        let malformed = || Error::Malformed { request: Request::GET_CONFIG, what: "its length" };
        let (said, bytes) = ConfigHeader::read_from_prefix(&answer.body).map_err(|_| malformed())?;
        if said.size == 0 {
            return Err(Error::Refused(Request::GET_CONFIG));
        }
        Config::read_from_bytes(bytes).map_err(|_| malformed())
    }

    /// Turns the disk's write cache on or off.
    pub fn set_write_cache(&mut self, on: bool) -> Result<(), Error> {
        if !self.has(protocol::CONFIG) || self.features & blk::CONFIG_WCE == 0 {
            return Err(Error::Unsupported("the disk's write cache cannot be set".into()));
        }
        let header = ConfigHeader { offset: offset_of!(Config, writeback) as u32, size: 1, flags: 0 };
        let request = [header.as_bytes(), &[u8::from(on)]].concat();
        self.connection.tell(Request::SET_CONFIG, &request, &[])
    }

    /// Sends the memory, the in-flight region and the queues, and starts the queues. If there is no in-flight region
    /// yet and the server supports one, gets a new one and stores it in `inflight_region`.
    pub fn start(
        &mut self,
        memory: &DriverMemory,
        vrings: &[Vring],
        eventfds: &[&Eventfds],
        inflight_region: &mut Option<InflightRegion>,
    ) -> Result<(), Error> {
        if self.has(protocol::INFLIGHT_SHMFD) {
            if inflight_region.is_none() {
                *inflight_region = Some(self.new_inflight_region(vrings)?);
            }
            if let Some(InflightRegion { what, file }) = inflight_region {
                self.connection.tell(Request::SET_INFLIGHT_FD, what.as_bytes(), &[file.as_fd()])?;
            }
        }
        let region = MemoryRegion { guest: GUEST, size: memory.len(), user: USER, offset: 0 };
        // One region: its number, and padding.
        let mut table = [0; MEMORY_HEADER + size_of::<MemoryRegion>()];
        table[0] = 1;
        table[MEMORY_HEADER..].copy_from_slice(region.as_bytes());
        self.connection.tell(Request::SET_MEM_TABLE, &table, &[memory.file()])?;
        for (vring, eventfds) in vrings.iter().zip(eventfds) {
            let state = |value| VringState { index: vring.address.index, value };
            self.connection.tell(Request::SET_VRING_NUM, state(vring.size.into()).as_bytes(), &[])?;
            self.connection.tell(Request::SET_VRING_BASE, state(vring.base).as_bytes(), &[])?;
            self.connection.tell(Request::SET_VRING_ADDR, vring.address.as_bytes(), &[])?;
            let number = u64::from(vring.address.index);
            let mut bell =
                |request, fd: &OwnedFd| self.connection.tell(request, number.as_bytes(), &[fd.as_fd()]);
            bell(Request::SET_VRING_ERR, &eventfds.error)?;
            bell(Request::SET_VRING_CALL, &eventfds.call)?;
            bell(Request::SET_VRING_KICK, &eventfds.kick)?;
        }
        if self.protocol != 0 {
            for vring in vrings {
                let state = VringState { index: vring.address.index, value: 1 };
                self.connection.tell(Request::SET_VRING_ENABLE, state.as_bytes(), &[])?;
            }
        }
        Ok(())
    }

    fn new_inflight_region(&mut self, vrings: &[Vring]) -> Result<InflightRegion, Error> {
        let request = Request::GET_INFLIGHT_FD;
        let queues = vrings.iter().map(|vring| vring.address.index + 1).max().unwrap_or(0) as u16;
        let queue_size = vrings.iter().map(|vring| vring.size).max().unwrap_or(0);
        let want = InflightArea { size: 0, offset: 0, queues, queue_size, padding: 0 };
        let answer = self.connection.ask(request, want.as_bytes(), &[])?;
        // The payload comes with or without the padding that C adds.
        let mut bytes = answer.body.clone();
        bytes.resize(
            if bytes.len() == InflightArea::PACKED { size_of::<InflightArea>() } else { bytes.len() },
            0,
        );
        let what = InflightArea::read_from_bytes(&bytes)
            .map_err(|_| Error::Malformed { request, what: "its length" })?;
        let mut files = answer.fds.into_iter();
        match (files.next(), files.next()) {
            (Some(file), None) if what.size > 0 => Ok(InflightRegion { what, file }),
            _ => Err(Error::Malformed { request, what: "it must have one descriptor, and a size" }),
        }
    }

    /// Stops a queue. The server first completes the requests in flight. Returns the base from which a successor
    /// continues.
    pub fn stop(&mut self, index: u32) -> Result<u32, Error> {
        let request = Request::GET_VRING_BASE;
        let state: VringState =
            self.connection.ask_for(request, VringState { index, value: 0 }.as_bytes())?;
        if state.index != index {
            return Err(Error::Malformed { request, what: "it is about another queue" });
        }
        Ok(state.value)
    }

    /// Makes the server mark the pages that it writes in `log`, with one bit for each page of 4096 bytes. Also enables
    /// logging for the used rings at these addresses.
    pub fn log_to(&mut self, log: &DriverMemory, rings: &[VringAddress]) -> Result<(), Error> {
        if !self.has(protocol::LOG_SHMFD) || self.offered & feature::LOG_ALL == 0 {
            return Err(Error::Unsupported("the server marks no dirty pages".into()));
        }
        let what = LogArea { size: log.len(), offset: 0 };
        // The server answers this message in any case.
        self.connection.ask(Request::SET_LOG_BASE, what.as_bytes(), &[log.file()])?;
        self.set_log(true, rings)
    }

    /// Turns the log on or off while the queues run.
    pub fn set_log(&mut self, on: bool, rings: &[VringAddress]) -> Result<(), Error> {
        let log = if on { feature::LOG_ALL } else { 0 };
        let features = self.features | feature::PROTOCOL_FEATURES | log;
        self.connection.tell(Request::SET_FEATURES, features.as_bytes(), &[])?;
        for &ring in rings {
            let ring = VringAddress { flags: if on { VringAddress::LOG } else { 0 }, ..ring };
            self.connection.tell(Request::SET_VRING_ADDR, ring.as_bytes(), &[])?;
        }
        Ok(())
    }

    /// Returns whether the server has reported a change of the configuration space. Does not block.
    pub fn config_changed(&mut self) -> Result<bool, Error> {
        let Some(backend) = &self.backend else { return Ok(false) };
        let mut changed = false;
        while wait(&[backend.as_fd()], Some(Duration::ZERO))? {
            let deadline = Instant::now() + Duration::from_secs(1);
            let Some(message) = receive(backend.as_fd(), deadline)? else { break };
            let header = message.header;
            let known = header.request == BackendRequest::CONFIG_CHANGE.0;
            changed |= known;
            if header.flags & Header::NEED_REPLY != 0 {
                self.answer(backend.as_fd(), header, u64::from(!known))?;
            }
        }
        Ok(changed)
    }

    fn answer(&self, to: BorrowedFd<'_>, header: Header, value: u64) -> Result<(), Error> {
        let flags = header.flags & !Header::NEED_REPLY | Header::REPLY;
        let header = Header { flags, size: size_of::<u64>() as u32, ..header };
        let bytes = [header.as_bytes(), value.as_bytes()].concat();
        fdpass::send_all::<OwnedFd>(to, &bytes, &[], SendFlags::empty())
            .map_err(Error::io("answering on the backend channel"))
    }
}

/// Returns the offered features that the client uses.
fn choose(options: &Options, offered: u64) -> Result<u64, Error> {
    let mut want = WANTED;
    if options.indirect {
        want |= virtio::INDIRECT_DESC;
    }
    if options.event_idx {
        want |= virtio::EVENT_IDX;
    }
    if options.ring == Ring::Packed {
        want |= virtio::RING_PACKED;
        if offered & virtio::RING_PACKED == 0 {
            return Err(Error::Unsupported("the server has no packed rings; ask for split ones".into()));
        }
    }
    if offered & virtio::VERSION_1 == 0 {
        return Err(Error::Unsupported("the server has no virtio 1.0 device".into()));
    }
    if options.device != Device::Blk {
        // The low bits have a meaning of their own for a SCSI device. The client uses only the reports of changes.
        want = want & !DEVICE_BITS | scsi::CHANGE;
    }
    Ok(want & offered)
}
