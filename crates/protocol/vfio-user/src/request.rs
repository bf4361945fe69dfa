//! What a message asks for.

use ginnel_layout::vfio_user::{
    Access, Command, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, IrqSet, RegionInfo, Version,
};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use zerocopy::{FromBytes, IntoBytes};

/// Most bytes of one access to a region: no device here has a register or a configuration space that is longer.
pub const MAX_DATA: usize = 4096;

/// The page of all addresses that are mapped.
const PAGE: u64 = 4096;

/// What a client asks for. All numbers of the message are checked as far as that is possible without knowing the device.
#[derive(Debug)]
pub enum Request<'a> {
    /// The first message. The major version is that of the reply. [`Limits::version`] is the answer.
    Version {
        /// The client's minor version.
        minor: u16,
        /// The client's capabilities in JSON, which end with a zero byte; may be empty. Not checked.
        capabilities: &'a [u8],
    },
    /// The device may use a range of addresses. Neither the range nor its part of the file passes 2^64 - 1; all three numbers are
    /// multiples of 4096.
    Map {
        /// The first address.
        address: u64,
        /// Bytes; not zero.
        size: u64,
        /// Offset of the range in its file.
        offset: u64,
        /// Whether the device may write.
        writable: bool,
        /// The file; `None` if only messages can read and write the range.
        file: Option<OwnedFd>,
    },
    /// The device must not use the addresses from the first to the last any more. [`unmapped`](Request::unmapped) is the answer.
    Unmap {
        /// The structure of the message, for the answer.
        message: DmaUnmap,
        /// The first address.
        first: u64,
        /// The last address, not less than the first. A size that passes the end of all addresses means all up to that end.
        last: u64,
    },
    /// What the device is. A [`DeviceInfo`] is the answer.
    DeviceInfo,
    /// What a region is. [`Region::reply`](crate::Region::reply) is the answer.
    RegionInfo {
        /// The number of the region.
        index: u32,
        /// Bytes that the client takes, at least those of a [`RegionInfo`].
        argsz: u32,
    },
    /// What a kind of interrupts is. An [`IrqInfo`] is the answer.
    IrqInfo {
        /// The kind.
        index: u32,
    },
    /// Interrupts are set, masked, raised.
    SetIrqs {
        /// The kind.
        index: u32,
        /// The first interrupt.
        start: u32,
        /// The number of interrupts. `start + count` is a `u32`.
        count: u32,
        /// What happens to them.
        action: Action,
        /// To which of them, and with what.
        irqs: Irqs<'a>,
    },
    /// A part of a region is read. The [`Access`] and the bytes are the answer.
    Read {
        /// The region and the part; at least one byte, and at most [`MAX_DATA`]. `offset + count` is a `u64`.
        access: Access,
    },
    /// A part of a region is written. The [`Access`] is the answer.
    Write {
        /// The region and the part, as for a read.
        access: Access,
        /// The bytes, `count` of them.
        data: &'a [u8],
    },
    /// The device is reset.
    Reset,
}

/// What happens to interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// They are masked.
    Mask,
    /// They are unmasked.
    Unmask,
    /// They get eventfds, or are raised.
    Trigger,
}

/// To which interrupts something happens.
#[derive(Debug)]
pub enum Irqs<'a> {
    /// To all.
    All,
    /// To those whose byte is not zero; one byte for each.
    Where(&'a [u8]),
    /// To all: they get these eventfds. One for each, or none at all, by which the interrupts lose theirs.
    Eventfds(Vec<OwnedFd>),
}

impl<'a> Request<'a> {
    /// Parses the body of a command, with the descriptors that came with it.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for an unknown command, `EPROTONOSUPPORT` for another version, and otherwise `EINVAL`.
    pub fn parse(command: Command, body: &'a [u8], mut fds: Vec<OwnedFd>) -> Result<Self, Errno> {
        let takes_fds = match command {
            Command::DMA_MAP => 1,
            Command::DEVICE_SET_IRQS => usize::MAX,
            _ => 0,
        };
        if fds.len() > takes_fds {
            return Err(Errno::INVAL);
        }
        match command {
            Command::VERSION => version(body),
            Command::DMA_MAP => map(exact(body)?, fds.pop()),
            Command::DMA_UNMAP => unmap(exact(body)?),
            Command::DEVICE_GET_INFO => {
                let DeviceInfo { argsz, .. } = exact(body)?;
                has_room::<DeviceInfo>(argsz)?;
                Ok(Self::DeviceInfo)
            }
            Command::DEVICE_GET_REGION_INFO => {
                let RegionInfo { argsz, index, .. } = exact(body)?;
                has_room::<RegionInfo>(argsz)?;
                Ok(Self::RegionInfo { index, argsz })
            }
            Command::DEVICE_GET_IRQ_INFO => {
                let IrqInfo { argsz, index, .. } = exact(body)?;
                has_room::<IrqInfo>(argsz)?;
                Ok(Self::IrqInfo { index })
            }
            Command::DEVICE_SET_IRQS => set_irqs(body, fds),
            Command::REGION_READ => {
                let access: Access = exact(body)?;
                check_access(access)?;
                Ok(Self::Read { access })
            }
            Command::REGION_WRITE => {
                let (access, data) = Access::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
                check_access(access)?;
                if data.len() != access.count as usize {
                    return Err(Errno::INVAL);
                }
                Ok(Self::Write { access, data })
            }
            Command::DEVICE_RESET if body.is_empty() => Ok(Self::Reset),
            Command::DEVICE_RESET => Err(Errno::INVAL),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    /// Returns the answer to a [`Request::Unmap`], which is its message.
    pub fn unmapped(message: DmaUnmap) -> [u8; size_of::<DmaUnmap>()] {
        zerocopy::transmute!(message)
    }
}

fn exact<T: FromBytes>(body: &[u8]) -> Result<T, Errno> {
    T::read_from_bytes(body).map_err(|_| Errno::INVAL)
}

/// Fails if the client takes fewer bytes than a `T` has.
fn has_room<T>(argsz: u32) -> Result<(), Errno> {
    if (argsz as usize) < size_of::<T>() { Err(Errno::INVAL) } else { Ok(()) }
}

fn version(body: &[u8]) -> Result<Request<'_>, Errno> {
    let (Version { major, minor }, capabilities) =
        Version::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
    match capabilities.last() {
        _ if major != Version::OURS.major => Err(Errno::PROTONOSUPPORT),
        Some(last) if *last != 0 => Err(Errno::INVAL),
        _ => Ok(Request::Version { minor, capabilities }),
    }
}

fn map<'a>(message: DmaMap, file: Option<OwnedFd>) -> Result<Request<'a>, Errno> {
    let DmaMap { argsz, flags, offset, address, size } = message;
    has_room::<DmaMap>(argsz)?;
    let last = size.checked_sub(1).ok_or(Errno::INVAL)?;
    let ends = address.checked_add(last).is_some() && offset.checked_add(last).is_some();
    let aligned = [address, size, offset].iter().all(|number| number.is_multiple_of(PAGE));
    if !ends || !aligned || flags & DmaMap::READ == 0 || flags & !(DmaMap::READ | DmaMap::WRITE) != 0 {
        return Err(Errno::INVAL);
    }
    Ok(Request::Map { address, size, offset, writable: flags & DmaMap::WRITE != 0, file })
}

fn unmap<'a>(message: DmaUnmap) -> Result<Request<'a>, Errno> {
    let DmaUnmap { argsz, flags, address, size } = message;
    has_room::<DmaUnmap>(argsz)?;
    match flags {
        DmaUnmap::ALL => Ok(Request::Unmap { message, first: 0, last: u64::MAX }),
        0 => {
            // QEMU sends sizes that reach to the end of all addresses.
            let last = size.checked_sub(1).ok_or(Errno::INVAL)?;
            Ok(Request::Unmap { message, first: address, last: address.saturating_add(last) })
        }
        _ => Err(Errno::INVAL),
    }
}

fn set_irqs(body: &[u8], fds: Vec<OwnedFd>) -> Result<Request<'_>, Errno> {
    let (set, data) = IrqSet::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
    let IrqSet { argsz, flags, index, start, count } = set;
    has_room::<IrqSet>(argsz)?;
    start.checked_add(count).ok_or(Errno::INVAL)?;
    const DATA: u32 = IrqSet::DATA_NONE | IrqSet::DATA_BOOL | IrqSet::DATA_EVENTFD;
    let action = match flags & !DATA {
        IrqSet::ACTION_MASK => Action::Mask,
        IrqSet::ACTION_UNMASK => Action::Unmask,
        IrqSet::ACTION_TRIGGER => Action::Trigger,
        _ => return Err(Errno::INVAL),
    };
    let count_of = |len: usize| len == count as usize;
    let irqs = match flags & DATA {
        IrqSet::DATA_NONE if data.is_empty() && fds.is_empty() => Irqs::All,
        IrqSet::DATA_BOOL if count_of(data.len()) && fds.is_empty() => Irqs::Where(data),
        IrqSet::DATA_EVENTFD if data.is_empty() && (fds.is_empty() || count_of(fds.len())) => {
            Irqs::Eventfds(fds)
        }
        _ => return Err(Errno::INVAL),
    };
    Ok(Request::SetIrqs { index, start, count, action, irqs })
}

fn check_access(access: Access) -> Result<(), Errno> {
    let Access { offset, count, .. } = access;
    let ends = offset.checked_add(count.into()).is_some();
    if ends && count > 0 && count as usize <= MAX_DATA { Ok(()) } else { Err(Errno::INVAL) }
}

/// What a server takes, as it says in its answer to [`Request::Version`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most descriptors in one message, at most [`MAX_FDS`](crate::MAX_FDS).
    pub fds: usize,
    /// Most bytes of one access, at most [`MAX_DATA`].
    pub data: usize,
    /// Most ranges that are mapped at a time.
    pub maps: usize,
}

impl Limits {
    /// Returns the body of the answer.
    pub fn version(self) -> Vec<u8> {
        let Self { fds, data, maps } = self;
        let capabilities = format!(
            "{{\"capabilities\":{{\"max_msg_fds\":{fds},\"max_data_xfer_size\":{data},\"max_dma_maps\":{maps},\"pgsizes\":{PAGE}}}}}\0"
        );
        [Version::OURS.as_bytes(), capabilities.as_bytes()].concat()
    }
}
