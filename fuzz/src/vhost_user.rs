//! A vhost-user session as bytes: the actions of a front end, one step after the other.
//!
//! A step is [`STEP`] bytes of header and then its body. The header is a code, flags, and the low and high byte of the body's
//! length. Codes below [`RUN`] are messages of that number. Of the flags, the low four bits choose the descriptor that is sent
//! along, bit 4 asks for an acknowledgement, bit 5 sends a second descriptor, bit 6 sends the message in two pieces, and bit 7
//! sends a wrong length.

use ginnel_layout::vhost_user::{
    ConfigHeader, InflightArea, LogArea, MemoryRegion, Request, VringAddress, VringState, feature, protocol,
};
use ginnel_layout::virtio::feature as virtio;
use ginnel_layout::virtio_scsi::{Address, CDB_LEN, CommandHeader, CommandResponse, FIRST_COMMAND_QUEUE};
use ginnel_shmem::Mapping;
use ginnel_virtqueue::{InflightQueue, Kind};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The number of bytes of a step before its body.
pub const STEP: usize = size_of::<Step>();

/// The header of a step.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Step {
    /// The number of a message, or one of the codes below.
    pub code: u8,
    /// The flags, described at the top of this module.
    pub flags: u8,
    /// The length of the body, low byte first.
    pub len: [u8; 2],
}

/// Code of a step in which the workers serve the queues.
pub const RUN: u8 = 200;
/// Code of a step that writes to the guest's memory: the first two bytes of the body are the offset, the others are written.
pub const SCRIBBLE: u8 = 201;
/// Code of a step that truncates the guest's memory to as many pages as the body's first byte says.
pub const TRUNCATE: u8 = 202;
/// Code of a step that changes the size of the disk.
pub const RESIZE: u8 = 203;

/// The descriptors that can be sent along.
pub mod fd {
    pub const NONE: u8 = 0;
    pub const MEMORY: u8 = 1;
    pub const EVENT: u8 = 2;
    pub const SOCKET: u8 = 3;
    pub const PIPE: u8 = 4;
    pub const NULL: u8 = 5;
    pub const FOLDER: u8 = 6;
    pub const READ_ONLY: u8 = 7;
    /// The descriptor that came with the last answer.
    pub const ANSWERED: u8 = 8;
}

/// The flag that asks for an acknowledgement.
pub const ACK: u8 = 1 << 4;
/// The size of the guest's memory in bytes.
pub const MEMORY: u64 = 64 << 10;
/// The addresses of the memory for the guest (`GUEST`) and for the front end (`USER`).
pub const GUEST: u64 = 0x1_0000;
pub const USER: u64 = 0x7000_0000;

/// The number of descriptors of a queue in the seeds.
const SIZE: u16 = 8;

fn step(into: &mut Vec<u8>, code: u8, flags: u8, body: &[u8]) {
    into.extend(Step { code, flags, len: (body.len() as u16).to_le_bytes() }.as_bytes());
    into.extend(body);
}

/// Returns a whole session of an honest front end, of a blk device or of a SCSI target. The first two queues of a SCSI target
/// are not for commands.
pub fn session(packed: bool, scsi: bool, disturb: u8) -> Vec<u8> {
    let first = if scsi { u32::from(FIRST_COMMAND_QUEUE) } else { 0 };
    let mut all = Vec::new();
    let s = &mut all;
    let mut say = |request: Request, flags: u8, body: &[u8]| step(s, request.0 as u8, flags, body);
    say(Request::GET_FEATURES, 0, &[]);
    say(Request::GET_PROTOCOL_FEATURES, 0, &[]);
    let agreed = protocol::MQ
        | protocol::LOG_SHMFD
        | protocol::REPLY_ACK
        | protocol::BACKEND_REQ
        | protocol::CONFIG
        | protocol::INFLIGHT_SHMFD
        | protocol::CONFIGURE_MEM_SLOTS;
    say(Request::SET_PROTOCOL_FEATURES, 0, agreed.as_bytes());
    say(Request::GET_QUEUE_NUM, 0, &[]);
    say(Request::GET_MAX_MEM_SLOTS, 0, &[]);
    say(Request::SET_BACKEND_REQ_FD, fd::SOCKET | ACK, &[]);
    say(Request::SET_OWNER, ACK, &[]);
    let kind = if packed { virtio::RING_PACKED } else { 0 };
    let features = virtio::VERSION_1 | virtio::EVENT_IDX | virtio::INDIRECT_DESC | kind;
    say(Request::SET_FEATURES, ACK, (features | feature::PROTOCOL_FEATURES).as_bytes());
    let config = ConfigHeader { offset: 0, size: 60, flags: 0 };
    say(Request::GET_CONFIG, 0, &[config.as_bytes(), &[0; 60]].concat());
    let queues = first as u16 + 2;
    let area = InflightArea { size: 0, offset: 0, queues, queue_size: SIZE, padding: 0 };
    say(Request::GET_INFLIGHT_FD, 0, area.as_bytes());
    // No larger than the answer says, because otherwise the session ends here.
    let kind = if packed { Kind::Packed } else { Kind::Split };
    let size = u64::from(queues) * InflightQueue::<Mapping>::len(kind, SIZE) as u64;
    let area = InflightArea { size, ..area };
    say(Request::SET_INFLIGHT_FD, fd::ANSWERED | ACK, area.as_bytes());
    let region = MemoryRegion { guest: GUEST, size: MEMORY, user: USER, offset: 0 };
    let table = [&[1, 0, 0, 0, 0, 0, 0, 0], region.as_bytes()].concat();
    say(Request::SET_MEM_TABLE, fd::MEMORY | ACK, &table);
    for index in first..first + 2 {
        let at = USER + 0x1000 * u64::from(index - first);
        let state = |value| VringState { index, value };
        let base = if packed { 0x8000_8000 } else { 0 };
        say(Request::SET_VRING_NUM, ACK, state(SIZE.into()).as_bytes());
        say(Request::SET_VRING_BASE, ACK, state(base).as_bytes());
        let (descriptors, available, used) = (at, at + 0x400, at + 0x800);
        let flags = if disturb == 1 { VringAddress::LOG } else { 0 };
        let address = VringAddress { index, flags, descriptors, used, available, log: 0 };
        say(Request::SET_VRING_ADDR, ACK, address.as_bytes());
        for request in [Request::SET_VRING_ERR, Request::SET_VRING_CALL, Request::SET_VRING_KICK] {
            say(request, fd::EVENT | ACK, u64::from(index).as_bytes());
        }
    }
    for index in first..first + 2 {
        say(Request::SET_VRING_ENABLE, ACK, VringState { index, value: 1 }.as_bytes());
    }
    if disturb == 1 {
        say(Request::SET_LOG_BASE, fd::MEMORY, LogArea { size: 0x4000, offset: 0xc000 }.as_bytes());
        let log = features | feature::PROTOCOL_FEATURES | feature::LOG_ALL;
        say(Request::SET_FEATURES, ACK, log.as_bytes());
        let config = ConfigHeader { offset: 32, size: 1, flags: 0 };
        say(Request::SET_CONFIG, ACK, &[config.as_bytes(), &[0]].concat());
    }
    for queue in 0..2u16 {
        requests(s, queue, packed, scsi);
        step(s, RUN, 0, &[]);
    }
    let mut say = |request: Request, flags: u8, body: &[u8]| step(s, request.0 as u8, flags, body);
    match disturb {
        0 | 1 => {}
        2 => {
            let region = MemoryRegion { guest: 1 << 30, size: 4096, user: 1 << 40, offset: 4096 };
            let body = [&[0; 8], region.as_bytes()].concat();
            say(Request::ADD_MEM_REG, fd::MEMORY | ACK, &body);
            say(Request::REM_MEM_REG, ACK, &body);
            step(s, RESIZE, 0, &[9]);
        }
        3 => step(s, TRUNCATE, 0, &[1]),
        _ => say(Request::RESET_DEVICE, ACK, &[]),
    }
    step(s, RUN, 0, &[]);
    for index in first..first + 2 {
        step(s, Request::GET_VRING_BASE.0 as u8, 0, VringState { index, value: 0 }.as_bytes());
    }
    all
}

/// Adds a write and a read in a queue: header, one sector of data, and the answer. The answer of a SCSI target comes before the
/// data that is read.
fn requests(s: &mut Vec<u8>, queue: u16, packed: bool, scsi: bool) {
    let mut scribble = |at: u16, bytes: &[u8]| step(s, SCRIBBLE, 0, &[&at.to_le_bytes(), bytes].concat());
    let ring = 0x1000 * queue;
    let data = 0x4000 + 0x2000 * queue;
    let mut descriptors = Vec::new();
    for (number, write) in [(0u16, true), (1, false)] {
        let place = data + 0x1000 * number;
        let sector = 3u64;
        let header = match scsi {
            false => [u32::from(write).as_bytes(), &[0; 4], sector.as_bytes()].concat(),
            true => {
                let mut cdb = [0; CDB_LEN];
                cdb[..9].copy_from_slice(&[if write { 0x2a } else { 0x28 }, 0, 0, 0, 0, 3, 0, 0, 1]);
                let lun = Address::bytes(0, 0);
                let header = CommandHeader { lun, tag: 7, task_attribute: 0, priority: 0, crn: 0, cdb };
                header.as_bytes().to_vec()
            }
        };
        scribble(place, &header);
        let guest = GUEST + u64::from(place);
        let answer = if scsi { size_of::<CommandResponse>() as u32 } else { 1 };
        // In the flags, 1 means next and 2 means write; 128 is the available bit of a packed ring.
        let sector = (guest + 512, 512, if write { 1 } else { 3 });
        let parts = match scsi && !write {
            false => [(guest, header.len() as u32, 1u16), sector, (guest + 1024, answer, 2)],
            true => [(guest, header.len() as u32, 1), (guest + 1024, answer, 3), (guest + 512, 512, 2)],
        };
        for (at, (address, len, flags)) in parts.into_iter().enumerate() {
            descriptors.extend(address.to_le_bytes());
            descriptors.extend(len.to_le_bytes());
            if packed {
                descriptors.extend(number.to_le_bytes());
                descriptors.extend((flags | 128).to_le_bytes());
            } else {
                descriptors.extend(flags.to_le_bytes());
                descriptors.extend((3 * number + at as u16 + 1).to_le_bytes());
            }
        }
    }
    scribble(ring, &descriptors);
    if !packed {
        // Flags, index, and the two heads.
        scribble(ring + 0x400, [0u16, 2, 0, 3].as_bytes());
    }
}
