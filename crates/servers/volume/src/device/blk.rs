//! virtio-blk (virtio 1.2, section 5.2).

use super::{Begin, Device, Request, part};
use crate::backend::{Failure, Op};
use crate::disk::Disk;
use ginnel_guest_memory::GuestMemory;
use ginnel_layout::virtio_blk::{
    Config, ID_LEN, RangeSegment, RequestHeader, RequestKind, SECTOR, Status, feature,
};
use ginnel_shmem::Mapping;
use ginnel_virtqueue::Chain;
use std::mem::offset_of;
use std::sync::Arc;
use zerocopy::IntoBytes;

const HEADER: u64 = size_of::<RequestHeader>() as u64;
const RANGE: u64 = size_of::<RangeSegment>() as u64;

/// The largest range of one discard or write-zeroes request: 1 GiB, so that no request delays the draining of a queue
/// for long.
const MAX_RANGE: u64 = 1 << 30;

/// A virtio-blk device.
#[derive(Debug)]
pub struct Blk {
    disk: Arc<Disk>,
    queues: u16,
    /// The largest number of data segments in a request.
    segments: u16,
    /// Whether the backend can give space back.
    discard: bool,
}

impl Blk {
    /// Returns a device with this many request queues.
    pub fn new(disk: Arc<Disk>, queues: u16, segments: u16, discard: bool) -> Self {
        Self { disk, queues, segments, discard }
    }
}

impl Device for Blk {
    fn queues(&self) -> u16 {
        self.queues
    }

    fn features(&self) -> u64 {
        let mut bits =
            feature::SEG_MAX | feature::BLK_SIZE | feature::FLUSH | feature::TOPOLOGY | feature::MQ;
        if self.disk.write_cache {
            bits |= feature::CONFIG_WCE;
        }
        if self.disk.read_only {
            bits |= feature::RO;
        } else if self.discard {
            bits |= feature::DISCARD | feature::WRITE_ZEROES;
        }
        bits
    }

    fn set_features(&self, features: u64) {
        // All writes of a driver that cannot flush must become durable without a flush (5.2.6.2). Firmware is such a
        // driver, but the driver after it is not, so this setting must not last. The configuration space is not
        // suitable for it: front ends keep a copy of that, which they show to later drivers too (QEMU 7.2).
        self.disk.set_flushes(features & feature::FLUSH != 0);
    }

    fn disks(&self) -> Vec<Arc<Disk>> {
        vec![self.disk.clone()]
    }

    fn config(&self) -> Vec<u8> {
        let in_sectors = |bytes: u64| (bytes / SECTOR) as u32;
        let block = self.disk.block_size;
        let range = if self.disk.read_only || !self.discard { 0 } else { MAX_RANGE };
        let config = Config {
            capacity: self.disk.bytes() / SECTOR,
            seg_max: u32::from(self.segments),
            blk_size: block,
            min_io_size: 1,
            writeback: u8::from(self.disk.is_cache_on()),
            num_queues: self.queues,
            max_discard_sectors: in_sectors(range),
            max_discard_seg: u32::from(range > 0),
            discard_sector_alignment: in_sectors(block.max(4096).into()),
            max_write_zeroes_sectors: in_sectors(range),
            max_write_zeroes_seg: u32::from(range > 0),
            write_zeroes_may_unmap: u8::from(range > 0),
            ..Config::default()
        };
        config.as_bytes().to_vec()
    }

    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String> {
        match bytes {
            [on @ (0 | 1)] if offset as usize == offset_of!(Config, writeback) => {
                self.disk.turn_cache(*on == 1);
                Ok(())
            }
            _ => Err("only the write cache can be changed, to 0 or 1".to_owned()),
        }
    }

    fn begin(&self, _: u16, memory: &GuestMemory<Mapping>, chain: &Chain, request: &mut Request) -> Begin {
        request.clear();
        let (asked, room) = (u64::from(chain.readable_len()), u64::from(chain.writable_len()));
        let Some(answer) = room.checked_sub(1) else {
            // There is no room for a status.
            return Begin::Done(0);
        };
        part(chain.writable(), answer, 1, &mut request.reply);
        let mut header = [0; HEADER as usize];
        memory.read(chain.readable(), 0, &mut header);
        let header: RequestHeader = zerocopy::transmute!(header);
        let ask = Ask { header, out: asked.saturating_sub(HEADER), room: answer, complete: asked >= HEADER };
        let range = || {
            let mut bytes = [0; RANGE as usize];
            memory.read(chain.readable(), HEADER, &mut bytes);
            zerocopy::transmute!(bytes)
        };
        let plan = plan(&ask, range, &self.disk);
        let op = match plan {
            Ok(Plan::Op(op)) => op,
            Ok(Plan::Id) => {
                let n = memory.write(chain.writable(), 0, &self.disk.serial[..ID_LEN.min(answer as usize)]);
                memory.write(&request.reply, 0, &[Status::OK.0]);
                // The memory in between belongs to the driver, and stays as it is.
                return Begin::Done(n as u32 + 1);
            }
            Err(status) => {
                memory.write(&request.reply, 0, &[status.0]);
                return Begin::Done(1);
            }
        };
        match op {
            Op::Read { .. } => part(chain.writable(), 0, answer, &mut request.data),
            Op::Write { .. } => part(chain.readable(), HEADER, ask.out, &mut request.data),
            _ => {}
        }
        (request.bytes, request.note) = match op {
            Op::Read { .. } => (answer, answer),
            Op::Write { .. } => (ask.out, 0),
            _ => (0, 0),
        };
        Begin::Do { disk: 0, op }
    }

    fn finish(&self, memory: &GuestMemory<Mapping>, request: &Request, result: Result<(), Failure>) -> u32 {
        let status = match result {
            Ok(()) => Status::OK,
            Err(Failure::Unsupported) => Status::UNSUPP,
            Err(_) => Status::IOERR,
        };
        memory.write(&request.reply, 0, &[status.0]);
        request.note as u32 + 1
    }
}

/// The parts of a request that can be checked without its data.
struct Ask {
    header: RequestHeader,
    /// Number of readable bytes behind the header.
    out: u64,
    /// Number of writable bytes, without the status.
    room: u64,
    /// Whether the whole header was there.
    complete: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Plan {
    Op(Op),
    Id,
}

/// Returns the operation that a request asks for, or the status with which it fails.
#[inline]
fn plan(ask: &Ask, range: impl FnOnce() -> RangeSegment, disk: &Disk) -> Result<Plan, Status> {
    if !ask.complete {
        return Err(Status::IOERR);
    }
    let at = || ask.header.sector.checked_mul(SECTOR).ok_or(Status::IOERR);
    let op = match ask.header.kind {
        RequestKind::IN => {
            let at = at()?;
            // Readable bytes behind the header are ignored, as they have no meaning for a read.
            require(disk.holds(at, ask.room))?;
            Op::Read { at }
        }
        RequestKind::OUT => {
            let at = at()?;
            require(!disk.read_only && disk.holds(at, ask.out))?;
            Op::Write { at, through: !disk.write_back() }
        }
        RequestKind::FLUSH => Op::Flush,
        RequestKind::GET_ID => return Ok(Plan::Id),
        kind @ (RequestKind::DISCARD | RequestKind::WRITE_ZEROES) => {
            require(!disk.read_only && ask.out >= RANGE)?;
            if ask.out > RANGE {
                // The request has more segments than `max_discard_seg` and `max_write_zeroes_seg` allow.
                return Err(Status::UNSUPP);
            }
            let range = range();
            let known = if kind == RequestKind::DISCARD { 0 } else { RangeSegment::UNMAP };
            if range.flags & !known != 0 {
                return Err(Status::UNSUPP);
            }
            let at = range.sector.checked_mul(SECTOR).ok_or(Status::IOERR)?;
            let len = u64::from(range.sectors) * SECTOR;
            require(len <= MAX_RANGE && disk.holds(at, len))?;
            let through = !disk.write_back();
            match kind {
                RequestKind::DISCARD => Op::Discard { at, len },
                _ => Op::WriteZeroes { at, len, unmap: range.flags & RangeSegment::UNMAP != 0, through },
            }
        }
        _ => return Err(Status::UNSUPP),
    };
    Ok(Plan::Op(op))
}

#[inline]
fn require(fine: bool) -> Result<(), Status> {
    if fine { Ok(()) } else { Err(Status::IOERR) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::seed;
    use zerocopy::FromBytes;

    fn shown(blk: &Blk) -> Config {
        Config::read_from_bytes(&blk.config()).unwrap()
    }

    const NO_RANGE: RangeSegment = RangeSegment { sector: 0, sectors: 0, flags: 0 };

    fn ask(kind: RequestKind, sector: u64, out: u64, room: u64) -> Ask {
        Ask { header: RequestHeader { kind, reserved: 7, sector }, out, room, complete: true }
    }

    fn planned(disk: &Disk, ask: &Ask, range: RangeSegment) -> Result<Plan, Status> {
        let mut data = range.as_bytes().to_vec();
        data.resize(ask.out as usize, 0);
        let header = if ask.complete { ask.header.as_bytes() } else { &ask.header.as_bytes()[..9] };
        seed::blk(disk.read_only, &[header, &data], ask.room as usize + 1);
        plan(ask, || range, disk)
    }

    #[test]
    fn reads_and_writes_are_whole_blocks_of_the_disk() {
        for (block, bytes) in [(512, 8192), (4096, 8192)] {
            let disk = Disk::new(bytes, block, false, "");
            let read = |sector, room| planned(&disk, &ask(RequestKind::IN, sector, 0, room), NO_RANGE);
            let write = |sector, out| planned(&disk, &ask(RequestKind::OUT, sector, out, 0), NO_RANGE);
            assert_eq!(read(8, 4096), Ok(Plan::Op(Op::Read { at: 4096 })));
            assert_eq!(write(0, 8192), Ok(Plan::Op(Op::Write { at: 0, through: false })));
            for (sector, len) in
                [(8, 8192), (16, 4096), (0, 100), (u64::MAX, 4096), (u64::MAX / 512, 4096), (1 << 55, 4096)]
            {
                assert_eq!(read(sector, len), Err(Status::IOERR), "{sector}+{len}");
                assert_eq!(write(sector, len), Err(Status::IOERR), "{sector}+{len}");
            }
            let small = if block == 512 { Ok(Plan::Op(Op::Read { at: 512 })) } else { Err(Status::IOERR) };
            assert_eq!(read(1, 512), small);
        }
    }

    #[test]
    fn a_driver_that_cannot_flush_writes_through() {
        let disk = Arc::new(Disk::new(8192, 512, false, ""));
        let blk = Blk::new(disk.clone(), 2, 126, true);
        let write = || planned(&disk, &ask(RequestKind::OUT, 0, 512, 0), NO_RANGE);
        blk.set_features(0);
        assert_eq!(write(), Ok(Plan::Op(Op::Write { at: 0, through: true })));
        blk.set_features(feature::FLUSH);
        assert_eq!(write(), Ok(Plan::Op(Op::Write { at: 0, through: false })));
        blk.set_config(32, &[0]).unwrap();
        assert_eq!(write(), Ok(Plan::Op(Op::Write { at: 0, through: true })));
        assert_eq!({ shown(&blk).writeback }, 0);
        for (offset, bytes) in [(32, &[2][..]), (31, &[0]), (32, &[0, 0]), (u32::MAX, &[0]), (32, &[])] {
            assert!(blk.set_config(offset, bytes).is_err());
        }
    }

    #[test]
    fn a_read_only_disk_says_so_and_takes_nothing() {
        let disk = Arc::new(Disk::new(8192, 512, true, ""));
        let blk = Blk::new(disk.clone(), 1, 126, true);
        assert!(blk.features() & feature::RO != 0 && blk.features() & feature::DISCARD == 0);
        assert_eq!({ shown(&blk).max_discard_seg }, 0);
        for kind in [RequestKind::OUT, RequestKind::DISCARD, RequestKind::WRITE_ZEROES] {
            assert_eq!(planned(&disk, &ask(kind, 0, 512, 0), NO_RANGE), Err(Status::IOERR));
        }
        assert_eq!(
            planned(&disk, &ask(RequestKind::IN, 0, 0, 512), NO_RANGE),
            Ok(Plan::Op(Op::Read { at: 0 }))
        );
    }

    #[test]
    fn ranges_are_checked() {
        let disk = Disk::new(8192, 512, false, "");
        let with = |kind, sector, sectors, flags| {
            planned(&disk, &ask(kind, 99, 16, 0), RangeSegment { sector, sectors, flags })
        };
        let (discard, zeroes) = (RequestKind::DISCARD, RequestKind::WRITE_ZEROES);
        assert_eq!(with(discard, 1, 15, 0), Ok(Plan::Op(Op::Discard { at: 512, len: 7680 })));
        let op = Op::WriteZeroes { at: 0, len: 512, unmap: true, through: false };
        assert_eq!(with(zeroes, 0, 1, 1), Ok(Plan::Op(op)));
        assert_eq!(with(discard, 0, 1, 1), Err(Status::UNSUPP));
        assert_eq!(with(zeroes, 0, 1, 2), Err(Status::UNSUPP));
        assert_eq!(with(zeroes, 1, 16, 0), Err(Status::IOERR));
        assert_eq!(with(zeroes, u64::MAX, u32::MAX, 0), Err(Status::IOERR));
        for kind in [discard, zeroes] {
            assert_eq!(planned(&disk, &ask(kind, 0, 32, 0), NO_RANGE), Err(Status::UNSUPP), "two ranges");
            assert_eq!(planned(&disk, &ask(kind, 0, 0, 0), NO_RANGE), Err(Status::IOERR), "none");
        }
    }

    #[test]
    fn unknown_requests_are_unsupported() {
        let disk = Disk::new(8192, 512, false, "");
        for kind in [2, 3, 5, 7, 10, 12, 14, 0x8000_0000, u32::MAX] {
            assert_eq!(planned(&disk, &ask(RequestKind(kind), 0, 0, 512), NO_RANGE), Err(Status::UNSUPP));
        }
        let short = Ask { complete: false, ..ask(RequestKind::IN, 0, 0, 512) };
        assert_eq!(planned(&disk, &short, NO_RANGE), Err(Status::IOERR));
    }
}
