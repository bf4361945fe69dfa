//! The ioctls of linux/vfio.h that are needed, and their structures.

use std::io;
use std::os::fd::AsRawFd;

// `_IO(';', 100 + n)`.
pub const GET_API_VERSION: libc::c_ulong = 0x3b64;
pub const CHECK_EXTENSION: libc::c_ulong = 0x3b65;
pub const SET_IOMMU: libc::c_ulong = 0x3b66;
pub const GROUP_GET_STATUS: libc::c_ulong = 0x3b67;
pub const GROUP_SET_CONTAINER: libc::c_ulong = 0x3b68;
pub const GROUP_GET_DEVICE_FD: libc::c_ulong = 0x3b6a;
pub const DEVICE_GET_INFO: libc::c_ulong = 0x3b6b;
pub const DEVICE_GET_REGION_INFO: libc::c_ulong = 0x3b6c;
pub const DEVICE_GET_IRQ_INFO: libc::c_ulong = 0x3b6d;
pub const DEVICE_SET_IRQS: libc::c_ulong = 0x3b6e;
pub const IOMMU_GET_INFO: libc::c_ulong = 0x3b70;
pub const IOMMU_MAP_DMA: libc::c_ulong = 0x3b71;
pub const IOMMU_UNMAP_DMA: libc::c_ulong = 0x3b72;

pub const API_VERSION: libc::c_int = 0;
pub const TYPE1V2_IOMMU: libc::c_ulong = 3;

/// A structure that begins with its own size, beyond which the kernel neither reads nor writes, and in which any bytes are valid.
///
/// # Safety
///
/// The type is `repr(C)`, has only integers, and its first field is a `u32` that is set to its size.
pub unsafe trait Sized32 {}

#[repr(C)]
pub struct GroupStatus {
    pub argsz: u32,
    pub flags: u32,
}

impl GroupStatus {
    pub const VIABLE: u32 = 1;
}

#[repr(C)]
pub struct DeviceInfo {
    pub argsz: u32,
    pub flags: u32,
    pub num_regions: u32,
    pub num_irqs: u32,
}

#[repr(C)]
pub struct RegionInfo {
    pub argsz: u32,
    pub flags: u32,
    pub index: u32,
    pub cap_offset: u32,
    pub size: u64,
    pub offset: u64,
}

impl RegionInfo {
    pub const MMAP: u32 = 1 << 2;
}

#[repr(C)]
pub struct IrqInfo {
    pub argsz: u32,
    pub flags: u32,
    pub index: u32,
    pub count: u32,
}

/// What an IOMMU can do, with room for its capabilities behind the first fields.
#[repr(C)]
pub struct IommuInfo {
    pub argsz: u32,
    pub flags: u32,
    pub page_sizes: u64,
    pub cap_offset: u32,
    pub pad: u32,
    pub more: [u32; 1018],
}

impl IommuInfo {
    pub const CAPS: u32 = 1 << 1;
    /// The capability that lists the addresses that devices can use.
    pub const CAP_IOVA_RANGE: u32 = 1;
}

#[repr(C)]
pub struct DmaMap {
    pub argsz: u32,
    pub flags: u32,
    pub vaddr: u64,
    pub iova: u64,
    pub size: u64,
}

impl DmaMap {
    pub const READ: u32 = 1;
    pub const WRITE: u32 = 2;
}

#[repr(C)]
pub struct DmaUnmap {
    pub argsz: u32,
    pub flags: u32,
    pub iova: u64,
    pub size: u64,
}

macro_rules! sized {
    ($($name:ident: $bytes:literal),*) => { $(
        const _: () = assert!(size_of::<$name>() == $bytes && std::mem::offset_of!($name, argsz) == 0);
        // SAFETY: the structure is `repr(C)` and has only integers, and its first field is the size, which `request` sets.
        unsafe impl Sized32 for $name {}
        impl Default for $name {
            fn default() -> Self {
                // SAFETY: all fields are integers, of which zero is a value.
                let zero: Self = unsafe { std::mem::zeroed() };
                Self { argsz: size_of::<Self>() as u32, ..zero }
            }
        }
    )* };
}
sized!(GroupStatus: 8, DeviceInfo: 16, RegionInfo: 32, IrqInfo: 16, IommuInfo: 4096, DmaMap: 32, DmaUnmap: 24);

pub fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Calls an ioctl whose argument is a number.
pub fn by_value(
    fd: &impl AsRawFd,
    request: libc::c_ulong,
    argument: libc::c_ulong,
) -> io::Result<libc::c_int> {
    debug_assert!([GET_API_VERSION, CHECK_EXTENSION, SET_IOMMU].contains(&request));
    // SAFETY: these requests take their argument by value.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) })
}

/// Calls an ioctl that reads an int.
pub fn by_pointer(fd: &impl AsRawFd, argument: &libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: this request reads one int.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), GROUP_SET_CONTAINER, std::ptr::from_ref(argument)) })
}

/// Calls an ioctl that fills a structure.
pub fn structure<T: Sized32>(
    fd: &impl AsRawFd,
    request: libc::c_ulong,
    argument: &mut T,
) -> io::Result<libc::c_int> {
    debug_assert!(request != IOMMU_MAP_DMA, "it reads an address");
    // SAFETY: the kernel reads and writes at most the size in the structure's first field, which is its own.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) })
}
