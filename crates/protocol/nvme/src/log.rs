//! The answers to Get Log Page (5.14).

use crate::identify::{Properties, padded};
use ginnel_layout::nvme::log::{CHANGED_LEN, ERROR_LEN, Effects, Firmware, Page, Smart};
use ginnel_layout::nvme::{ALL_NAMESPACES, Command, Opcode, Status};
use zerocopy::{FromZeros, IntoBytes};

/// The temperature that a controller reports, in kelvin. There is no sensor, but a log page has no value that says so.
const TEMPERATURE: u16 = 300;

/// What a controller counts. It does so since its process began, not since the disk was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Read commands.
    pub reads: u64,
    /// Write commands.
    pub writes: u64,
    /// Commands that failed because of the disk.
    pub errors: u64,
    /// Hours for which the disk has been served.
    pub hours: u64,
    /// The namespace is in read-only state although it should not be (critical warning, bit 3).
    pub became_read_only: bool,
}

/// Returns the answer to a Get Log Page command: as many bytes as it asks for, or as the page has behind its offset, at most 4096. The
/// rest of the command's buffer stays as it is. `namespace_changed` says what the log page Changed Namespace List has; the caller
/// forgets it afterwards, unless the command has RAE ([`retains_event`]).
pub fn answer(
    properties: &Properties,
    health: &Health,
    namespace_changed: bool,
    command: &Command,
) -> Result<Vec<u8>, Status> {
    let mut page = match Page(command.cdw10 as u8) {
        Page::ERRORS => vec![0; ERROR_LEN],
        Page::SMART if matches!(command.nsid, 0 | ALL_NAMESPACES) => smart(health),
        // The controller has no health of each namespace (LPA bit 0).
        Page::SMART => return Err(Status::INVALID_NAMESPACE.for_good()),
        Page::FIRMWARE => firmware(properties),
        Page::CHANGED_NAMESPACES => changed(namespace_changed),
        Page::EFFECTS => effects(properties),
        _ => return Err(Status::INVALID_LOG_PAGE.for_good()),
    };
    let offset = u64::from(command.cdw12) | u64::from(command.cdw13) << 32;
    if !offset.is_multiple_of(4) || offset > page.len() as u64 {
        return Err(Status::INVALID_FIELD.for_good());
    }
    page.drain(..offset as usize);
    page.truncate(usize::try_from(len(command)).unwrap_or(usize::MAX));
    Ok(page)
}

/// Returns how many bytes a Get Log Page command asks for: 4 to 16 GiB.
pub fn len(command: &Command) -> u64 {
    let dwords = u64::from(command.cdw10 >> 16) | u64::from(command.cdw11 & 0xffff) << 16;
    4 * (dwords + 1)
}

/// Returns whether the event that led to the command stays (RAE: Retain Asynchronous Event).
pub fn retains_event(command: &Command) -> bool {
    command.cdw10 >> 15 & 1 != 0
}

fn smart(health: &Health) -> Vec<u8> {
    let mut page = Smart::new_zeroed();
    let units = |bytes: u64| [bytes.div_ceil(512 * 1000), 0];
    page.critical = u8::from(health.became_read_only) << 3;
    page.temperature = TEMPERATURE;
    page.spare = 100;
    page.read_units = units(health.read);
    page.written_units = units(health.written);
    page.reads = [health.reads, 0];
    page.writes = [health.writes, 0];
    page.power_hours = [health.hours, 0];
    page.media_errors = [health.errors, 0];
    page.as_bytes().to_vec()
}

fn firmware(properties: &Properties) -> Vec<u8> {
    let mut page = Firmware::new_zeroed();
    page.active = 1;
    page.revisions[0] = padded(&properties.firmware);
    page.as_bytes().to_vec()
}

fn changed(namespace_changed: bool) -> Vec<u8> {
    let mut page = vec![0; CHANGED_LEN];
    page[..4].copy_from_slice(&u32::from(namespace_changed).to_le_bytes());
    page
}

fn effects(properties: &Properties) -> Vec<u8> {
    let mut page = Effects::new_zeroed();
    let admin = [
        Opcode::DELETE_SUBMISSION,
        Opcode::CREATE_SUBMISSION,
        Opcode::GET_LOG_PAGE,
        Opcode::DELETE_COMPLETION,
        Opcode::CREATE_COMPLETION,
        Opcode::IDENTIFY,
        Opcode::ABORT,
        Opcode::SET_FEATURES,
        Opcode::GET_FEATURES,
        Opcode::ASYNC_EVENT,
    ];
    for opcode in admin {
        page.admin[usize::from(opcode.0)] = Effects::SUPPORTED;
    }
    if properties.doorbell_buffer {
        page.admin[usize::from(Opcode::DOORBELL_BUFFER.0)] = Effects::SUPPORTED;
    }
    let changes = Effects::SUPPORTED | Effects::CHANGES_BLOCKS;
    let io = [
        (Opcode::READ, true, Effects::SUPPORTED),
        (Opcode::FLUSH, true, Effects::SUPPORTED),
        (Opcode::WRITE, true, changes),
        (Opcode::WRITE_ZEROES, properties.write_zeroes, changes),
        (Opcode::DATASET_MANAGEMENT, properties.deallocate, changes),
    ];
    for (opcode, supported, effects) in io {
        page.io[usize::from(opcode.0)] = if supported { effects } else { 0 };
    }
    page.as_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    fn properties() -> Properties {
        Properties {
            vendor: [0; 2],
            serial: String::new(),
            model: String::new(),
            firmware: "1.0".into(),
            uuid: [0; 16],
            mdts: 7,
            doorbell_buffer: false,
            write_cache: false,
            blocks: 1,
            block_exponent: 9,
            read_only: false,
            deallocate: false,
            write_zeroes: true,
            reads_zeros: false,
            granularity: 0,
            optimal: 0,
        }
    }

    fn get(page: Page, len: u32, offset: u64) -> Result<Vec<u8>, Status> {
        let dwords = len / 4 - 1;
        let command = Command {
            nsid: ALL_NAMESPACES,
            cdw10: u32::from(page.0) | dwords << 16,
            cdw11: dwords >> 16,
            cdw12: offset as u32,
            cdw13: (offset >> 32) as u32,
            ..Command::new_zeroed()
        };
        assert_eq!(super::len(&command), len.into());
        let health =
            Health { read: 512_001, reads: 3, errors: 2, became_read_only: true, ..Health::default() };
        answer(&properties(), &health, true, &command)
    }

    #[test]
    fn pages_are_as_long_as_asked_for() {
        for (page, all) in [
            (Page::ERRORS, 64),
            (Page::SMART, 512),
            (Page::FIRMWARE, 512),
            (Page::CHANGED_NAMESPACES, 4096),
            (Page::EFFECTS, 4096),
        ] {
            for len in [4, 64, 512, 4096, 1 << 20, u32::MAX - 3] {
                for offset in [0, 4, 64] {
                    let wanted = (len as usize).min(all - offset);
                    assert_eq!(get(page, len, offset as u64).map(|bytes| bytes.len()), Ok(wanted));
                }
                for offset in [2, all as u64 + 4, u64::MAX - 3] {
                    assert_eq!(get(page, len, offset), Err(Status::INVALID_FIELD.for_good()));
                }
            }
        }
        assert_eq!(get(Page(0x0d), 4, 0), Err(Status::INVALID_LOG_PAGE.for_good()));
    }

    #[test]
    fn pages_have_what_happened() {
        let smart = Smart::read_from_bytes(&get(Page::SMART, 512, 0).unwrap()).unwrap();
        let (read, reads, errors) = (smart.read_units, smart.reads, smart.media_errors);
        assert_eq!((read, reads, errors, smart.critical), ([2, 0], [3, 0], [2, 0], 8));
        let firmware = get(Page::FIRMWARE, 512, 0).unwrap();
        assert_eq!((firmware[0], &firmware[8..16]), (1, &b"1.0     "[..]));
        assert_eq!(get(Page::CHANGED_NAMESPACES, 8, 0), Ok(vec![1, 0, 0, 0, 0, 0, 0, 0]));
        let effects = Effects::read_from_bytes(&get(Page::EFFECTS, 4096, 0).unwrap()).unwrap();
        assert_eq!((effects.admin[6], effects.admin[0x7c], effects.admin[0x80]), (1, 0, 0));
        assert_eq!((effects.io[1], effects.io[2], effects.io[8], effects.io[9]), (3, 1, 3, 0));
        let one = Command { nsid: 1, cdw10: 2, ..Command::new_zeroed() };
        let refused = answer(&properties(), &Health::default(), false, &one);
        assert_eq!(refused, Err(Status::INVALID_NAMESPACE.for_good()));
        assert!(!retains_event(&one) && retains_event(&Command { cdw10: 1 << 15, ..one }));
    }
}
