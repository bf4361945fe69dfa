//! Virtqueues: the structures that a virtio driver and its device share (virtio 1.2, section 2.7 split and 2.8 packed
//! virtqueues).
//!
//! A queue of `size` entries has three areas, each at any place in the driver's memory:
//!
//! ```text
//!            descriptor area            driver area (written by the driver)    device area (written by the device)
//! split      Descriptor[size]           flags u16, idx u16, ring u16[size],    flags u16, idx u16, ring {id u32,
//!            written by the driver      used_event u16                         len u32}[size], avail_event u16
//! packed     PackedDescriptor[size]     off_wrap u16, flags u16                off_wrap u16, flags u16
//!            written by both
//! ```

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum size of a queue of either format (2.7, 2.8.10.1).
pub const MAX_SIZE: u16 = 1 << 15;

/// Bytes of a descriptor of either format, also in an indirect table.
pub const DESCRIPTOR: usize = 16;

/// Alignment of the descriptor area.
pub const DESCRIPTOR_ALIGN: usize = 16;

/// Feature bits of the queues and the transport (section 6; bits 26 and 30: vhost-user specification).
pub mod feature {
    /// The device must log dirty pages (vhost).
    pub const VHOST_LOG_ALL: u64 = 1 << 26;
    /// The driver may use indirect descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notifications are suppressed by index (`used_event`, `avail_event`).
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The vhost-user protocol features can be negotiated (vhost-user).
    pub const VHOST_USER_PROTOCOL: u64 = 1 << 30;
    /// The device complies with virtio 1.0 or later.
    pub const VERSION_1: u64 = 1 << 32;
    /// Addresses are translated by an IOMMU of the platform.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// The queues are packed instead of split.
    pub const RING_PACKED: u64 = 1 << 34;
    /// The device uses buffers in the order in which the driver made them available.
    pub const IN_ORDER: u64 = 1 << 35;
}

/// Flags of a descriptor. Unknown bits are reserved, and readers ignore them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct DescriptorFlags(pub u16);

impl DescriptorFlags {
    /// The chain continues.
    pub const NEXT: Self = Self(1);
    /// The device writes the buffer; without this flag, it reads it.
    pub const WRITE: Self = Self(2);
    /// The buffer contains a table of descriptors.
    pub const INDIRECT: Self = Self(4);
    /// Packed: equal to the driver's wrap counter in an available descriptor.
    pub const AVAIL: Self = Self(1 << 7);
    /// Packed: different from the driver's wrap counter in an available descriptor, equal to the device's in a used one.
    pub const USED: Self = Self(1 << 15);

    /// Returns whether all bits of `other` are set.
    #[inline]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the bits of both.
    #[inline]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Packed: returns the AVAIL and USED flags of a descriptor that is made available under this wrap counter (2.8.1).
    #[inline]
    pub const fn available(wrap: bool) -> Self {
        if wrap { Self::AVAIL } else { Self::USED }
    }

    /// Packed: returns the AVAIL and USED flags of a descriptor that is used under this wrap counter (2.8.1).
    #[inline]
    pub const fn used(wrap: bool) -> Self {
        if wrap { Self(Self::AVAIL.0 | Self::USED.0) } else { Self(0) }
    }

    /// Packed: returns the AVAIL and USED flags alone.
    #[inline]
    pub const fn state(self) -> Self {
        Self(self.0 & (Self::AVAIL.0 | Self::USED.0))
    }
}

/// A descriptor of a split queue, or of an indirect table of one (2.7.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Descriptor {
    /// Guest physical address of the buffer.
    pub address: u64,
    /// Bytes of the buffer.
    pub len: u32,
    /// Flags of the descriptor.
    pub flags: DescriptorFlags,
    /// Index of the next descriptor, if the chain continues.
    pub next: u16,
}
layout!(Descriptor, 16 { address: 0, len: 8, flags: 12, next: 14 });

/// A descriptor of a packed queue, or of an indirect table of one (2.8.13).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PackedDescriptor {
    /// Guest physical address of the buffer.
    pub address: u64,
    /// Bytes of the buffer; in a used descriptor, bytes written.
    pub len: u32,
    /// Identifier of the buffer, chosen by the driver.
    pub id: u16,
    /// Flags of the descriptor.
    pub flags: DescriptorFlags,
}
layout!(PackedDescriptor, 16 { address: 0, len: 8, id: 12, flags: 14 });

const _: () = assert!(size_of::<Descriptor>() == DESCRIPTOR && size_of::<PackedDescriptor>() == DESCRIPTOR);

impl Descriptor {
    /// Decodes a descriptor from its two words in memory.
    #[inline]
    pub const fn from_words(address: u64, rest: u64) -> Self {
        Self {
            address,
            len: rest as u32,
            flags: DescriptorFlags((rest >> 32) as u16),
            next: (rest >> 48) as u16,
        }
    }

    /// Returns the second of the descriptor's two words in memory; the first is the address.
    #[inline]
    pub const fn rest(self) -> u64 {
        self.len as u64 | (self.flags.0 as u64) << 32 | (self.next as u64) << 48
    }
}

impl PackedDescriptor {
    /// Decodes a descriptor from its two words in memory.
    #[inline]
    pub const fn from_words(address: u64, rest: u64) -> Self {
        Self {
            address,
            len: rest as u32,
            id: (rest >> 32) as u16,
            flags: DescriptorFlags((rest >> 48) as u16),
        }
    }

    /// Returns the second of the descriptor's two words in memory; the first is the address.
    #[inline]
    pub const fn rest(self) -> u64 {
        self.len as u64 | (self.id as u64) << 32 | (self.flags.0 as u64) << 48
    }
}

/// The rings of a split queue (2.7.6 the available ring, in the driver area; 2.7.8 the used ring, in the device area).
pub mod split {
    /// Offset of the flags in both rings.
    pub const FLAGS: usize = 0;
    /// Offset of the index in both rings.
    pub const INDEX: usize = 2;
    /// Available ring: the driver does not want to be interrupted (unless EVENT_IDX is negotiated).
    pub const NO_INTERRUPT: u16 = 1;
    /// Used ring: the device does not want to be kicked (unless EVENT_IDX is negotiated).
    pub const NO_NOTIFY: u16 = 1;
    /// Alignment of the driver area.
    pub const DRIVER_ALIGN: usize = 2;
    /// Alignment of the device area.
    pub const DEVICE_ALIGN: usize = 4;

    /// Returns the offset of entry `i` of the available ring, a u16.
    #[inline]
    pub const fn available(i: u16) -> usize {
        4 + 2 * i as usize
    }
    /// Returns the offset of entry `i` of the used ring: id, then length, each a u32.
    #[inline]
    pub const fn used(i: u16) -> usize {
        4 + 8 * i as usize
    }
    /// Returns the offset of `used_event`, which follows the available ring.
    #[inline]
    pub const fn used_event(size: u16) -> usize {
        available(size)
    }
    /// Returns the offset of `avail_event`, which follows the used ring.
    #[inline]
    pub const fn avail_event(size: u16) -> usize {
        used(size)
    }
    /// Returns the bytes of the driver area.
    pub const fn driver_len(size: u16, event_idx: bool) -> usize {
        used_event(size) + if event_idx { 2 } else { 0 }
    }
    /// Returns the bytes of the device area.
    pub const fn device_len(size: u16, event_idx: bool) -> usize {
        avail_event(size) + if event_idx { 2 } else { 0 }
    }
}

// The entries of either ring begin behind these words.
words!(split::available(0); ring { split::FLAGS: u16, split::INDEX: u16 });

/// The event suppression structures of a packed queue (2.8.14), each of which is one 32-bit word with `off_wrap` in the low
/// half.
pub mod packed {
    /// Notify always.
    pub const ENABLE: u16 = 0;
    /// Notify never.
    pub const DISABLE: u16 = 1;
    /// Notify when the descriptor at `off_wrap` is reached (EVENT_IDX only).
    pub const DESC: u16 = 2;
    /// Bytes and alignment of the driver area and of the device area.
    pub const EVENT: usize = 4;

    /// Returns the event suppression word.
    #[inline]
    pub const fn event(off_wrap: u16, flags: u16) -> u32 {
        off_wrap as u32 | (flags as u32) << 16
    }
}
