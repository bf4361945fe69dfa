//! What the vfio_user target reads: the steps of a client.

use ginnel_layout::vfio_user::{
    Access, Command, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, IrqSet, RegionInfo, Version, pci,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// One step of a client. It is followed by `len` bytes: the body.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Step {
    /// The command; [`RAW`] for bytes without a header.
    pub command: u8,
    /// Half the number of descriptors in the lower four bits; then [`NO_REPLY`] and so on.
    pub flags: u8,
    pub len: [u8; 2],
}

/// A step without a header.
pub const RAW: u8 = 0xff;
/// The client wants no reply.
pub const NO_REPLY: u8 = 1 << 4;
/// The size in the header is wrong.
pub const WRONG_SIZE: u8 = 1 << 5;
/// The client does not read replies after this step.
pub const DEAF: u8 = 1 << 6;
/// The message comes in two pieces.
pub const CUT: u8 = 1 << 7;

/// Returns the input of a client that uses a device well, with these flags in each step.
pub fn session(flags: u8) -> Vec<u8> {
    let version = [Version::OURS.as_bytes(), b"{\"capabilities\":{}}\0"].concat();
    let map = DmaMap { argsz: 32, flags: 3, offset: 0, address: 0x10_0000, size: 0x10_0000 };
    let unmap = DmaUnmap { argsz: 24, flags: 0, address: 0x10_0000, size: 0x10_0000 };
    let info = DeviceInfo { argsz: 16, flags: 0, num_regions: 0, num_irqs: 0 };
    let region = RegionInfo { argsz: 32, flags: 0, index: 0, cap_offset: 0, size: 0, offset: 0 };
    let irqs = IrqInfo { argsz: 16, flags: 0, index: pci::MSIX, count: 0 };
    let action = IrqSet::DATA_EVENTFD | IrqSet::ACTION_TRIGGER;
    let set = IrqSet { argsz: 20, flags: action, index: pci::MSIX, start: 0, count: 2 };
    let access = Access { offset: 0x1000, region: 0, count: 4 };
    let steps: [(Command, u8, Vec<u8>); 11] = [
        (Command::VERSION, 0, version),
        (Command::DMA_MAP, 0, map.as_bytes().to_vec()),
        (Command::DEVICE_GET_INFO, 0, info.as_bytes().to_vec()),
        (Command::DEVICE_GET_REGION_INFO, 0, region.as_bytes().to_vec()),
        (Command::DEVICE_GET_IRQ_INFO, 0, irqs.as_bytes().to_vec()),
        (Command::DEVICE_SET_IRQS, 1, set.as_bytes().to_vec()),
        (Command::DEVICE_SET_IRQS, 0, set.as_bytes().to_vec()),
        (Command::REGION_READ, 0, access.as_bytes().to_vec()),
        (Command::REGION_WRITE, 0, [access.as_bytes(), &[1; 4]].concat()),
        (Command::DMA_UNMAP, 0, unmap.as_bytes().to_vec()),
        (Command::DEVICE_RESET, 0, Vec::new()),
    ];
    let bytes = |(command, fds, body): &(Command, u8, Vec<u8>)| {
        let len = (body.len() as u16).to_le_bytes();
        let step = Step { command: command.0 as u8, flags: flags | fds, len };
        [step.as_bytes(), body].concat()
    };
    steps.iter().flat_map(bytes).collect()
}
