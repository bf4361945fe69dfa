//! Messages of the vhost-user protocol (QEMU's `docs/interop/vhost-user.rst`), as they are sent on the socket.
//!
//! A message is a [`Header`], then `size` bytes of payload. File descriptors accompany the header. Messages have the same
//! form in both directions, and on both channels (the front end's, and the back end's own).

use core::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Header of each message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Kind of the message: a [`Request`], or a [`BackendRequest`] on the back end's channel.
    pub request: u32,
    /// [`Header::VERSION`], and the flags [`Header::REPLY`] and [`Header::NEED_REPLY`].
    pub flags: u32,
    /// Bytes of payload.
    pub size: u32,
}
layout!(Header, 12 { request: 0, flags: 4, size: 8 });

impl Header {
    /// The version of all messages, in the lowest two bits of the flags.
    pub const VERSION: u32 = 1;
    /// Mask of the version in the flags.
    pub const VERSION_MASK: u32 = 0x3;
    /// Flag: the message is a reply.
    pub const REPLY: u32 = 1 << 2;
    /// Flag: the sender asks for a reply that says whether the request succeeded ([`protocol::REPLY_ACK`]).
    pub const NEED_REPLY: u32 = 1 << 3;
}

/// Maximum bytes of the payload of the requests below; longer messages are refused.
pub const MAX_PAYLOAD: usize = 4096;

/// Maximum number of descriptors with one message.
pub const MAX_FDS: usize = 32;

/// A request of the front end. Readers refuse unknown values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Request(pub u32);

macro_rules! requests {
    ($($name:ident = $value:literal,)*) => {
        #[allow(missing_docs)] // The specification's names, "Front-end message types".
        impl Request {
            $(pub const $name: Self = Self($value);)*
        }

        impl fmt::Debug for Request {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {
                    $($value => f.write_str(stringify!($name)),)*
                    other => write!(f, "request {other}"),
                }
            }
        }
    };
}

requests! {
    GET_FEATURES = 1,
    SET_FEATURES = 2,
    SET_OWNER = 3,
    RESET_OWNER = 4,
    SET_MEM_TABLE = 5,
    SET_LOG_BASE = 6,
    SET_LOG_FD = 7,
    SET_VRING_NUM = 8,
    SET_VRING_ADDR = 9,
    SET_VRING_BASE = 10,
    GET_VRING_BASE = 11,
    SET_VRING_KICK = 12,
    SET_VRING_CALL = 13,
    SET_VRING_ERR = 14,
    GET_PROTOCOL_FEATURES = 15,
    SET_PROTOCOL_FEATURES = 16,
    GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18,
    SET_BACKEND_REQ_FD = 21,
    GET_CONFIG = 24,
    SET_CONFIG = 25,
    GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD = 32,
    RESET_DEVICE = 34,
    GET_MAX_MEM_SLOTS = 36,
    ADD_MEM_REG = 37,
    REM_MEM_REG = 38,
}

/// A request of the back end, on its own channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendRequest(pub u32);

impl BackendRequest {
    /// The configuration of the device has changed.
    pub const CONFIG_CHANGE: Self = Self(2);
}

/// Protocol features, as bits of a 64-bit word.
#[allow(missing_docs)] // The specification's names, "Protocol features".
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const GET_VRING_BASE_INFLIGHT: u64 = 1 << 20;
}

/// Feature bits that belong to the connection and not to the device.
pub mod feature {
    /// `VHOST_F_LOG_ALL`: the device must mark the pages that it writes in the log.
    pub const LOG_ALL: u64 = 1 << 26;
    /// `VHOST_USER_F_PROTOCOL_FEATURES`: protocol features can be negotiated.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
}

/// A region of guest memory. The payload of `SET_MEM_TABLE` is a count, four bytes of padding and the regions; that of
/// `ADD_MEM_REG` and `REM_MEM_REG` is eight bytes of padding and one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryRegion {
    /// Guest physical address.
    pub guest: u64,
    /// Bytes of the region.
    pub size: u64,
    /// Address in the front end's process.
    pub user: u64,
    /// Offset of the region in its file.
    pub offset: u64,
}
layout!(MemoryRegion, 32 { guest: 0, size: 8, user: 16, offset: 24 });

/// Bytes in front of the regions of `SET_MEM_TABLE`, and of the region of `ADD_MEM_REG` and `REM_MEM_REG`.
pub const MEMORY_HEADER: usize = 8;

/// A queue and a number: payload of `SET_VRING_NUM`, `SET_VRING_BASE`, `GET_VRING_BASE`, `SET_VRING_ENABLE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Index of the queue.
    pub index: u32,
    /// The queue's size, its base, or whether it is enabled (0 or 1).
    pub value: u32,
}
layout!(VringState, 8 { index: 0, value: 4 });

/// Addresses of the parts of a queue, in the address space of the front end's process (`SET_VRING_ADDR`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddress {
    /// Index of the queue.
    pub index: u32,
    /// Zero or [`VringAddress::LOG`].
    pub flags: u32,
    /// Address of the descriptor table, or of the packed ring.
    pub descriptors: u64,
    /// Address of the used ring, or of the device's event suppression structure.
    pub used: u64,
    /// Address of the available ring, or of the driver's event suppression structure.
    pub available: u64,
    /// Guest physical address of the used ring, for the log.
    pub log: u64,
}
layout!(VringAddress, 40 { index: 0, flags: 4, descriptors: 8, used: 16, available: 24, log: 32 });

impl VringAddress {
    /// `VHOST_VRING_F_LOG`: the device must mark its writes to the used ring in the log.
    pub const LOG: u32 = 1;
}

/// Mask of the queue's index in the payload of `SET_VRING_KICK`, `SET_VRING_CALL` and `SET_VRING_ERR`.
pub const VRING_INDEX_MASK: u64 = 0xff;
/// Flag in the same payload: no descriptor comes with the message.
pub const VRING_NO_FD: u64 = 1 << 8;

/// Header of the payload of `GET_CONFIG` and `SET_CONFIG`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigHeader {
    /// Offset in the configuration space.
    pub offset: u32,
    /// Number of bytes.
    pub size: u32,
    /// Whether the driver writes the configuration, or a migration.
    pub flags: u32,
}
layout!(ConfigHeader, 12 { offset: 0, size: 4, flags: 8 });

/// Maximum bytes of a configuration space.
pub const MAX_CONFIG: usize = 256;

/// The in-flight region, which records the descriptors in flight (`GET_INFLIGHT_FD`, `SET_INFLIGHT_FD`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InflightArea {
    /// Bytes of the region.
    pub size: u64,
    /// Offset of the region in its file.
    pub offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Number of descriptors of each queue.
    pub queue_size: u16,
    /// Zero. Front ends send the structure with this padding of the C compiler, or without it.
    pub padding: u32,
}
layout!(InflightArea, 24 { size: 0, offset: 8, queues: 16, queue_size: 18, padding: 20 });

impl InflightArea {
    /// Bytes of the structure without the padding.
    pub const PACKED: usize = 20;
}

/// The log of written pages (`SET_LOG_BASE`), which has one bit for each 4 KiB of guest physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LogArea {
    /// Bytes of the log.
    pub size: u64,
    /// Offset of the log in its file.
    pub offset: u64,
}
layout!(LogArea, 16 { size: 0, offset: 8 });
