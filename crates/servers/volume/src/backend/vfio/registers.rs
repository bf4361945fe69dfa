//! The registers of a controller, mapped.

use ginnel_guest_memory::Area;
use ginnel_layout::nvme::{Aqa, DOORBELLS, cap, cc, csts, register};
use ginnel_nvme::DriverDoorbell;
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use ginnel_vfio::Device;
use std::io;
use std::time::{Duration, Instant};

/// Normal shutdown, in the field [`cc::SHN`].
const SHUTDOWN: u32 = 1 << 14;

/// What a device that is gone says.
const GONE: u32 = u32::MAX;

/// BAR 0 of a controller.
pub struct Registers {
    bar: Mapping,
    cap: u64,
}

impl Registers {
    /// Maps the registers of an NVMe controller.
    pub fn map(device: &Device) -> anyhow::Result<Self> {
        use anyhow::{Context, ensure};
        let region = device.region(0)?;
        ensure!(
            region.can_be_mapped && region.size > DOORBELLS as u64,
            "its registers cannot be mapped; is it an NVMe controller, and does the kernel allow it (lockdown)?"
        );
        let bar = Mapping::of_file(device, region.offset, region.size as usize, Protection::ReadWrite)
            .context("its registers cannot be mapped")?;
        bar.keep_from_children();
        let registers = Self { bar, cap: 0 };
        let cap =
            u64::from(registers.read(register::CAP)) | u64::from(registers.read(register::CAP + 4)) << 32;
        ensure!(cap as u32 != GONE, "it does not answer");
        ensure!(cap::mpsmin(cap) == 0, "it has no pages of 4096 bytes, and this driver knows no others");
        ensure!(cap & cap::CSS_NVM != 0, "it does not have the NVM command set");
        Ok(Self { cap, ..registers })
    }

    fn read(&self, at: usize) -> u32 {
        self.bar.load_acquire_u32(at)
    }

    fn write(&self, at: usize, value: u32) {
        self.bar.store_release_u32(at, value);
    }

    /// Writes a register of 64 bits, as Linux does: some devices take no more than 32 at a time.
    fn write_long(&self, at: usize, value: u64) {
        self.write(at, value as u32);
        self.write(at + 4, (value >> 32) as u32);
    }

    /// Returns the most entries of a queue.
    pub fn max_entries(&self) -> u32 {
        cap::max_entries(self.cap)
    }

    /// Returns why the controller will not answer any more, if it says so.
    pub fn failure(&self) -> Option<&'static str> {
        match self.read(register::CSTS) {
            GONE => Some("is gone"),
            _ if self.bar.is_broken() => Some("is gone"),
            csts if csts & csts::CFS != 0 => Some("has failed (CSTS.CFS)"),
            csts if csts & csts::RDY == 0 => Some("was reset"),
            _ => None,
        }
    }

    /// Resets the controller, and waits until it has stopped.
    pub fn disable(&self) -> io::Result<()> {
        self.write(register::CC, 0);
        self.wait_for("to stop", |csts| csts & csts::RDY == 0)
    }

    /// Enables the controller with admin queues of so many entries at these addresses, and waits until it is ready.
    pub fn enable(&self, entries: u16, submissions: u64, completions: u64) -> io::Result<()> {
        self.write(register::AQA, Aqa::new(entries.into(), entries.into()).0);
        self.write_long(register::ASQ, submissions);
        self.write_long(register::ACQ, completions);
        self.write(register::CC, cc::enable());
        self.wait_for("to become ready", |csts| csts & (csts::RDY | csts::CFS) != 0)?;
        match self.failure() {
            Some(why) => Err(io::Error::other(format!("it {why} when it was enabled"))),
            None => Ok(()),
        }
    }

    /// Lets the controller shut down, which makes its cache durable, and waits for that at most so long.
    pub fn shut_down(&self, patience: Duration) -> io::Result<()> {
        self.write(register::CC, cc::enable() | SHUTDOWN);
        self.wait_at_most(patience, "to shut down", |csts| csts & csts::SHST == csts::SHST_COMPLETE)
    }

    fn wait_for(&self, what: &str, is_so: impl Fn(u32) -> bool) -> io::Result<()> {
        let patience = Duration::from_millis(500) * u32::from(cap::timeout(self.cap)).max(2);
        self.wait_at_most(patience, what, is_so)
    }

    fn wait_at_most(&self, patience: Duration, what: &str, is_so: impl Fn(u32) -> bool) -> io::Result<()> {
        let begin = Instant::now();
        loop {
            match self.read(register::CSTS) {
                GONE => return Err(io::Error::other("it is gone")),
                csts if is_so(csts) => return Ok(()),
                _ if begin.elapsed() > patience => {
                    return Err(io::Error::other(format!("{patience:?} are not enough for it {what}")));
                }
                // A driver has nothing to wait on but the register.
                _ => std::thread::sleep(Duration::from_micros(200)),
            }
        }
    }

    /// Returns the doorbell at an offset.
    pub fn doorbell(&self, at: usize) -> DriverDoorbell<Mapping> {
        DriverDoorbell::Mapped(Area { memory: self.bar.clone(), at, len: 4, guest: 0 })
    }

    /// Returns the number of bytes from one doorbell to the next.
    pub fn stride(&self) -> usize {
        cap::stride(self.cap)
    }
}
