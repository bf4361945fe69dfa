//! The answers to Identify (5.15): one controller with one namespace, number 1.

use ginnel_layout::nvme::identify::{
    Cns, Controller, DescriptorHeader, LEN, Namespace, dlfeat, lpa, nsfeat, oacs, oncs, vwc,
};
use ginnel_layout::nvme::{ALL_NAMESPACES, Command, Status, VS_1_4, event};
use zerocopy::{FromZeros, IntoBytes};

/// The number of the only namespace.
pub const NSID: u32 = 1;
/// How many Abort commands a controller takes at a time.
pub const ABORTS: u8 = 4;
/// How many Asynchronous Event Requests a controller takes at a time.
pub const ASYNC_EVENTS: u8 = 4;

/// What a controller says about itself and its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// PCI vendor ID, and subsystem vendor ID.
    pub vendor: [u16; 2],
    /// Serial number, at most 20 characters of ASCII. Longer ones are cut off, and other characters become "?".
    pub serial: String,
    /// Model number, at most 40 characters.
    pub model: String,
    /// Firmware revision, at most 8 characters.
    pub firmware: String,
    /// Names the subsystem and the namespace. No two controllers of a guest may have the same one.
    pub uuid: [u8; 16],
    /// The largest transfer is `4096 << mdts` bytes.
    pub mdts: u8,
    /// Whether there are shadow doorbells.
    pub doorbell_buffer: bool,
    /// Whether there is a volatile write cache, which Flush empties.
    pub write_cache: bool,
    /// Size of the namespace in blocks.
    pub blocks: u64,
    /// The size of a block is `1 << block_exponent` bytes: 9 to 16.
    pub block_exponent: u8,
    /// Whether the namespace can only be read.
    pub read_only: bool,
    /// Whether blocks can be deallocated: Dataset Management, and Write Zeroes with DEAC.
    pub deallocate: bool,
    /// Whether there is Write Zeroes.
    pub write_zeroes: bool,
    /// Whether deallocated blocks always read as zeros.
    pub reads_zeros: bool,
    /// Preferred granularity and alignment of writes and of deallocation, in blocks; 0 if there is none.
    pub granularity: u32,
    /// Optimal size of a transfer, in blocks; 0 if there is none.
    pub optimal: u32,
}

/// Returns the answer to an Identify command.
pub fn answer(properties: &Properties, command: &Command) -> Result<[u8; LEN], Status> {
    let one_namespace = |answer: [u8; LEN]| match command.nsid {
        NSID => Ok(answer),
        _ => Err(Status::INVALID_NAMESPACE.for_good()),
    };
    match Cns(command.cdw10 as u8) {
        // For all namespaces, it describes what they have in common, which is nothing if they cannot be managed.
        Cns::NAMESPACE => one_namespace(namespace(properties)),
        Cns::CONTROLLER => Ok(controller(properties)),
        Cns::ACTIVE => active(command.nsid),
        Cns::DESCRIPTORS => one_namespace(descriptors(properties)),
        _ => Err(Status::INVALID_FIELD.for_good()),
    }
}

/// Returns Identify Controller.
pub fn controller(properties: &Properties) -> [u8; LEN] {
    let Properties { vendor, doorbell_buffer, write_cache, deallocate, write_zeroes, .. } = *properties;
    let mut controller = Controller::new_zeroed();
    [controller.vid, controller.ssvid] = vendor;
    controller.sn = padded(&properties.serial);
    controller.mn = padded(&properties.model);
    controller.fr = padded(&properties.firmware);
    controller.mdts = properties.mdts;
    controller.ver = VS_1_4;
    controller.oaes = event::NAMESPACE_NOTICES;
    controller.cntrltype = 1;
    controller.oacs = if doorbell_buffer { oacs::DOORBELL_BUFFER } else { 0 };
    controller.acl = ABORTS - 1;
    controller.aerl = ASYNC_EVENTS - 1;
    // One slot, which is read-only.
    controller.frmw = 1 | 1 << 1;
    controller.lpa = lpa::EFFECTS | lpa::EXTENDED;
    // Both the required and the maximum size.
    controller.sqes = 6 | 6 << 4;
    controller.cqes = 4 | 4 << 4;
    controller.nn = NSID;
    controller.oncs = if deallocate { oncs::DATASET_MANAGEMENT } else { 0 }
        | if write_zeroes { oncs::WRITE_ZEROES } else { 0 };
    controller.vwc = vwc::FLUSH_ALL | if write_cache { vwc::PRESENT } else { 0 };
    let nqn = format!("nqn.2014-08.org.nvmexpress:uuid:{}", hyphenated(&properties.uuid));
    controller.subnqn[..nqn.len()].copy_from_slice(nqn.as_bytes());
    bytes(&controller)
}

/// Returns Identify Namespace.
pub fn namespace(properties: &Properties) -> [u8; LEN] {
    let Properties { blocks, block_exponent, deallocate, granularity, optimal, .. } = *properties;
    let mut namespace = Namespace::new_zeroed();
    (namespace.nsze, namespace.ncap, namespace.nuse) = (blocks, blocks, blocks);
    let bytes_of_all = u128::from(blocks) << block_exponent;
    namespace.nvmcap = [bytes_of_all as u64, (bytes_of_all >> 64) as u64];
    namespace.lbaf[0] = u32::from(block_exponent) << 16;
    if granularity > 0 || optimal > 0 {
        let count = |blocks: u32| u16::try_from(blocks.max(1) - 1).unwrap_or(u16::MAX);
        namespace.nsfeat |= nsfeat::OPTIMAL;
        (namespace.npwg, namespace.npwa) = (count(granularity), count(granularity));
        (namespace.npdg, namespace.npda) = (count(granularity), count(granularity));
        namespace.nows = count(optimal.max(granularity));
    }
    if properties.reads_zeros {
        namespace.dlfeat |= dlfeat::ZEROS;
    }
    if deallocate && properties.write_zeroes {
        namespace.dlfeat |= dlfeat::WRITE_ZEROES;
    }
    namespace.nsattr = properties.read_only.into();
    namespace.nguid = properties.uuid;
    bytes(&namespace)
}

/// Returns the list of active namespaces behind this one.
fn active(behind: u32) -> Result<[u8; LEN], Status> {
    if behind >= ALL_NAMESPACES - 1 {
        return Err(Status::INVALID_NAMESPACE.for_good());
    }
    let mut list = [0; LEN];
    if behind < NSID {
        list[..4].copy_from_slice(&NSID.to_le_bytes());
    }
    Ok(list)
}

/// Returns the namespace identification descriptors: the NGUID, as in Identify Namespace, and the UUID.
fn descriptors(properties: &Properties) -> [u8; LEN] {
    let mut list = [0; LEN];
    let mut at = 0;
    for nidt in [DescriptorHeader::NGUID, DescriptorHeader::UUID] {
        let header = DescriptorHeader { nidt, nidl: 16, reserved: [0; 2] };
        for part in [header.as_bytes(), &properties.uuid] {
            list[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    }
    list
}

/// Returns the structure's bytes. Both have 4096.
fn bytes(structure: &(impl IntoBytes + zerocopy::Immutable)) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes.copy_from_slice(structure.as_bytes());
    bytes
}

/// Returns a text as a field of ASCII characters, padded with spaces (1.5).
pub(crate) fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    for (to, from) in field.iter_mut().zip(text.chars()) {
        *to = if matches!(from, ' '..='~') { from as u8 } else { b'?' };
    }
    field
}

fn hyphenated(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    fn properties() -> Properties {
        Properties {
            vendor: [0x1234, 0x5678],
            serial: "vol-1".into(),
            model: "A disk with a name of more than forty characters".into(),
            firmware: "1.2\u{e9}".into(),
            uuid: *b"0123456789abcdef",
            mdts: 7,
            doorbell_buffer: true,
            write_cache: true,
            blocks: 1 << 40,
            block_exponent: 12,
            read_only: false,
            deallocate: true,
            write_zeroes: true,
            reads_zeros: true,
            granularity: 16,
            optimal: 0,
        }
    }

    fn identify(cns: Cns, nsid: u32) -> Result<[u8; LEN], Status> {
        let command = Command { nsid, cdw10: cns.0.into(), ..Command::new_zeroed() };
        answer(&properties(), &command)
    }

    #[test]
    fn a_controller_has_padded_names() {
        let c = Controller::read_from_bytes(&identify(Cns::CONTROLLER, 0).unwrap()).unwrap();
        assert_eq!((c.vid, c.ssvid, c.mdts, c.nn), (0x1234, 0x5678, 7, 1));
        assert_eq!(&c.sn, b"vol-1               ");
        assert_eq!(&c.mn, b"A disk with a name of more than forty ch");
        assert_eq!(&c.fr, b"1.2?    ");
        let nqn = b"nqn.2014-08.org.nvmexpress:uuid:30313233-3435-3637-3839-616263646566";
        assert_eq!(&c.subnqn[..nqn.len()], nqn);
        assert!(c.subnqn[nqn.len()..].iter().all(|byte| *byte == 0));
        assert_eq!((c.oacs, c.oncs, c.vwc, c.sqes, c.cqes), (0x100, 0xc, 7, 0x66, 0x44));
        let small = Properties {
            doorbell_buffer: false,
            write_cache: false,
            deallocate: false,
            write_zeroes: false,
            ..properties()
        };
        let c = Controller::read_from_bytes(&controller(&small)).unwrap();
        assert_eq!((c.oacs, c.oncs, c.vwc), (0, 0, 6));
    }

    #[test]
    fn a_namespace_has_one_format() {
        let n = Namespace::read_from_bytes(&identify(Cns::NAMESPACE, 1).unwrap()).unwrap();
        assert_eq!((n.nsze, n.ncap, n.nuse, n.nlbaf, n.flbas), (1 << 40, 1 << 40, 1 << 40, 0, 0));
        let (lbaf, nvmcap) = (n.lbaf, n.nvmcap);
        assert_eq!((lbaf[0], nvmcap), (12 << 16, [1 << 52, 0]));
        assert_eq!((n.nsfeat, n.npwg, n.npda, n.nows, n.dlfeat, n.nsattr), (0x10, 15, 15, 15, 9, 0));
        assert_eq!(n.nguid, properties().uuid);
        let plain = Properties {
            granularity: 0,
            reads_zeros: false,
            deallocate: false,
            read_only: true,
            ..properties()
        };
        let n = Namespace::read_from_bytes(&namespace(&plain)).unwrap();
        assert_eq!((n.nsfeat, n.npwg, n.nows, n.dlfeat, n.nsattr), (0, 0, 0, 0, 1));
        for nsid in [0, 2, ALL_NAMESPACES] {
            assert_eq!(identify(Cns::NAMESPACE, nsid), Err(Status::INVALID_NAMESPACE.for_good()));
            assert_eq!(identify(Cns::DESCRIPTORS, nsid), Err(Status::INVALID_NAMESPACE.for_good()));
        }
    }

    #[test]
    fn there_is_one_namespace() {
        assert_eq!(&identify(Cns::ACTIVE, 0).unwrap()[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(identify(Cns::ACTIVE, 1), Ok([0; LEN]));
        assert_eq!(identify(Cns::ACTIVE, ALL_NAMESPACES - 1), Err(Status::INVALID_NAMESPACE.for_good()));
        assert_eq!(identify(Cns(6), 1), Err(Status::INVALID_FIELD.for_good()));
        let descriptors = identify(Cns::DESCRIPTORS, 1).unwrap();
        assert_eq!(&descriptors[..4], [2, 16, 0, 0]);
        assert_eq!(&descriptors[20..24], [3, 16, 0, 0]);
        assert_eq!(descriptors[24..40], properties().uuid);
        assert!(descriptors[40..].iter().all(|byte| *byte == 0));
    }
}
