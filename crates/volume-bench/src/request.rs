//! What a disk can be asked to do, and what it answers.

use std::fmt;

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Disk to buffer.
    Read,
    /// Buffer to disk.
    Write,
    /// What was acknowledged before is on stable storage when this is.
    Flush,
    /// The contents of the range are no longer needed.
    Discard,
    /// The range reads as zeros.
    WriteZeroes {
        /// Its space may be given back.
        unmap: bool,
    },
    /// The disk's serial number, into the buffer.
    GetId,
    /// A request of this type (virtio-blk) or with this operation code (SCSI) whatever it means, with the buffer for the
    /// disk to write to. For tests.
    Other(u32),
    /// SCSI: this command, with the buffer for the disk to write to.
    Command([u8; 16]),
}

/// An operation and the range it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is to be done.
    pub operation: Operation,
    /// Where, in bytes; a multiple of 512.
    pub offset: u64,
    /// Bytes. A multiple of 512, except with [`Operation::GetId`].
    pub len: u32,
}

impl Request {
    /// Reads `len` bytes.
    pub fn read(offset: u64, len: u32) -> Self {
        Self { operation: Operation::Read, offset, len }
    }
    /// Writes `len` bytes.
    pub fn write(offset: u64, len: u32) -> Self {
        Self { operation: Operation::Write, offset, len }
    }
    /// Flushes the disk's cache.
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
    /// Done.
    Ok,
    /// Failed (virtio-blk `VIRTIO_BLK_S_IOERR`).
    IoError,
    /// The disk does not do that (`VIRTIO_BLK_S_UNSUPP`).
    Unsupported,
    /// No status was written, or one that no specification knows.
    Unknown(u8),
    /// SCSI: the target's answer.
    Scsi {
        /// What the transport says; 0: the rest is valid.
        response: u8,
        /// SCSI status; 2: check condition.
        status: u8,
        /// Sense key, additional sense code, and its qualifier.
        sense: [u8; 3],
    },
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("OK"),
            Self::IoError => f.write_str("I/O error"),
            Self::Unsupported => f.write_str("unsupported"),
            Self::Unknown(byte) => write!(f, "unknown status {byte:#x}"),
            Self::Scsi { response, status, sense: [key, code, qualifier] } => write!(
                f,
                "SCSI response {response}, status {status:#x}, sense {key:x}/{code:02x}/{qualifier:02x}"
            ),
        }
    }
}
