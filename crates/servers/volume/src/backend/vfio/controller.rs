//! An NVMe controller that this process drives.

use super::dma::Dma;
use super::pair::{ENTRIES, Pair};
use super::prps::DATA;
use super::registers::Registers;
use crate::backend::Failure;
use crate::backend::commands::is_path_related;
use anyhow::{Context, Result, bail, ensure};
use ginnel_layout::nvme::identify::{self, Cns, oncs, vwc};
use ginnel_layout::nvme::{Command, Feature, Opcode, PAGE, PCI_CLASS};
use ginnel_shmem::SharedMemory;
use ginnel_vfio::{Container, DRIVER, Device, Function, Group};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use zerocopy::{FromBytes, FromZeros};

/// The entries of the admin queues.
const ADMIN_ENTRIES: u16 = 32;

/// How long an admin command, or a flush without a worker, may take. It is the time that Linux gives them.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long another process may keep the device: when one has ended, the kernel releases all pages of its VM, and resets the device.
const BUSY: Duration = Duration::from_secs(60);

/// The feature Number of Queues.
const NUMBER_OF_QUEUES: u32 = Feature::QUEUES.0 as u32;

/// An NVMe controller that this process has to itself.
pub struct Controller {
    address: String,
    registers: Registers,
    dma: Arc<Dma>,
    identity: identify::Controller,
    /// For each worker, its pair of queues, until it takes that.
    pairs: Mutex<Vec<Option<Pair>>>,
    /// The pair for flushes without a worker.
    spare: Mutex<Pair>,
    admin: Mutex<Pair>,
    _device: Device,
    // The devices of a group stay usable as long as its file is open.
    _group: Group,
}

impl Controller {
    /// Opens the controller at a PCI address, resets it, and makes a pair of queues for each of so many workers. Waits for a predecessor
    /// that the kernel has not buried yet.
    pub fn open(address: &str, workers: usize) -> Result<Self> {
        let function = Function::find(Path::new("/sys"), address)?;
        ensure!(function.class()? == PCI_CLASS, "{function} is no NVMe controller");
        match function.driver() {
            Some(driver) if driver == DRIVER => {}
            Some(driver) => bail!(
                "{function} belongs to the kernel's driver {driver}; take it away (`ginnel volume bind {address}`), or use backend = \"uring-cmd\""
            ),
            None => bail!("{function} has no driver; give it to user space (`ginnel volume bind {address}`)"),
        }
        let Some(number) = function.iommu_group() else {
            bail!(
                "{function} has no IOMMU, so it could reach all memory; enable the IOMMU in the firmware and by the kernel's arguments \
                 (intel_iommu=on), or use backend = \"uring-cmd\""
            );
        };
        let dev = Path::new("/dev");
        let container = Container::open(dev)?;
        let group = open_group(dev, number)?;
        ensure!(
            group.is_viable()?,
            "IOMMU group {number} has other devices too, with drivers of their own; give them to {DRIVER} as well"
        );
        container.add(&group)?;
        let device = Device::open(&group, address)?;
        let dma = Dma::new(container)?;
        let registers = Registers::map(&device)?;
        registers.disable().with_context(|| format!("{function} cannot be reset"))?;
        // Only now does nothing that an earlier driver has left reach memory.
        device.set_bus_master(true)?;
        let mut admin = Pair::new(&dma, &registers, 0, ADMIN_ENTRIES)?;
        let [submissions, completions] = admin.addresses();
        registers
            .enable(ADMIN_ENTRIES, submissions, completions)
            .with_context(|| format!("{function} cannot be enabled"))?;
        let identity: identify::Controller = identify(&mut admin, 0, Cns::CONTROLLER)?;
        let entries = ENTRIES.min(registers.max_entries().try_into().unwrap_or(u16::MAX));
        let wanted = u16::try_from(workers + 1).unwrap_or(u16::MAX);
        let have = set_queues(&mut admin, wanted)?;
        ensure!(
            have >= wanted,
            "{function} has {have} pairs of queues, and {workers} threads need {wanted}; write a smaller `threads`"
        );
        let mut make = |id| create(&mut admin, &dma, &registers, id, entries);
        let pairs = (1..wanted).map(|id| make(id).map(Some)).collect::<Result<_>>()?;
        let spare = make(wanted)?;
        info!(
            device = address,
            model = String::from_utf8_lossy(&identity.mn).trim(),
            serial = String::from_utf8_lossy(&identity.sn).trim(),
            queues = workers,
            "this process drives the NVMe controller"
        );
        Ok(Self {
            address: address.to_owned(),
            registers,
            dma,
            identity,
            pairs: Mutex::new(pairs),
            spare: Mutex::new(spare),
            admin: Mutex::new(admin),
            _device: device,
            _group: group,
        })
    }

    /// Returns what the controller says about a namespace.
    pub fn namespace(&self, nsid: u32) -> Result<identify::Namespace> {
        let found: identify::Namespace = identify(&mut lock(&self.admin), nsid, Cns::NAMESPACE)?;
        ensure!({ found.nsze } > 0, "it has no active namespace {nsid}");
        Ok(found)
    }

    /// Returns the number of its namespace, if it has one.
    pub fn only_namespace(&self) -> Result<u32> {
        let found: [u32; 1024] = identify(&mut lock(&self.admin), 0, Cns::ACTIVE)?;
        let found: Vec<u32> = found.into_iter().take_while(|&nsid| nsid != 0).collect();
        match found[..] {
            [] => bail!("it has no namespace; create one, with nvme-cli and the kernel's driver"),
            [one] => Ok(one),
            _ => bail!("it has the namespaces {found:?}; write which one (`namespace`)"),
        }
    }

    /// Takes the pair of queues for the worker of that number, which is there once.
    pub fn take_pair(&self, worker: usize) -> Option<Pair> {
        lock(&self.pairs).get_mut(worker)?.take()
    }

    /// Returns the memory that the controller can reach.
    pub fn dma(&self) -> &Arc<Dma> {
        &self.dma
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the longest data of a command, in bytes.
    pub fn data(&self) -> u64 {
        match self.identity.mdts {
            0 => DATA,
            n => PAGE.checked_shl(n.into()).filter(|&bytes| bytes > 0).unwrap_or(DATA).min(DATA),
        }
    }

    /// Returns whether it has a cache that a power cut empties.
    pub fn has_cache(&self) -> bool {
        self.identity.vwc & vwc::PRESENT != 0
    }

    pub fn can_discard(&self) -> bool {
        self.identity.oncs & oncs::DATASET_MANAGEMENT != 0
    }

    pub fn makes_zeroes(&self) -> bool {
        self.identity.oncs & oncs::WRITE_ZEROES != 0
    }

    /// Returns why the controller will not answer any more, if it says so.
    pub fn failure(&self) -> Option<&'static str> {
        self.registers.failure()
    }

    /// Lets the controller shut down, which makes its cache durable. No command may be under way, and none can be sent from now on.
    /// Waits as long as the controller says that it takes, and at least as long as Linux does.
    pub fn shut_down(&self) {
        const LEAST: Duration = Duration::from_secs(5);
        let [_, entry] = { self.identity.rtd3 };
        let patience = Duration::from_micros(entry.into()).clamp(LEAST, PATIENCE);
        match self.registers.shut_down(patience) {
            Ok(()) => info!(device = self.address, "the NVMe controller is shut down"),
            Err(error) => warn!(device = self.address, "the NVMe controller was not shut down: {error}"),
        }
    }

    /// Makes all writes to a namespace so far durable, without a worker. Blocks for as long as the device takes.
    pub fn flush(&self, nsid: u32) -> Result<(), Failure> {
        if !self.has_cache() {
            return Ok(());
        }
        let flush = Command { opcode: Opcode::FLUSH, nsid, ..Command::new_zeroed() };
        match lock(&self.spare).call(flush, PATIENCE) {
            Ok(completion) if completion.status().is_success() => Ok(()),
            Ok(completion) if is_path_related(completion.status()) => Err(Failure::Errno(libc::EIO)),
            Ok(_) => Err(Failure::Lost(libc::EIO)),
            Err(error) => {
                warn!(device = self.address, "a flush has no result: {error}");
                Err(Failure::Errno(libc::EIO))
            }
        }
    }
}

fn open_group(dev: &Path, number: u32) -> Result<Group> {
    let begin = Instant::now();
    loop {
        let opened = Group::open(dev, number);
        let is_busy = |error: &anyhow::Error| {
            let below = error.downcast_ref::<io::Error>();
            below.is_some_and(|error| error.raw_os_error() == Some(libc::EBUSY))
        };
        match &opened {
            // Nobody tells when it is free.
            Err(error) if is_busy(error) && begin.elapsed() < BUSY => {
                std::thread::sleep(Duration::from_millis(20));
            }
            _ => return opened,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Executes an admin command. Returns its result.
fn admin(pair: &mut Pair, what: &str, command: Command) -> Result<u32> {
    let completion = pair.call(command, PATIENCE).with_context(|| format!("{what} fails"))?;
    let status = completion.status();
    ensure!(status.is_success(), "{what} fails with status {:#x}", status.code().0);
    Ok(completion.result)
}

fn identify<T: FromBytes>(pair: &mut Pair, nsid: u32, cns: Cns) -> Result<T> {
    let (_, _, prp1) = pair.data();
    let command =
        Command { opcode: Opcode::IDENTIFY, nsid, prp1, cdw10: cns.0.into(), ..Command::new_zeroed() };
    admin(pair, "Identify", command)?;
    let (memory, at, _) = pair.data();
    let mut bytes = vec![0; identify::LEN];
    memory.read(at, &mut bytes);
    T::read_from_bytes(&bytes).ok().context("an answer of another length")
}

/// Asks for so many pairs of queues. Returns how many there are.
fn set_queues(pair: &mut Pair, wanted: u16) -> Result<u16> {
    let count = u32::from(wanted) - 1;
    let command = Command {
        opcode: Opcode::SET_FEATURES,
        cdw10: NUMBER_OF_QUEUES,
        cdw11: count | count << 16,
        ..Command::new_zeroed()
    };
    let result = admin(pair, "Set Features (Number of Queues)", command)?;
    let fewer = (result as u16).min((result >> 16) as u16);
    Ok(fewer.saturating_add(1))
}

/// Creates a pair of queues without interrupts.
fn create(pair: &mut Pair, dma: &Arc<Dma>, registers: &Registers, id: u16, entries: u16) -> Result<Pair> {
    const CONTIGUOUS: u32 = 1;
    let made = Pair::new(dma, registers, id, entries)?;
    let [submissions, completions] = made.addresses();
    let size = u32::from(id) | (u32::from(entries) - 1) << 16;
    let create = |opcode, prp1, cdw11| Command { opcode, prp1, cdw10: size, cdw11, ..Command::new_zeroed() };
    let command = create(Opcode::CREATE_COMPLETION, completions, CONTIGUOUS);
    admin(pair, "Create I/O Completion Queue", command)?;
    let command = create(Opcode::CREATE_SUBMISSION, submissions, CONTIGUOUS | u32::from(id) << 16);
    admin(pair, "Create I/O Submission Queue", command)?;
    Ok(made)
}
