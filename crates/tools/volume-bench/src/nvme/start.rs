//! The start of a controller, in the order in which Linux does it: admin queues, Identify, I/O queues, and shadow doorbells.

use crate::disk::Disk;
use crate::error::Error;
use crate::memory::DriverMemory;
use crate::nvme::admin::{Admin, setup};
use crate::nvme::command::command;
use crate::nvme::device::Device;
use crate::nvme::layout::{ADMIN_ENTRIES, Layout, area};
use crate::nvme::options::{Doorbells, NvmeOptions};
use crate::nvme::transport::Rings;
use ginnel_guest_memory::Area;
use ginnel_layout::nvme::identify::{Cns, Controller, Namespace, oacs, oncs, vwc};
use ginnel_layout::nvme::{
    Command, Completion, DOORBELLS, Feature, Opcode, PAGE, cap, completion_doorbell, submission_doorbell,
};
use ginnel_nvme::{DriverCompletions, DriverDoorbell, DriverSubmissions};
use ginnel_shmem::{Mapping, SharedMemory as _};
use zerocopy::FromBytes;

/// The number of queues that the client asks for, to learn how many there are.
const MANY: u32 = 256;

/// What a started controller is, and the queues in it.
pub(crate) struct Started {
    pub admin: Admin,
    pub disk: Disk,
    pub serial: String,
    /// Exponent of the size of a block.
    pub exponent: u8,
    pub doorbells: Doorbells,
    pub rings: Vec<Rings>,
}

/// What the start needs.
pub(crate) struct Start<'a> {
    pub options: &'a NvmeOptions,
    pub memory: &'a DriverMemory,
    pub layout: &'a Layout,
    pub device: &'a Device,
}

impl Start<'_> {
    /// Starts the controller. If it runs, it is reset first. Blocks for at most the `patience` of the options for each step.
    pub fn start(&self) -> Result<Started, Error> {
        let Self { options, memory, layout, device } = *self;
        // A controller that runs would take what it sees for commands, so it stops first.
        device.disable()?;
        layout.admin.clear(memory);
        layout.io.iter().for_each(|queue| queue.pair.clear(memory));
        for range in [layout.shadows, layout.events] {
            memory.mapping.zero(range.at, range.len);
        }
        let (submissions, completions) = (layout.admin.submissions.guest(), layout.admin.completions.guest());
        device.enable(ADMIN_ENTRIES, submissions, completions)?;
        let mut admin = Admin::new(device, memory, layout.admin)?;
        let controller: Controller = self.identify(&mut admin, Cns::CONTROLLER)?;
        let granted =
            self.done(&mut admin, feature(Opcode::SET_FEATURES, Feature::QUEUES, MANY | MANY << 16))?;
        let queues = (granted.result & 0xffff).min(granted.result >> 16) + 1;
        if queues < options.queues.into() {
            let wanted = options.queues;
            return Err(Error::Unsupported(format!("the disk has {queues} queues and not {wanted}")));
        }
        self.check_limits(&controller)?;
        let namespace: Namespace = self.identify(&mut admin, Cns::NAMESPACE)?;
        let write_cache = controller.vwc & vwc::PRESENT != 0
            && self.done(&mut admin, feature(Opcode::GET_FEATURES, Feature::WRITE_CACHE, 0))?.result & 1 != 0;
        let format = { namespace.lbaf }[usize::from(namespace.flbas & 15)];
        let exponent = (format >> 16) as u8;
        if !(9..=16).contains(&exponent) {
            return Err(Error::Unsupported(format!("the disk has blocks of 2^{exponent} bytes")));
        }
        let disk = Disk {
            bytes: namespace.nsze.saturating_mul(1 << exponent),
            block: 1 << exponent,
            queues: u16::try_from(queues).unwrap_or(u16::MAX),
            read_only: namespace.nsattr & 1 != 0,
            write_cache,
            discard: controller.oncs & oncs::DATASET_MANAGEMENT != 0,
            write_zeroes: controller.oncs & oncs::WRITE_ZEROES != 0,
            segments: if controller.mdts == 0 { 0 } else { 1 << controller.mdts.min(31) },
        };
        for index in 0..options.queues {
            self.create(&mut admin, index)?;
        }
        let doorbells = self.choose_doorbells(&mut admin, &controller)?;
        let rings =
            (0..options.queues).map(|index| self.rings(index, doorbells)).collect::<Result<_, _>>()?;
        let serial = String::from_utf8_lossy(&controller.sn).trim_end().to_owned();
        Ok(Started { admin, disk, serial, exponent, doorbells, rings })
    }

    fn check_limits(&self, controller: &Controller) -> Result<(), Error> {
        let (entries, most) = (self.options.entries(), cap::max_entries(self.device.cap));
        if u32::from(entries) > most {
            return Err(Error::Unsupported(format!(
                "the disk's queues have {most} entries and not {entries}"
            )));
        }
        let (buffer, mdts) = (self.options.buffer, controller.mdts);
        if mdts != 0 && u64::from(buffer) > PAGE << mdts.min(30) {
            return Err(Error::Unsupported(format!(
                "the disk takes requests of at most {} bytes, and not of {buffer}",
                PAGE << mdts.min(30)
            )));
        }
        Ok(())
    }

    /// Executes an admin command, which must succeed.
    fn done(&self, admin: &mut Admin, command: Command) -> Result<Completion, Error> {
        let completion = admin.call(command, self.options.patience)?;
        let status = completion.status();
        if status.is_success() {
            return Ok(completion);
        }
        Err(Error::Controller(format!("{:?} has failed with status {:#x}", command.opcode, status.0)))
    }

    fn identify<T: FromBytes>(&self, admin: &mut Admin, cns: Cns) -> Result<T, Error> {
        let data = self.layout.data;
        let ask = Command { prp1: data.guest(), cdw10: cns.0.into(), ..command(Opcode::IDENTIFY) };
        // The controller is not a namespace.
        let nsid = if cns == Cns::CONTROLLER { 0 } else { ask.nsid };
        self.done(admin, Command { nsid, ..ask })?;
        let mut bytes = vec![0; data.len];
        self.memory.mapping.read(data.at, &mut bytes);
        T::read_from_bytes(&bytes).map_err(|_| Error::Controller("it does not identify itself".into()))
    }

    /// Creates one pair of I/O queues.
    fn create(&self, admin: &mut Admin, index: u16) -> Result<(), Error> {
        let (id, last) = (u32::from(index) + 1, u32::from(self.options.entries()) - 1);
        let pair = self.layout.io[usize::from(index)].pair;
        let create = |opcode, address, how| Command {
            nsid: 0,
            prp1: address,
            cdw10: id | last << 16,
            // The queue is contiguous.
            cdw11: how | 1,
            ..command(opcode)
        };
        let interrupts = if self.options.interrupts { 2 } else { 0 };
        let completions = create(Opcode::CREATE_COMPLETION, pair.completions.guest(), id << 16 | interrupts);
        self.done(admin, completions)?;
        let submissions = create(Opcode::CREATE_SUBMISSION, pair.submissions.guest(), id << 16);
        self.done(admin, submissions).map(drop)
    }

    fn choose_doorbells(&self, admin: &mut Admin, controller: &Controller) -> Result<Doorbells, Error> {
        let first = submission_doorbell(1, self.device.stride());
        if self.options.trapped {
            return Ok(Doorbells::Trapped);
        }
        if self.device.doorbell(first).is_some() {
            return Ok(Doorbells::Mapped);
        }
        if controller.oacs & oacs::DOORBELL_BUFFER == 0 {
            return Ok(Doorbells::Trapped);
        }
        let (prp1, prp2) = (self.layout.shadows.guest(), self.layout.events.guest());
        self.done(admin, Command { nsid: 0, prp1, prp2, ..command(Opcode::DOORBELL_BUFFER) })?;
        Ok(Doorbells::Shadow)
    }

    fn rings(&self, index: u16, doorbells: Doorbells) -> Result<Rings, Error> {
        let Self { options, memory, layout, device } = *self;
        let (id, entries, stride) = (index + 1, options.entries(), device.stride());
        let at = [submission_doorbell(id, stride), completion_doorbell(id, stride)];
        let pair = layout.io[usize::from(index)].pair;
        let submissions = area(memory, pair.submissions);
        let submissions =
            DriverSubmissions::new(id, entries, options.depth, submissions, self.doorbell(at[0], doorbells)?);
        let completions = area(memory, pair.completions);
        let completions = DriverCompletions::new(id, entries, completions, self.doorbell(at[1], doorbells)?);
        Ok(Rings {
            submissions: submissions.map_err(setup)?,
            completions: completions.map_err(setup)?,
            doorbells: at,
            registers: device.registers.clone(),
            vector: device.vectors[usize::from(id)].clone(),
        })
    }

    fn doorbell(&self, at: usize, doorbells: Doorbells) -> Result<DriverDoorbell<Mapping>, Error> {
        Ok(match doorbells {
            Doorbells::Trapped => DriverDoorbell::Trapped,
            Doorbells::Mapped => DriverDoorbell::Mapped(self.device.doorbell(at).ok_or_else(|| {
                Error::Controller(format!("the doorbell at {at:#x} is not mapped, and others are"))
            })?),
            Doorbells::Shadow => {
                let word = |range| Area { len: 4, ..shifted(area(self.memory, range), at - DOORBELLS) };
                DriverDoorbell::Shadow { value: word(self.layout.shadows), event: word(self.layout.events) }
            }
        })
    }
}

fn shifted(area: Area<Mapping>, by: usize) -> Area<Mapping> {
    Area { at: area.at + by, len: area.len.saturating_sub(by), guest: area.guest + by as u64, ..area }
}

fn feature(opcode: Opcode, feature: Feature, value: u32) -> Command {
    Command { nsid: 0, cdw10: feature.0.into(), cdw11: value, ..command(opcode) }
}
