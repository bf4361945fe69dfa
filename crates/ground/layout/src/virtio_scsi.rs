//! virtio-scsi: configuration space, commands, task management and events (virtio 1.2, section 5.6).
//!
//! Queue 0 is the control queue, queue 1 the event queue, and the other queues carry commands. A command is a
//! [`CommandHeader`] and the data to write (read by the device), then a [`CommandResponse`] and room for the data to read
//! (written by the device).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The control queue, which carries [`TaskManagement`] and [`Notification`] requests.
pub const CONTROL_QUEUE: u16 = 0;
/// The event queue, whose buffers wait for an [`Event`].
pub const EVENT_QUEUE: u16 = 1;
/// The first command queue.
pub const FIRST_COMMAND_QUEUE: u16 = 2;

/// Bytes of a command descriptor block. A driver may select another size in the configuration space; front ends refuse that.
pub const CDB_LEN: usize = 32;
/// Bytes of room for sense data. A driver may select another size, which front ends refuse as well.
pub const SENSE_LEN: usize = 96;

/// Feature bits (5.6.3).
pub mod feature {
    /// A request may have both data to read and data to write.
    pub const INOUT: u64 = 1 << 0;
    /// The device sends events when logical units are added or removed.
    pub const HOTPLUG: u64 = 1 << 1;
    /// The device sends events when a logical unit has changed.
    pub const CHANGE: u64 = 1 << 2;
}

/// The configuration space (5.6.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// Number of command queues.
    pub num_queues: u32,
    /// Maximum number of segments of a command's data.
    pub seg_max: u32,
    /// Maximum number of 512-byte sectors of a command's data.
    pub max_sectors: u32,
    /// Maximum number of outstanding commands at one logical unit.
    pub cmd_per_lun: u32,
    /// Bytes of a buffer in the event queue.
    pub event_info_size: u32,
    /// [`SENSE_LEN`].
    pub sense_size: u32,
    /// [`CDB_LEN`].
    pub cdb_size: u32,
    /// Zero.
    pub max_channel: u16,
    /// Highest target number.
    pub max_target: u16,
    /// Highest logical unit number.
    pub max_lun: u32,
}
layout!(Config, 36 {
    num_queues: 0, seg_max: 4, max_sectors: 8, cmd_per_lun: 12, event_info_size: 16, sense_size: 20,
    cdb_size: 24, max_channel: 28, max_target: 30, max_lun: 32,
});

/// Header of each command (5.6.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct CommandHeader {
    /// Address of the logical unit: see [`Address::parse`].
    pub lun: [u8; 8],
    /// Tag by which task management refers to the command.
    pub tag: u64,
    /// Ordering of the command relative to others.
    pub task_attribute: u8,
    /// Zero.
    pub priority: u8,
    /// Zero.
    pub crn: u8,
    /// Command descriptor block.
    pub cdb: [u8; CDB_LEN],
}
layout!(CommandHeader, 51 { lun: 0, tag: 8, task_attribute: 16, priority: 17, crn: 18, cdb: 19 });

/// Response to a command (5.6.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CommandResponse {
    /// Valid bytes of `sense`.
    pub sense_len: u32,
    /// Bytes of the driver's data that were not transferred.
    pub residual: u32,
    /// Zero.
    pub status_qualifier: u16,
    /// SCSI status of the command (SAM-5); valid only with [`Response::OK`].
    pub status: u8,
    /// Whether the command reached its logical unit.
    pub response: Response,
    /// Sense data.
    pub sense: [u8; SENSE_LEN],
}
layout!(CommandResponse, 108 {
    sense_len: 0, residual: 4, status_qualifier: 8, status: 10, response: 11, sense: 12,
});

/// Whether a request reached its target (5.6.6.1, 5.6.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Response(pub u8);

impl Response {
    /// The request reached its target. For task management: the function is complete.
    pub const OK: Self = Self(0);
    /// The command transfers more data than there is room for.
    pub const OVERRUN: Self = Self(1);
    /// The target does not exist.
    pub const BAD_TARGET: Self = Self(3);
    /// Another error.
    pub const FAILURE: Self = Self(9);
    /// Task management: the device does not support the function.
    pub const FUNCTION_REJECTED: Self = Self(11);
    /// Task management: the logical unit does not exist.
    pub const INCORRECT_LUN: Self = Self(12);
}

/// Kind of a control request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct ControlKind(pub u32);

impl ControlKind {
    /// [`TaskManagement`].
    pub const TASK_MANAGEMENT: Self = Self(0);
    /// [`Notification`]: asks which notifications the device supports.
    pub const NOTIFICATION_QUERY: Self = Self(1);
    /// [`Notification`]: subscribes to notifications.
    pub const NOTIFICATION_SUBSCRIBE: Self = Self(2);
}

/// A task management request. The device answers it with one byte of [`Response`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TaskManagement {
    /// [`ControlKind::TASK_MANAGEMENT`].
    pub kind: ControlKind,
    /// The function.
    pub function: TaskFunction,
    /// Address of the logical unit: see [`Address::parse`].
    pub lun: [u8; 8],
    /// Tag of the command that the function concerns.
    pub tag: u64,
}
layout!(TaskManagement, 24 { kind: 0, function: 4, lun: 8, tag: 16 });

/// Task management functions (5.6.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct TaskFunction(pub u32);

impl TaskFunction {
    /// Aborts one command.
    pub const ABORT_TASK: Self = Self(0);
    /// Aborts all commands of this driver.
    pub const ABORT_TASK_SET: Self = Self(1);
    /// Aborts all commands.
    pub const CLEAR_TASK_SET: Self = Self(3);
    /// Resets all logical units of a target.
    pub const I_T_NEXUS_RESET: Self = Self(4);
    /// Resets one logical unit.
    pub const LOGICAL_UNIT_RESET: Self = Self(5);
}

/// A query or subscription of asynchronous notifications (5.6.6.2), answered with [`NotificationResponse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Notification {
    /// [`ControlKind::NOTIFICATION_QUERY`] or [`ControlKind::NOTIFICATION_SUBSCRIBE`].
    pub kind: ControlKind,
    /// Address of the logical unit: see [`Address::parse`].
    pub lun: [u8; 8],
    /// Bits of the requested notifications.
    pub events: u32,
}
layout!(Notification, 16 { kind: 0, lun: 4, events: 12 });

/// The answer to [`Notification`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct NotificationResponse {
    /// Bits of the supported notifications.
    pub events: u32,
    /// Whether the request reached its target.
    pub response: Response,
}
layout!(NotificationResponse, 5 { events: 0, response: 4 });

/// An event, which the device writes into a buffer of the event queue (5.6.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Event {
    /// [`Event::PARAM_CHANGE`] or [`Event::NONE`], perhaps with [`Event::MISSED`].
    pub event: u32,
    /// Address of the logical unit: see [`Address::parse`].
    pub lun: [u8; 8],
    /// PARAM_CHANGE: additional sense code (bits 0-7) and additional sense code qualifier (8-15).
    pub reason: u32,
}
layout!(Event, 16 { event: 0, lun: 4, reason: 12 });

impl Event {
    /// No event; sent only to carry the bit [`Event::MISSED`].
    pub const NONE: u32 = 0;
    /// The parameters of a logical unit have changed.
    pub const PARAM_CHANGE: u32 = 3;
    /// A bit: earlier events were lost because no buffer was available. The driver should scan all units.
    pub const MISSED: u32 = 1 << 31;
}

/// The addressee of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// A logical unit.
    Lun {
        /// The target.
        target: u8,
        /// The unit's number at its target, 0-16383.
        lun: u16,
    },
    /// The well-known logical unit that lists the others.
    ReportLuns,
    /// Not a valid address.
    Nobody,
}

impl Address {
    /// Decodes the eight address bytes of a request (5.6.6.1).
    pub fn parse(lun: [u8; 8]) -> Self {
        match lun {
            [1, target, high, low, ..] => Self::Lun { target, lun: u16::from_be_bytes([high & 0x3f, low]) },
            [0xc1, 1, ..] => Self::ReportLuns,
            _ => Self::Nobody,
        }
    }

    /// Returns the eight address bytes of a logical unit.
    pub fn bytes(target: u8, lun: u16) -> [u8; 8] {
        let [high, low] = lun.to_be_bytes();
        [1, target, 0x40 | high, low, 0, 0, 0, 0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back() {
        for (target, lun) in [(0, 0), (7, 1), (255, 255), (0, 256), (3, 16383)] {
            assert_eq!(Address::parse(Address::bytes(target, lun)), Address::Lun { target, lun });
        }
        // This address has no bits of flat addressing: drivers also address units below 256 in this way.
        assert_eq!(Address::parse([1, 2, 0, 9, 0, 0, 0, 0]), Address::Lun { target: 2, lun: 9 });
        assert_eq!(Address::parse([0xc1, 1, 0, 0, 0, 0, 0, 0]), Address::ReportLuns);
        for nobody in [[0; 8], [2, 0, 0x40, 0, 0, 0, 0, 0], [0xc1, 2, 0, 0, 0, 0, 0, 0], [255; 8]] {
            assert_eq!(Address::parse(nobody), Address::Nobody);
        }
    }
}
