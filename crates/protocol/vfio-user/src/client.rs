//! The client's side, as far as tests and benchmarks need it. It blocks until the server has answered, or for as long as
//! [`Client::set_patience`] allows.

use crate::region::Region;
use crate::server::MAX_BODY;
use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use ginnel_layout::vfio_user::{
    Access, Area, Command, DeviceInfo, DmaMap, DmaUnmap, Header, IrqInfo, IrqSet, RegionInfo, SparseMmap,
    Version, pci,
};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

/// Why a command has failed.
#[derive(Debug, Error)]
pub enum Error {
    /// The server has answered with an error. The connection can be used further.
    #[error("the server has refused {0:?}: {1}")]
    Refused(Command, Errno),
    /// The server's answer is wrong.
    #[error("the server's answer to {0:?} {1}")]
    Malformed(Command, &'static str),
    /// The connection has ended, or the server has not answered in time.
    #[error("the connection to the server: {0}")]
    Io(#[from] io::Error),
}

/// A reply without error.
#[derive(Debug)]
pub struct Reply {
    /// The command that it belongs to.
    pub command: Command,
    /// The body.
    pub body: Vec<u8>,
    /// The descriptors that came with it.
    pub fds: Vec<OwnedFd>,
}

/// Most replies that are kept until somebody waits for them.
const MAX_EARLY: usize = 4096;

/// A connection to a server.
#[derive(Debug)]
pub struct Client {
    socket: UnixStream,
    id: u16,
    /// Replies that came while another one was waited for.
    early: Vec<(u16, Result<Reply, Error>)>,
}

impl Client {
    /// Connects to a server, and negotiates the version.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let mut client = Self::new(UnixStream::connect(path)?);
        client.negotiate()?;
        Ok(client)
    }

    /// Takes over a connected socket. Nothing is negotiated yet.
    pub fn new(socket: UnixStream) -> Self {
        Self { socket, id: 0, early: Vec::new() }
    }

    /// Sets how long an answer is waited for; without limit at first.
    pub fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        self.socket.set_read_timeout(patience)
    }

    /// Proposes the version, with the capabilities that QEMU names. Returns the server's in JSON.
    pub fn negotiate(&mut self) -> Result<String, Error> {
        let capabilities = "{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576,\"max_dma_maps\":65535,\
                            \"pgsizes\":4096,\"write_multiple\":true}}\0";
        let body = [Version::OURS.as_bytes(), capabilities.as_bytes()].concat();
        let reply = self.call(Command::VERSION, &body, &[])?;
        let malformed = |why| Error::Malformed(Command::VERSION, why);
        let (version, text) =
            Version::read_from_prefix(&reply.body).map_err(|_| malformed("is too short"))?;
        if version != Version::OURS {
            return Err(malformed("has another version"));
        }
        let text = text.strip_suffix(&[0]).unwrap_or(text);
        String::from_utf8(text.to_vec()).map_err(|_| malformed("is not text"))
    }

    /// Asks what the device is.
    pub fn device_info(&mut self) -> Result<DeviceInfo, Error> {
        let info =
            DeviceInfo { argsz: size_of::<DeviceInfo>() as u32, flags: 0, num_regions: 0, num_irqs: 0 };
        self.call_for(Command::DEVICE_GET_INFO, info.as_bytes())
    }

    /// Asks what a region is, twice if it has capabilities, as QEMU does. Returns its file too, if it can be mapped.
    pub fn region(&mut self, index: u32) -> Result<(Region, Option<OwnedFd>), Error> {
        const COMMAND: Command = Command::DEVICE_GET_REGION_INFO;
        let mut argsz = size_of::<RegionInfo>() as u32;
        loop {
            let ask = RegionInfo { argsz, flags: 0, index, cap_offset: 0, size: 0, offset: 0 };
            let mut reply = self.call(COMMAND, ask.as_bytes(), &[])?;
            let (info, rest) = RegionInfo::read_from_prefix(&reply.body)
                .map_err(|_| Error::Malformed(COMMAND, "is too short"))?;
            if info.argsz > argsz && info.argsz as usize <= MAX_BODY {
                argsz = info.argsz;
                continue;
            }
            let mut region =
                Region { size: info.size, writable: info.flags & RegionInfo::WRITE != 0, areas: Vec::new() };
            if info.flags & RegionInfo::CAPS != 0 {
                let (cap, areas) = SparseMmap::read_from_prefix(rest)
                    .map_err(|_| Error::Malformed(COMMAND, "has no capability"))?;
                let (areas, _) = <[Area]>::ref_from_prefix_with_elems(areas, cap.areas as usize)
                    .map_err(|_| Error::Malformed(COMMAND, "has fewer areas than it says"))?;
                region.areas = areas.to_vec();
            }
            return Ok((region, reply.fds.pop()));
        }
    }

    /// Asks what a kind of interrupts is.
    pub fn irqs(&mut self, index: u32) -> Result<IrqInfo, Error> {
        let info = IrqInfo { argsz: size_of::<IrqInfo>() as u32, flags: 0, index, count: 0 };
        self.call_for(Command::DEVICE_GET_IRQ_INFO, info.as_bytes())
    }

    /// Gives the MSI-X vectors from `start` eventfds.
    pub fn set_vectors<Fd: AsFd>(&mut self, start: u32, eventfds: &[Fd]) -> Result<(), Error> {
        let set = irq_set(IrqSet::DATA_EVENTFD, start, eventfds.len() as u32);
        let fds: Vec<_> = eventfds.iter().map(AsFd::as_fd).collect();
        self.call(Command::DEVICE_SET_IRQS, set.as_bytes(), &fds).map(drop)
    }

    /// Takes the eventfds of `count` MSI-X vectors from `start` away; of all, if `count` is zero.
    pub fn clear_vectors(&mut self, start: u32, count: u32) -> Result<(), Error> {
        let data = if count == 0 { IrqSet::DATA_NONE } else { IrqSet::DATA_EVENTFD };
        self.call(Command::DEVICE_SET_IRQS, irq_set(data, start, count).as_bytes(), &[]).map(drop)
    }

    /// Lets the device use a range of addresses: that of a file from an offset, or one that it cannot see.
    pub fn map(
        &mut self,
        address: u64,
        size: u64,
        writable: bool,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<(), Error> {
        let flags = DmaMap::READ | if writable { DmaMap::WRITE } else { 0 };
        let offset = file.map_or(0, |(_, offset)| offset);
        let map = DmaMap { argsz: size_of::<DmaMap>() as u32, flags, offset, address, size };
        let file = file.map(|(file, _)| file);
        self.call(Command::DMA_MAP, map.as_bytes(), file.as_slice()).map(drop)
    }

    /// Takes a range of addresses away, and waits until the device does not use it any more.
    pub fn unmap(&mut self, address: u64, size: u64) -> Result<(), Error> {
        let id = self.begin_unmap(address, size)?;
        self.finish(id).map(drop)
    }

    /// Begins to take a range of addresses away. [`Client::finish`] waits for the answer.
    pub fn begin_unmap(&mut self, address: u64, size: u64) -> Result<u16, Error> {
        let unmap = DmaUnmap { argsz: size_of::<DmaUnmap>() as u32, flags: 0, address, size };
        self.begin(Command::DMA_UNMAP, unmap.as_bytes(), &[])
    }

    /// Reads a part of a region.
    pub fn read(&mut self, region: u32, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let access = Access { offset, region, count: into.len() as u32 };
        let reply = self.call(Command::REGION_READ, access.as_bytes(), &[])?;
        match Access::read_from_prefix(&reply.body) {
            Ok((answer, data)) if answer == access && data.len() == into.len() => {
                into.copy_from_slice(data);
                Ok(())
            }
            _ => Err(Error::Malformed(Command::REGION_READ, "has other bytes than asked for")),
        }
    }

    /// Writes a part of a region, and waits for the answer.
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Error> {
        let access = Access { offset, region, count: data.len() as u32 };
        self.call(Command::REGION_WRITE, &[access.as_bytes(), data].concat(), &[]).map(drop)
    }

    /// Writes a part of a region without waiting: there is no answer.
    pub fn post(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Error> {
        let access = Access { offset, region, count: data.len() as u32 };
        let body = [access.as_bytes(), data].concat();
        self.send(Command::REGION_WRITE, Header::NO_REPLY, &body, &[]).map(drop)
    }

    /// Resets the device.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.call(Command::DEVICE_RESET, &[], &[]).map(drop)
    }

    /// Sends any command, and waits for its answer.
    pub fn call(&mut self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Reply, Error> {
        let id = self.begin(command, body, fds)?;
        self.finish(id)
    }

    /// Sends any command. Returns its number for [`Client::finish`].
    pub fn begin(&mut self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<u16, Error> {
        self.send(command, 0, body, fds)
    }

    fn send(
        &mut self,
        command: Command,
        flags: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<u16, Error> {
        self.id = self.id.wrapping_add(1);
        let size = (size_of::<Header>() + body.len()) as u32;
        let header = Header { id: self.id, command, size, flags, error: 0 };
        let bytes = [header.as_bytes(), body].concat();
        fdpass::send_all(self.socket.as_fd(), &bytes, fds, SendFlags::empty()).map_err(io::Error::from)?;
        Ok(self.id)
    }

    /// Waits for the answer to the command with this number.
    pub fn finish(&mut self, id: u16) -> Result<Reply, Error> {
        if let Some(at) = self.early.iter().position(|(early, _)| *early == id) {
            return self.early.swap_remove(at).1;
        }
        loop {
            let (of, reply) = self.receive()?;
            if of == id {
                return reply;
            }
            if self.early.len() >= MAX_EARLY {
                return Err(Error::Malformed(Command(0), "is one of many that nobody waits for"));
            }
            self.early.push((of, reply));
        }
    }

    fn receive(&mut self) -> Result<(u16, Result<Reply, Error>), Error> {
        let mut fds = Vec::new();
        let mut header = [0; size_of::<Header>()];
        self.receive_all(&mut header, &mut fds)?;
        let header: Header = zerocopy::transmute!(header);
        let malformed = |why| Error::Malformed(header.command, why);
        if header.flags & Header::TYPE != Header::REPLY {
            return Err(malformed("is not a reply"));
        }
        let len = (header.size as usize).checked_sub(size_of::<Header>());
        let len = len.filter(|len| *len <= MAX_BODY).ok_or(malformed("has an impossible length"))?;
        let mut body = vec![0; len];
        self.receive_all(&mut body, &mut fds)?;
        let reply = match header.flags & Header::ERROR {
            0 => Ok(Reply { command: header.command, body, fds }),
            _ => Err(Error::Refused(header.command, errno(header.error))),
        };
        Ok((header.id, reply))
    }

    fn receive_all(&self, mut into: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<(), Error> {
        while !into.is_empty() {
            let got =
                fdpass::receive(self.socket.as_fd(), into, 1, RecvFlags::empty()).map_err(io::Error::from)?;
            if got.len == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            fds.extend(got.fds);
            into = &mut into[got.len..];
        }
        Ok(())
    }

    /// Sends a command whose answer is a structure.
    fn call_for<T: FromBytes>(&mut self, command: Command, body: &[u8]) -> Result<T, Error> {
        let reply = self.call(command, body, &[])?;
        T::read_from_bytes(&reply.body).map_err(|_| Error::Malformed(command, "has another length"))
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Returns the error of a reply. A number that the kernel does not use becomes `EIO`.
fn errno(number: u32) -> Errno {
    match i32::try_from(number) {
        Ok(number @ 1..4096) => Errno::from_raw_os_error(number),
        _ => Errno::IO,
    }
}

fn irq_set(data: u32, start: u32, count: u32) -> IrqSet {
    let argsz = size_of::<IrqSet>() as u32;
    IrqSet { argsz, flags: data | IrqSet::ACTION_TRIGGER, index: pci::MSIX, start, count }
}
