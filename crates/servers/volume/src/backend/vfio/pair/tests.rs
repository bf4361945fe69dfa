//! Operations, and a device that executes their commands as the specification says, on memory that it reaches by other addresses.

use super::super::dma::Attached;
use super::*;
use crate::backend::commands::CommandLimits;
use crate::backend::{Failure, Op};
use ginnel_guest_memory::{Buffer, GuestMemory, Region};
use ginnel_layout::nvme::{Range, Status};
use proptest::prelude::*;
use zerocopy::FromBytes;

const REGION: usize = 1 << 20;
const DISK: usize = 1 << 20;
const QUEUES: u64 = 0x7000_0000;
const NSID: u32 = 3;

/// A device with one namespace.
struct Device {
    /// What it reaches, at its addresses.
    memory: GuestMemory<Mapping>,
    queues: Mapping,
    layout: Layout,
    disk: Vec<u8>,
    block: u64,
    head: usize,
    tail: usize,
    phase: bool,
    entries: usize,
    /// The next command fails with this status.
    fails: Option<Status>,
}

impl Device {
    /// Executes the next command.
    fn execute(&mut self) -> Command {
        let mut bytes = [0; COMMAND];
        self.queues.read(COMMAND * self.head, &mut bytes);
        let command = Command::read_from_bytes(&bytes).unwrap();
        self.head = (self.head + 1) % self.entries;
        assert_eq!((command.nsid, command.flags), (NSID, 0));
        let status = self.fails.take().unwrap_or_else(|| self.perform(&command));
        let at = self.layout.completions + COMPLETION * self.tail;
        let word = Completion::word(self.head as u16, 1, command.cid, status, self.phase);
        self.queues.store_release_u64(at + 8, word);
        self.tail = (self.tail + 1) % self.entries;
        self.phase ^= self.tail == 0;
        command
    }

    fn data(&self, command: &Command, len: u64) -> Vec<Buffer> {
        let mut buffers = Vec::new();
        ginnel_nvme::prp::buffers(&self.memory, command.prp1, command.prp2, len as u32, 1024, &mut buffers)
            .unwrap_or_else(|status| panic!("{command:?}: {status:?}"));
        buffers
    }

    fn perform(&mut self, command: &Command) -> Status {
        let (at, len) = (command.slba() * self.block, u64::from(command.blocks()) * self.block);
        let range = at as usize..(at + len) as usize;
        match command.opcode {
            Opcode::READ => {
                let buffers = self.data(command, len);
                assert_eq!(self.memory.write(&buffers, 0, &self.disk[range]), len as usize);
            }
            Opcode::WRITE => {
                let buffers = self.data(command, len);
                assert_eq!(self.memory.read(&buffers, 0, &mut self.disk[range]), len as usize);
            }
            Opcode::WRITE_ZEROES => self.disk[range].fill(0),
            Opcode::DATASET_MANAGEMENT => {
                let mut bytes = [0; 16];
                self.memory.read(&self.data(command, 16), 0, &mut bytes);
                let range = Range::read_from_bytes(&bytes).unwrap();
                let at = (range.slba * self.block) as usize;
                let len = u64::from(range.blocks) * self.block;
                assert_eq!((command.cdw10, command.cdw11), (0, Command::AD));
                self.disk[at..at + len as usize].fill(0);
            }
            Opcode::FLUSH => {}
            other => panic!("{other:?}"),
        }
        Status::SUCCESS
    }
}

/// A driver, its device, and what guest memory and disk must contain.
struct Bed {
    pair: Pair,
    device: Device,
    guest: Arc<GuestMemory<Mapping>>,
    attached: Arc<Attached>,
    limits: CommandLimits,
    memory: Vec<Vec<u8>>,
    disk: Vec<u8>,
}

impl Bed {
    fn new(block: u64, zeroes: u64, entries: u16) -> Self {
        let maps: Vec<Mapping> = (0..3).map(|_| Mapping::anonymous(REGION).unwrap()).collect();
        // The regions adjoin in the guest and not for the device, which does not reach the third.
        let region = |(n, memory): (usize, &Mapping)| Region {
            guest: (n * REGION) as u64,
            user: (n * REGION) as u64,
            memory: memory.clone(),
        };
        let guest = Arc::new(GuestMemory::new(maps.iter().enumerate().map(region).collect()).unwrap());
        let at = [Some(0x1000_0000), Some(0x4000_0000), None];
        let layout = Layout::new(entries);
        let pages = Pages::without_device(layout.len(), QUEUES);
        let queues = pages.memory.clone();
        let reached = at
            .iter()
            .zip(&maps)
            .filter_map(|(at, memory)| Some(Region { guest: (*at)?, user: (*at)?, memory: memory.clone() }));
        let own = Region { guest: QUEUES, user: QUEUES, memory: queues.clone() };
        let device = Device {
            memory: GuestMemory::new(reached.chain([own]).collect()).unwrap(),
            queues,
            layout,
            disk: vec![0x5a; DISK],
            block,
            head: 0,
            tail: 0,
            phase: true,
            entries: entries.into(),
            fails: None,
        };
        let doorbells = [DriverDoorbell::Trapped, DriverDoorbell::Trapped];
        Self {
            pair: Pair::in_pages(pages, 1, entries, doorbells).unwrap(),
            disk: device.disk.clone(),
            device,
            attached: Arc::new(Attached::without_device(&guest, &at)),
            guest,
            limits: CommandLimits { block, data: 96 << 10, segments: u64::MAX, discard: 64 << 10, zeroes },
            memory: vec![vec![0; REGION]; 3],
        }
    }

    /// Executes an operation, and returns how many commands it took.
    fn run(&mut self, flight: &mut Flight<Prps>, op: Op, data: &[Buffer]) -> (usize, Result<(), Failure>) {
        flight.transfer.attached = Some(self.attached.clone());
        flight.begin(0, op, data, &self.guest, self.limits);
        for sent in 1.. {
            let command = match flight.step(NSID) {
                Ok(command) => command,
                Err(failure) => {
                    flight.end();
                    return (sent, Err(failure));
                }
            };
            let cid = self.pair.submit_for(flight, command).unwrap();
            self.pair.ring();
            let command = self.device.execute();
            let completion = self.pair.reap().unwrap().unwrap();
            assert_eq!((completion.cid, command.cid), (cid, cid));
            let reads = command.opcode == Opcode::READ;
            self.pair.take_back(cid, flight, reads && completion.status().is_success());
            if let Some(result) = flight.advance(i32::from(completion.status().0 & 0x7fff)) {
                flight.end();
                return (sent, result);
            }
            assert!(sent < 10_000, "{op:?} never ends");
        }
        unreachable!()
    }

    fn check(&self) {
        assert!(self.device.disk == self.disk, "the disk has other bytes");
        for (n, wanted) in self.memory.iter().enumerate() {
            let mut found = vec![0; REGION];
            self.guest.regions()[n].memory.read(0, &mut found);
            assert!(found == *wanted, "region {n} has other bytes");
        }
    }
}

#[derive(Clone, Debug)]
enum Kind {
    Read,
    Write,
    Zero { unmap: bool },
    Discard,
    Flush,
}

prop_compose! {
    /// An operation: its kind, first block, number of blocks, where its memory begins, and the ends and holes of its pieces.
    fn operations()(
        kind in prop_oneof![
            3 => Just(Kind::Read), 3 => Just(Kind::Write), 1 => any::<bool>().prop_map(|unmap| Kind::Zero { unmap }),
            1 => Just(Kind::Discard), 1 => Just(Kind::Flush),
        ],
        first in 0..100_usize,
        blocks in 1..60_usize,
        region in 0..3_u16,
        start in prop_oneof![Just(0_usize), (0..64_usize).prop_map(|n| n * 512), 0..8192_usize],
        cuts in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![Just(0_usize), Just(4096), 0..5000_usize]), 0..12),
        whole_pages: bool,
    ) -> (Kind, usize, usize, u16, usize, Vec<(prop::sample::Index, usize)>, bool) {
        (kind, first, blocks, region, start, cuts, whole_pages)
    }
}

/// Cuts so many bytes into buffers.
fn cut(
    bytes: usize,
    mut region: u16,
    start: usize,
    cuts: &[(prop::sample::Index, usize)],
    pages: bool,
) -> Vec<Buffer> {
    let round = |at: usize| if pages { at & !4095 } else { at };
    let mut ends: Vec<(usize, usize)> =
        cuts.iter().map(|(cut, hole)| (round(cut.index(bytes)), round(*hole))).collect();
    ends.push((bytes, 0));
    ends.sort_unstable();
    let (mut from, mut at, mut buffers) = (0, round(start), Vec::new());
    for (end, hole) in ends {
        if end > from {
            buffers.push(Buffer { region, at, len: (end - from) as u32 });
            (at, from) = (at + end - from + hole, end);
            // Some pieces lie elsewhere.
            if hole == 4096 {
                region = (region + 1) % 3;
            }
        }
    }
    buffers
}

proptest! {
    /// Whatever the operations and their memory are, the disk and the guest's memory have what they should, and nothing else has changed.
    #[test]
    fn operations_do_what_they_should(steps in prop::collection::vec(operations(), 1..20), large: bool, has_zeroes: bool) {
        let block = if large { 4096 } else { 512 };
        let mut bed = Bed::new(block, if has_zeroes { 32 << 10 } else { 0 }, if large { 256 } else { 8 });
        let mut flight = Flight::idle(Prps::new());
        for (n, (kind, first, blocks, region, start, cuts, pages)) in steps.into_iter().enumerate() {
            let block = block as usize;
            let (at, len) = (first * block, blocks * block);
            let data = cut(len, region, start, &cuts, pages);
            let range = at..at + len;
            let (op, data) = match kind {
                Kind::Read => {
                    let mut done = at;
                    for piece in &data {
                        let (to, len) = (piece.at, piece.len as usize);
                        bed.memory[usize::from(piece.region)][to..to + len].copy_from_slice(&bed.disk[done..done + len]);
                        done += len;
                    }
                    (Op::Read { at: at as u64 }, data)
                }
                Kind::Write => {
                    let mut done = at;
                    for piece in &data {
                        let (to, len) = (piece.at, piece.len as usize);
                        let bytes = vec![n as u8 + 1; len];
                        bed.guest.regions()[usize::from(piece.region)].memory.write(to, &bytes);
                        bed.memory[usize::from(piece.region)][to..to + len].fill(n as u8 + 1);
                        bed.disk[done..done + len].fill(n as u8 + 1);
                        done += len;
                    }
                    (Op::Write { at: at as u64, through: false }, data)
                }
                Kind::Zero { unmap } => {
                    bed.disk[range].fill(0);
                    (Op::WriteZeroes { at: at as u64, len: len as u64, unmap, through: false }, Vec::new())
                }
                Kind::Discard => {
                    bed.disk[range].fill(0);
                    (Op::Discard { at: at as u64, len: len as u64 }, Vec::new())
                }
                Kind::Flush => (Op::Flush, Vec::new()),
            };
            let (_, result) = bed.run(&mut flight, op, &data);
            prop_assert_eq!(result, Ok(()));
            bed.check();
        }
    }
}

#[test]
fn what_the_device_reaches_is_one_command() {
    let mut bed = Bed::new(512, 32 << 10, 64);
    let mut flight = Flight::idle(Prps::new());
    let piece = |region, at, len| Buffer { region, at, len };
    for (data, commands) in [
        (vec![piece(0, 0, 512)], 1),
        (vec![piece(0, 512, 8192)], 1),
        (vec![piece(0, 4, 64 << 10)], 1),
        // From page to page, wherever the pages lie.
        (vec![piece(0, 512, 3584), piece(1, 8192, 8192), piece(0, 40960, 512)], 1),
        (vec![piece(0, 512, 512), piece(0, 1024, 512), piece(0, 1536, 512)], 1),
        // A hole within a page; a piece that ends within a block; bytes that no address names; memory that the device does not reach.
        (vec![piece(0, 0, 512), piece(0, 1024, 512)], 2),
        (vec![piece(0, 0, 100), piece(0, 4096, 412)], 1),
        (vec![piece(0, 1, 512)], 1),
        (vec![piece(2, 0, 32 << 10)], 2),
    ] {
        let (sent, result) = bed.run(&mut flight, Op::Read { at: 0 }, &data);
        assert_eq!((sent, result), (commands, Ok(())), "{data:?}");
    }
}

#[test]
fn a_command_that_failed_is_sent_again_with_the_same_memory() {
    let mut bed = Bed::new(512, 32 << 10, 8);
    let mut flight = Flight::idle(Prps::new());
    for data in [Buffer { region: 0, at: 0, len: 8192 }, Buffer { region: 2, at: 1, len: 8192 }] {
        bed.device.fails = Some(Status::INTERRUPTED);
        let (sent, result) = bed.run(&mut flight, Op::Read { at: 0 }, &[data]);
        assert_eq!((sent, result), (2, Ok(())));
        bed.memory[usize::from(data.region)][data.at..data.at + 8192].fill(0x5a);
        bed.check();
    }
}
