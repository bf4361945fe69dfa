//! The requests that the unit tests send to devices, as seeds of the fuzz target `volume_request`. They are written to
//! the folder that `GINNEL_SEEDS` names (`scripts/fuzz seeds`).

use std::fs;

/// Longer requests differ from shorter ones only in their data.
const MOST: usize = 1024;

/// Writes a seed with a request for a queue of the fuzz target's SCSI device: the readable bytes, and the number of
/// writable bytes.
pub fn scsi(queue: u16, parts: &[&[u8]], room: usize) {
    keep((queue as u8) << 2, parts, room);
}

/// Writes a seed with a request for one of the fuzz target's blk devices: the one with a read-only disk, or the other
/// one.
pub fn blk(protected: bool, parts: &[&[u8]], room: usize) {
    keep(2 | u8::from(protected), parts, room);
}

/// Writes a seed as the fuzz target reads it: which device, how many writable bytes, where buffers are cut in two, and
/// the readable bytes.
fn keep(choice: u8, parts: &[&[u8]], room: usize) {
    let Some(folder) = std::env::var_os("GINNEL_SEEDS") else { return };
    let data = parts.concat();
    let Some(room) = u16::try_from(room).ok().filter(|_| data.len() <= MOST) else { return };
    let cut = parts.first().map_or(0, |head| head.len()) as u8;
    let [low, high] = room.to_le_bytes();
    let seed = [&[choice, low, high, cut], &data[..]].concat();
    let hash =
        seed.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    fs::write(std::path::Path::new(&folder).join(format!("unit-{hash:016x}")), seed).unwrap();
}
