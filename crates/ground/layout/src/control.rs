//! The control memory of a VM: a small sealed file that only this VM and the host daemon share.
//!
//! ```text
//! 0x00000   ControlHeader (identity; the two session lines)
//! 0x01000   ring host -> guest (message ring, CAPACITY data bytes)
//! 0x12000   ring guest -> host
//! 0x40000   end
//! ```
//!
//! # Session
//!
//! A session is one pair of daemon incarnations. Either daemon may die at any time, so the rings are set up anew for each
//! session, and each side writes only its own line:
//!
//! 1. The guest daemon starts, or finds that `host_epoch` is not the one that it accepted. It stores its `boot_id`, then a
//!    fresh random `guest_epoch`, and rings the host's vector 0.
//! 2. The host finds a `guest_epoch` that it has not accepted. It resets its own words of both rings (the producer's of the
//!    first, the consumer's of the second), stores a fresh random `host_epoch`, then `host_ack = guest_epoch`, and rings
//!    vector 0.
//! 3. The guest finds `host_ack == guest_epoch`. It resets its own words of both rings, then stores `guest_ack = host_epoch`,
//!    and rings. From here on it may produce and consume.
//! 4. The host finds `guest_ack == host_epoch`. It may produce and consume.
//!
//! A host daemon that starts stores `host_ack = 0` and a fresh `host_epoch`, and rings; the guest then begins at step 1. Each
//! store in these steps is a release, and each look is an acquire.

use crate::{Name, ring};
use core::mem::offset_of;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of the control memory (a power of two, since it is a PCI BAR).
pub const SIZE: usize = 256 << 10;
/// Data bytes of each control ring.
pub const CAPACITY: usize = 64 << 10;
/// Offset of the ring from host to guest.
pub const TO_GUEST: usize = 0x1000;
/// Offset of the ring from guest to host.
pub const TO_HOST: usize = 0x12000;

words!(SIZE;
    to_guest { TO_GUEST: [u8; ring::footprint(CAPACITY)] }
    to_host { TO_HOST: [u8; ring::footprint(CAPACITY)] }
);
const _: () = assert!(size_of::<ControlHeader>() <= TO_GUEST && SIZE.is_power_of_two());

/// First word of a [`ControlHeader`]: `GINNELCT`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"GINNELCT");
/// Version of the control memory. Zero in memory means "not ready yet".
pub const VERSION: u32 = 1;

/// Header at the beginning of the control memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ControlHeader {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`], published last; zero until then.
    pub version: u32,
    /// This VM's member number; also its ivshmem peer id.
    pub member: u32,
    /// Number of doorbell vectors of each member.
    pub vectors: u32,
    /// Zero.
    pub reserved: [u32; 11],
    /// The session line that the host writes.
    pub host: HostLine,
    /// The session line that the guest writes.
    pub guest: GuestLine,
    /// The VM's name.
    pub name: Name,
}

/// The host's session line.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct HostLine {
    /// Random, never zero; changes with each session.
    pub epoch: u64,
    /// The guest epoch that the host has accepted, or zero.
    pub ack: u64,
    /// Zero.
    pub reserved: [u64; 6],
}
layout!(HostLine, 64 { epoch: 0, ack: 8, reserved: 16 });

/// The guest's session line.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct GuestLine {
    /// Random, never zero; changes with each session.
    pub epoch: u64,
    /// The host epoch that the guest has accepted.
    pub ack: u64,
    /// The guest kernel's `/proc/sys/kernel/random/boot_id`. If it changes, the VM has rebooted, and every endpoint of the
    /// earlier boot is dead.
    pub boot_id: [u8; 16],
    /// 1 if the guest can receive interrupts (MSI-X through VFIO), 0 if it polls.
    pub interrupts: u32,
    /// Zero.
    pub reserved: [u32; 7],
}
layout!(GuestLine, 64 { epoch: 0, ack: 8, boot_id: 16, interrupts: 32, reserved: 36 });

layout!(ControlHeader, 256 {
    magic: 0, version: 8, member: 12, vectors: 16, reserved: 20, host: 64, guest: 128, name: 192,
});

/// Offset of the `version` word.
pub const VERSION_AT: usize = offset_of!(ControlHeader, version);
/// Offset of [`HostLine::epoch`].
pub const HOST_EPOCH: usize = offset_of!(ControlHeader, host) + offset_of!(HostLine, epoch);
/// Offset of [`HostLine::ack`].
pub const HOST_ACK: usize = offset_of!(ControlHeader, host) + offset_of!(HostLine, ack);
/// Offset of [`GuestLine::epoch`].
pub const GUEST_EPOCH: usize = offset_of!(ControlHeader, guest) + offset_of!(GuestLine, epoch);
/// Offset of [`GuestLine::ack`].
pub const GUEST_ACK: usize = offset_of!(ControlHeader, guest) + offset_of!(GuestLine, ack);
/// Offset of [`GuestLine::boot_id`].
pub const GUEST_BOOT_ID: usize = offset_of!(ControlHeader, guest) + offset_of!(GuestLine, boot_id);
/// Offset of [`GuestLine::interrupts`].
pub const GUEST_INTERRUPTS: usize = offset_of!(ControlHeader, guest) + offset_of!(GuestLine, interrupts);

/// The doorbell vector of a member on which its daemon listens. The other vectors belong to endpoints.
pub const DAEMON_VECTOR: u32 = 0;
