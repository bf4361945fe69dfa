//! A pair of I/O queues as a [`Transport`].

use crate::error::Error;
use crate::nvme::admin::broken;
use crate::nvme::command::{data, encode, status};
use crate::nvme::device::Registers;
use crate::queue::Queue;
use crate::request::{Operation, Request};
use crate::slots::Slot;
use crate::transport::{Answer, Transport};
use ginnel_layout::nvme::{Command, PAGE, Range};
use ginnel_nvme::{DriverCompletions, DriverSubmissions};
use ginnel_shmem::{Mapping, SharedMemory as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// A submission queue and its completion queue in a controller, and where their doorbells are in its BAR 0.
pub(crate) struct Rings {
    pub submissions: DriverSubmissions<Mapping>,
    pub completions: DriverCompletions<Mapping>,
    pub doorbells: [usize; 2],
    pub registers: Registers,
    /// The eventfd of the completion queue's interrupt.
    pub vector: Arc<OwnedFd>,
}

/// The memory of the slots.
pub(crate) struct SlotMemory {
    /// The buffers, and their distance in bytes.
    pub buffers: Mapping,
    pub stride: usize,
    /// Size of a buffer, in bytes.
    pub len: u32,
    /// Guest addresses of the buffers, and of the PRP lists, one page for each slot.
    pub guest: u64,
    pub lists: u64,
    /// Exponent of the size of a block.
    pub exponent: u8,
}

/// A pair of NVMe I/O queues.
pub struct NvmeTransport {
    index: usize,
    rings: Rings,
    memory: SlotMemory,
    /// The slot of each command identifier.
    slot_of: Vec<u16>,
    traps: u64,
}

impl NvmeTransport {
    pub(crate) fn new(index: usize, depth: u16, rings: Rings, memory: SlotMemory) -> Self {
        Self { index, rings, memory, slot_of: vec![0; depth.into()], traps: 0 }
    }

    /// Continues with empty queues.
    pub(crate) fn restart(&mut self, rings: Rings) {
        self.rings = rings;
    }

    #[inline]
    fn put_command(&mut self, slot: Slot, command: Command) -> Result<(), Error> {
        let cid = self.rings.submissions.submit(command).ok_or(Error::Full)?;
        self.slot_of[usize::from(cid)] = slot.0;
        Ok(())
    }

    /// Returns the guest address of a slot's buffer.
    #[inline]
    fn buffer(&self, slot: Slot) -> u64 {
        self.memory.guest + (slot.index() * self.memory.stride) as u64
    }

    #[cold]
    fn trap(&mut self, doorbell: usize, value: u32) -> Result<(), Error> {
        self.traps += 1;
        match self.rings.registers.write_u32(self.rings.doorbells[doorbell], value) {
            // As with a kick, it is not here that the loss of the server is found.
            Err(Error::Gone) => Ok(()),
            result => result,
        }
    }
}

impl Transport for NvmeTransport {
    #[inline]
    fn put(&mut self, slot: Slot, request: Request) -> Result<(), Error> {
        let memory = &self.memory;
        let mut command = encode(&request, memory.exponent)?;
        if let Some((_, len)) = data(&request) {
            if len > memory.len {
                let room = memory.len;
                return Err(Error::Invalid(format!(
                    "{request}: a buffer has {room} bytes; connect with larger ones"
                )));
            }
            command.prp1 = self.buffer(slot);
            command.prp2 = match u64::from(len).div_ceil(PAGE) {
                1 => 0,
                2 => command.prp1 + PAGE,
                _ => memory.lists + slot.index() as u64 * PAGE,
            };
        } else if request.operation == Operation::Discard {
            let (blocks, slba) = (request.len >> memory.exponent, request.offset >> memory.exponent);
            let range = Range { attributes: 0, blocks, slba };
            memory.buffers.write(slot.index() * memory.stride, range.as_bytes());
            command.prp1 = self.buffer(slot);
        }
        self.put_command(slot, command)
    }

    #[inline]
    fn publish(&mut self) -> Result<(), Error> {
        // The room in the completion queue first: the device needs it for the new commands.
        if let Some(head) = self.rings.completions.ring() {
            self.trap(1, head)?;
        }
        if let Some(tail) = self.rings.submissions.ring() {
            self.trap(0, tail)?;
        }
        Ok(())
    }

    #[inline]
    fn poll(&mut self) -> Result<Option<Answer>, Error> {
        let Some(completion) = self.rings.completions.reap() else { return Ok(None) };
        let taken = self.rings.submissions.completed(&completion);
        taken.map_err(|corrupt| broken(self.rings.submissions.id(), &corrupt))?;
        // A command that was outstanding has a slot.
        let slot = Slot(self.slot_of[usize::from(completion.cid)]);
        Ok(Some(Answer { slot, status: status(completion.status()), written: 0 }))
    }

    fn data(&self, request: &Request) -> Option<(bool, u32)> {
        data(request)
    }

    fn kicks(&self) -> u64 {
        self.traps
    }

    /// The controller says in CSTS that it has failed.
    fn is_given_up(&self) -> bool {
        self.rings.registers.has_failed()
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.rings.registers.socket()
    }

    fn wake_up(&self) -> BorrowedFd<'_> {
        self.rings.vector.as_fd()
    }

    /// Interrupts are never turned off, so the eventfd counts each one since the last sleep.
    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}
}

impl Queue<NvmeTransport> {
    /// Writes any command into the queue, with a slot that names its completion, for tests of the device. Its identifier is
    /// chosen here. The completion belongs to [`Operation::Other`] with the opcode.
    pub fn submit_command(&mut self, slot: Slot, command: Command) -> Result<(), Error> {
        let request = Request { operation: Operation::Other(command.opcode.0.into()), offset: 0, len: 0 };
        self.submit_with(slot, request, |transport| transport.put_command(slot, command))
    }

    /// Returns the guest address of a slot's buffer.
    pub fn guest_address(&self, slot: Slot) -> u64 {
        self.transport.buffer(slot)
    }

    /// Returns its number in the controller; 0 is the admin queue.
    pub fn id(&self) -> u16 {
        self.transport.index as u16 + 1
    }
}
