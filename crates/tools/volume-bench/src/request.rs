//! The requests to a disk, and its answers.

use std::fmt;

/// An operation of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Copies from the disk to the buffer.
    Read,
    /// Copies from the buffer to the disk.
    Write,
    /// Makes all earlier acknowledged writes durable.
    Flush,
    /// Declares that the contents of the range are no longer needed.
    Discard,
    /// Fills the range with zeros.
    WriteZeroes {
        /// Whether the disk may release the space.
        unmap: bool,
    },
    /// Reads the disk's serial number into the buffer.
    GetId,
    /// A request with this type (virtio-blk), operation code (SCSI) or opcode (NVMe), whatever it means. The disk may write to
    /// the buffer. For tests.
    Other(u32),
    /// SCSI: this command. The disk may write to the buffer.
    Command([u8; 16]),
}

/// An operation with its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What to do.
    pub operation: Operation,
    /// Start of the range in bytes; a multiple of 512.
    pub offset: u64,
    /// Length of the range in bytes. A multiple of 512, except for [`Operation::GetId`].
    pub len: u32,
}

impl Request {
    /// Returns a request that reads `len` bytes.
    pub fn read(offset: u64, len: u32) -> Self {
        Self { operation: Operation::Read, offset, len }
    }
    /// Returns a request that writes `len` bytes.
    pub fn write(offset: u64, len: u32) -> Self {
        Self { operation: Operation::Write, offset, len }
    }
    /// Returns a request that flushes the disk's cache.
    pub fn flush() -> Self {
        Self { operation: Operation::Flush, offset: 0, len: 0 }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operation {
            Operation::Flush | Operation::GetId => write!(f, "{:?}", self.operation),
            _ => write!(f, "{:?} of {} bytes at {}", self.operation, self.len, self.offset),
        }
    }
}

/// A disk's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The request succeeded.
    Ok,
    /// The request failed (virtio-blk `VIRTIO_BLK_S_IOERR`).
    IoError,
    /// The disk does not support the request (`VIRTIO_BLK_S_UNSUPP`).
    Unsupported,
    /// No status was written, or one that no specification has.
    Unknown(u8),
    /// SCSI: the target's answer, if it is not good.
    Scsi {
        /// The transport's response; the other fields are valid if it is 0.
        response: u8,
        /// The SCSI status; 2 is CHECK CONDITION.
        status: u8,
        /// Sense key, additional sense code, and additional sense code qualifier.
        sense: [u8; 3],
    },
    /// NVMe: the status field of the completion without the phase tag, if it is not success.
    Nvme(u16),
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("OK"),
            Self::IoError => f.write_str("I/O error"),
            Self::Unsupported => f.write_str("unsupported"),
            Self::Unknown(byte) => write!(f, "unknown status {byte:#x}"),
            Self::Nvme(status) => {
                write!(f, "NVMe status type {}, code {:#04x}", status >> 8 & 7, status & 0xff)
            }
            Self::Scsi { response, status, sense: [key, code, qualifier] } => write!(
                f,
                "SCSI response {response}, status {status:#x}, sense {key:x}/{code:02x}/{qualifier:02x}"
            ),
        }
    }
}
