//! The pages with which a logical unit describes itself (SPC-4 sections 6.6 and 7; SBC-3 sections 5.16 and 6.5).

use crate::disk::Disk;

/// The largest range of one UNMAP or WRITE SAME, in bytes: 1 GiB, so that no command delays the draining of a queue for
/// long.
pub const MAX_RANGE: u64 = 1 << 30;

const VENDOR: &[u8; 8] = b"GINNEL  ";
const PRODUCT: &[u8; 16] = b"volume          ";

/// Vital product data pages.
mod vpd {
    pub const SUPPORTED: u8 = 0x00;
    pub const SERIAL: u8 = 0x80;
    pub const IDENTIFICATION: u8 = 0x83;
    pub const BLOCK_LIMITS: u8 = 0xb0;
    pub const CHARACTERISTICS: u8 = 0xb1;
    pub const PROVISIONING: u8 = 0xb2;
    pub const ALL: [u8; 6] = [SUPPORTED, SERIAL, IDENTIFICATION, BLOCK_LIMITS, CHARACTERISTICS, PROVISIONING];
}

/// Mode pages.
mod mode {
    pub const CACHING: u8 = 0x08;
    pub const CONTROL: u8 = 0x0a;
    pub const ALL: u8 = 0x3f;
}

/// Length of the caching page without its two bytes of header.
const CACHING_LEN: usize = 0x12;
const WRITE_CACHE: u8 = 0x04;

/// Returns the standard INQUIRY data of a disk.
pub fn inquiry() -> Vec<u8> {
    let mut data = inquiry_of(0x00);
    // Supports several commands at a time (CMDQUE).
    data[7] = 0x02;
    data
}

/// Returns the standard INQUIRY data where there is no unit.
pub fn inquiry_of_none() -> Vec<u8> {
    inquiry_of(0x7f)
}

fn inquiry_of(peripheral: u8) -> Vec<u8> {
    let mut data = vec![0; 36];
    data[0] = peripheral;
    // SPC-4.
    data[2] = 0x06;
    // Hierarchical addressing, and this response data format.
    data[3] = 0x12;
    data[4] = 36 - 5;
    data[8..16].copy_from_slice(VENDOR);
    data[16..32].copy_from_slice(PRODUCT);
    let version = env!("CARGO_PKG_VERSION").bytes().chain(std::iter::repeat(b' '));
    data[32..].iter_mut().zip(version).for_each(|(to, from)| *to = from);
    data
}

/// Returns a vital product data page, if there is one of that number. `space` says whether the backend can give space
/// back.
pub fn vital(page: u8, disk: &Disk, space: bool) -> Option<Vec<u8>> {
    let serial = || disk.serial.split(|byte| *byte == 0).next().unwrap_or(&[]);
    let body = match page {
        vpd::SUPPORTED => vpd::ALL.to_vec(),
        vpd::SERIAL => serial().to_vec(),
        vpd::IDENTIFICATION => identification(serial()),
        vpd::BLOCK_LIMITS => block_limits(disk, space),
        vpd::CHARACTERISTICS => {
            let mut body = vec![0; 0x3c];
            // The medium does not rotate.
            body[1] = 1;
            body
        }
        vpd::PROVISIONING => {
            let (commands, thin) = if space { (0xe0, 2) } else { (0, 0) };
            vec![0, commands, thin, 0]
        }
        _ => return None,
    };
    let mut data = vec![0, page];
    data.extend((body.len() as u16).to_be_bytes());
    data.extend(body);
    Some(data)
}

/// Returns one designator, with the vendor and the serial number (SPC-4, 7.8.6.3).
fn identification(serial: &[u8]) -> Vec<u8> {
    let mut body = vec![0x02, 0x01, 0, (VENDOR.len() + serial.len()) as u8];
    body.extend(VENDOR);
    body.extend(serial);
    body
}

fn block_limits(disk: &Disk, space: bool) -> Vec<u8> {
    let mut body = vec![0; 0x3c];
    let blocks = MAX_RANGE / u64::from(disk.block_size);
    if space {
        body[16..20].copy_from_slice(&(blocks as u32).to_be_bytes());
        // An UNMAP may have one descriptor.
        body[23] = 1;
        let page = 4096 / disk.block_size;
        body[24..28].copy_from_slice(&page.max(1).to_be_bytes());
    }
    body[32..40].copy_from_slice(&blocks.to_be_bytes());
    body
}

/// Returns the data of READ CAPACITY (10).
pub fn capacity_10(disk: &Disk) -> Vec<u8> {
    let last = u32::try_from(last_block(disk)).unwrap_or(u32::MAX);
    [last.to_be_bytes(), disk.block_size.to_be_bytes()].concat()
}

/// Returns the data of READ CAPACITY (16).
pub fn capacity_16(disk: &Disk, space: bool) -> Vec<u8> {
    let mut data = vec![0; 32];
    data[..8].copy_from_slice(&last_block(disk).to_be_bytes());
    data[8..12].copy_from_slice(&disk.block_size.to_be_bytes());
    data[14] = if space { 0x80 } else { 0 };
    data
}

/// Returns the number of the last block. It is 0 also for a disk without any block, which refuses to read block 0.
fn last_block(disk: &Disk) -> u64 {
    (disk.bytes() / u64::from(disk.block_size)).saturating_sub(1)
}

/// The fields of a MODE SENSE command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModeSense {
    /// Whether it is the command of ten bytes, whose header is longer.
    pub long: bool,
    /// Whether the block descriptor is left out (DBD).
    pub no_descriptor: bool,
    /// The kind of values: 0 current, 1 changeable, 2 default, 3 saved.
    pub control: u8,
    /// Number of the page.
    pub page: u8,
    /// Number of the subpage.
    pub subpage: u8,
}

/// Returns MODE SENSE data, if there is such a page.
pub fn mode_sense(ask: ModeSense, disk: &Disk) -> Option<Vec<u8>> {
    let mut pages = Vec::new();
    let wanted = |page| ask.page == page || ask.page == mode::ALL;
    if !matches!((ask.page, ask.subpage), (_, 0) | (mode::ALL, 0xff)) {
        return None;
    }
    if wanted(mode::CACHING) {
        let write_cache = match ask.control {
            0 => disk.is_cache_on(),
            // The bit is changeable, and its default is on.
            _ => true,
        };
        pages.extend([mode::CACHING, CACHING_LEN as u8, if write_cache { WRITE_CACHE } else { 0 }]);
        pages.extend([0; CACHING_LEN - 1]);
    }
    if wanted(mode::CONTROL) {
        pages.extend([mode::CONTROL, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        if ask.control != 1 {
            // Commands may be reordered.
            let at = pages.len() - 12;
            pages[at + 3] = 0x10;
        }
    }
    if pages.is_empty() {
        return None;
    }
    let mut descriptor = Vec::new();
    if !ask.no_descriptor {
        let blocks = u32::try_from(disk.bytes() / u64::from(disk.block_size)).unwrap_or(u32::MAX);
        descriptor.extend(blocks.to_be_bytes());
        descriptor.extend(disk.block_size.to_be_bytes());
    }
    // FUA is supported, and the disk may be write-protected.
    let device = 0x10 | if disk.read_only { 0x80 } else { 0 };
    let rest = descriptor.len() + pages.len();
    let mut data = match ask.long {
        true => {
            let [high, low] = (rest as u16 + 6).to_be_bytes();
            vec![high, low, 0, device, 0, 0, 0, descriptor.len() as u8]
        }
        false => vec![rest as u8 + 3, 0, device, descriptor.len() as u8],
    };
    data.extend(descriptor);
    data.extend(pages);
    Some(data)
}

/// Returns the state of the write cache that the parameter list of a MODE SELECT sets, if it sets one. Nothing else can
/// be changed.
pub fn mode_select(list: &[u8], long: bool) -> Result<Option<bool>, super::Sense> {
    let short = super::Sense::PARAMETER_LIST_LENGTH;
    let (header, descriptors) = match long {
        true => (8, list.get(6..8).map(|d| usize::from(u16::from_be_bytes([d[0], d[1]])))),
        false => (4, list.get(3).map(|d| usize::from(*d))),
    };
    let mut pages = list.get(header + descriptors.ok_or(short)?..).ok_or(short)?;
    let mut write_cache = None;
    while !pages.is_empty() {
        let [page, len, rest @ ..] = pages else { return Err(short) };
        let body = rest.get(..usize::from(*len)).ok_or(short)?;
        match (page, body) {
            (&mode::CACHING, [flags, zeros @ ..]) if body.len() == CACHING_LEN => {
                if flags & !WRITE_CACHE != 0 || zeros.iter().any(|byte| *byte != 0) {
                    return Err(super::Sense::INVALID_PARAMETER);
                }
                write_cache = Some(flags & WRITE_CACHE != 0);
            }
            _ => return Err(super::Sense::INVALID_PARAMETER),
        }
        pages = &rest[body.len()..];
    }
    Ok(write_cache)
}

/// Returns REPORT LUNS data for the units 0 to `count` - 1.
pub fn luns(count: u16) -> Vec<u8> {
    let mut data = Vec::with_capacity(8 + 8 * usize::from(count));
    data.extend((u32::from(count) * 8).to_be_bytes());
    data.extend([0; 4]);
    for lun in 0..count {
        // Flat addressing from unit 256 on (SAM-5, 4.7).
        let [high, low] = lun.to_be_bytes();
        data.extend([if lun < 256 { 0 } else { 0x40 | high }, low, 0, 0, 0, 0, 0, 0]);
    }
    data
}

#[cfg(test)]
mod tests {
    use super::super::Sense;
    use super::*;

    fn disk(read_only: bool) -> Disk {
        Disk::new(1 << 20, 512, read_only, "disk-7")
    }

    #[test]
    fn a_disk_says_who_it_is() {
        let data = inquiry();
        assert_eq!((data.len(), data[0], data[4]), (36, 0, 31));
        assert_eq!(&data[8..32], b"GINNEL  volume          ");
        assert_eq!(inquiry_of_none()[0], 0x7f);
        assert_eq!(vital(0x00, &disk(false), true).unwrap(), [0, 0, 0, 6, 0, 0x80, 0x83, 0xb0, 0xb1, 0xb2]);
        assert_eq!(vital(0x80, &disk(false), true).unwrap(), b"\x00\x80\x00\x06disk-7");
        assert_eq!(&vital(0x83, &disk(false), true).unwrap()[4..], b"\x02\x01\x00\x0eGINNEL  disk-7");
        assert_eq!(vital(0xb0, &disk(false), true).unwrap().len(), 64);
        assert_eq!(vital(0xb2, &disk(false), true).unwrap(), [0, 0xb2, 0, 4, 0, 0xe0, 2, 0]);
        assert_eq!(vital(0x84, &disk(false), true), None);
    }

    #[test]
    fn capacities_name_the_last_block() {
        assert_eq!(capacity_10(&disk(false)), [0, 0, 7, 255, 0, 0, 2, 0]);
        assert_eq!(capacity_16(&disk(false), true)[..15], [0, 0, 0, 0, 0, 0, 7, 255, 0, 0, 2, 0, 0, 0, 0x80]);
        let huge = Disk::new(1 << 50, 512, false, "");
        assert_eq!(capacity_10(&huge)[..4], [255; 4]);
    }

    #[test]
    fn mode_pages_tell_of_the_cache_and_can_change_it() {
        let ask = ModeSense { long: false, no_descriptor: true, control: 0, page: 0x08, subpage: 0 };
        let writable = disk(false);
        let data = mode_sense(ask, &writable).unwrap();
        assert_eq!((data.len(), data[0], data[2], data[3]), (24, 23, 0x10, 0));
        assert_eq!(data[4..7], [0x08, 0x12, 0x04]);
        writable.turn_cache(false);
        assert_eq!(mode_sense(ask, &writable).unwrap()[6], 0);
        assert_eq!(mode_sense(ask, &disk(true)).unwrap()[2], 0x90, "protected");
        let long = ModeSense { long: true, no_descriptor: false, page: 0x3f, ..ask };
        let data = mode_sense(long, &writable).unwrap();
        assert_eq!(usize::from(data[1]) + 2, data.len());
        assert_eq!((data.len(), data[7]), (8 + 8 + 20 + 12, 8));
        assert_eq!(mode_sense(ModeSense { page: 0x1c, ..ask }, &writable), None);
        assert_eq!(mode_sense(ModeSense { subpage: 1, ..ask }, &writable), None);

        let mut page = data[8 + 8..8 + 8 + 20].to_vec();
        page[2] = 0x04;
        let list = |page: &[u8]| [&[0; 8], page].concat();
        assert_eq!(mode_select(&list(&page), true), Ok(Some(true)));
        page[2] = 0;
        assert_eq!(mode_select(&list(&page), true), Ok(Some(false)));
        assert_eq!(mode_select(&list(&[]), true), Ok(None));
        page[2] = 1;
        assert_eq!(mode_select(&list(&page), true), Err(Sense::INVALID_PARAMETER));
        assert_eq!(mode_select(&list(&page[..19]), true), Err(Sense::PARAMETER_LIST_LENGTH));
        assert_eq!(mode_select(&list(&[0x0a, 0]), true), Err(Sense::INVALID_PARAMETER));
        assert_eq!(mode_select(&[0, 0, 0, 200], false), Err(Sense::PARAMETER_LIST_LENGTH));
        assert_eq!(mode_select(&[], true), Err(Sense::PARAMETER_LIST_LENGTH));
    }

    #[test]
    fn units_are_listed() {
        assert_eq!(luns(2), [0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(luns(300)[8 + 299 * 8..][..2], [0x41, 43]);
    }
}
