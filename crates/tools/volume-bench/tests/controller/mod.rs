//! A small NVMe controller behind vfio-user, with a disk in its memory. It believes its client.

use ginnel_guest_memory::{GuestMemory, Region as Memory};
use ginnel_layout::nvme::{
    Aqa, COMMAND, COMPLETION, Command, Feature, Opcode, Range, Status, VS_1_4, cap, cc, completion_doorbell,
    csts, register, submission_doorbell,
};
use ginnel_layout::vfio_user::{Area, DeviceInfo, IrqInfo, pci};
use ginnel_nvme::identify::{self, Properties};
use ginnel_nvme::{
    CompletionRecord, Constants, Doorbell, QueueGroup, QueueSetup, State, SubmissionRecord, prp,
};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use ginnel_vfio_user::{Errno, Gone, Irqs, Limits, Region, Request, Server};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use zerocopy::{FromBytes, IntoBytes};

/// The size of the disk in blocks of 512 bytes.
pub const BLOCKS: u64 = 8192;
const QUEUES: u16 = 4;
const SLOTS: u16 = 256;

/// How a controller behaves.
#[derive(Clone, Copy)]
pub struct Manner {
    /// Whether the doorbells of I/O queues are mapped; otherwise there are shadow doorbells.
    pub mapped: bool,
    /// The command that fails, whether it is an admin command, and how.
    pub fails: Option<(bool, Opcode, Status)>,
    /// The number of I/O commands after which the connection is closed.
    pub ends_after: u64,
}

impl Manner {
    pub const MAPPED: Self = Self { mapped: true, fails: None, ends_after: u64::MAX };
    pub const SHADOW: Self = Self { mapped: false, ..Self::MAPPED };
}

/// Serves clients at the socket, one after the other, as many as there are manners. Returns the disk.
pub fn serve(socket: &Path, manners: &[Manner]) -> JoinHandle<Vec<u8>> {
    let listener = UnixListener::bind(socket).unwrap();
    let manners = manners.to_vec();
    std::thread::spawn(move || {
        let mut disk = vec![0; BLOCKS as usize * 512];
        for manner in manners {
            let server = Server::new(listener.accept().unwrap().0).unwrap();
            disk = Controller::new(server, manner, disk).run();
        }
        disk
    })
}

struct Controller {
    server: Server,
    manner: Manner,
    disk: Vec<u8>,
    file: Arc<OwnedFd>,
    bar: Mapping,
    state: State<Mapping>,
    memory: GuestMemory<Mapping>,
    vectors: BTreeMap<u32, OwnedFd>,
    registers: BTreeMap<usize, u64>,
    shadows: Option<(u64, u64)>,
    groups: BTreeMap<u16, QueueGroup<Mapping>>,
    done: u64,
}

impl Controller {
    fn new(server: Server, manner: Manner, disk: Vec<u8>) -> Self {
        let dstrd = if manner.mapped { 10 } else { 0 };
        let cap = cap::mqes(SLOTS.into()) | cap::CQR | cap::CSS_NVM | cap::dstrd(dstrd);
        let len = submission_doorbell(QUEUES + 1, cap::stride(cap)).next_power_of_two();
        let file = memfd_create("doorbells", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len as u64).unwrap();
        let state = Mapping::anonymous(State::<Mapping>::len(QUEUES, SLOTS)).unwrap();
        let constants = Constants { queues: QUEUES, slots: SLOTS, mapped: manner.mapped, cap, vs: VS_1_4 };
        let registers = [(register::CAP, cap), (register::VS, VS_1_4.into())];
        Self {
            server,
            manner,
            disk,
            bar: Mapping::of_file(&file, 0, len, Protection::ReadWrite).unwrap(),
            file: Arc::new(file),
            state: State::create(state, &constants).unwrap(),
            memory: GuestMemory::new(Vec::new()).unwrap(),
            vectors: BTreeMap::new(),
            registers: registers.into(),
            shadows: None,
            groups: BTreeMap::new(),
            done: 0,
        }
    }

    fn run(mut self) -> Vec<u8> {
        while self.done < self.manner.ends_after {
            match self.server.receive() {
                Ok(Some(message)) => self.answer(message),
                Ok(None) => std::thread::yield_now(),
                Err(Gone::Closed) => break,
                Err(gone) => panic!("{gone}"),
            }
            let mut groups = std::mem::take(&mut self.groups);
            for (id, group) in &mut groups {
                while let Some((ticket, command)) = group.take().unwrap() {
                    let (status, result) = self.execute(*id, &command);
                    group.complete(ticket, status, result);
                }
                if group.publish()
                    && let Some(vector) = self.vectors.get(&u32::from(*id))
                {
                    rustix::io::write(vector, &1u64.to_ne_bytes()).unwrap();
                }
            }
            // Those that a command has just made replace the old ones.
            groups.append(&mut self.groups);
            self.groups = groups;
            for group in self.groups.values_mut() {
                let _ = group.arm();
            }
            if self.register(register::CC) & u64::from(cc::EN) == 0 {
                self.groups.clear();
            }
        }
        self.disk
    }

    fn register(&self, at: usize) -> u64 {
        self.registers.get(&at).copied().unwrap_or(0)
    }

    fn answer(&mut self, mut message: ginnel_vfio_user::Message) {
        let to = message.reply_to();
        let mut file = None;
        let mut refused = None;
        let body = match message.request().unwrap() {
            Request::Version { .. } => Limits { fds: 16, data: 4096, maps: 64 }.version(),
            Request::Map { address, size, offset, file: Some(file), .. } => {
                let memory = Mapping::of_file(&file, offset, size as usize, Protection::ReadWrite).unwrap();
                let region = Memory { guest: address, user: address, memory };
                self.memory = GuestMemory::new(vec![region]).unwrap();
                Vec::new()
            }
            Request::DeviceInfo => {
                DeviceInfo { argsz: 16, flags: 3, num_regions: 9, num_irqs: 5 }.as_bytes().to_vec()
            }
            Request::RegionInfo { index: pci::BAR0, argsz } => {
                let size = self.bar.len() as u64;
                let areas = if self.manner.mapped {
                    vec![Area { offset: 0x3000, size: size - 0x3000 }]
                } else {
                    Vec::new()
                };
                let (body, whole) = Region { size, writable: true, areas }.reply(pci::BAR0, argsz);
                file = whole.then(|| self.file.clone());
                body
            }
            Request::IrqInfo { index } => {
                IrqInfo { argsz: 16, flags: 1, index, count: u32::from(QUEUES) + 1 }.as_bytes().to_vec()
            }
            Request::SetIrqs { start, irqs: Irqs::Eventfds(fds), .. } => {
                self.vectors.extend((start..).zip(fds));
                Vec::new()
            }
            Request::Read { access } => {
                let value = self.register(access.offset as usize).to_le_bytes();
                [access.as_bytes(), &value[..access.count as usize]].concat()
            }
            Request::Write { access, data } => {
                let mut value = [0; 8];
                value[..data.len()].copy_from_slice(data);
                let (at, value) = (access.offset as usize, u64::from_le_bytes(value));
                let answer = access.as_bytes().to_vec();
                if access.region == pci::BAR0 {
                    self.write(at, value);
                }
                answer
            }
            Request::Reset => {
                self.write(register::CC, 0);
                Vec::new()
            }
            _ => {
                refused = Some(Errno::NOTSUP);
                Vec::new()
            }
        };
        match refused {
            Some(errno) => self.server.fail(to, errno),
            None => self.server.reply(to, &body, file),
        }
        // The client may have gone; the next look finds that.
        let _ = self.server.flush();
    }

    fn write(&mut self, at: usize, value: u64) {
        if at >= 0x1000 {
            self.bar.store_release_u32(at, value as u32);
            return;
        }
        self.registers.insert(at, value);
        if at != register::CC {
            return;
        }
        let mut status = 0;
        if value & u64::from(cc::EN) == 0 {
            self.groups.clear();
            self.state.delete_all();
            self.shadows = None;
        } else {
            status |= csts::RDY;
            if self.state.completion(0).is_none() {
                let aqa = Aqa(self.register(register::AQA) as u32);
                self.create_completion(0, self.register(register::ACQ), aqa.completion() as u16, true);
                self.create_submission(0, self.register(register::ASQ), aqa.submission() as u16);
            }
        }
        if value & u64::from(cc::SHN) != 0 {
            status |= csts::SHST_COMPLETE;
        }
        self.registers.insert(register::CSTS, status.into());
    }

    fn doorbells(&self, id: u16) -> [Doorbell<Mapping>; 2] {
        let stride = cap::stride(self.register(register::CAP));
        [submission_doorbell(id, stride), completion_doorbell(id, stride)].map(|at| {
            let real = Doorbell::new(self.bar.clone(), at).unwrap();
            match self.shadows {
                Some((values, events)) if id != 0 => {
                    let word = |page: u64| self.memory.at_guest(page + (at - 0x1000) as u64, 4).unwrap();
                    real.with_shadow(&word(values), &word(events)).unwrap()
                }
                _ => real,
            }
        })
    }

    fn create_completion(&mut self, id: u16, base: u64, size: u16, interrupts: bool) {
        let record = CompletionRecord { created: 1, base, size, vector: id, interrupts };
        self.state.create_completion(id, &record, &self.doorbells(id)[1]).unwrap();
    }

    fn create_submission(&mut self, id: u16, base: u64, size: u16) {
        let record = SubmissionRecord { created: 1, base, size, completion: id };
        self.state.create_submission(id, &record, &self.doorbells(id)[0]).unwrap();
        self.make_group(id);
    }

    fn make_group(&mut self, id: u16) {
        let (Some(cq), Some(sq)) = (self.state.completion(id), self.state.submission(id)) else { return };
        let ring = |base, len| self.memory.at_guest(base, len).unwrap();
        let [tail, head] = self.doorbells(id);
        let completion =
            QueueSetup { id, ring: ring(cq.base, COMPLETION * usize::from(cq.size)), doorbell: head };
        let submission =
            QueueSetup { id, ring: ring(sq.base, COMMAND * usize::from(sq.size)), doorbell: tail };
        self.groups.insert(id, QueueGroup::new(&self.state, completion, vec![submission]).unwrap());
    }

    fn execute(&mut self, queue: u16, command: &Command) -> (Status, u32) {
        if let Some((admin, opcode, status)) = self.manner.fails
            && (admin, opcode) == (queue == 0, command.opcode)
        {
            return (status, 0);
        }
        if queue == 0 {
            return self.execute_admin(command);
        }
        self.done += 1;
        let at = command.slba() as usize * 512;
        let len = command.blocks() as usize * 512;
        match command.opcode {
            Opcode::FLUSH => {}
            Opcode::DATASET_MANAGEMENT => {
                let mut range = [0; 16];
                self.copy(command, &mut range, false);
                let Range { slba, blocks, .. } = Range::read_from_bytes(&range).unwrap();
                self.disk[slba as usize * 512..][..blocks as usize * 512].fill(0);
            }
            _ if at + len > self.disk.len() => return (Status::LBA_RANGE.for_good(), 0),
            Opcode::WRITE_ZEROES => self.disk[at..at + len].fill(0),
            Opcode::READ | Opcode::WRITE => {
                let mut disk = std::mem::take(&mut self.disk);
                self.copy(command, &mut disk[at..at + len], command.opcode == Opcode::READ);
                self.disk = disk;
            }
            _ => return (Status::INVALID_OPCODE.for_good(), 0),
        }
        (Status::SUCCESS, 0)
    }

    fn copy(&self, command: &Command, bytes: &mut [u8], to_guest: bool) {
        let mut pieces = Vec::new();
        let len = bytes.len() as u32;
        prp::buffers(&self.memory, command.prp1, command.prp2, len, 600, &mut pieces).unwrap();
        let copied =
            if to_guest { self.memory.write(&pieces, 0, bytes) } else { self.memory.read(&pieces, 0, bytes) };
        assert_eq!(copied, bytes.len());
    }

    fn execute_admin(&mut self, command: &Command) -> (Status, u32) {
        let (id, size) = (command.cdw10 as u16, (command.cdw10 >> 16) as u16);
        match command.opcode {
            Opcode::IDENTIFY => match identify::answer(&properties(), command) {
                Ok(mut answer) => self.copy(command, &mut answer, true),
                Err(status) => return (status, 0),
            },
            Opcode::SET_FEATURES if command.cdw10 as u8 == Feature::QUEUES.0 => {
                let last = u32::from(QUEUES) - 1;
                return (Status::SUCCESS, last | last << 16);
            }
            Opcode::GET_FEATURES => return (Status::SUCCESS, 1),
            Opcode::CREATE_COMPLETION => {
                self.create_completion(id, command.prp1, size + 1, command.cdw11 & 2 != 0);
            }
            Opcode::CREATE_SUBMISSION => self.create_submission(id, command.prp1, size + 1),
            Opcode::DOORBELL_BUFFER => {
                self.shadows = Some((command.prp1, command.prp2));
                (1..=QUEUES).for_each(|id| self.make_group(id));
            }
            _ => return (Status::INVALID_OPCODE.for_good(), 0),
        }
        (Status::SUCCESS, 0)
    }
}

fn properties() -> Properties {
    Properties {
        vendor: [1, 1],
        serial: "small".into(),
        model: "a test".into(),
        firmware: "1".into(),
        uuid: [7; 16],
        mdts: 5,
        doorbell_buffer: true,
        write_cache: true,
        blocks: BLOCKS,
        block_exponent: 9,
        read_only: false,
        deallocate: true,
        write_zeroes: true,
        reads_zeros: true,
        granularity: 0,
        optimal: 0,
    }
}
