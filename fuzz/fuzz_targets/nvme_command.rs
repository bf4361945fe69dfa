//! Commands of a hostile guest to an NVMe namespace, with PRPs and ranges, to a disk in memory and back.
//!
//! The input has the command and the beginning of the guest's memory. No operation may touch anything outside of the disk or change
//! a protected disk, a command has an end, and only a read changes the guest's memory, and only where the command's data lies.
#![no_main]

use ginnel_guest_memory::{Buffer, GuestMemory, Region};
use ginnel_layout::nvme::{Command, MAX_RANGES, Opcode};
use ginnel_nvme::identify::NSID;
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_volume::backend::{Backend, Op, Stores};
use ginnel_volume::device::Begin;
use ginnel_volume::device::nvme::{Namespace, Request};
use ginnel_volume::disk::Disk;
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;
use zerocopy::FromBytes;

const GUEST: u64 = 0x10_0000;
/// Bytes of each of the two regions.
const REGION: usize = 0x8000;
const DISK: u64 = 256 << 10;
const MAX_TRANSFER: u32 = 32 << 10;
/// An address beyond this number, which a choice removes, is in neither region.
const NEAR: u64 = 2 * REGION as u64 - 1;

fuzz_target!(|input: &[u8]| {
    let [choice, data @ ..] = input else { return };
    let Ok((command, data)) = Command::read_from_prefix(data) else { return };
    let command = likely(command, *choice);
    let (protected, block) = (choice & 1 != 0, if choice & 2 != 0 { 4096 } else { 512 });

    let data = &data[..data.len().min(REGION)];
    let regions = [0, 1].map(|_| Mapping::anonymous(REGION).unwrap());
    regions[0].write(0, data);
    let region = |n: usize| Region {
        guest: GUEST + (n * REGION) as u64,
        user: (n * REGION) as u64,
        memory: regions[n].clone(),
    };
    let guest = GuestMemory::new(vec![region(0), region(1)]).unwrap();
    let disk = Arc::new(Disk::new(DISK, block, protected, "serial"));
    let namespace = Namespace::new(disk.clone(), MAX_TRANSFER, true);
    let backend = Backend::Ram(Mapping::anonymous(DISK as usize).unwrap());
    let mut stores = Stores::new(&[backend], 0, None).unwrap();

    let before = all(&regions);
    let mut request = Request::default();
    let mut op = match namespace.begin(&guest, &command, &mut request) {
        Begin::Do { disk: 0, op } => op,
        Begin::Done(status) => {
            let hints = command.opcode == Opcode::DATASET_MANAGEMENT;
            assert!(hints || !status.is_success());
            return assert!(before == all(&regions));
        }
        other => panic!("{other:?}"),
    };
    let mut count = 0;
    let status = loop {
        check(op, &disk, &request);
        let result = stores.start(0, 0, op, &request.data, &guest).expect("memory is done at once");
        count += 1;
        match namespace.next(&guest, &mut request) {
            Some(next) => op = next,
            None => break namespace.finish(&request, op, result),
        }
    };
    assert!(count <= MAX_RANGES && (status.is_success() || count > 1 || matches!(op, Op::Discard { .. })));
    let changes: &[Buffer] = if let Op::Read { .. } = op { &request.data } else { &[] };
    let mut expected = before;
    for buffer in changes {
        let at = usize::from(buffer.region) * REGION + buffer.at;
        // The disk is empty, except for what this very command has written, and then it reads nothing.
        expected[at..at + buffer.len as usize].fill(0);
    }
    assert!(expected == all(&regions));
});

/// Makes a command more likely to be one that is executed, as the bits of `choice` say.
fn likely(mut command: Command, choice: u8) -> Command {
    let near = |address: u64| GUEST + (address & NEAR);
    if choice & 4 != 0 {
        (command.nsid, command.flags) = (NSID, 0);
        command.opcode = [
            Opcode::READ,
            Opcode::WRITE,
            Opcode::FLUSH,
            Opcode::WRITE_ZEROES,
            Opcode::DATASET_MANAGEMENT,
            Opcode::COMPARE,
        ][usize::from(command.opcode.0) % 6];
    }
    if choice & 8 != 0 {
        command.prp1 = near(command.prp1) & !3;
    }
    if choice & 16 != 0 {
        command.prp2 = near(command.prp2) & !7;
    }
    if choice & 32 != 0 {
        (command.cdw10, command.cdw12) = (command.cdw10 & 0x1ff, command.cdw12 & 0xffff_003f);
    }
    if choice & 64 != 0 {
        command.cdw11 = if command.opcode == Opcode::DATASET_MANAGEMENT { Command::AD } else { 0 };
    }
    command
}

/// Checks that an operation lies inside the disk, does not change a protected disk, and has as much data as it says.
fn check(op: Op, disk: &Disk, request: &Request) {
    let data: u64 = request.data.iter().map(|buffer| u64::from(buffer.len)).sum();
    let (at, len, writes) = match op {
        Op::Read { at } => (at, data, false),
        Op::Write { at, .. } => (at, data, true),
        Op::Discard { at, len } | Op::WriteZeroes { at, len, .. } => (at, len, true),
        Op::Flush => (0, 0, false),
    };
    assert!(disk.holds(at, len), "{op:?} of {len} bytes");
    assert!(!(writes && disk.read_only), "{op:?}");
    assert_eq!(matches!(op, Op::Read { .. } | Op::Write { .. }), data > 0);
    assert!(request.bytes == data && data <= MAX_TRANSFER.into());
}

fn all(regions: &[Mapping; 2]) -> Vec<u8> {
    let mut bytes = vec![0; 2 * REGION];
    for (region, bytes) in regions.iter().zip(bytes.chunks_exact_mut(REGION)) {
        region.read(0, bytes);
    }
    bytes
}
