//! How each kind of device encodes its requests and its answers.

use crate::request::{Operation, Request, Status};
use crate::scsi::{self, Unit};
use crate::slots::ANSWER;
use ginnel_layout::virtio_blk::{self as blk, RangeSegment, RequestHeader, RequestKind, SECTOR};
use ginnel_layout::virtio_scsi::FIRST_COMMAND_QUEUE;
use ginnel_shmem::{Mapping, SharedMemory};
use zerocopy::IntoBytes;

/// The kind of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// vhost-user-blk.
    #[default]
    Blk,
    /// vhost-user-scsi: one logical unit.
    Scsi {
        /// The unit's target.
        target: u8,
        /// The unit's number in the target.
        lun: u16,
        /// Whether to use commands of 16 bytes even where shorter ones suffice.
        wide: bool,
    },
}

impl Device {
    /// Returns the number of the first request queue among all queues of the device.
    pub(crate) fn first_queue(self) -> u16 {
        match self {
            Self::Blk => 0,
            Self::Scsi { .. } => FIRST_COMMAND_QUEUE,
        }
    }

    pub(crate) fn encoding(self) -> Encoding {
        match self {
            Self::Blk => Encoding::Blk,
            Self::Scsi { target, lun, wide } => Encoding::Scsi(Unit::new(target, lun, wide)),
        }
    }
}

/// The encoding of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Encoding {
    Blk,
    Scsi(Unit),
}

/// The lengths of a request's head, after it was written.
pub(crate) struct Frame {
    /// Number of bytes that the device reads, from the start of the head.
    pub asked: u32,
    /// Number of bytes of the device's answer, at [`ANSWER`].
    pub answered: u32,
}

/// No device writes this status, so it shows that none was written.
const UNANSWERED: u8 = 0xff;

impl Encoding {
    /// Returns whether the answer comes before the data that the device writes.
    #[inline]
    pub fn answers_first(&self) -> bool {
        matches!(self, Self::Scsi(_))
    }

    /// Returns whether the device writes the request's data, and the length of the data in bytes; `None` if there are
    /// none.
    #[inline]
    pub fn buffer(&self, request: &Request) -> Option<(bool, u32)> {
        match request.operation {
            Operation::Read | Operation::GetId | Operation::Other(_) | Operation::Command(_) => {
                Some((true, request.len))
            }
            Operation::Write => Some((false, request.len)),
            Operation::Flush | Operation::Discard | Operation::WriteZeroes { .. } => None,
        }
        .filter(|(_, len)| *len > 0)
    }

    /// Writes a request's head at `at`.
    #[inline]
    pub fn frame(&self, heads: &Mapping, at: usize, request: Request) -> Frame {
        match self {
            Self::Blk => frame_blk(heads, at, request),
            Self::Scsi(unit) => unit.frame(heads, at, request),
        }
    }

    /// Reads the answer of the head at `at`.
    #[inline]
    pub fn status(&self, heads: &Mapping, at: usize) -> Status {
        match self {
            Self::Scsi(_) => scsi::status(heads, at),
            Self::Blk => {
                // The device writes one byte; the rest of the word belongs to the client.
                let status = heads.load_relaxed_u32(at + ANSWER).to_le_bytes()[0];
                match blk::Status(status) {
                    blk::Status::OK => Status::Ok,
                    blk::Status::IOERR => Status::IoError,
                    blk::Status::UNSUPP => Status::Unsupported,
                    blk::Status(other) => Status::Unknown(other),
                }
            }
        }
    }
}

#[inline]
fn frame_blk(heads: &Mapping, at: usize, request: Request) -> Frame {
    let sector = request.offset / SECTOR;
    let (kind, range) = match request.operation {
        Operation::Read => (RequestKind::IN, None),
        Operation::Write => (RequestKind::OUT, None),
        Operation::Flush => (RequestKind::FLUSH, None),
        Operation::GetId => (RequestKind::GET_ID, None),
        Operation::Other(kind) => (RequestKind(kind), None),
        // SCSI commands do not exist in virtio-blk, so this uses a type that no disk knows.
        Operation::Command(_) => (RequestKind(u32::MAX), None),
        Operation::Discard => (RequestKind::DISCARD, Some(0)),
        Operation::WriteZeroes { unmap } => {
            (RequestKind::WRITE_ZEROES, Some(if unmap { RangeSegment::UNMAP } else { 0 }))
        }
    };
    // For a request with a range, the header has no sector.
    let header = RequestHeader { kind, reserved: 0, sector: if range.is_some() { 0 } else { sector } };
    heads.write(at, header.as_bytes());
    heads.store_relaxed_u32(at + ANSWER, u32::from(UNANSWERED));
    let mut asked = size_of::<RequestHeader>();
    if let Some(flags) = range {
        let range = RangeSegment { sector, sectors: (u64::from(request.len) / SECTOR) as u32, flags };
        heads.write(at + asked, range.as_bytes());
        asked += size_of::<RangeSegment>();
    }
    Frame { asked: asked as u32, answered: 1 }
}
