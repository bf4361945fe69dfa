//! Messages of the vfio-user protocol, version 0.0 (QEMU's `docs/interop/vfio-user.rst`), as they are sent on the socket.
//!
//! A message is a [`Header`] and a body. File descriptors accompany the first byte. The bodies are structures of Linux' VFIO
//! (`<linux/vfio.h>`), in part with other members. Only commands of the client are described; a server has two of its own, which
//! Ginnel does not use.

use core::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Header of each message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Chosen by the sender of a command, and repeated in the reply. It need not be unique.
    pub id: u16,
    /// What the message is about.
    pub command: Command,
    /// Bytes of the message with this header.
    pub size: u32,
    /// The type of the message ([`Header::TYPE`]), [`Header::NO_REPLY`] and [`Header::ERROR`].
    pub flags: u32,
    /// The `errno` of a reply with [`Header::ERROR`]; otherwise reserved.
    pub error: u32,
}
layout!(Header, 16 { id: 0, command: 2, size: 4, flags: 8, error: 12 });

impl Header {
    /// Mask of the type: 0 is a command, [`Header::REPLY`] a reply. The other values are reserved.
    pub const TYPE: u32 = 0xf;
    /// The type of a reply.
    pub const REPLY: u32 = 1;
    /// Flag of a command: the sender wants no reply.
    pub const NO_REPLY: u32 = 1 << 4;
    /// Flag of a reply: the command has failed. The reply has no body.
    pub const ERROR: u32 = 1 << 5;
}

/// A command. Readers refuse unknown values.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Command(pub u16);

macro_rules! commands {
    ($($name:ident = $value:literal,)*) => {
        #[allow(missing_docs)] // The specification's names, "Commands", without VFIO_USER_.
        impl Command {
            $(pub const $name: Self = Self($value);)*
        }

        impl fmt::Debug for Command {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {
                    $($value => f.write_str(stringify!($name)),)*
                    other => write!(f, "command {other}"),
                }
            }
        }
    };
}

commands! {
    VERSION = 1,
    DMA_MAP = 2,
    DMA_UNMAP = 3,
    DEVICE_GET_INFO = 4,
    DEVICE_GET_REGION_INFO = 5,
    DEVICE_GET_REGION_IO_FDS = 6,
    DEVICE_GET_IRQ_INFO = 7,
    DEVICE_SET_IRQS = 8,
    REGION_READ = 9,
    REGION_WRITE = 10,
    DMA_READ = 11,
    DMA_WRITE = 12,
    DEVICE_RESET = 13,
    REGION_WRITE_MULTI = 15,
    DEVICE_FEATURE = 16,
    MIG_DATA_READ = 17,
    MIG_DATA_WRITE = 18,
}

/// Body of `VERSION`, in both directions: this, and then JSON text that ends with a zero byte. The text is optional.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Version {
    /// The major version, which must be the same on both sides.
    pub major: u16,
    /// The minor version. The server's is not larger than the client's.
    pub minor: u16,
}
layout!(Version, 4 { major: 0, minor: 2 });

impl Version {
    /// The version that is described here.
    pub const OURS: Self = Self { major: 0, minor: 0 };
}

/// Body of `DMA_MAP`: the device may use a range of addresses. With it comes the file in which the range lies, or no
/// descriptor if only messages could read and write the range. The reply has no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaMap {
    /// Bytes of this structure.
    pub argsz: u32,
    /// [`DmaMap::READ`] and [`DmaMap::WRITE`].
    pub flags: u32,
    /// Offset of the range in its file.
    pub offset: u64,
    /// The first address.
    pub address: u64,
    /// Bytes of the range.
    pub size: u64,
}
layout!(DmaMap, 32 { argsz: 0, flags: 4, offset: 8, address: 16, size: 24 });

impl DmaMap {
    /// The device may read the range.
    pub const READ: u32 = 1 << 0;
    /// The device may write the range.
    pub const WRITE: u32 = 1 << 1;
}

/// Body of `DMA_UNMAP`: the device must not use a range any more. The reply is the same structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaUnmap {
    /// Bytes of this structure, and of a bitmap that follows in the reply if it is asked for.
    pub argsz: u32,
    /// Zero or [`DmaUnmap::ALL`]. Other flags are about bitmaps of written pages.
    pub flags: u32,
    /// The first address.
    pub address: u64,
    /// Bytes of the range.
    pub size: u64,
}
layout!(DmaUnmap, 24 { argsz: 0, flags: 4, address: 8, size: 16 });

impl DmaUnmap {
    /// Flag: every range is unmapped. Address and size are zero.
    pub const ALL: u32 = 1 << 1;
}

/// Body of `DEVICE_GET_INFO` and of its reply. The command only sets `argsz`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Bytes that the client takes; in the reply, bytes that there are.
    pub argsz: u32,
    /// [`DeviceInfo::RESET`] and [`DeviceInfo::PCI`].
    pub flags: u32,
    /// The number of regions.
    pub num_regions: u32,
    /// The number of kinds of interrupts.
    pub num_irqs: u32,
}
layout!(DeviceInfo, 16 { argsz: 0, flags: 4, num_regions: 8, num_irqs: 12 });

impl DeviceInfo {
    /// The device supports `DEVICE_RESET`.
    pub const RESET: u32 = 1 << 0;
    /// The device is a PCI device; its regions and interrupts have the numbers of [`pci`].
    pub const PCI: u32 = 1 << 1;
}

/// Numbers of the regions and interrupts of PCI devices (`VFIO_PCI_*_INDEX`).
pub mod pci {
    /// Region of the first base address register; the others follow.
    pub const BAR0: u32 = 0;
    /// Region of the configuration space.
    pub const CONFIG: u32 = 7;
    /// The number of regions: six base address registers, the ROM, the configuration space and VGA.
    pub const REGIONS: u32 = 9;
    /// Interrupts of the pin.
    pub const INTX: u32 = 0;
    /// MSI-X interrupts.
    pub const MSIX: u32 = 2;
    /// Interrupts of errors that the bus reports.
    pub const ERR: u32 = 3;
    /// The number of kinds of interrupts: pin, MSI, MSI-X, errors and the request to release the device.
    pub const IRQS: u32 = 5;
}

/// Body of `DEVICE_GET_REGION_INFO`, and beginning of that of its reply. The command sets `argsz` and `index`.
///
/// If the client takes fewer bytes than there are, it gets this structure alone, in which `argsz` says how many there are, and
/// asks again. Behind the structure are capabilities, such as [`SparseMmap`]; the file comes with the full reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionInfo {
    /// Bytes that the client takes; in the reply, bytes that there are.
    pub argsz: u32,
    /// [`RegionInfo::READ`] and so on.
    pub flags: u32,
    /// The number of the region.
    pub index: u32,
    /// Offset of the first capability from the beginning of this structure.
    pub cap_offset: u32,
    /// Bytes of the region.
    pub size: u64,
    /// Offset of the region in its file.
    pub offset: u64,
}
layout!(RegionInfo, 32 { argsz: 0, flags: 4, index: 8, cap_offset: 12, size: 16, offset: 24 });

impl RegionInfo {
    /// The region can be read.
    pub const READ: u32 = 1 << 0;
    /// The region can be written.
    pub const WRITE: u32 = 1 << 1;
    /// The region can be mapped.
    pub const MMAP: u32 = 1 << 2;
    /// There are capabilities.
    pub const CAPS: u32 = 1 << 3;
}

/// The capability by which only areas of a region can be mapped. It is followed by `areas` structures [`Area`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseMmap {
    /// [`SparseMmap::ID`].
    pub id: u16,
    /// 1.
    pub version: u16,
    /// Offset of the next capability from the beginning of the [`RegionInfo`], or zero.
    pub next: u32,
    /// The number of areas.
    pub areas: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(SparseMmap, 16 { id: 0, version: 2, next: 4, areas: 8, reserved: 12 });

impl SparseMmap {
    /// `VFIO_REGION_INFO_CAP_SPARSE_MMAP`.
    pub const ID: u16 = 1;
}

/// A part of a region that can be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Area {
    /// Offset from the beginning of the region. In the file, the area lies at this offset behind that of the region.
    pub offset: u64,
    /// Bytes of the area.
    pub size: u64,
}
layout!(Area, 16 { offset: 0, size: 8 });

/// Body of `DEVICE_GET_IRQ_INFO` and of its reply. The command sets `argsz` and `index`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqInfo {
    /// Bytes of this structure.
    pub argsz: u32,
    /// [`IrqInfo::EVENTFD`] and so on.
    pub flags: u32,
    /// The kind of interrupts.
    pub index: u32,
    /// The number of interrupts of this kind.
    pub count: u32,
}
layout!(IrqInfo, 16 { argsz: 0, flags: 4, index: 8, count: 12 });

impl IrqInfo {
    /// The interrupts are raised by eventfds.
    pub const EVENTFD: u32 = 1 << 0;
    /// All interrupts of the kind must be set at once. Without this flag, one after the other can be.
    pub const NORESIZE: u32 = 1 << 3;
}

/// Beginning of the body of `DEVICE_SET_IRQS`. The descriptors that come with it are the eventfds; without any, the
/// interrupts have none any more. The reply has no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqSet {
    /// Bytes of this structure, and of data that follows.
    pub argsz: u32,
    /// One of the data flags, and one of the action flags.
    pub flags: u32,
    /// The kind of interrupts.
    pub index: u32,
    /// The first interrupt.
    pub start: u32,
    /// The number of interrupts. With [`IrqSet::DATA_NONE`] and [`IrqSet::ACTION_TRIGGER`], zero disables the kind.
    pub count: u32,
}
layout!(IrqSet, 20 { argsz: 0, flags: 4, index: 8, start: 12, count: 16 });

impl IrqSet {
    /// There is no data.
    pub const DATA_NONE: u32 = 1 << 0;
    /// The data is a byte for each interrupt.
    pub const DATA_BOOL: u32 = 1 << 1;
    /// The data is a descriptor for each interrupt.
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// The interrupts are masked.
    pub const ACTION_MASK: u32 = 1 << 3;
    /// The interrupts are unmasked.
    pub const ACTION_UNMASK: u32 = 1 << 4;
    /// The interrupts are set or raised.
    pub const ACTION_TRIGGER: u32 = 1 << 5;
}

/// Body of `REGION_READ`, and beginning of those of its reply, of `REGION_WRITE` and of its reply. In the reply to a read and in
/// the command of a write it is followed by `count` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Access {
    /// Offset in the region.
    pub offset: u64,
    /// The number of the region.
    pub region: u32,
    /// The number of bytes.
    pub count: u32,
}
layout!(Access, 16 { offset: 0, region: 8, count: 12 });
