//! Interprets the bytes of a command (SPC-4, SBC-3).

use super::Sense;
use super::pages::{self, MAX_RANGE, ModeSense};
use crate::backend::Op;
use crate::disk::Disk;

/// Operation codes.
mod code {
    pub const TEST_UNIT_READY: u8 = 0x00;
    pub const REQUEST_SENSE: u8 = 0x03;
    pub const READ_6: u8 = 0x08;
    pub const WRITE_6: u8 = 0x0a;
    pub const INQUIRY: u8 = 0x12;
    pub const MODE_SELECT_6: u8 = 0x15;
    pub const MODE_SENSE_6: u8 = 0x1a;
    pub const START_STOP_UNIT: u8 = 0x1b;
    pub const READ_CAPACITY_10: u8 = 0x25;
    pub const READ_10: u8 = 0x28;
    pub const WRITE_10: u8 = 0x2a;
    pub const VERIFY_10: u8 = 0x2f;
    pub const SYNCHRONIZE_CACHE_10: u8 = 0x35;
    pub const WRITE_SAME_10: u8 = 0x41;
    pub const UNMAP: u8 = 0x42;
    pub const MODE_SELECT_10: u8 = 0x55;
    pub const MODE_SENSE_10: u8 = 0x5a;
    pub const READ_16: u8 = 0x88;
    pub const WRITE_16: u8 = 0x8a;
    pub const VERIFY_16: u8 = 0x8f;
    pub const SYNCHRONIZE_CACHE_16: u8 = 0x91;
    pub const WRITE_SAME_16: u8 = 0x93;
    pub const SERVICE_ACTION_IN_16: u8 = 0x9e;
    pub const REPORT_LUNS: u8 = 0xa0;
    pub const READ_12: u8 = 0xa8;
    pub const WRITE_12: u8 = 0xaa;
    pub const VERIFY_12: u8 = 0xaf;
}

/// A service action of SERVICE ACTION IN (16).
const READ_CAPACITY_16: u8 = 0x10;

/// Bit 3 of the second byte. In a write: FUA, the data must be durable when the command ends. In WRITE SAME: UNMAP.
const BIT_3: u8 = 0x08;

/// The largest number of bytes of a parameter list that are read. The longest list that is supported is far shorter.
pub const MAX_LIST: usize = 256;

/// What a command requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Nothing; the command succeeds.
    Good,
    /// This data is returned to the driver.
    Data(Vec<u8>),
    /// An operation on the disk, with this many bytes of data.
    Op {
        /// The operation.
        op: Op,
        /// Number of bytes to read or to write.
        bytes: u64,
    },
    /// This operation, if the command has this many bytes of data and all are zeros.
    Zeros {
        /// The operation.
        op: Op,
        /// Number of bytes, at most a block.
        bytes: usize,
    },
}

/// The logical unit for which a command is interpreted.
pub struct Unit<'a> {
    /// The disk.
    pub disk: &'a Disk,
    /// Whether its backend can give space back.
    pub space: bool,
    /// Number of logical units of the target.
    pub luns: u16,
}

/// The bytes of a command (CDB). All fields are big-endian.
struct Cdb<'a>(&'a [u8; 32]);

impl Cdb<'_> {
    fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.0[at], self.0[at + 1]])
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from(self.u16(at)) << 16 | u32::from(self.u16(at + 2))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from(self.u32(at)) << 32 | u64::from(self.u32(at + 4))
    }

    /// Returns the first block and the number of blocks of a command whose length determines where these fields are.
    fn range(&self) -> (u64, u64) {
        match self.0[0] >> 5 {
            // READ (6) and WRITE (6) have 21 bits for the block, and 0 blocks mean 256.
            0 => {
                let blocks = if self.0[4] == 0 { 256 } else { u64::from(self.0[4]) };
                (u64::from(self.u32(0) & 0x1f_ffff), blocks)
            }
            1 | 2 => (self.u32(2).into(), self.u16(7).into()),
            5 => (self.u32(2).into(), self.u32(6).into()),
            _ => (self.u64(2), self.u32(10).into()),
        }
    }
}

/// Returns what a command requires at a logical unit. `list` reads the first bytes of the data to write.
#[inline]
pub fn plan(cdb: &[u8; 32], unit: &Unit, list: impl FnOnce() -> Vec<u8>) -> Result<Plan, Sense> {
    let command = Cdb(cdb);
    let Unit { disk, .. } = *unit;
    match cdb[0] {
        code::READ_10 | code::READ_16 | code::READ_12 | code::READ_6 => {
            let (at, bytes) = transfer(&command, disk)?;
            // The data that is read is on the medium or will be, so FUA has no effect here: it matters only for caches
            // that are not coherent.
            Ok(some(Op::Read { at }, bytes))
        }
        code::WRITE_10 | code::WRITE_16 | code::WRITE_12 | code::WRITE_6 => {
            writable(disk)?;
            let (at, bytes) = transfer(&command, disk)?;
            let forced = cdb[0] != code::WRITE_6 && cdb[1] & BIT_3 != 0;
            Ok(some(Op::Write { at, through: forced || !disk.write_back() }, bytes))
        }
        // Flushes the whole cache, whatever part is asked for; but that part must exist.
        code::SYNCHRONIZE_CACHE_10 | code::SYNCHRONIZE_CACHE_16 => {
            located(&command, disk)?;
            Ok(Plan::Op { op: Op::Flush, bytes: 0 })
        }
        _ => rare(&command, unit, list),
    }
}

/// Interprets all commands except those that read, write or flush.
fn rare(command: &Cdb, unit: &Unit, list: impl FnOnce() -> Vec<u8>) -> Result<Plan, Sense> {
    let (cdb, disk) = (command.0, unit.disk);
    match cdb[0] {
        code::TEST_UNIT_READY | code::START_STOP_UNIT => Ok(Plan::Good),
        code::REQUEST_SENSE => data(Sense::NONE.bytes().to_vec(), cdb[4].into()),
        code::INQUIRY => {
            let reply = match (cdb[1] & 1 != 0, cdb[2]) {
                (true, page) => pages::vital(page, disk, unit.space).ok_or(Sense::INVALID_FIELD)?,
                (false, 0) => pages::inquiry(),
                (false, _) => return Err(Sense::INVALID_FIELD),
            };
            data(reply, command.u16(3).into())
        }
        code::READ_CAPACITY_10 => data(pages::capacity_10(disk), u64::MAX),
        code::SERVICE_ACTION_IN_16 if cdb[1] & 0x1f == READ_CAPACITY_16 => {
            data(pages::capacity_16(disk, unit.space), command.u32(10).into())
        }
        code::REPORT_LUNS => match cdb[2] {
            0 | 2 => data(pages::luns(unit.luns), command.u32(6).into()),
            // The driver asks only for well-known units, and there are none.
            1 => data(pages::luns(0), command.u32(6).into()),
            _ => Err(Sense::INVALID_FIELD),
        },
        code::MODE_SENSE_6 | code::MODE_SENSE_10 => {
            let long = cdb[0] == code::MODE_SENSE_10;
            let ask = ModeSense {
                long,
                no_descriptor: cdb[1] & BIT_3 != 0,
                control: cdb[2] >> 6,
                page: cdb[2] & 0x3f,
                subpage: cdb[3],
            };
            let reply = pages::mode_sense(ask, disk).ok_or(Sense::INVALID_FIELD)?;
            data(reply, if long { command.u16(7).into() } else { cdb[4].into() })
        }
        code::MODE_SELECT_6 | code::MODE_SELECT_10 => {
            // PF must be set, and SP must not, since no values are saved.
            if cdb[1] & 0x11 != 0x10 {
                return Err(Sense::INVALID_FIELD);
            }
            let long = cdb[0] == code::MODE_SELECT_10;
            let len = if long { command.u16(7).into() } else { usize::from(cdb[4]) };
            if len == 0 {
                return Ok(Plan::Good);
            }
            let list = list();
            let list = list.get(..len).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
            if let Some(on) = pages::mode_select(list, long)? {
                disk.turn_cache(on);
            }
            // No driver was told that the data in the cache is durable, so it is flushed.
            Ok(Plan::Op { op: Op::Flush, bytes: 0 })
        }
        code::VERIFY_10 | code::VERIFY_12 | code::VERIFY_16 => {
            // Without data to compare there is nothing to do; VERIFY with data is not supported.
            if cdb[1] & 0x06 != 0 {
                return Err(Sense::INVALID_FIELD);
            }
            located(command, disk)?;
            Ok(Plan::Good)
        }
        code::WRITE_SAME_10 | code::WRITE_SAME_16 => write_same(command, unit),
        code::UNMAP => unmap(command, unit, list),
        _ => Err(Sense::INVALID_COMMAND),
    }
}

/// WRITE SAME, for zeros only.
fn write_same(command: &Cdb, unit: &Unit) -> Result<Plan, Sense> {
    let (cdb, disk) = (command.0, unit.disk);
    writable(disk)?;
    // WRPROTECT and ANCHOR are not supported.
    if cdb[1] & 0xf0 != 0 {
        return Err(Sense::INVALID_FIELD);
    }
    let block = u64::from(disk.block_size);
    let (first, blocks) = command.range();
    let rest = (disk.bytes() / block).checked_sub(first).ok_or(Sense::OUT_OF_RANGE)?;
    let blocks = if blocks == 0 { rest } else { blocks };
    if blocks > rest {
        return Err(Sense::OUT_OF_RANGE);
    }
    let len = blocks * block;
    if len > MAX_RANGE {
        return Err(Sense::INVALID_FIELD);
    }
    let op =
        Op::WriteZeroes { at: first * block, len, unmap: cdb[1] & BIT_3 != 0, through: !disk.write_back() };
    let no_data = cdb[0] == code::WRITE_SAME_16 && cdb[1] & 1 != 0;
    Ok(Plan::Zeros { op, bytes: if no_data { 0 } else { disk.block_size as usize } })
}

/// UNMAP of one range (SBC-3, 5.28).
fn unmap(command: &Cdb, unit: &Unit, list: impl FnOnce() -> Vec<u8>) -> Result<Plan, Sense> {
    let disk = unit.disk;
    if !unit.space {
        return Err(Sense::INVALID_COMMAND);
    }
    writable(disk)?;
    let len = usize::from(command.u16(7));
    if len == 0 {
        return Ok(Plan::Good);
    }
    let list = list();
    let list = list.get(..len).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
    let [_, _, high, low, _, _, _, _, descriptors @ ..] = list else {
        return Err(Sense::PARAMETER_LIST_LENGTH);
    };
    let said = usize::from(u16::from_be_bytes([*high, *low]));
    let descriptors = descriptors.get(..said - said % 16).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
    match descriptors.as_chunks::<16>().0 {
        [] => Ok(Plan::Good),
        [descriptor] => {
            let mut padded = [0; 32];
            padded[..16].copy_from_slice(descriptor);
            let (first, blocks) = (Cdb(&padded).u64(0), Cdb(&padded).u32(8).into());
            let (at, len) = range(first, blocks, disk)?;
            if len > MAX_RANGE {
                return Err(Sense::INVALID_PARAMETER);
            }
            Ok(some(Op::Discard { at, len }, 0).unless_empty(len))
        }
        _ => Err(Sense::INVALID_PARAMETER),
    }
}

impl Plan {
    /// Returns `Good` if the operation has no length.
    fn unless_empty(self, len: u64) -> Self {
        if len == 0 { Self::Good } else { self }
    }
}

/// Returns the plan for an operation. A read or write of no bytes needs no operation.
#[inline]
fn some(op: Op, bytes: u64) -> Plan {
    match op {
        Op::Read { .. } | Op::Write { .. } if bytes == 0 => Plan::Good,
        _ => Plan::Op { op, bytes },
    }
}

fn data(mut bytes: Vec<u8>, room: u64) -> Result<Plan, Sense> {
    bytes.truncate(usize::try_from(room).unwrap_or(usize::MAX));
    Ok(Plan::Data(bytes))
}

#[inline]
fn writable(disk: &Disk) -> Result<(), Sense> {
    if disk.read_only { Err(Sense::WRITE_PROTECTED) } else { Ok(()) }
}

/// Returns the offset and length in bytes of the blocks that a read or write command names.
#[inline]
fn transfer(command: &Cdb, disk: &Disk) -> Result<(u64, u64), Sense> {
    // RDPROTECT and WRPROTECT are not supported.
    if command.0[0] >> 5 != 0 && command.0[1] & 0xe0 != 0 {
        return Err(Sense::INVALID_FIELD);
    }
    located(command, disk)
}

#[inline]
fn located(command: &Cdb, disk: &Disk) -> Result<(u64, u64), Sense> {
    let (first, blocks) = command.range();
    range(first, blocks, disk)
}

#[inline]
fn range(first: u64, blocks: u64, disk: &Disk) -> Result<(u64, u64), Sense> {
    let block = u64::from(disk.block_size);
    let at = first.checked_mul(block).ok_or(Sense::OUT_OF_RANGE)?;
    // Both factors are at most 32 bits long.
    let len = blocks * block;
    if disk.holds(at, len) { Ok((at, len)) } else { Err(Sense::OUT_OF_RANGE) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::seed;
    use ginnel_layout::virtio_scsi::{Address, CommandHeader, CommandResponse, FIRST_COMMAND_QUEUE};
    use zerocopy::IntoBytes;

    fn cdb(bytes: &[u8]) -> [u8; 32] {
        let mut cdb = [0; 32];
        cdb[..bytes.len()].copy_from_slice(bytes);
        cdb
    }

    fn planned(disk: &Disk, bytes: &[u8], list: &[u8]) -> Result<Plan, Sense> {
        let plan = plan(&cdb(bytes), &Unit { disk, space: true, luns: 3 }, || list.to_vec());
        if plan != Err(Sense::INVALID_COMMAND) {
            // For the writable unit or the read-only one, with room for a page.
            let lun = Address::bytes(0, u16::from(disk.read_only));
            let header =
                CommandHeader { lun, tag: 7, task_attribute: 0, priority: 0, crn: 0, cdb: cdb(bytes) };
            let room = size_of::<CommandResponse>() + 4096;
            seed::scsi(FIRST_COMMAND_QUEUE, &[header.as_bytes(), list], room);
        }
        plan
    }

    fn op(op: Op, bytes: u64) -> Result<Plan, Sense> {
        Ok(Plan::Op { op, bytes })
    }

    #[test]
    fn each_length_of_read_and_write() {
        let disk = Disk::new(1 << 20, 512, false, "");
        let read = |at, bytes| op(Op::Read { at }, bytes);
        assert_eq!(planned(&disk, &[0x08, 0xe0, 1, 2, 3], &[]), read(258 * 512, 1536), "lun bits of old");
        assert_eq!(planned(&disk, &[0x08, 0, 0, 0, 0], &[]), read(0, 131_072), "none are 256");
        assert_eq!(planned(&disk, &[0x28, 0, 0, 0, 0, 8, 0, 0, 8], &[]), read(4096, 4096));
        assert_eq!(planned(&disk, &[0xa8, 0, 0, 0, 0, 8, 0, 0, 0, 8], &[]), read(4096, 4096));
        let long = [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 8];
        assert_eq!(planned(&disk, &long, &[]), read(4096, 4096));
        let write = |through| op(Op::Write { at: 512, through }, 512);
        assert_eq!(planned(&disk, &[0x2a, 0, 0, 0, 0, 1, 0, 0, 1], &[]), write(false));
        assert_eq!(planned(&disk, &[0x2a, 8, 0, 0, 0, 1, 0, 0, 1], &[]), write(true));
        assert_eq!(planned(&disk, &[0x0a, 0, 0, 1, 1], &[]), write(false));
        disk.turn_cache(false);
        assert_eq!(planned(&disk, &[0x0a, 0, 0, 1, 1], &[]), write(true));
        assert_eq!(planned(&disk, &[0x28, 0, 0, 0, 0, 8, 0, 0, 0], &[]), Ok(Plan::Good), "nothing");
    }

    #[test]
    fn beyond_the_end_is_out_of_range() {
        let disk = Disk::new(8192, 512, false, "");
        for bytes in [
            &[0x28, 0, 0, 0, 0, 16, 0, 0, 1][..],
            &[0x28, 0, 0, 0, 0, 8, 0, 0, 9],
            &[0x2a, 0, 255, 255, 255, 255, 255, 255, 255],
            &[0x88, 0, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255],
            &[0x35, 0, 0, 0, 1, 0],
            &[0x2f, 0, 0, 0, 0, 16, 0, 0, 1],
            &[0x93, 0, 255, 255, 255, 255, 255, 255, 255, 255],
            &[0x41, 0, 0, 0, 0, 8, 0, 0, 9],
        ] {
            assert_eq!(planned(&disk, bytes, &[]), Err(Sense::OUT_OF_RANGE), "{bytes:x?}");
        }
        assert_eq!(planned(&disk, &[0x28, 0x20, 0, 0, 0, 0, 0, 0, 1], &[]), Err(Sense::INVALID_FIELD));
    }

    #[test]
    fn a_protected_disk_takes_no_writes() {
        let disk = Disk::new(8192, 512, true, "");
        for code in [0x0a, 0x2a, 0xaa, 0x8a, 0x41, 0x93, 0x42] {
            assert_eq!(planned(&disk, &[code], &[]), Err(Sense::WRITE_PROTECTED), "{code:x}");
        }
    }

    #[test]
    fn zeros_and_unmaps_are_one_range() {
        let disk = Disk::new(1 << 20, 512, false, "");
        let zeros = |at, len, unmap, bytes| {
            Ok(Plan::Zeros { op: Op::WriteZeroes { at, len, unmap, through: false }, bytes })
        };
        assert_eq!(planned(&disk, &[0x41, 8, 0, 0, 0, 1, 0, 0, 2], &[]), zeros(512, 1024, true, 512));
        let no_data = [0x93, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2];
        assert_eq!(planned(&disk, &no_data, &[]), zeros(512, 1024, false, 0));
        assert_eq!(planned(&disk, &[0x93, 0], &[]), zeros(0, 1 << 20, false, 512), "all of it");
        assert_eq!(planned(&disk, &[0x41, 0x10], &[]), Err(Sense::INVALID_FIELD), "anchor");

        let list = |descriptors: &[[u8; 16]]| {
            let len = (descriptors.len() * 16) as u16;
            let header = [&(len + 6).to_be_bytes()[..], &len.to_be_bytes(), &[0; 4]].concat();
            [header, descriptors.concat()].concat()
        };
        let one = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0];
        let ask = |len| [0x42, 0, 0, 0, 0, 0, 0, 0, len];
        assert_eq!(planned(&disk, &ask(24), &list(&[one])), op(Op::Discard { at: 512, len: 1024 }, 0));
        assert_eq!(planned(&disk, &ask(40), &list(&[one, one])), Err(Sense::INVALID_PARAMETER));
        assert_eq!(planned(&disk, &ask(8), &list(&[])), Ok(Plan::Good));
        assert_eq!(planned(&disk, &ask(0), &[]), Ok(Plan::Good));
        assert_eq!(planned(&disk, &ask(24), &list(&[one])[..20]), Err(Sense::PARAMETER_LIST_LENGTH));
        assert_eq!(planned(&disk, &ask(16), &list(&[one])), Err(Sense::PARAMETER_LIST_LENGTH));
        assert_eq!(planned(&disk, &ask(4), &list(&[one])), Err(Sense::PARAMETER_LIST_LENGTH));
        let unit = Unit { disk: &disk, space: false, luns: 1 };
        assert_eq!(plan(&cdb(&ask(24)), &unit, || list(&[one])), Err(Sense::INVALID_COMMAND));
    }

    #[test]
    fn an_answer_is_cut_to_the_room_for_it() {
        let disk = Disk::new(1 << 20, 512, false, "abc");
        let len = |bytes: &[u8]| match planned(&disk, bytes, &[]) {
            Ok(Plan::Data(data)) => data.len(),
            other => panic!("{other:?}"),
        };
        assert_eq!(len(&[0x12, 0, 0, 0, 36]), 36);
        assert_eq!(len(&[0x12, 0, 0, 0, 5]), 5);
        assert_eq!(len(&[0x12, 1, 0x80, 0, 255]), 7);
        assert_eq!(len(&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12]), 12);
        assert_eq!(len(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 255]), 32);
        assert_eq!(len(&[0x1a, 0, 0x3f, 0, 255]), 4 + 8 + 20 + 12);
        assert_eq!(len(&[0x03, 0, 0, 0, 18]), 18);
    }

    #[test]
    fn the_cache_is_turned_off_and_emptied() {
        let disk = Disk::new(8192, 512, false, "");
        let mut list = vec![0; 24];
        (list[4], list[5]) = (0x08, 0x12);
        assert_eq!(planned(&disk, &[0x15, 0x10, 0, 0, 24], &list), op(Op::Flush, 0));
        assert!(!disk.write_back());
        assert_eq!(planned(&disk, &[0x15, 0x11, 0, 0, 24], &list), Err(Sense::INVALID_FIELD), "saved");
        assert_eq!(planned(&disk, &[0x15, 0x10, 0, 0, 25], &list), Err(Sense::PARAMETER_LIST_LENGTH));
        assert_eq!(planned(&disk, &[0x15, 0x10], &[]), Ok(Plan::Good));
    }

    #[test]
    fn unknown_commands_are_refused() {
        let disk = Disk::new(8192, 512, false, "");
        let known = [
            0x00, 0x03, 0x08, 0x0a, 0x12, 0x15, 0x1a, 0x1b, 0x25, 0x28, 0x2a, 0x2f, 0x35, 0x41, 0x42, 0x55,
            0x5a, 0x88, 0x8a, 0x8f, 0x91, 0x93, 0x9e, 0xa0, 0xa8, 0xaa, 0xaf,
        ];
        for code in 0..=255 {
            let unknown = planned(&disk, &[code], &[]) == Err(Sense::INVALID_COMMAND);
            // SERVICE ACTION IN has no service action 0.
            assert_eq!(unknown, !known.contains(&code) || code == 0x9e, "{code:x}");
        }
    }
}
