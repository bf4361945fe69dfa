//! What the unit tests ask of devices, as seeds of the fuzz target `volume_request`: written where `GINNEL_SEEDS` names a folder
//! (`scripts/fuzz seeds`).

use std::fs;

/// Longer ones differ from shorter ones by their data alone.
const MOST: usize = 1024;

/// Keeps a request for a queue of the target's SCSI device: what is read, and how much room there is to write.
pub fn scsi(queue: u16, parts: &[&[u8]], room: usize) {
    keep((queue as u8) << 2, parts, room);
}

/// Keeps a request for one of the target's blk devices, which has a protected disk or another one.
pub fn blk(protected: bool, parts: &[&[u8]], room: usize) {
    keep(2 | u8::from(protected), parts, room);
}

/// As the target reads it: which device, how much room, where buffers are cut in two, and what is read.
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
