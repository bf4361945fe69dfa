use super::*;
use ginnel_guest_memory::Region;
use ginnel_shmem::SharedMemory;
use zerocopy::{FromZeros, IntoBytes};

const BYTES: u64 = 1 << 20;
const MAX_TRANSFER: u32 = 64 << 10;
/// The guest's memory.
const GUEST: u64 = 0x10_0000;

fn disk() -> Disk {
    Disk::new(BYTES, 512, false, "serial")
}

fn namespace(disk: Disk) -> Namespace {
    Namespace::new(Arc::new(disk), MAX_TRANSFER, true)
}

fn command(opcode: Opcode) -> Command {
    Command { opcode, nsid: NSID, ..Command::new_zeroed() }
}

/// Returns a command for `blocks` (1 to 65536) blocks.
fn blocks(opcode: Opcode, slba: u64, blocks: u32) -> Command {
    Command { cdw10: slba as u32, cdw11: (slba >> 32) as u32, cdw12: blocks - 1, ..command(opcode) }
}

fn planned(command: &Command) -> Result<Plan, Status> {
    namespace(disk()).plan(command)
}

#[test]
fn blocks_become_bytes() {
    let read = |at, bytes| Ok(Plan::Transfer { op: Op::Read { at }, bytes });
    let write = |at, bytes| Ok(Plan::Transfer { op: Op::Write { at, through: false }, bytes });
    assert_eq!(planned(&blocks(Opcode::READ, 0, 1)), read(0, 512));
    assert_eq!(planned(&blocks(Opcode::READ, 2047, 1)), read(BYTES - 512, 512));
    assert_eq!(planned(&blocks(Opcode::WRITE, 3, 128)), write(3 * 512, 64 << 10));
    let large = namespace(Disk::new(1 << 50, 4096, false, ""));
    assert_eq!(large.plan(&blocks(Opcode::READ, 1 << 33, 16)), read(1 << 45, 64 << 10));
}

#[test]
fn a_range_must_lie_in_the_namespace() {
    for opcode in [Opcode::READ, Opcode::WRITE, Opcode::WRITE_ZEROES] {
        for (slba, n) in [
            (2048, 1),
            (2047, 2),
            (0, 2049),
            (u64::MAX, 1),
            (u64::MAX, 65536),
            (u64::MAX - 1, 2),
            (1 << 55, 1),
            ((1 << 55) - 1, 2),
            (1 << 63, 1),
        ] {
            assert_eq!(planned(&blocks(opcode, slba, n)), Err(Status::LBA_RANGE), "{opcode:?} {slba} {n}");
        }
    }
}

#[test]
fn a_transfer_is_no_longer_than_said() {
    for opcode in [Opcode::READ, Opcode::WRITE] {
        assert!(planned(&blocks(opcode, 0, 128)).is_ok());
        assert_eq!(planned(&blocks(opcode, 0, 129)), Err(Status::INVALID_FIELD));
    }
    let op = Op::WriteZeroes { at: 0, len: BYTES, unmap: false, through: false };
    assert_eq!(planned(&blocks(Opcode::WRITE_ZEROES, 0, 2048)), Ok(Plan::Op(op)), "it has no data");
}

#[test]
fn durable_writes() {
    let fua = |opcode| {
        let command = blocks(opcode, 0, 1);
        Command { cdw12: command.cdw12 | Command::FUA, ..command }
    };
    let write = |through| Ok(Plan::Transfer { op: Op::Write { at: 0, through }, bytes: 512 });
    let zeroes = |through| Ok(Plan::Op(Op::WriteZeroes { at: 0, len: 512, unmap: false, through }));
    assert_eq!(planned(&blocks(Opcode::WRITE, 0, 1)), write(false));
    assert_eq!(planned(&fua(Opcode::WRITE)), write(true));
    assert_eq!(planned(&blocks(Opcode::WRITE_ZEROES, 0, 1)), zeroes(false));
    assert_eq!(planned(&fua(Opcode::WRITE_ZEROES)), zeroes(true));
    let read = Plan::Transfer { op: Op::Read { at: 0 }, bytes: 512 };
    assert_eq!(planned(&fua(Opcode::READ)), Ok(read));
    let uncached = namespace(disk());
    uncached.disk().turn_cache(false);
    assert_eq!(uncached.plan(&blocks(Opcode::WRITE, 0, 1)), write(true));
    assert_eq!(uncached.plan(&blocks(Opcode::WRITE_ZEROES, 0, 1)), zeroes(true));
}

#[test]
fn zeroes_may_give_space_back() {
    let command = blocks(Opcode::WRITE_ZEROES, 8, 8);
    let command = Command { cdw12: command.cdw12 | Command::DEAC, ..command };
    let op = Op::WriteZeroes { at: 4096, len: 4096, unmap: true, through: false };
    assert_eq!(planned(&command), Ok(Plan::Op(op)));
}

#[test]
fn only_namespace_1_exists() {
    for opcode in
        [Opcode::READ, Opcode::WRITE, Opcode::WRITE_ZEROES, Opcode::DATASET_MANAGEMENT, Opcode::FLUSH]
    {
        for nsid in [0, 2, ALL_NAMESPACES] {
            let found = planned(&Command { nsid, ..command(opcode) });
            if (opcode, nsid) == (Opcode::FLUSH, ALL_NAMESPACES) {
                assert_eq!(found, Ok(Plan::Op(Op::Flush)));
            } else {
                assert_eq!(found, Err(Status::INVALID_NAMESPACE), "{opcode:?} {nsid:#x}");
            }
        }
        for flags in [1, 2, 0x40, 0x80] {
            let found = planned(&Command { flags, ..command(opcode) });
            assert_eq!(found, Err(Status::INVALID_FIELD), "fused, or with SGLs");
        }
    }
    assert_eq!(planned(&command(Opcode::FLUSH)), Ok(Plan::Op(Op::Flush)));
}

#[test]
fn other_commands_do_not_exist() {
    let known =
        [Opcode::FLUSH, Opcode::WRITE, Opcode::READ, Opcode::WRITE_ZEROES, Opcode::DATASET_MANAGEMENT];
    for opcode in (0..=255).map(Opcode).filter(|opcode| !known.contains(opcode)) {
        assert_eq!(planned(&command(opcode)), Err(Status::INVALID_OPCODE), "{opcode:?}");
    }
    let thick = Namespace::new(Arc::new(disk()), MAX_TRANSFER, false);
    for opcode in [Opcode::WRITE_ZEROES, Opcode::DATASET_MANAGEMENT] {
        assert_eq!(thick.plan(&command(opcode)), Err(Status::INVALID_OPCODE));
    }
}

#[test]
fn a_read_only_disk_takes_nothing() {
    let protected = namespace(Disk::new(BYTES, 512, true, ""));
    let deallocate = Command { cdw11: Command::AD, ..command(Opcode::DATASET_MANAGEMENT) };
    for command in [blocks(Opcode::WRITE, 0, 1), blocks(Opcode::WRITE_ZEROES, 0, 1), deallocate] {
        assert_eq!(protected.plan(&command), Err(Status::WRITE_PROTECTED));
    }
    assert!(protected.plan(&blocks(Opcode::READ, 0, 1)).is_ok());
    assert!(protected.plan(&command(Opcode::FLUSH)).is_ok());
}

#[test]
fn a_failure_is_never_a_success() {
    let namespace = namespace(disk());
    let request = Request::default();
    let ops = [
        Op::Flush,
        Op::Read { at: 0 },
        Op::Write { at: 0, through: true },
        Op::Discard { at: 0, len: 1 },
        Op::WriteZeroes { at: 0, len: 1, unmap: true, through: true },
    ];
    let failures = [
        Failure::Unsupported,
        Failure::Truncated,
        Failure::Errno(libc::EIO),
        Failure::Errno(libc::ENOSPC),
        Failure::Errno(0),
        Failure::Lost(libc::EIO),
        Failure::Lost(0),
        Failure::LostEarlier,
    ];
    for op in ops {
        assert_eq!(namespace.finish(&request, op, Ok(())), Status::SUCCESS);
        for failure in failures {
            let status = namespace.finish(&request, op, Err(failure));
            assert!(!status.is_success() && status == status.for_good(), "{op:?} {failure:?}");
        }
    }
    let ended = |op, failure| namespace.finish(&request, op, Err(failure)).code();
    assert_eq!(ended(ops[1], Failure::Truncated), Status::READ_ERROR);
    assert_eq!(ended(ops[0], Failure::Lost(libc::EIO)), Status::WRITE_FAULT);
    assert_eq!(ended(ops[0], Failure::LostEarlier), Status::WRITE_FAULT);
    assert_eq!(ended(ops[2], Failure::Errno(libc::ENOSPC)), Status::CAPACITY_EXCEEDED);
    assert_eq!(ended(ops[2], Failure::Errno(libc::EDQUOT)), Status::CAPACITY_EXCEEDED);
    assert_eq!(ended(ops[3], Failure::Unsupported), Status::INVALID_OPCODE);
}

/// A namespace, and a guest with 64 KiB of memory.
struct Rig {
    namespace: Namespace,
    memory: Mapping,
    guest: GuestMemory<Mapping>,
    request: Request,
}

impl Rig {
    fn new(disk: Disk) -> Self {
        let memory = Mapping::anonymous(64 << 10).unwrap();
        let region = Region { guest: GUEST, user: 0, memory: memory.clone() };
        let guest = GuestMemory::new(vec![region]).unwrap();
        Self { namespace: namespace(disk), memory, guest, request: Request::default() }
    }

    fn begin(&mut self, command: &Command) -> Begin<Status> {
        self.namespace.begin(&self.guest, command, &mut self.request)
    }

    /// Begins a command that deallocates ranges, each a first block and a number of blocks.
    fn deallocate(&mut self, ranges: &[(u64, u32)]) -> Begin<Status> {
        for (n, (slba, blocks)) in ranges.iter().enumerate() {
            let range = Range { attributes: 0xffff_ffff, blocks: *blocks, slba: *slba };
            self.memory.write(n * RANGE as usize, range.as_bytes());
        }
        self.begin(&Command {
            prp1: GUEST,
            cdw10: ranges.len() as u32 - 1,
            cdw11: Command::AD,
            ..command(Opcode::DATASET_MANAGEMENT)
        })
    }

    /// Returns all operations of the command, the first of which is `first`, and its status.
    fn all(&mut self, first: Begin<Status>) -> (Vec<Op>, Status) {
        let mut ops = Vec::new();
        let mut begun = first;
        loop {
            let op = match begun {
                Begin::Done(status) => return (ops, status),
                Begin::Do { disk: 0, op } => op,
                other => panic!("{other:?}"),
            };
            ops.push(op);
            begun = match self.namespace.next(&self.guest, &mut self.request) {
                Some(op) => Begin::Do { disk: 0, op },
                None => Begin::Done(self.namespace.finish(&self.request, op, Ok(()))),
            };
        }
    }
}

fn discard(at: u64, len: u64) -> Op {
    Op::Discard { at, len }
}

#[test]
fn data_lies_where_the_prps_say() {
    let mut rig = Rig::new(disk());
    let read = Command { prp1: GUEST + 0x100, ..blocks(Opcode::READ, 7, 1) };
    assert_eq!(rig.begin(&read), Begin::Do { disk: 0, op: Op::Read { at: 7 * 512 } });
    assert_eq!(rig.request.data, [Buffer { region: 0, at: 0x100, len: 512 }]);
    assert_eq!(rig.request.bytes, 512);
    let outside = Command { prp1: GUEST + (64 << 10), ..read };
    let Begin::Done(status) = rig.begin(&outside) else { panic!("it lies nowhere") };
    assert!(!status.is_success());
    // Nothing of the previous command is left.
    assert_eq!(rig.begin(&command(Opcode::FLUSH)), Begin::Do { disk: 0, op: Op::Flush });
    assert!(rig.request.data.is_empty() && rig.request.bytes == 0 && !rig.request.has_more());
}

#[test]
fn ranges_are_deallocated_one_after_the_other() {
    let mut rig = Rig::new(disk());
    let begun = rig.deallocate(&[(0, 8), (100, 1), (2047, 1)]);
    assert!(rig.request.has_more() && rig.request.bytes == 0);
    let ops = vec![discard(0, 4096), discard(51_200, 512), discard(BYTES - 512, 512)];
    assert_eq!(rig.all(begun), (ops, Status::SUCCESS));
    assert!(!rig.request.has_more());
    let begun = rig.deallocate(&[(1, 0), (2, 0), (3, 1), (4, 0)]);
    assert_eq!(rig.all(begun), (vec![discard(1536, 512)], Status::SUCCESS), "some are empty");
    let begun = rig.deallocate(&[(5, 0); 256]);
    assert_eq!(begun, Begin::Done(Status::SUCCESS), "all are empty");
    let begun = rig.deallocate(&[(5, 1); 256]);
    assert_eq!(rig.all(begun), (vec![discard(2560, 512); 256], Status::SUCCESS));
    let hints = Command { cdw11: 3, prp1: 1, cdw10: 255, ..command(Opcode::DATASET_MANAGEMENT) };
    assert_eq!(rig.begin(&hints), Begin::Done(Status::SUCCESS));
}

#[test]
fn a_range_outside_ends_the_command() {
    let mut rig = Rig::new(disk());
    let outside = Status::LBA_RANGE.for_good();
    for range in [(2048, 1), (2047, 2), (0, u32::MAX), (u64::MAX, 1), (1 << 55, u32::MAX)] {
        let begun = rig.deallocate(&[range, (0, 1)]);
        assert_eq!(begun, Begin::Done(outside), "{range:?}");
        let begun = rig.deallocate(&[(0, 1), range, (2, 1)]);
        assert_eq!(rig.all(begun), (vec![discard(0, 512)], outside), "{range:?}");
    }
    let begun = rig.deallocate(&[(0, 1)]);
    assert_eq!(rig.all(begun), (vec![discard(0, 512)], Status::SUCCESS), "the status was forgotten");
    let nowhere = Command { prp1: 0x1000, cdw11: Command::AD, ..command(Opcode::DATASET_MANAGEMENT) };
    let Begin::Done(status) = rig.begin(&nowhere) else { panic!("there are no ranges") };
    assert!(!status.is_success());
}

#[test]
fn a_large_range_is_deallocated_in_parts() {
    let mut rig = Rig::new(Disk::new(1 << 50, 4096, false, ""));
    let begun = rig.deallocate(&[(1, (5 << 17) + 1), (0, 1)]);
    let ops = vec![
        discard(4096, MAX_PART),
        discard(4096 + MAX_PART, MAX_PART),
        discard(4096 + 2 * MAX_PART, MAX_PART / 2 + 4096),
        discard(0, 4096),
    ];
    assert_eq!(rig.all(begun), (ops, Status::SUCCESS));
}
