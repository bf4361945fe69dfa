//! Log pages (5.14.1).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Identifier of a log page, bits 0-7 of word 10 of Get Log Page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page(pub u8);

impl Page {
    /// Error Information: entries of 64 bytes.
    pub const ERRORS: Self = Self(0x01);
    /// SMART / Health Information: [`Smart`].
    pub const SMART: Self = Self(0x02);
    /// Firmware Slot Information: [`Firmware`].
    pub const FIRMWARE: Self = Self(0x03);
    /// Changed Namespace List: 1024 namespace IDs, as u32.
    pub const CHANGED_NAMESPACES: Self = Self(0x04);
    /// Commands Supported and Effects: [`Effects`].
    pub const EFFECTS: Self = Self(0x05);
}

/// Bytes of an entry of the log page Error Information.
pub const ERROR_LEN: usize = 64;
/// Bytes of the log page Changed Namespace List.
pub const CHANGED_LEN: usize = 4096;

/// SMART / Health Information (figure 196). Counters of 128 bits are two words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct Smart {
    /// Bits of what is critical.
    pub critical: u8,
    /// Temperature in kelvin.
    pub temperature: u16,
    /// Available spare, in percent.
    pub spare: u8,
    /// The spare below which there is an event, in percent.
    pub spare_threshold: u8,
    /// Part of the expected life that is used, in percent.
    pub used: u8,
    /// Not used.
    pub reserved0: [u8; 26],
    /// Units read: thousands of 512 bytes, rounded up.
    pub read_units: [u64; 2],
    /// Units written: thousands of 512 bytes, rounded up.
    pub written_units: [u64; 2],
    /// Read commands.
    pub reads: [u64; 2],
    /// Write commands.
    pub writes: [u64; 2],
    /// Minutes in which there was I/O.
    pub busy_minutes: [u64; 2],
    /// Power cycles.
    pub power_cycles: [u64; 2],
    /// Hours with power.
    pub power_hours: [u64; 2],
    /// Power losses without a shutdown.
    pub unsafe_shutdowns: [u64; 2],
    /// Media errors.
    pub media_errors: [u64; 2],
    /// Entries of the error log since the beginning.
    pub error_entries: [u64; 2],
    /// Not used.
    pub reserved1: [u8; 320],
}
layout!(Smart, 512 {
    critical: 0, temperature: 1, spare: 3, spare_threshold: 4, used: 5, reserved0: 6, read_units: 32, written_units: 48, reads: 64,
    writes: 80, busy_minutes: 96, power_cycles: 112, power_hours: 128, unsafe_shutdowns: 144, media_errors: 160, error_entries: 176,
    reserved1: 192,
});

/// Firmware Slot Information (figure 198).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Firmware {
    /// Slot of the active firmware (bits 0-2).
    pub active: u8,
    /// Reserved.
    pub reserved0: [u8; 7],
    /// Revision in each of the slots 1 to 7.
    pub revisions: [[u8; 8]; 7],
    /// Reserved.
    pub reserved1: [u8; 448],
}
layout!(Firmware, 512 { active: 0, reserved0: 1, revisions: 8, reserved1: 64 });

/// Commands Supported and Effects (figure 199).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Effects {
    /// Effects of the admin commands, by opcode.
    pub admin: [u32; 256],
    /// Effects of the I/O commands, by opcode.
    pub io: [u32; 256],
    /// Reserved.
    pub reserved: [u8; 2048],
}
layout!(Effects, 4096 { admin: 0, io: 1024, reserved: 2048 });

impl Effects {
    /// The command is supported.
    pub const SUPPORTED: u32 = 1;
    /// The command can change the content of blocks.
    pub const CHANGES_BLOCKS: u32 = 1 << 1;
}
