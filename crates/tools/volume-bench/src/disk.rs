//! The properties of a disk.

use ginnel_layout::virtio_blk::{Config, SECTOR, feature};
use serde::Serialize;

/// The properties of a disk, as it reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Disk {
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// Size of a logical block, in bytes. Requests begin and end at multiples of it.
    pub block: u32,
    /// Number of request queues.
    pub queues: u16,
    /// Whether the disk refuses writes.
    pub read_only: bool,
    /// Whether writes may stay in a cache until a flush.
    pub write_cache: bool,
    /// Whether the disk supports discards.
    pub discard: bool,
    /// Whether the disk supports requests to write zeroes.
    pub write_zeroes: bool,
    /// The largest number of pieces of a buffer; 0 if the disk does not report it.
    pub segments: u32,
}

impl Disk {
    /// Returns the properties of a virtio-blk device.
    pub(crate) fn of_blk(config: &Config, features: u64) -> Self {
        let has = |bit| features & bit != 0;
        Self {
            bytes: config.capacity.saturating_mul(SECTOR),
            block: if has(feature::BLK_SIZE) { config.blk_size } else { SECTOR as u32 },
            queues: if has(feature::MQ) { config.num_queues } else { 1 },
            read_only: has(feature::RO),
            write_cache: has(feature::FLUSH) && (!has(feature::CONFIG_WCE) || config.writeback != 0),
            discard: has(feature::DISCARD),
            write_zeroes: has(feature::WRITE_ZEROES),
            segments: if has(feature::SEG_MAX) { config.seg_max } else { 0 },
        }
    }
}
