//! SCSI commands (SPC-4, SBC-3) in virtio-scsi requests (virtio 1.2, section 5.6.6.1).

use crate::device::Frame;
use crate::disk::Disk;
use crate::request::{Operation, Request, Status};
use crate::slots::ANSWER;
use ginnel_layout::virtio_scsi::{Address, CDB_LEN, CommandHeader, CommandResponse, Response};
use ginnel_shmem::{Mapping, SharedMemory};
use std::mem::offset_of;
use zerocopy::IntoBytes;

/// A command descriptor block: one command with its operands.
pub(crate) type Cdb = [u8; 16];

/// A logical unit, as far as its requests depend on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    pub address: [u8; 8],
    /// Size of a logical block, in bytes.
    pub block: u32,
    /// Whether to use READ(16) and WRITE(16) even where the shorter commands suffice.
    pub wide: bool,
}

impl Unit {
    pub fn new(target: u8, lun: u16, wide: bool) -> Self {
        Self { address: Address::bytes(target, lun), block: 512, wide }
    }

    /// Writes a request's head at `at`.
    pub fn frame(&self, heads: &Mapping, at: usize, request: Request) -> Frame {
        let mut cdb = [0; CDB_LEN];
        cdb[..16].copy_from_slice(&self.cdb(&request));
        let tag = at as u64;
        let header = CommandHeader { lun: self.address, tag, task_attribute: 0, priority: 0, crn: 0, cdb };
        heads.write(at, header.as_bytes());
        let mut asked = size_of::<CommandHeader>();
        if request.operation == Operation::Discard {
            // The parameter list of UNMAP, with one range. It is data that the device reads, so it follows the header.
            let (first, blocks) = self.range(&request);
            let mut list = [0; 24];
            list[..2].copy_from_slice(&22u16.to_be_bytes());
            list[2..4].copy_from_slice(&16u16.to_be_bytes());
            list[8..16].copy_from_slice(&first.to_be_bytes());
            list[16..20].copy_from_slice(&blocks.to_be_bytes());
            heads.write(at + asked, &list);
            asked += list.len();
        }
        // No device writes these values, so they show that none was written.
        heads.store_relaxed_u32(at + ANSWER + WORD, u32::MAX);
        Frame { asked: asked as u32, answered: size_of::<CommandResponse>() as u32 }
    }

    /// Returns the first block and the number of blocks.
    fn range(&self, request: &Request) -> (u64, u32) {
        (request.offset / u64::from(self.block), request.len / self.block)
    }

    fn cdb(&self, request: &Request) -> Cdb {
        let (first, blocks) = self.range(request);
        let long = |code, flags| {
            let mut cdb = [0; 16];
            (cdb[0], cdb[1]) = (code, flags);
            cdb[2..10].copy_from_slice(&first.to_be_bytes());
            cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
            cdb
        };
        let short = |code: u8| {
            let (first, blocks) = (u32::try_from(first).ok()?, u16::try_from(blocks).ok()?);
            let mut cdb = [0; 16];
            cdb[0] = code;
            cdb[2..6].copy_from_slice(&first.to_be_bytes());
            cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
            Some(cdb).filter(|_| !self.wide)
        };
        match request.operation {
            Operation::Read => short(0x28).unwrap_or_else(|| long(0x88, 0)),
            Operation::Write => short(0x2a).unwrap_or_else(|| long(0x8a, 0)),
            Operation::Flush if self.wide => long(0x91, 0),
            Operation::Flush => command([0x35, 0, 0, 0]),
            Operation::Discard => {
                let mut cdb = command([0x42, 0, 0, 0]);
                cdb[8] = 24;
                cdb
            }
            // WRITE SAME(16) without a block of data, which writes zeros.
            Operation::WriteZeroes { unmap } => long(0x93, 1 | if unmap { 8 } else { 0 }),
            // INQUIRY for the page with the serial number.
            Operation::GetId => inquiry(0x80, request.len as u8),
            Operation::Other(code) => command([code as u8, 0, 0, 0]),
            Operation::Command(cdb) => cdb,
        }
    }
}

fn command(start: [u8; 4]) -> Cdb {
    let mut cdb = [0; 16];
    cdb[..4].copy_from_slice(&start);
    cdb
}

fn inquiry(page: u8, len: u8) -> Cdb {
    let mut cdb = command([0x12, 1, page, 0]);
    cdb[4] = len;
    cdb
}

/// Offset of the word that ends with status and response.
const WORD: usize = offset_of!(CommandResponse, status_qualifier);
const _: () = assert!(offset_of!(CommandResponse, status) == WORD + 2);
const _: () = assert!(offset_of!(CommandResponse, response) == WORD + 3);

/// Reads the answer of the head at `at`.
pub(crate) fn status(heads: &Mapping, at: usize) -> Status {
    let [_, _, status, response] = heads.load_relaxed_u32(at + ANSWER + WORD).to_le_bytes();
    if (Response(response), status) == (Response::OK, 0) {
        return Status::Ok;
    }
    let mut sense = [0; 18];
    heads.read(at + ANSWER + offset_of!(CommandResponse, sense), &mut sense);
    let sense = match sense[0] & 0x7f {
        0x70 | 0x71 => [sense[2] & 0xf, sense[12], sense[13]],
        0x72 | 0x73 => [sense[1] & 0xf, sense[2], sense[3]],
        _ => [0; 3],
    };
    Status::Scsi { response, status, sense }
}

/// Returns a request with this command and `len` bytes of answer.
fn ask(cdb: Cdb, len: u32) -> Request {
    Request { operation: Operation::Command(cdb), offset: 0, len }
}

/// Returns TEST UNIT READY. Its answer may be a unit attention; there is one for each condition.
pub(crate) fn test_unit_ready() -> Request {
    ask(command([0, 0, 0, 0]), 0)
}

/// Returns READ CAPACITY(16).
pub(crate) fn read_capacity() -> Request {
    let mut cdb = command([0x9e, 0x10, 0, 0]);
    cdb[13] = 32;
    ask(cdb, 32)
}

/// Returns MODE SENSE(6) for the caching page, without block descriptors.
pub(crate) fn mode_sense() -> Request {
    let mut cdb = command([0x1a, 8, 8, 0]);
    cdb[4] = 64;
    ask(cdb, 64)
}

/// Returns the disk that the answers to [`read_capacity`] and [`mode_sense`] describe.
pub(crate) fn disk(capacity: &[u8; 32], mode: &[u8; 64], queues: u16) -> Disk {
    let number = |at: usize, len: usize| {
        capacity[at..at + len].iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let block = number(8, 4);
    let unmap = capacity[14] & 0x80 != 0;
    Disk {
        bytes: number(0, 8).saturating_add(1).saturating_mul(block),
        block: block as u32,
        queues,
        read_only: mode[2] & 0x80 != 0,
        // The page follows the header of four bytes and the block descriptors, if the unit has sent some nevertheless.
        write_cache: mode.get(4 + usize::from(mode[3]) + 2).is_some_and(|flags| flags & 4 != 0),
        discard: unmap,
        write_zeroes: true,
        segments: 0,
    }
}
