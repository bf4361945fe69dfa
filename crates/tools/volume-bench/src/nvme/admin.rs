//! The admin queues. Their doorbells are trapped, whatever those of the I/O queues are.

use crate::connection::is_closed;
use crate::error::Error;
use crate::memory::DriverMemory;
use crate::nvme::device::{Device, Registers};
use crate::nvme::layout::{ADMIN_ENTRIES, Pair, area};
use ginnel_layout::nvme::{Command, Completion, completion_doorbell, submission_doorbell};
use ginnel_nvme::{Corrupt, DriverCompletions, DriverDoorbell, DriverSubmissions, SetupError};
use ginnel_shmem::Mapping;
use std::time::{Duration, Instant};

pub(crate) struct Admin {
    registers: Registers,
    submissions: DriverSubmissions<Mapping>,
    completions: DriverCompletions<Mapping>,
    /// Offsets of the doorbells in BAR 0.
    doorbells: [usize; 2],
}

impl Admin {
    /// Takes over the empty queues of a controller that has just been enabled.
    pub fn new(device: &Device, memory: &DriverMemory, pair: Pair) -> Result<Self, Error> {
        let (size, trapped) = (ADMIN_ENTRIES, DriverDoorbell::Trapped);
        let submissions =
            DriverSubmissions::new(0, size, size - 1, area(memory, pair.submissions), trapped.clone());
        let completions = DriverCompletions::new(0, size, area(memory, pair.completions), trapped);
        let stride = device.stride();
        Ok(Self {
            registers: device.registers.clone(),
            submissions: submissions.map_err(setup)?,
            completions: completions.map_err(setup)?,
            doorbells: [submission_doorbell(0, stride), completion_doorbell(0, stride)],
        })
    }

    /// Submits a command. Returns its identifier.
    pub fn submit(&mut self, command: Command) -> Result<u16, Error> {
        let cid = self.submissions.submit(command).ok_or(Error::Full)?;
        if let Some(tail) = self.submissions.ring() {
            self.registers.write_u32(self.doorbells[0], tail)?;
        }
        Ok(cid)
    }

    /// Returns the next completion, if there is one.
    pub fn poll(&mut self) -> Result<Option<Completion>, Error> {
        let Some(completion) = self.completions.reap() else { return Ok(None) };
        self.submissions.completed(&completion).map_err(|corrupt| broken(0, &corrupt))?;
        if let Some(head) = self.completions.ring() {
            self.registers.write_u32(self.doorbells[1], head)?;
        }
        Ok(Some(completion))
    }

    /// Executes a command, and drops the completions of earlier ones.
    pub fn call(&mut self, command: Command, patience: Duration) -> Result<Completion, Error> {
        let cid = self.submit(command)?;
        let deadline = Instant::now() + patience;
        loop {
            match self.poll()? {
                Some(completion) if completion.cid == cid => return Ok(completion),
                Some(_) => continue,
                None => {}
            }
            if is_closed(self.registers.socket()) {
                return Err(Error::Gone);
            }
            if Instant::now() > deadline {
                return Err(Error::TimedOut(patience));
            }
            std::thread::yield_now();
        }
    }
}

pub(crate) fn setup(error: SetupError) -> Error {
    Error::Invalid(error.to_string())
}

#[cold]
pub(crate) fn broken(queue: u16, corrupt: &Corrupt) -> Error {
    Error::Corrupt { queue: queue.into(), what: corrupt.to_string() }
}
