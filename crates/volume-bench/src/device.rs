//! How each kind of device wants its requests written, and writes its answers.

use crate::queue::ANSWER;
use crate::request::{Operation, Request, Status};
use crate::scsi::{self, Unit};
use ginnel_layout::virtio_blk::{self as blk, RangeSegment, RequestHeader, RequestKind, SECTOR};
use ginnel_layout::virtio_scsi::FIRST_COMMAND_QUEUE;
use ginnel_shmem::{Mapping, SharedMemory};
use zerocopy::IntoBytes;

/// A kind of device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// vhost-user-blk.
    #[default]
    Blk,
    /// vhost-user-scsi: one logical unit.
    Scsi {
        /// Its target.
        target: u8,
        /// Its number there.
        lun: u16,
        /// Commands of 16 bytes also where shorter ones would do.
        wide: bool,
    },
}

impl Device {
    /// The number of the first request queue among all queues of the device.
    pub(crate) fn first_queue(self) -> u16 {
        match self {
            Self::Blk => 0,
            Self::Scsi { .. } => FIRST_COMMAND_QUEUE,
        }
    }

    pub(crate) fn wire(self) -> Wire {
        match self {
            Self::Blk => Wire::Blk,
            Self::Scsi { target, lun, wide } => Wire::Scsi(Unit::new(target, lun, wide)),
        }
    }
}

/// The form of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wire {
    Blk,
    Scsi(Unit),
}

/// A request whose head is written.
pub(crate) struct Frame {
    /// Bytes that the device reads, from the start of the head.
    pub asked: u32,
    /// Bytes that it answers with, at [`ANSWER`].
    pub answered: u32,
}

/// No device writes this status, so it shows that none was written.
const UNANSWERED: u8 = 0xff;

impl Wire {
    /// Whether the answer comes before the data that the device writes.
    #[inline]
    pub fn answers_first(&self) -> bool {
        matches!(self, Self::Scsi(_))
    }

    /// Whether data go with the request: whether the device writes them, and how many bytes they are.
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

    /// Writes the head at `at` for a request.
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
                // The status is the byte; the rest of the word is ours.
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
        // No virtio-blk request: one that no disk knows.
        Operation::Command(_) => (RequestKind(u32::MAX), None),
        Operation::Discard => (RequestKind::DISCARD, Some(0)),
        Operation::WriteZeroes { unmap } => {
            (RequestKind::WRITE_ZEROES, Some(if unmap { RangeSegment::UNMAP } else { 0 }))
        }
    };
    // Of a range, the header has no sector.
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
