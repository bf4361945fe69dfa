//! Identify: what a controller says about itself and its namespaces (5.15).
//!
//! Fields that a controller of ours always leaves at zero are in the reserved ones.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of each answer.
pub const LEN: usize = 4096;

/// What to identify: CNS, bits 0-7 of word 10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cns(pub u8);

impl Cns {
    /// A namespace: [`Namespace`].
    pub const NAMESPACE: Self = Self(0x00);
    /// The controller: [`Controller`].
    pub const CONTROLLER: Self = Self(0x01);
    /// The active namespaces behind NSID, at most 1024, as u32 in ascending order.
    pub const ACTIVE: Self = Self(0x02);
    /// The identification descriptors of a namespace: [`DescriptorHeader`].
    pub const DESCRIPTORS: Self = Self(0x03);
}

/// Identify Controller (figure 247).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct Controller {
    /// PCI vendor ID.
    pub vid: u16,
    /// PCI subsystem vendor ID.
    pub ssvid: u16,
    /// Serial number, ASCII, padded with spaces.
    pub sn: [u8; 20],
    /// Model number, ASCII, padded with spaces.
    pub mn: [u8; 40],
    /// Firmware revision, ASCII, padded with spaces.
    pub fr: [u8; 8],
    /// Recommended arbitration burst.
    pub rab: u8,
    /// OUI of the vendor; 0 if none is assigned.
    pub ieee: [u8; 3],
    /// Multi-path capabilities.
    pub cmic: u8,
    /// Maximum data transfer size: `1 << mdts` pages of the smallest size (`CAP.MPSMIN`); 0 is no limit.
    pub mdts: u8,
    /// Controller ID.
    pub cntlid: u16,
    /// Version, as in the register VS.
    pub ver: u32,
    /// Time to resume, and to enter, the state RTD3.
    pub rtd3: [u32; 2],
    /// Optional asynchronous events.
    pub oaes: u32,
    /// Controller attributes.
    pub ctratt: u32,
    /// Reserved.
    pub reserved0: [u8; 11],
    /// Controller type: 1 is an I/O controller.
    pub cntrltype: u8,
    /// FRU globally unique identifier, retry delays, and more that is not used.
    pub reserved1: [u8; 144],
    /// Optional admin commands: [`oacs`].
    pub oacs: u16,
    /// Most Abort commands at a time (0's based).
    pub acl: u8,
    /// Most Asynchronous Event Requests at a time (0's based).
    pub aerl: u8,
    /// Firmware updates: bit 0 is set if slot 1 is read-only, and bits 1-3 have the number of slots.
    pub frmw: u8,
    /// Log page attributes: [`lpa`].
    pub lpa: u8,
    /// Entries of the error log (0's based).
    pub elpe: u8,
    /// Number of power states (0's based).
    pub npss: u8,
    /// Not used.
    pub reserved2: [u8; 2],
    /// Warning temperature, in kelvin.
    pub wctemp: u16,
    /// Critical temperature, in kelvin.
    pub cctemp: u16,
    /// Not used.
    pub reserved3: [u8; 242],
    /// Size of commands: required (bits 0-3) and maximum (4-7), as powers of two.
    pub sqes: u8,
    /// Size of completions: required (bits 0-3) and maximum (4-7), as powers of two.
    pub cqes: u8,
    /// Most commands at a time; 0 is not said.
    pub maxcmd: u16,
    /// Largest namespace ID.
    pub nn: u32,
    /// Optional NVM commands: [`oncs`].
    pub oncs: u16,
    /// Fused operations.
    pub fuses: u16,
    /// Format attributes.
    pub fna: u8,
    /// Volatile write cache: [`vwc`].
    pub vwc: u8,
    /// Atomic write unit, in blocks (0's based).
    pub awun: u16,
    /// Atomic write unit at a power failure, in blocks (0's based).
    pub awupf: u16,
    /// Not used.
    pub reserved4: [u8; 6],
    /// SGL support.
    pub sgls: u32,
    /// Not used.
    pub reserved5: [u8; 228],
    /// NVM subsystem qualified name, UTF-8, padded with zeros.
    pub subnqn: [u8; 256],
    /// Not used.
    pub reserved6: [u8; 1024],
    /// Power states. The first one is described by zeros except its maximum power.
    pub psd: [[u8; 32]; 32],
    /// For the vendor.
    pub vendor: [u8; 1024],
}
layout!(Controller, 4096 {
    vid: 0, ssvid: 2, sn: 4, mn: 24, fr: 64, rab: 72, ieee: 73, cmic: 76, mdts: 77, cntlid: 78, ver: 80, rtd3: 84, oaes: 92,
    ctratt: 96, reserved0: 100, cntrltype: 111, reserved1: 112, oacs: 256, acl: 258, aerl: 259, frmw: 260, lpa: 261, elpe: 262,
    npss: 263, reserved2: 264, wctemp: 266, cctemp: 268, reserved3: 270, sqes: 512, cqes: 513, maxcmd: 514, nn: 516, oncs: 520,
    fuses: 522, fna: 524, vwc: 525, awun: 526, awupf: 528, reserved4: 530, sgls: 536, reserved5: 540, subnqn: 768, reserved6: 1024,
    psd: 2048, vendor: 3072,
});

/// Bits of [`Controller::oacs`].
pub mod oacs {
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER: u16 = 1 << 8;
}

/// Bits of [`Controller::oncs`].
pub mod oncs {
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u16 = 1 << 2;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 3;
}

/// Bits of [`Controller::lpa`].
pub mod lpa {
    /// The log page Commands Supported and Effects.
    pub const EFFECTS: u8 = 1 << 1;
    /// Get Log Page takes an offset, and a number of dwords of 32 bits.
    pub const EXTENDED: u8 = 1 << 2;
}

/// Bits of [`Controller::vwc`].
pub mod vwc {
    /// There is a volatile write cache.
    pub const PRESENT: u8 = 1;
    /// Flush with the NSID of all namespaces is supported (bits 1-2 are 3).
    pub const FLUSH_ALL: u8 = 3 << 1;
    /// Flush with the NSID of all namespaces is not supported (bits 1-2 are 2).
    pub const NO_FLUSH_ALL: u8 = 2 << 1;
}

/// Identify Namespace (figure 245).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct Namespace {
    /// Size in blocks.
    pub nsze: u64,
    /// Capacity in blocks.
    pub ncap: u64,
    /// Blocks in use.
    pub nuse: u64,
    /// Features: [`nsfeat`].
    pub nsfeat: u8,
    /// Number of formats (0's based).
    pub nlbaf: u8,
    /// The format in use.
    pub flbas: u8,
    /// Metadata, and protection of data.
    pub reserved0: [u8; 3],
    /// Bit 0: several controllers may share the namespace.
    pub nmic: u8,
    /// Reservations, and progress of formatting.
    pub reserved1: [u8; 2],
    /// What deallocated blocks contain: [`dlfeat`].
    pub dlfeat: u8,
    /// Atomic writes and their boundaries; not used.
    pub reserved2: [u8; 12],
    /// Optimal boundary of I/O, in blocks; 0 is none.
    pub noiob: u16,
    /// Capacity in bytes; 0 is not said.
    pub nvmcap: [u64; 2],
    /// Preferred granularity of writes, in blocks (0's based).
    pub npwg: u16,
    /// Preferred alignment of writes, in blocks (0's based).
    pub npwa: u16,
    /// Preferred granularity of deallocation, in blocks (0's based).
    pub npdg: u16,
    /// Preferred alignment of deallocation, in blocks (0's based).
    pub npda: u16,
    /// Optimal size of a write, in blocks (0's based).
    pub nows: u16,
    /// Not used.
    pub reserved3: [u8; 25],
    /// Bit 0: the namespace is write-protected.
    pub nsattr: u8,
    /// Not used.
    pub reserved4: [u8; 4],
    /// Globally unique identifier; 0 if there is none.
    pub nguid: [u8; 16],
    /// EUI-64; 0 if there is none.
    pub eui64: [u8; 8],
    /// Formats: bytes of metadata (bits 0-15), exponent of the block size (16-23), relative performance (24-25).
    pub lbaf: [u32; 16],
    /// Not used.
    pub reserved5: [u8; 192],
    /// For the vendor.
    pub vendor: [u8; 3712],
}
layout!(Namespace, 4096 {
    nsze: 0, ncap: 8, nuse: 16, nsfeat: 24, nlbaf: 25, flbas: 26, reserved0: 27, nmic: 30, reserved1: 31, dlfeat: 33, reserved2: 34,
    noiob: 46, nvmcap: 48, npwg: 64, npwa: 66, npdg: 68, npda: 70, nows: 72, reserved3: 74, nsattr: 99, reserved4: 100, nguid: 104,
    eui64: 120, lbaf: 128, reserved5: 192, vendor: 384,
});

/// Bits of [`Namespace::nsfeat`].
pub mod nsfeat {
    /// Thin provisioning: the capacity may be less than the size.
    pub const THIN: u8 = 1;
    /// NPWG, NPWA, NPDG, NPDA and NOWS are valid.
    pub const OPTIMAL: u8 = 1 << 4;
}

/// Bits of [`Namespace::dlfeat`].
pub mod dlfeat {
    /// Deallocated blocks read as zeros.
    pub const ZEROS: u8 = 1;
    /// Write Zeroes may deallocate blocks.
    pub const WRITE_ZEROES: u8 = 1 << 3;
}

/// Header of a namespace identification descriptor (figure 246). The identifier follows, and then the next descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DescriptorHeader {
    /// Kind of identifier: [`DescriptorHeader::UUID`] and others. 0 ends the list.
    pub nidt: u8,
    /// Bytes of the identifier.
    pub nidl: u8,
    /// Reserved.
    pub reserved: [u8; 2],
}
layout!(DescriptorHeader, 4 { nidt: 0, nidl: 1, reserved: 2 });

impl DescriptorHeader {
    /// An EUI-64, 8 bytes.
    pub const EUI64: u8 = 1;
    /// An NGUID, 16 bytes.
    pub const NGUID: u8 = 2;
    /// A UUID, 16 bytes.
    pub const UUID: u8 = 3;
}
