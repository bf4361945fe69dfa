//! What a disk says of itself.

use ginnel_layout::virtio_blk::{Config, SECTOR, feature};
use serde::Serialize;

/// A disk's properties. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Disk {
    /// Its size.
    pub bytes: u64,
    /// Its logical block: requests begin and end at multiples.
    pub block: u32,
    /// How many queues it takes requests from.
    pub queues: u16,
    /// It takes no writes.
    pub read_only: bool,
    /// Writes may stay in a cache until a flush.
    pub write_cache: bool,
    /// It takes discards.
    pub discard: bool,
    /// It takes requests to write zeroes.
    pub write_zeroes: bool,
    /// The most pieces that a buffer may be in; 0 if it does not say.
    pub segments: u32,
}

impl Disk {
    /// As a virtio-blk device describes itself.
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
